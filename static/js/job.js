// A job, live. One event stream tells that the state has changed (the page then asks for its changed parts, in the reader's
// language) and that curves have new points (metrics.js reads them). The logs have their own stream (logs.js).
// The one rule: when a stream can't be had, the page asks every few seconds instead, and nothing is lost.

const job = document.getElementById("job");
const REFRESH_EVERY = 700;
const POLL_EVERY = 4000;
const LIVE = new Set(["overview", "nodes", "events", "cost"]); // tabs whose contents change while the job runs

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
/** The tab that is seen. Only its contents are refreshed. */
const seen = () => document.querySelector("#job .tab-pane.active")?.id ?? "";
document.addEventListener("htmx:configRequest", (event) => {
  if (event.target.id === "job-header") event.detail.parameters.tab = seen();
});
const ended = () => Boolean(document.getElementById("job-header").dataset.ended);

let polling = 0;
const poll = (on) => {
  clearInterval(polling);
  polling = on ? setInterval(() => (ended() ? poll(false) : (refresh(), tellPoints())), POLL_EVERY) : 0;
};
const tellPoints = () => document.dispatchEvent(new Event("trainyard:points"));

const stream = new EventSource(job.dataset.stream);
let first = true;
stream.addEventListener("state", (event) => {
  const state = JSON.parse(event.data);
  // The page was drawn with the state that the stream begins with, unless it changed in between.
  if (!first || Boolean(state.finished_at) !== Boolean(job.dataset.ended)) refresh();
  first = false;
  if (!state.finished_at) return;
  stream.close();
  if (!job.dataset.ended) document.dispatchEvent(new Event("trainyard:ended"));
});
stream.addEventListener("metrics", tellPoints);
stream.addEventListener("open", () => poll(false));
stream.addEventListener("error", () => {
  if (!ended()) poll(true);
  if (ended()) stream.close();
});

// --- Tabs: the address remembers which one is open ---------------------------------------------------------------------
// Contents are loaded when a tab is first seen. Those that were loaded while the job ran are loaded again when seen again.
const loadedWhileOpen = new Set(ended() ? [] : [seen()]);
document.addEventListener("htmx:afterSwap", (event) => {
  if (event.target.parentElement?.classList.contains("tab-pane")) loadedWhileOpen[ended() ? "delete" : "add"](event.target.parentElement.id);
});
document.querySelectorAll('[data-bs-toggle="tab"]').forEach((tab) => {
  tab.addEventListener("shown.bs.tab", () => {
    const name = tab.dataset.bsTarget.slice(1);
    history.replaceState(null, "", `${location.pathname}#${name}`);
    if (loadedWhileOpen.has(name) && LIVE.has(name)) window.htmx.trigger(`#job-${name}`, "refresh");
  });
});
const SECTIONS = { details: "configuration", environment: "configuration" }; // tabs of earlier versions
const asked = location.hash.slice(1);
const tab = asked ? document.getElementById(`${SECTIONS[asked] ?? asked}-tab`) : null;
if (tab?.dataset.bsToggle === "tab") window.tabler.bootstrap.Tab.getOrCreateInstance(tab).show();

// A link of the header opens a tab of this page.
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-open-tab]");
  if (!link) return;
  event.preventDefault();
  const opened = document.getElementById(`${link.dataset.openTab}-tab`);
  window.tabler.bootstrap.Tab.getOrCreateInstance(opened).show();
  opened.scrollIntoView({ block: "start" });
});
