// Curves of one or several jobs: a chart for each curve, with a line for each attempt of each run.
// The API has each point with its epoch, time and cost; this module draws them along the chosen axis.
import { axisStyle, colour, onResize, seriesColour } from "./charts.js";

const REFRESH_MS = 2000; // the least time between two requests
const HEIGHT = 240;
const DASH = [6, 4]; // of lines of earlier attempts
const MAX_POINTS = 40; // a line with fewer points shows each as a dot
const TICK_SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800]; // intervals between ticks of the time axis
const language = document.documentElement.lang;
const figures = new Intl.NumberFormat(language, { maximumSignificantDigits: 5 });
const fill = (template, values) => template.replace(/\{(\w+)\}/g, (_all, name) => values[name] ?? "");
const clock = (seconds) => {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  const digits = parts.map((part, index) => (index ? String(part).padStart(2, "0") : String(part)));
  return parts[0] ? digits.join(":") : `${parts[1]}:${digits[2]}`;
};
const majors = (currency) => new Intl.NumberFormat(language, { style: "currency", currency, maximumFractionDigits: 6 });
const minorsPerMajor = (currency) => 10 ** new Intl.NumberFormat(language, { style: "currency", currency }).resolvedOptions().maximumFractionDigits;

/** How many epochs were done at each point. Points of one epoch that only name its number are spread over it. */
const epochsDone = (rows, first) => {
  if (rows.some((row) => !Number.isInteger(row.epoch))) return rows.map((row) => row.epoch);
  const sizes = new Map();
  rows.forEach((row) => sizes.set(row.epoch, (sizes.get(row.epoch) ?? 0) + 1));
  const longest = Math.max(...sizes.values());
  const last = rows.at(-1)?.epoch;
  const counts = new Map();
  return rows.map(({ epoch }) => {
    counts.set(epoch, (counts.get(epoch) ?? 0) + 1);
    // The last epoch may be incomplete, so the longest one stands for its length.
    return epoch - first + counts.get(epoch) / (epoch === last ? longest : sizes.get(epoch));
  });
};

/** Exponential moving average, corrected for its start. `weight` 0..1 is that of the past. */
const smooth = (values, weight) => {
  let past = 0;
  let total = 0;
  return values.map((value) => {
    past = past * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return past / total;
  });
};

