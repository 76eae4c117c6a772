// The form of a new training. The script notes which fields were touched, because only these show their errors. It keeps the
// order of the chosen datasets, offers images with the chosen framework, and shows the number of processes. htmx requests
// the quotes.
import { watchQuote } from "./quote_card.js";

const form = document.getElementById("training");
const field = (name) => form.elements.namedItem(name);

const touched = new Set(field("touched").value.split(",").filter(Boolean));
const touch = (event) => {
  const { dataset, versionOf } = event.target.dataset;
  const name = dataset || versionOf ? "datasets" : event.target.dataset.field ?? event.target.name;
  if (name) touched.add(name);
  field("touched").value = [...touched].join(",");
};
form.addEventListener("change", touch, true);
form.addEventListener("input", touch, true);

const datasets = field("datasets");
const boxes = [...form.querySelectorAll("[data-dataset]")];
const versions = [...form.querySelectorAll("[data-version-of]")];
// The chosen datasets in order: "name" for the latest version, or "name@3".
const chosen = () => datasets.value.split(",").map((each) => each.trim()).filter(Boolean);
const nameOf = (each) => each.split("@")[0];
const showDatasets = () => {
  const order = chosen().map(nameOf);
  for (const select of versions) {
    select.hidden = !order.includes(select.dataset.versionOf);
    const [, number = ""] = chosen().find((each) => nameOf(each) === select.dataset.versionOf)?.split("@") ?? [];
    if ([...select.options].some((option) => option.value === number)) select.value = number;
  }
  for (const box of boxes) {
    const position = order.indexOf(box.dataset.dataset);
    const badge = box.parentElement.querySelector("[data-place]");
    box.checked = position >= 0;
    badge.hidden = position < 0 || order.length < 2;
    badge.textContent = position + 1;
  }
};
form.addEventListener("change", (event) => {
  const { dataset, versionOf } = event.target.dataset;
  if (dataset) {
    const others = chosen().filter((each) => nameOf(each) !== dataset);
    datasets.value = [...others, ...(event.target.checked ? [dataset] : [])].join(",");
  } else if (versionOf) {
    const text = event.target.value ? `${versionOf}@${event.target.value}` : versionOf;
    datasets.value = chosen().map((each) => (nameOf(each) === versionOf ? text : each)).join(",");
  } else return;
  showDatasets();
}, true);

const image = document.getElementById("image");
const framework = document.getElementById("framework");
const showImages = () => {
  for (const option of image.options) option.disabled = option.hidden = !option.dataset.frameworks.split(" ").includes(framework.value);
  const usable = [...image.options].filter((option) => !option.disabled);
  const fitting = usable.find((option) => option.dataset.notReady === undefined) ?? usable[0];
  if (image.selectedOptions[0]?.disabled && fitting) fitting.selected = true;
};
// Fields that the framework does not have are hidden and not sent.
const showFrameworkFields = () => {
  for (const group of form.querySelectorAll(".fold [data-frameworks]")) {
    group.hidden = !group.dataset.frameworks.split(" ").includes(framework.value);
    for (const control of group.querySelectorAll("input, select")) control.disabled = group.hidden;
  }
};
framework.addEventListener("change", showImages, true);
framework.addEventListener("change", showFrameworkFields, true);

// Open the fold if one of its fields has an error.
const fold = document.getElementById("advanced");
document.addEventListener("htmx:afterSettle", () => {
  if ([...fold.querySelectorAll(".invalid-feedback")].some((slot) => slot.textContent.trim())) fold.open = true;
});

form.addEventListener("change", (event) => {
  if (event.target.name === "node_spec") field("workers_per_node").value = Math.max(1, Number(event.target.dataset.gpus));
}, true);

const showWorld = () => {
  const world = Number(field("nodes").value) * Number(field("workers_per_node").value);
  document.getElementById("world-size").textContent = Number.isInteger(world) && world > 0 ? world : "–";
};
form.addEventListener("input", showWorld);
form.addEventListener("change", showWorld);

