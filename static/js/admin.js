// What django-unfold's pages leave unsaid to assistive technology: the main landmark, and names for fields in tables,
// for its lists of choices, and for places that scroll.
const heading = (cell) => {
  const head = cell.closest("table")?.tHead?.rows;
  return head?.[head.length - 1]?.cells[cell.cellIndex]?.textContent.trim() ?? "";
};
const named = (element) => element.labels?.length || element.getAttribute("aria-label") || element.getAttribute("aria-labelledby");

const name = (root) => {
  for (const field of root.querySelectorAll("td input:not([type=hidden]), td select, td textarea")) {
    const label = !named(field) && heading(field.closest("td"));
    if (label) field.setAttribute("aria-label", label);
  }
  for (const cell of root.querySelectorAll("th")) {
    if (!cell.textContent.trim() && !cell.querySelector("input")) cell.setAttribute("role", "presentation");
  }
  for (const select of root.querySelectorAll("select.select2-hidden-accessible")) {
    const label = select.labels?.[0]?.textContent.trim() || select.getAttribute("aria-label") || heading(select.closest("td") ?? select);
    for (const part of select.nextElementSibling?.querySelectorAll("[role=combobox], [role=textbox]") ?? []) part.setAttribute("aria-label", label);
  }
  // A region needs a name of its own; what merely scrolls is none.
  for (const scroller of root.querySelectorAll(".simplebar-content-wrapper")) scroller.setAttribute("role", "group");
};

const start = () => {
  document.getElementById("main")?.setAttribute("role", "main");
  name(document);
  new MutationObserver((changes) => {
    for (const change of changes) if (change.target.nodeType === Node.ELEMENT_NODE && change.addedNodes.length) name(change.target);
  }).observe(document.body, { childList: true, subtree: true });
};
addEventListener("DOMContentLoaded", start);
