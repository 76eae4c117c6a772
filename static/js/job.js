// The live page of a job. An event stream reports two things. When the state has changed, the page requests its changed
// parts in the reader's language. When curves have new points, metrics.js loads them. Logs have a stream of their own
// (logs.js). While the stream is broken, the page polls.

const job = document.getElementById("job");
const REFRESH_MS = 700; // the least time between two refreshes, so that many events cause one
const POLL_MS = 4000; // the interval of polls while the stream is broken
const LIVE = new Set(["overview", "nodes", "events", "cost"]); // tabs whose contents change while the job runs

// --- State -----------------------------------------------------------------------------------------------------------
let refreshAt = 0;
let refreshTimer = 0;
const refresh = () => {
  clearTimeout(refreshTimer);
  refreshTimer = setTimeout(() => {
    refreshAt = Date.now();
    window.htmx.trigger("#job-header", "refresh");
  }, Math.max(0, refreshAt + REFRESH_MS - Date.now()));
};
/** The id of the active tab. Only its contents are refreshed. */
const activeTab = () => document.querySelector("#job .tab-pane.active")?.id ?? "";
document.addEventListener("htmx:configRequest", (event) => {
  if (event.target.id === "job-header") event.detail.parameters.tab = activeTab();
});
const ended = () => Boolean(document.getElementById("job-header").dataset.ended);

let polling = 0;
const poll = (on) => {
  clearInterval(polling);
  polling = on ? setInterval(() => (ended() ? poll(false) : (refresh(), announcePoints())), POLL_MS) : 0;
};
const announcePoints = () => document.dispatchEvent(new Event("trainyard:points"));

const stream = new EventSource(job.dataset.stream);
let isFirst = true;
stream.addEventListener("state", (event) => {
  const state = JSON.parse(event.data);
  // The first event repeats the state that the page shows, unless the job has ended in between.
  if (!isFirst || Boolean(state.finished_at) !== Boolean(job.dataset.ended)) refresh();
  isFirst = false;
  if (!state.finished_at) return;
  stream.close();
  if (!job.dataset.ended) document.dispatchEvent(new Event("trainyard:ended"));
});
stream.addEventListener("metrics", announcePoints);
stream.addEventListener("open", () => poll(false));
stream.addEventListener("error", () => {
  if (!ended()) poll(true);
  if (ended()) stream.close();
});

// --- A notebook's time limit: a countdown, and the warning before the end ---------------------------------------------
// The server says how many seconds are left, since the clock of a browser may be wrong.
const renderedAt = new WeakMap();
const pad = (number) => String(number).padStart(2, "0");
const clock = (seconds) => `${Math.floor(seconds / 3600)}:${pad(Math.floor(seconds / 60) % 60)}:${pad(seconds % 60)}`;
const countDown = () => {
  const shown = document.querySelector("[data-seconds-left]");
  if (!shown) return;
  if (!renderedAt.has(shown)) renderedAt.set(shown, Date.now());
  const seconds = Math.max(0, Math.ceil(shown.dataset.secondsLeft - (Date.now() - renderedAt.get(shown)) / 1000));
  shown.textContent = clock(seconds);
  const warning = document.getElementById("notebook-ending");
  if (warning && seconds <= Number(warning.dataset.withinSeconds)) warning.hidden = false;
};
setInterval(countDown, 1000);
document.addEventListener("htmx:afterSwap", countDown);
countDown();

// --- Tabs: the URL has the one that is open ---------------------------------------------------------------------------
// htmx loads a tab when it is first opened. A tab that was loaded while the job ran is loaded again when it is reopened.
const loadedWhileOpen = new Set(ended() ? [] : [activeTab()]);
document.addEventListener("htmx:afterSwap", (event) => {
  if (event.target.parentElement?.classList.contains("tab-pane")) loadedWhileOpen[ended() ? "delete" : "add"](event.target.parentElement.id);
});
const showTab = (name) => window.tabler.bootstrap.Tab.getOrCreateInstance(document.getElementById(`${name}-tab`)).show();
const partList = document.getElementById("job-tab"); // stands in the place of the tabs on phones
partList.addEventListener("change", () => showTab(partList.value));
document.querySelectorAll('[data-bs-toggle="tab"]').forEach((tab) => {
  tab.addEventListener("shown.bs.tab", () => {
    const name = tab.dataset.bsTarget.slice(1);
    partList.value = name;
    history.replaceState(null, "", `${location.pathname}#${name}`);
    if (loadedWhileOpen.has(name) && LIVE.has(name)) window.htmx.trigger(`#job-${name}`, "refresh");
  });
});
const RENAMED_TABS = { details: "configuration", environment: "configuration" }; // tabs of earlier versions
const fragment = location.hash.slice(1);
const tab = fragment ? document.getElementById(`${RENAMED_TABS[fragment] ?? fragment}-tab`) : null;
if (tab?.dataset.bsToggle === "tab") showTab(RENAMED_TABS[fragment] ?? fragment);

// A link of the header opens a tab of this page.
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-open-tab]");
  if (!link) return;
  event.preventDefault();
  showTab(link.dataset.openTab);
  partList.parentElement.scrollIntoView({ block: "start" });
});
