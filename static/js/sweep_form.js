// The form of a new sweep: rows of parameters. htmx requests the quotes.
import { watchQuote } from "./quote_card.js";

const form = document.getElementById("sweep-form");
const rows = document.getElementById("parameters");
const add = document.getElementById("add-parameter");
const template = document.getElementById("parameter-template");

const showKind = (row) => {
  const isChoices = row.querySelector('[name="parameter_type"]').value === "categorical";
  for (const element of row.querySelectorAll("[data-range]")) element.hidden = isChoices;
  row.querySelector("[data-choices]").hidden = !isChoices;
};
const requote = () => window.htmx.trigger(form, "requote");

rows.addEventListener("change", (event) => {
  if (event.target.name === "parameter_type") showKind(event.target.closest("[data-parameter]"));
});
rows.addEventListener("click", (event) => {
  const button = event.target.closest("[data-remove-parameter]");
  if (!button) return;
  button.closest("[data-parameter]").remove();
  requote();
  add.focus();
});
add.addEventListener("click", () => {
  rows.append(template.content.cloneNode(true));
  showKind(rows.lastElementChild);
  rows.lastElementChild.querySelector("input").focus();
});
add.disabled = false;

rows.querySelectorAll("[data-parameter]").forEach(showKind);
watchQuote(form);
