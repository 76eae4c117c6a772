// The command palette and keyboard shortcuts. The dialogs are in the page only for members of an organization.
// Pages are filtered here; objects come from the API's search, and a newer request aborts an older one.

const palette = document.getElementById("palette");
const shortcuts = document.getElementById("shortcuts");
const OFF_KEY = "trainyard-single-keys-off"; // of localStorage: present if single keys are off
const SEARCH_AFTER_MS = 150; // one request for a word, not one for each of its letters

const modal = (element) => window.tabler.bootstrap.Modal.getOrCreateInstance(element);

if (palette) {
  const input = palette.querySelector("input");
  const list = palette.querySelector("#palette-list");
  const status = palette.querySelector("[data-palette-status]");
  const pages = [...list.querySelectorAll("[data-page]")];
  let pending = null;
  let timer = 0;

  const options = () => [...list.querySelectorAll("[role=option]:not([hidden])")];

  const choose = (option) => {
    list.querySelectorAll("[aria-selected=true]").forEach((each) => each.setAttribute("aria-selected", "false"));
    option?.setAttribute("aria-selected", "true");
    option?.scrollIntoView({ block: "nearest" });
    if (option) input.setAttribute("aria-activedescendant", option.id);
    else input.removeAttribute("aria-activedescendant");
  };

  const show = (hits) => {
    list.querySelectorAll("[data-hit]").forEach((each) => each.remove());
    hits.forEach((hit, index) => {
      const option = document.createElement("a");
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", "false");
      option.tabIndex = -1;
      option.dataset.hit = "";
      option.id = `palette-hit-${index}`;
      option.href = palette.getAttribute(`data-url-${hit.kind}`).replace(/0\/$/, `${encodeURIComponent(hit.id)}/`);
      const icon = pages.find((page) => page.id === `palette-${hit.kind}_list`)?.querySelector("svg");
      if (icon) option.append(icon.cloneNode(true));
      option.append(Object.assign(document.createElement("span"), { textContent: hit.title }));
      option.append(Object.assign(document.createElement("small"), { textContent: hit.detail }));
      list.append(option);
    });
    choose(options()[0]);
    status.textContent = options().length ? "" : status.dataset.none;
  };

  const search = async (text) => {
    pending?.abort();
    pending = new AbortController();
    try {
      const answer = await fetch(`${palette.dataset.search}?${new URLSearchParams({ q: text })}`, { signal: pending.signal });
      if (answer.status === 401) document.dispatchEvent(new Event("trainyard:signed-out"));
      if (!answer.ok) throw new Error(answer.statusText);
      show((await answer.json()).results);
    } catch (error) {
      if (error.name !== "AbortError") status.textContent = status.dataset.failed;
    }
  };

  const filter = () => {
    const text = input.value.trim().toLowerCase();
    for (const page of pages) page.hidden = !page.textContent.toLowerCase().includes(text);
    clearTimeout(timer);
    pending?.abort();
    status.textContent = "";
    if (text) timer = setTimeout(search, SEARCH_AFTER_MS, input.value.trim());
    else show([]);
    choose(options()[0]);
  };

  const open = () => {
    input.value = "";
    filter();
    modal(palette).show();
  };

  input.addEventListener("input", filter);
  palette.addEventListener("shown.bs.modal", () => input.focus());
  input.addEventListener("keydown", (event) => {
    const all = options();
    const at = all.findIndex((option) => option.getAttribute("aria-selected") === "true");
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const step = event.key === "ArrowDown" ? 1 : -1;
      choose(all[(at + step + all.length) % all.length]);
    } else if (event.key === "Enter" && all[at]) {
      event.preventDefault();
      all[at].click();
    }
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-palette-open]")) open();
  });

  const singleKeys = shortcuts.querySelector("#single-keys");
  singleKeys.checked = localStorage.getItem(OFF_KEY) === null;
  singleKeys.addEventListener("change", () => {
    if (singleKeys.checked) localStorage.removeItem(OFF_KEY);
    else localStorage.setItem(OFF_KEY, "");
  });

  let afterG = false;
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && !event.target.closest?.(".CodeMirror")) {
      event.preventDefault();
      open();
      return;
    }
    const types = event.target.closest?.("input, textarea, select, [contenteditable], .CodeMirror");
    const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (types || !isPlain || !singleKeys.checked || document.querySelector(".modal.show")) return;
    const target = afterG && shortcuts.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
    afterG = event.key === "g" && !afterG;
    if (target) location.assign(target.dataset.href);
    else if (event.key === "?") modal(shortcuts).show();
    else if (event.key === "/") {
      const field = document.querySelector("main [type=search]");
      if (!field) return;
      event.preventDefault();
      field.focus();
    }
  });
}
