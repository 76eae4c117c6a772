// The charts of a sweep: parallel coordinates, and the best value over trials and money. The API has the trials.
import { axisStyle, colour, onResize } from "./charts.js";
import { watchQuote } from "./quote_card.js";

const HEIGHT = 220;
const MIN_AXIS_WIDTH = 120; // of axes that stand beside each other
const AXIS_HEIGHT = 64; // of axes that lie below each other
const data = JSON.parse(document.getElementById("sweep-data").textContent);
const root = document.getElementById("sweep-charts");
const texts = root.dataset;
const chartElement = (name) => root.querySelector(`[data-chart="${name}"]`);
const language = document.documentElement.lang;
const figures = new Intl.NumberFormat(language, { maximumSignificantDigits: 4 });
const currency = new Intl.NumberFormat(language, { style: "currency", currency: data.currency });
const toMajor = (minor) => minor / 10 ** currency.resolvedOptions().maximumFractionDigits;
const isBetter = (value, other) => (data.goal === "maximize" ? value > other : value < other);
let trials = [];

const element = (name, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};

/** An axis of the parallel coordinates: {name, at(value) from 0 (bottom, or left on phones) to 1, ends: [[position, text]]}. */
const scale = (axis, values) => {
  if (axis.choices?.length) {
    const count = axis.choices.length;
    const at = (value) => (count === 1 ? 0.5 : axis.choices.indexOf(String(value)) / (count - 1));
    return { name: axis.name, at, ends: axis.choices.map((choice) => [at(choice), choice]) };
  }
  const mapped = (value) => (axis.log ? Math.log(value) : value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const at = (value) => (low === high ? 0.5 : (mapped(value) - mapped(low)) / (mapped(high) - mapped(low)));
  const ends = low === high ? [[0.5, figures.format(low)]] : [[0, figures.format(low)], [1, figures.format(high)]];
  return { name: axis.name, at, ends };
};

/** Parallel coordinates: axes side by side, and where that is too narrow, below each other. */
const drawParallel = (valued) => {
  const shown = [...data.axes, { name: data.metric, isValue: true }];
  const width = chartElement("parallel").clientWidth;
  const isUpright = width >= MIN_AXIS_WIDTH * shown.length;
  const [height, top, bottom, side] = isUpright ? [256, 34, 18, 56] : [AXIS_HEIGHT * shown.length, 24, 24, 12];
  const valueOf = (trial, axis) => (axis.isValue ? trial.value : trial.parameters[axis.name]);
  const scales = shown.map((axis) => scale(axis, valued.map((trial) => valueOf(trial, axis)).filter((value) => value !== undefined)));
  const across = (share) => side + share * (width - 2 * side);
  const down = (share) => top + share * (height - top - bottom);
  /** Where an axis, by its index, has a share of its length. */
  const place = (index, share) => {
    const axisAt = index / (shown.length - 1);
    return isUpright ? [across(axisAt), down(1 - share)] : [across(share), down(axisAt)];
  };
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": texts.parallel });
  const labels = element("g", {});
  const label = (x, y, anchor, text, weight = 400) => labels.append(element("text", { x, y, "text-anchor": anchor, "font-weight": weight }, text));
  scales.forEach((each, index) => {
    const [[x1, y1], [x2, y2]] = [place(index, 0), place(index, 1)];
    svg.append(element("line", { class: "axis", x1, y1, x2, y2 }));
    if (isUpright) label(x1, 14, "middle", each.name, 600);
    else label(0, y1 - 8, "start", each.name, 600);
    const isLast = index === scales.length - 1;
    for (const [share, text] of each.ends.slice(0, 12)) {
      const [x, y] = place(index, share);
      if (isUpright) label(x + (isLast ? -6 : 6), share ? y - 4 : y + 12, isLast ? "end" : "start", text);
      else label(share === 0 ? 0 : share === 1 ? width : x, y + 16, share === 0 ? "start" : share === 1 ? "end" : "middle", text);
    }
  });
  // The best line is drawn last, above the others.
  for (const trial of [...valued].sort((one, other) => one.is_best - other.is_best)) {
    const points = shown
      .map((axis, index) => [index, valueOf(trial, axis)])
      .filter(([, value]) => value !== undefined)
      .map(([index, value]) => place(index, scales[index].at(value)).map((number) => number.toFixed(1)).join(" "));
    const parameters = Object.entries(trial.parameters).map(([name, value]) => `${name} ${value}`);
    const title = [`${texts.trial} ${trial.number}: ${data.metric} ${figures.format(trial.value)}`, ...parameters].join("\n");
    const link = element("a", { href: data.job.replace("/0/", `/${trial.job}/`), tabindex: -1, class: trial.is_best ? "is-best" : "" });
    link.append(element("path", { d: `M${points.join("L")}` }, element("title", {}, title)));
    svg.append(link);
  }
  svg.append(labels);
  chartElement("parallel").replaceChildren(svg);
};

/** Dots of all values, and a stepped line of the best so far along x. `rows`: [{x, value, counts}] sorted by x. */
const drawBest = (name, rows, label, format) => {
  const container = chartElement(name);
  container.replaceChildren();
  let best = null;
  const line = rows.map(({ value, counts }) => {
    if (counts && (best === null || isBetter(value, best))) best = value;
    return best;
  });
  const axis = axisStyle();
  const number = (_chart, value) => (value === null || value === undefined ? "–" : figures.format(value));
  new window.uPlot(
    {
      width: container.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false, range: (_chart, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
      series: [
        { label, value: (_chart, value) => (value === null || value === undefined ? "" : format(value)) },
        { label: data.metric, stroke: colour("--tblr-secondary"), width: 0, points: { show: true, size: 6, fill: colour("--tblr-secondary") }, paths: () => null, value: number },
        { label: texts.best, stroke: colour("--tblr-primary"), width: 2, points: { show: false }, paths: window.uPlot.paths.stepped({ align: 1 }), value: number },
      ],
      axes: [
        { ...axis, values: (_chart, marks) => marks.map(format), space: 70 },
        { ...axis, size: 60, values: (_chart, marks) => marks.map((mark) => figures.format(mark)) },
      ],
    },
    [rows.map((row) => row.x), rows.map((row) => row.value), line],
    container,
  );
};

const draw = () => {
  const valued = trials.filter((trial) => trial.value !== null);
  root.querySelector("[data-charts]").hidden = !valued.length;
  root.querySelector("[data-message]").textContent = valued.length ? "" : texts.empty;
  root.querySelector("[data-message]").hidden = valued.length > 0;
  if (!valued.length) return;
  drawParallel(valued);
  const counts = (trial) => trial.outcome === "completed";
  drawBest("trials", valued.map((trial) => ({ x: trial.number, value: trial.value, counts: counts(trial) })), texts.trial, (mark) => (Number.isInteger(mark) ? figures.format(mark) : ""));
  let spent = 0;
  const priced = data.against_cost
    ? valued.map((trial) => ({ x: toMajor(trial.cost_minor), value: trial.value, counts: counts(trial) })).sort((one, other) => one.x - other.x)
    : trials.map((trial) => ({ x: toMajor((spent += trial.cost_minor)), value: trial.value, counts: counts(trial) })).filter((row) => row.value !== null);
  drawBest("money", priced, data.against_cost ? texts.oneCost : texts.cost, (mark) => currency.format(mark));
};

let version = "";
const load = async () => {
  const shown = document.getElementById("sweep").dataset.version;
  if (shown === version) return;
  root.setAttribute("aria-busy", version === "");
  try {
    const answer = await fetch(data.trials, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(answer.statusText);
    trials = (await answer.json()).results;
    version = shown;
    draw();
  } catch {
    root.querySelector("[data-message]").hidden = false;
    root.querySelector("[data-message]").textContent = texts.failed;
  }
  root.removeAttribute("aria-busy");
};

load();
document.addEventListener("htmx:afterSettle", load);
document.addEventListener("trainyard:theme", draw);
onResize(draw);
const extension = document.getElementById("extend");
if (extension) watchQuote(extension);
