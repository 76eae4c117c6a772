// Adds what django-unfold's pages lack for assistive technology: the main landmark, and accessible names of fields in
// tables, of its select widgets, and of scrolling regions.
const heading = (cell) => {
  const head = cell.closest("table")?.tHead?.rows;
  return head?.[head.length - 1]?.cells[cell.cellIndex]?.textContent.trim() ?? "";
};
const hasName = (element) => element.labels?.length || element.getAttribute("aria-label") || element.getAttribute("aria-labelledby");

const addNames = (root) => {
  for (const field of root.querySelectorAll("td input:not([type=hidden]), td select, td textarea")) {
    const label = !hasName(field) && heading(field.closest("td"));
    if (label) field.setAttribute("aria-label", label);
  }
  for (const cell of root.querySelectorAll("th")) {
    if (!cell.textContent.trim() && !cell.querySelector("input")) cell.setAttribute("role", "presentation");
  }
  for (const select of root.querySelectorAll("select.select2-hidden-accessible")) {
    const label = select.labels?.[0]?.textContent.trim() || select.getAttribute("aria-label") || heading(select.closest("td") ?? select);
    for (const part of select.nextElementSibling?.querySelectorAll("[role=combobox], [role=textbox]") ?? []) part.setAttribute("aria-label", label);
  }
  // simplebar makes these elements regions. A region needs a name, a group does not.
  for (const scroller of root.querySelectorAll(".simplebar-content-wrapper")) scroller.setAttribute("role", "group");
};

const start = () => {
  document.getElementById("main")?.setAttribute("role", "main");
  addNames(document);
  new MutationObserver((changes) => {
    for (const change of changes) if (change.target.nodeType === Node.ELEMENT_NODE && change.addedNodes.length) addNames(change.target);
  }).observe(document.body, { childList: true, subtree: true });
};
addEventListener("DOMContentLoaded", start);
