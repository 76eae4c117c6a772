// A job, live. One event stream tells that the state has changed (the page then asks for its changed parts, in the reader's
// language) and brings new points of curves; another brings the output of the rank that is shown.
// The one rule: when a stream can't be had, the page asks every few seconds instead, and nothing is lost.
import { axes, colour } from "./charts.js";
import { toast } from "./shared.js";

const job = document.getElementById("job");
const REFRESH_EVERY = 700;
const POLL_EVERY = 4000;

// --- State -----------------------------------------------------------------------------------------------------------
let refreshAt = 0;
let refreshTimer = 0;
const refresh = () => {
  clearTimeout(refreshTimer);
  refreshTimer = setTimeout(() => {
    refreshAt = Date.now();
    window.htmx.trigger("#job-header", "refresh");
  }, Math.max(0, refreshAt + REFRESH_EVERY - Date.now()));
};
const ended = () => Boolean(document.getElementById("job-header").dataset.ended);

let polling = 0;
const poll = (on) => {
  clearInterval(polling);
  polling = on ? setInterval(() => (ended() ? poll(false) : refresh()), POLL_EVERY) : 0;
};

const stream = new EventSource(job.dataset.stream);
let first = true;
stream.addEventListener("state", (event) => {
  const state = JSON.parse(event.data);
  // The page was drawn with the state that the stream begins with, unless it changed in between.
  if (!first || Boolean(state.finished_at) !== Boolean(job.dataset.ended)) refresh();
  first = false;
  if (state.finished_at) stream.close();
});
stream.addEventListener("metrics", (event) => addPoints(JSON.parse(event.data)));
stream.addEventListener("open", () => poll(false));
stream.addEventListener("error", () => {
  if (!ended()) poll(true);
  if (ended()) stream.close();
});

// --- Curves ----------------------------------------------------------------------------------------------------------
const curves = new Map(); // name -> Map(step -> value)
const charts = new Map();
const holder = document.getElementById("charts");
const data = (name) => {
  const points = [...curves.get(name)].sort((a, b) => a[0] - b[0]);
  return [points.map((point) => point[0]), points.map((point) => point[1])];
};

const draw = (name) => {
  const place = document.createElement("div");
  place.className = "col-md-6";
  place.innerHTML = '<div class="chart"><h3 class="card-title mb-1"></h3><div></div></div>';
  place.querySelector("h3").textContent = name;
  holder.append(place);
  const axis = axes();
  const chart = new window.uPlot(
    {
      width: place.clientWidth - 16,
      height: 220,
      scales: { x: { time: false } },
      cursor: { points: { size: 7 } },
      series: [{ label: holder.dataset.step }, { label: name, stroke: colour("--tblr-primary"), width: 2, points: { show: curves.get(name).size < 40, size: 5 } }],
      axes: [axis, { ...axis, size: 56 }],
    },
    data(name),
    place.querySelector(".chart > div"),
  );
  charts.set(name, { chart, place });
};

const shown = () => document.getElementById("metrics").classList.contains("active");
const drawAll = () => {
  if (!shown()) return;
  for (const name of [...curves.keys()].sort()) charts.has(name) ? charts.get(name).chart.setData(data(name)) : draw(name);
};
const addPoints = (news) => {
  for (const [name, points] of Object.entries(news)) {
    if (!curves.has(name)) curves.set(name, new Map());
    for (const [step, value] of points) curves.get(name).set(step, value);
  }
  document.getElementById("metrics-empty").hidden = curves.size > 0;
  drawAll();
};
const redraw = () => {
  charts.forEach(({ chart, place }) => (chart.destroy(), place.remove()));
  charts.clear();
  drawAll();
};
document.getElementById("metrics-tab").addEventListener("shown.bs.tab", drawAll);
document.addEventListener("trainyard:theme", redraw);
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(redraw, 150);
});

// --- Output ----------------------------------------------------------------------------------------------------------
const log = document.getElementById("log");
const rank = document.getElementById("log-rank");
const attempt = document.getElementById("log-attempt");
const follow = document.getElementById("log-follow");
const search = document.getElementById("log-search");
const found = document.getElementById("log-found");
let output = null;
let text = "";
let offset = 0;
let fallback = 0;