/** Load and draw the curves of an element of the page. Returns {redraw, schedule, reload}. */
const start = (root) => {
  const texts = root.dataset;
  const part = (name) => root.querySelector(`.curves-${name}`);
  const form = part("controls");
  const holder = part("charts");
  const runs = [...root.querySelectorAll("[data-run]")].map((element, index) => ({
    index, title: element.dataset.title, from: element.dataset.from, last: 0, curves: new Map(), better: new Map(),
  }));
  if (texts.axis) form.axis.value = texts.axis;
  const cards = new Map(); // curve -> {element, chart, shape, zoom}
  const axis = () => form.axis.value;
  const weight = () => Number(form.smoothing.value);

  const load = async (run) => {
    const response = await fetch(`${run.from}?after=${run.last}`, { headers: { Accept: "application/json" } });
    if (!response.ok) throw new Error(response.statusText);
    const data = await response.json();
    Object.assign(run, { last: data.last, currency: data.currency, isFree: data.is_free, keptEvery: data.kept_every });
    for (const curve of data.curves.filter((each) => !texts.only || each.name === texts.only)) {
      const rows = curve.value.map((value, index) => ({
        value, attempt: curve.attempt[index], step: curve.step[index], reported: curve.reported_step[index],
        epoch: curve.epoch[index], time: curve.seconds[index], money: curve.cost_minor[index],
      }));
      run.curves.set(curve.name, [...(run.curves.get(curve.name) ?? []), ...rows]);
      run.better.set(curve.name, curve.better);
    }
  };

  /** The number of a run's first epoch: scripts count from 0 or from 1, or report fractions of what is done. */
  const firstEpoch = (run) => {
    const epochs = [...run.curves.values()].flat().map((row) => row.epoch).filter((epoch) => epoch !== null);
    return epochs.every((epoch) => epoch >= 1 && Number.isInteger(epoch)) ? 1 : 0;
  };

  /** The lines of a curve: {run, attempt, rows, x, y}, sorted along the axis, with no two points at the same x. */
  const lines = (name) => runs.flatMap((run) => {
    const all = run.curves.get(name) ?? [];
    const first = axis() === "epoch" ? firstEpoch(run) : 0;
    return [...new Set(all.map((row) => row.attempt))].map((attempt) => {
      const isNumber = all.length === 1; // shown as a number, along any axis
      let rows = all.filter((row) => row.attempt === attempt && (isNumber || axis() !== "epoch" || row.epoch !== null));
      let positions;
      if (isNumber) positions = [0];
      else if (axis() === "epoch") positions = epochsDone(rows, first);
      else if (axis() === "money") positions = rows.map((row) => row.money / minorsPerMajor(run.currency));
      else positions = rows.map((row) => row[axis()]);
      const order = rows.map((_row, index) => index).sort((a, b) => positions[a] - positions[b]);
      rows = order.map((index) => rows[index]);
      const x = [];
      order.forEach((index) => x.push(x.length && positions[index] <= x.at(-1) ? x.at(-1) + Math.max(1e-9, Math.abs(x.at(-1)) * 1e-9) : positions[index]));
      const isLatest = attempt === all.at(-1).attempt;
      return { run, attempt, isLatest, rows, x, y: rows.map((row) => row.value) };
    });
  }).filter((line) => line.rows.length);

  const label = (line, name) => {
    const attempts = new Set(line.run.curves.get(name).map((row) => row.attempt)).size;
    const parts = [runs.length > 1 ? line.run.title : name];
    if (attempts > 1) parts.push(fill(texts.attempt, { number: line.attempt }));
    return parts.join(", ");
  };

  const bestOf = (drawn, name) => {
    const rows = drawn.flatMap((line) => line.rows.map((row) => ({ ...row, run: line.run })));
    const better = drawn[0].run.better.get(name);
    if (!better) return null;
    return rows.reduce((best, row) => ((better === "lower" ? row.value < best.value : row.value > best.value) ? row : best));
  };
  const describe = (row) =>
    fill(row.epoch === null ? texts.best : texts.bestEpoch, {
      value: figures.format(row.value), step: figures.format(row.step), epoch: row.epoch === null ? "" : figures.format(row.epoch),
    }) + (runs.length > 1 ? ` · ${row.run.title}` : "");

  const summary = (drawn, name) => {
    const parts = [];
    if (runs.length === 1) parts.push(fill(texts.last, { value: figures.format(drawn.at(-1).rows.at(-1).value) }));
    const best = bestOf(drawn, name);
    if (best) parts.push(describe(best));
    return parts.join(" · ");
  };

  const formatX = (value) => {
    if (value === null || value === undefined) return "";
    if (axis() === "time") return clock(value);
    return axis() === "money" ? majors(runs[0].currency).format(Number(value.toPrecision(3))) : figures.format(value);
  };

  const table = (drawn) => {
    const smoothed = weight() > 0;
    return window.uPlot.join(drawn.flatMap((line) => [[line.x, line.y], ...(smoothed ? [[line.x, smooth(line.y, weight())]] : [])]));
  };

  const isZoomed = (card) => card.zoom !== null;
  const updateReset = () => (form.reset.disabled = ![...cards.values()].some(isZoomed));

  const draw = (name, drawn, card) => {
    const smoothed = weight() > 0;
    const style = axisStyle();
    const series = drawn.flatMap((line) => {
      const stroke = runs.length > 1 || line.isLatest ? seriesColour(line.run.index) : colour("--tblr-secondary");
      const common = { stroke, spanGaps: true, dash: line.isLatest ? undefined : DASH, value: (_chart, value) => (value === null ? "–" : figures.format(value)) };
      const points = { show: line.rows.length < MAX_POINTS, size: 5 };
      if (!smoothed) return [{ ...common, label: label(line, name), width: 2, points }];
      return [
        { ...common, label: label(line, name), width: 1, alpha: 0.35, points: { show: false }, class: "curves-raw" },
        { ...common, label: fill(texts.smoothed, { name: label(line, name) }), width: 2, points: { show: false } },
      ];
    });
    const zoom = card.zoom;
    card.chart = new window.uPlot(
      {
        width: card.element.querySelector(".chart").clientWidth,
        height: HEIGHT,
        scales: { x: { time: false } },
        cursor: { points: { size: 7 }, drag: { x: true, y: false } },
        series: [{ label: texts[axis()], value: (_chart, value) => formatX(value) }, ...series],
        axes: [
          { ...style, values: (_chart, marks) => marks.map(formatX), space: axis() === "money" ? 90 : 60, ...(axis() === "time" && { incrs: TICK_SECONDS }) },
          { ...style, size: 64, values: (_chart, marks) => marks.map((mark) => figures.format(mark)) },
        ],
        hooks: {
          setScale: [(chart, key) => {
            if (key !== "x" || !chart.data[0].length) return;
            const { min, max } = chart.scales.x;
            const [low, high] = [chart.data[0][0], chart.data[0].at(-1)];
            card.zoom = min > low || max < high ? { min, max } : null;
            updateReset();
          }],
        },
      },
      table(drawn),
      card.element.querySelector(".chart"),
    );
    if (zoom) card.chart.setScale("x", zoom);
  };

  const showNumber = (drawn, card) => {
    card.element.querySelector(".chart").replaceChildren(
      ...drawn.map((line) => {
        const row = document.createElement("div");
        const number = document.createElement("div");
        number.className = "stat-value";
        number.textContent = figures.format(line.y[0]);
        const where = document.createElement("div");
        where.className = "text-secondary";
        where.textContent = [runs.length > 1 ? line.run.title : "", fill(texts.single, { step: figures.format(line.rows[0].step) })].filter(Boolean).join(" · ");
        row.append(number, where);
        return row;
      }),
    );
  };

  const newCard = (name) => {
    const element = document.createElement("section");
    element.innerHTML = '<h2 class="card-title mb-0"></h2><p class="small text-secondary mb-1"></p><div class="chart" tabindex="0" role="group"></div>';
    element.querySelector("h2").textContent = name;
    const card = { element, chart: null, shape: "", zoom: null };
    const chart = element.querySelector(".chart");
    chart.setAttribute("aria-label", fill(texts.keys, { name }));
    chart.addEventListener("keydown", (event) => onKey(event, card));
    cards.set(name, card);
    return card;
  };

  /** Put a card among the charts or the numbers, in the order of names. */
  const insertCard = (name, card, parent) => {
    if (card.element.parentElement === parent) return;
    const after = [...cards.keys()].sort().find((other) => other > name && cards.get(other).element.parentElement === parent);
    parent.insertBefore(card.element, after ? cards.get(after).element : null);
  };

  const showAll = (card) => card.chart?.setScale("x", { min: card.chart.data[0][0], max: card.chart.data[0].at(-1) });

  /** Zoom and move a chart with the keyboard. */
  const onKey = (event, { chart, ...card }) => {
    if (!chart || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = chart.scales.x;
    const width = max - min;
    const moved = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2] }[event.key];
    if (event.key === "0") showAll({ chart, ...card });
    else if (moved) {
      const [low, high] = [chart.data[0][0], chart.data[0].at(-1)];
      let [from, to] = [min + width * moved[0], max + width * moved[1]];
      if (event.key.startsWith("Arrow")) {
        const shift = Math.max(low - min, Math.min(high - max, width * moved[0]));
        [from, to] = [min + shift, max + shift];
      }
      chart.setScale("x", { min: Math.max(low, from), max: Math.min(high, to) });
    } else return;
    event.preventDefault();
  };

  const isVisible = () => root.offsetParent !== null;

  /** Draw what has changed. With `all`, every chart, because its axis, colors or size changed. */
  const drawAll = (all = false) => {
    if (!isVisible()) return;
    const names = [...new Set(runs.flatMap((run) => [...run.curves.keys()]))].sort();
    part("empty").hidden = !isLoaded || names.length > 0;
    form.hidden = !names.length;
    const keptEvery = Math.max(1, ...runs.map((run) => run.keptEvery ?? 1));
    part("thinned").hidden = keptEvery === 1;
    part("thinned").textContent = fill(texts.thinned, { number: keptEvery });
    const rows = runs.flatMap((run) => [...run.curves.values()].flat());
    form.axis.querySelector('[value="epoch"]').disabled = !rows.some((row) => row.epoch !== null);
    form.axis.querySelector('[value="money"]').disabled = runs.every((run) => run.isFree) || new Set(runs.map((run) => run.currency)).size > 1;
    for (const name of names) {
      const drawn = lines(name);
      const card = cards.get(name) ?? newCard(name);
      card.element.hidden = !drawn.length;
      if (!drawn.length) continue;
      card.element.querySelector("p").textContent = drawn.every((line) => line.rows.length === 1) ? "" : summary(drawn, name);
      const isNumber = drawn.every((line) => line.rows.length === 1) && new Set(drawn.map((line) => line.run)).size === drawn.length;
      const shape = [isNumber, ...drawn.map((line) => `${label(line, name)} ${line.rows.length < MAX_POINTS}`)].join("|");
      if (!all && card.chart && card.shape === shape) {
        card.chart.setData(table(drawn), card.zoom === null);
        continue;
      }
      card.shape = shape;
      insertCard(name, card, isNumber ? part("numbers") : holder);
      if (isNumber) card.element.className = runs.length > 1 ? "col-12" : "col-6 col-lg-3";
      else card.element.className = texts.only ? "col-12" : "col-md-6";
      card.chart?.destroy();
      card.chart = null;
      card.element.querySelector(".chart").replaceChildren();
      card.element.querySelector(".chart").classList.toggle("chart-number", isNumber);
      isNumber ? showNumber(drawn, card) : draw(name, drawn, card);
    }
    updateReset();
  };

  // --- Points: loaded at the start, and at most every REFRESH_MS when the job reports new ones -------------------------
  let timer = 0;
  let isLoading = false;
  let isLoaded = false; // until then, it is unknown whether there are curves
  let isPending = false;
  const refresh = async () => {
    clearTimeout(timer);
    if (isLoading || !isVisible()) return void (isPending = true);
    isLoading = true;
    isPending = false;
    root.setAttribute("aria-busy", !isLoaded);
    try {
      await Promise.all(runs.map(load));
      isLoaded = true;
      part("failed").hidden = true;
    } catch {
      // The next event of the stream tries again.
      part("failed").textContent = texts.failed;
      part("failed").hidden = false;
    }
    isLoading = false;
    root.removeAttribute("aria-busy");
    drawAll();
    if (isPending) timer = setTimeout(refresh, REFRESH_MS);
  };
  /** Read everything again: the end of a run may have changed what its time costs. */
  const reload = () => {
    runs.forEach((run) => Object.assign(run, { last: 0, curves: new Map() }));
    refresh();
  };
  let scheduleTimer = 0;
  const schedule = () => {
    if (!scheduleTimer) scheduleTimer = setTimeout(() => ((scheduleTimer = 0), refresh()), REFRESH_MS);
  };

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    form.level.value = form.smoothing.value;
    drawAll(true);
  });
  form.axis.addEventListener("change", () => {
    cards.forEach((card) => (card.zoom = null));
    drawAll(true);
  });
  form.reset.addEventListener("click", () => cards.forEach(showAll));
  new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && (isPending ? refresh() : drawAll(true))).observe(root);
  refresh();
  return { redraw: () => drawAll(true), schedule, reload };
};

const started = new Map(); // root -> its curves
const startAll = () => {
  for (const root of started.keys()) if (!root.isConnected) started.delete(root);
  document.querySelectorAll("[data-curves]").forEach((root) => started.has(root) || started.set(root, start(root)));
};
startAll();
document.addEventListener("htmx:load", startAll);
document.addEventListener("trainyard:points", () => started.forEach((curves) => curves.schedule()));
document.addEventListener("trainyard:ended", () => started.forEach((curves) => curves.reload()));
document.addEventListener("trainyard:theme", () => started.forEach((curves) => curves.redraw()));
onResize(() => started.forEach((curves) => curves.redraw()));
