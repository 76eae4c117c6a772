// The resource usage of a job: charts with a line for each node, and a table of ranks. They are loaded when the tab is
// opened, and every POLL_MS while the job runs and the tab is active.
import { axisStyle, inZone, onResize, seriesColour, timeAxisStyle, timeText, zone } from "./charts.js";

const pane = document.getElementById("telemetry");
const holder = document.getElementById("telemetry-charts");
const ranks = document.getElementById("telemetry-ranks");
const POLL_MS = 5000;
const ORDER = ["cpu", "memory", "gpu", "gpu_memory", "net_rx", "net_tx", "disk_read", "disk_write"];
const BYTES = new Set(ORDER.filter((name) => !["cpu", "gpu"].includes(name)));
/** Steps between the marks of an axis of bytes: powers of two, so that marks are round in KiB and MiB. */
const POWERS = Array.from({ length: 50 }, (_each, power) => 2 ** power);
const charts = [];
let usage = null;
let timer = 0;

const number = (value, digits = 1) => value.toLocaleString(document.documentElement.lang, { maximumFractionDigits: digits });
const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (bytes >= 1024 && power < units.length - 1) (bytes /= 1024), (power += 1);
  return `${number(bytes, bytes < 10 && power ? 1 : 0)} ${units[power]}`;
};
const orDash = (value, format) => (value === null || value === undefined ? "–" : format(value));
const seconds = (value) => (value < 1 ? `${number(value * 1000, value < 0.01 ? 1 : 0)} ms` : `${number(value, 2)} s`);

/** Return the values of all nodes as one table. Nodes are measured at different times, which uPlot joins. */
const table = (name) =>
  window.uPlot.join(usage.nodes.filter((node) => node.series[name]).map((node) => [node.at, node.series[name]]));

/** Return a node's value at the cursor. Without a cursor, its CPU usage of the last minute, as in the table of ranks. */
const legend = (name, node, value, index) => {
  if (typeof index !== "number" && name === "cpu" && node.recent_cpu !== null)
    return holder.dataset.recent.replace("{}", number(node.recent_cpu, 2));
  return orDash(value, BYTES.has(name) ? size : (amount) => number(amount, name === "cpu" ? 2 : 1));
};

const draw = (name) => {
  const nodes = usage.nodes.filter((node) => node.series[name]);
  if (!nodes.length) return;
  const container = document.createElement("div");
  container.className = "col-md-6";
  container.innerHTML = '<div class="chart"><h2 class="card-title mb-1"></h2><div></div></div>';
  container.querySelector("h2").textContent = holder.dataset[name];
  holder.append(container);
  const format = BYTES.has(name) ? size : number;
  const axis = axisStyle();
  charts.push(
    new window.uPlot(
      {
        width: container.clientWidth - 16,
        height: 200,
        tzDate: inZone,
        cursor: { sync: { key: "telemetry" }, points: { size: 6 } },
        scales: { y: { range: (_chart, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
        series: [
          { label: zone, value: (_chart, at) => (at === null || at === undefined ? "" : timeText(at)) },
          ...nodes.map((node) => ({
            label: `${holder.dataset.node} ${node.node}`,
            stroke: seriesColour(node.node),
            width: 1.5,
            spanGaps: true,
            points: { show: node.at.length < 3 },
            value: (_chart, value, _series, index) => legend(name, node, value, index),
          })),
        ],
        axes: [timeAxisStyle(), { ...axis, size: 72, values: (_chart, marks) => marks.map(format), ...(BYTES.has(name) && { incrs: POWERS }) }],
      },
      table(name),
      container.querySelector(".chart > div"),
    ),
  );
};

const cell = (label, text, isNumber) => {
  const element = document.createElement("td");
  element.dataset.label = label;
  element.textContent = text;
  if (isNumber) element.className = "num";
  return element;
};

const listRanks = () => {
  ranks.hidden = !usage.ranks.length;
  const body = ranks.querySelector("tbody");
  const labels = [...ranks.querySelectorAll("th")].map((heading) => heading.textContent);
  body.replaceChildren(
    ...usage.ranks.map((rank) => {
      const row = document.createElement("tr");
      row.append(
        cell(labels[0], String(rank.rank)),
        cell(labels[1], String(rank.node)),
        cell(labels[2], orDash(rank.steps || null, (value) => number(value, 0)), true),
        cell(labels[3], orDash(rank.seconds_per_step, seconds), true),
        cell(labels[4], orDash(rank.comm_share, (value) => `${number(value * 100, 0)} %`), true),
        cell(labels[5], orDash(rank.cpu, (value) => number(value, 2)), true),
        cell(labels[6], orDash(rank.memory, size), true),
      );
      if (rank.is_slow) {
        const badge = document.createElement("span");
        badge.className = "badge bg-yellow-lt ms-2";
        badge.textContent = body.dataset.slow;
        row.firstChild.append(badge);
      }
      return row;
    }),
  );
};

const isActive = () => pane.classList.contains("active");
const drawAll = () => {
  if (!usage || !isActive()) return;
  document.getElementById("telemetry-empty").hidden = usage.nodes.length > 0;
  document.getElementById("telemetry-sentences").replaceChildren(
    ...usage.sentences.map((sentence) => {
      const line = document.createElement("p");
      line.className = "mb-2 fw-medium";
      line.textContent = sentence;
      return line;
    }),
  );
  charts.splice(0).forEach((chart) => chart.destroy());
  holder.replaceChildren();
  ORDER.forEach(draw);
  listRanks();
};

const load = async () => {
  clearTimeout(timer);
  if (!isActive()) return;
  pane.setAttribute("aria-busy", usage === null);
  try {
    const response = await fetch(pane.dataset.from, { headers: { Accept: "application/json" } });
    if (response.ok) {
      usage = await response.json();
      drawAll();
    }
  } catch {
    // The console does not respond. The timer tries again.
  }
  pane.removeAttribute("aria-busy");
  if (!document.getElementById("job-header").dataset.ended) timer = setTimeout(load, POLL_MS);
};

document.getElementById("telemetry-tab").addEventListener("shown.bs.tab", load);
document.addEventListener("trainyard:theme", drawAll);
onResize(drawAll);
if (isActive()) load();