const address = () => {
  const url = new URL(job.dataset.logs, location.href);
  url.searchParams.set("rank", rank.value);
  url.searchParams.set("offset", offset);
  if (attempt) url.searchParams.set("attempt", attempt.value);
  return url;
};
const toEnd = () => follow.checked && (log.scrollTop = log.scrollHeight);

const append = (chunk) => {
  if (chunk.next_offset <= offset && chunk.text) return;
  offset = chunk.next_offset;
  text += chunk.text;
  if (search.value) return mark();
  if (chunk.text) {
    if (log.dataset.isEmpty) log.textContent = "";
    delete log.dataset.isEmpty;
    log.append(chunk.text);
  }
  toEnd();
};

const pollOutput = async () => {
  try {
    const answer = await fetch(address(), { headers: { Accept: "application/json" } });
    if (!answer.ok) return;
    const chunk = await answer.json();
    append(chunk);
    if (chunk.eof) clearInterval(fallback);
  } catch {
    // The console does not answer now; the next round asks again.
  }
};

const open = () => {
  output?.close();
  clearInterval(fallback);
  text = "";
  offset = 0;
  log.textContent = log.dataset.empty;
  log.dataset.isEmpty = "1";
  const source = new EventSource(address());
  output = source;
  source.addEventListener("log", (event) => {
    const chunk = JSON.parse(event.data);
    append(chunk);
    if (chunk.eof) source.close();
  });
  source.addEventListener("error", () => {
    if (source.readyState !== EventSource.CLOSED || output !== source) return;
    clearInterval(fallback);
    pollOutput();
    fallback = setInterval(pollOutput, POLL_EVERY);
  });
};

/** Show every place where the search is found, and go to the first. */
const mark = () => {
  const wanted = search.value.toLowerCase();
  if (!wanted) {
    found.textContent = "";
    log.textContent = text || log.dataset.empty;
    return toEnd();
  }
  const lower = text.toLowerCase();
  const parts = document.createDocumentFragment();
  let from = 0;
  let count = 0;
  for (let at = lower.indexOf(wanted); at >= 0 && count < 5000; at = lower.indexOf(wanted, at + wanted.length)) {
    parts.append(text.slice(from, at));
    const element = document.createElement("mark");
    element.textContent = text.slice(at, at + wanted.length);
    parts.append(element);
    from = at + wanted.length;
    count += 1;
  }
  parts.append(text.slice(from));
  log.replaceChildren(parts);
  found.textContent = String(count);
  step(0);
};
let current = 0;
const step = (by) => {
  const marks = log.querySelectorAll("mark");
  if (!marks.length) return;
  marks[current]?.classList.remove("is-current");
  current = by ? (current + by + marks.length) % marks.length : 0;
  marks[current].classList.add("is-current");
  marks[current].scrollIntoView({ block: "center" });
  found.textContent = `${current + 1}/${marks.length}`;
};

document.getElementById("logs-tab").addEventListener("shown.bs.tab", () => (output ? toEnd() : open()));
rank.addEventListener("change", open);
attempt?.addEventListener("change", open);
follow.addEventListener("change", toEnd);
search.addEventListener("input", mark);
search.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  step(event.shiftKey ? -1 : 1);
});
log.addEventListener("wheel", (event) => event.deltaY < 0 && (follow.checked = false), { passive: true });
document.getElementById("log-download").addEventListener("click", () => {
  if (!output) open();
  if (!text) return toast(log.dataset.empty, "status");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.download = `${log.dataset.name}-rank-${rank.value}.log`;
  link.click();
  URL.revokeObjectURL(link.href);
});

// --- Tabs: the address remembers which one is open ---------------------------------------------------------------------
document.querySelectorAll('[data-bs-toggle="tab"]').forEach((tab) => {
  tab.addEventListener("shown.bs.tab", () => history.replaceState(null, "", tab.dataset.bsTarget));
});
const asked = location.hash && document.querySelector(`[data-bs-target="${CSS.escape(location.hash).replace("\\#", "#")}"]`);
if (asked) window.tabler.bootstrap.Tab.getOrCreateInstance(asked).show();