// Buttons that set a field: scripts of the tree, and a requirements file that the quote suggests.
document.addEventListener("click", (event) => {
  const { setField, value } = event.target.closest("[data-set-field]")?.dataset ?? {};
  if (!setField) return;
  field(setField).value = value;
  field(setField).dispatchEvent(new Event("change", { bubbles: true }));
});

// In the tree of scripts, the chosen one is marked, and its folders are open.
const showScript = () => {
  for (const button of form.querySelectorAll("#script-tree button")) {
    const isChosen = button.dataset.value === field("code_path").value;
    button.removeAttribute("aria-current");
    if (!isChosen) continue;
    button.setAttribute("aria-current", "true");
    for (let folder = button.closest("details"); folder?.closest("#script-tree"); folder = folder.parentElement.closest("details")) folder.open = true;
  }
};
field("code_path").addEventListener("change", showScript);
document.addEventListener("htmx:oobAfterSwap", showScript);

// While the section of the environment is open, htmx requests it with each quote.
const preview = document.getElementById("launch-preview");
const showPreview = () => {
  const quote = document.querySelector("#quote [data-quote]")?.dataset.quote;
  if (preview.open && quote) window.htmx.ajax("GET", preview.dataset.url.replace(/[0-9a-f-]{36}/, quote), { target: "#launch-preview-rows", source: preview });
};
preview.addEventListener("toggle", showPreview);

// In a rerun, mark the fields that differ from the earlier job.
const earlier = JSON.parse(form.dataset.earlier ?? "{}");
const valuesOf = (name) =>
  [...form.elements]
    .filter((control) => control.name === name && (!["radio", "checkbox"].includes(control.type) || control.checked))
    .map((control) => control.value)
    .filter((value) => value !== "");
const showChanges = () => {
  const changed = [];
  for (const [name, before] of Object.entries(earlier)) {
    const control = [...form.elements].find((each) => each.name === name);
    const group = control?.closest('[id^="field-"]');
    if (!group) continue;
    group.querySelector(".changed-mark")?.remove();
    const isChanged = JSON.stringify([...valuesOf(name)].sort()) !== JSON.stringify([...before].sort());
    group.classList.toggle("is-changed", isChanged);
    if (!isChanged) continue;
    changed.push(group.dataset.title ?? group.querySelector("label, legend").firstChild.textContent.trim());
    const mark = document.getElementById("changed-mark").content.cloneNode(true);
    const code = mark.querySelector("code");
    const title = (value) => [...(control.options ?? [])].find((option) => option.value === value)?.text ?? value;
    code.textContent = before.map(title).join(", ") || code.dataset.empty;
    group.append(mark);
  }
  const line = document.getElementById("changed-fields");
  if (!line) return;
  line.hidden = !changed.length;
  line.querySelector("output").textContent = changed.join(", ");
};
form.addEventListener("input", showChanges);
form.addEventListener("change", showChanges);

// Choosing an alternative of the comparison sets the nodes of the form, which requests a quote for them.
document.addEventListener("click", (event) => {
  const { chooseSpec, chooseNodes, chooseWorkers } = event.target.closest("[data-choose-spec]")?.dataset ?? {};
  if (!chooseSpec) return;
  const spec = form.querySelector(`[name="node_spec"][value="${CSS.escape(chooseSpec)}"]`);
  if (!spec.checked) {
    spec.checked = true;
    spec.dispatchEvent(new Event("change", { bubbles: true }));
  }
  field("workers_per_node").value = chooseWorkers;
  field("nodes").value = chooseNodes;
  if (Number(field("min_nodes").value) > Number(chooseNodes)) field("min_nodes").value = chooseNodes;
  field("nodes").dispatchEvent(new Event("change", { bubbles: true }));
});

watchQuote(form, showPreview);
showScript();
showChanges();
showDatasets();
showImages();
showFrameworkFields();
showWorld();
