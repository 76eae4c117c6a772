// The form of a new training: which fields have been touched (errors are shown at those alone), datasets in the order
// chosen, images that carry the framework, the number of processes. Quotes themselves are asked for by htmx.
const form = document.getElementById("training");
const field = (name) => form.elements.namedItem(name);

const touched = new Set(field("touched").value.split(",").filter(Boolean));
const touch = (event) => {
  const name = event.target.dataset.dataset ? "datasets" : event.target.dataset.field ?? event.target.name;
  if (name) touched.add(name);
  field("touched").value = [...touched].join(",");
};
form.addEventListener("change", touch, true);
form.addEventListener("input", touch, true);

const datasets = field("datasets");
const boxes = [...form.querySelectorAll("[data-dataset]")];
const chosen = () => datasets.value.split(",").filter(Boolean);
const showDatasets = () => {
  const order = chosen();
  for (const box of boxes) {
    const place = order.indexOf(box.dataset.dataset);
    const badge = box.parentElement.querySelector("[data-place]");
    box.checked = place >= 0;
    badge.hidden = place < 0 || order.length < 2;
    badge.textContent = place + 1;
  }
};
form.addEventListener("change", (event) => {
  const name = event.target.dataset.dataset;
  if (!name) return;
  datasets.value = [...chosen().filter((each) => each !== name), ...(event.target.checked ? [name] : [])].join(",");
  showDatasets();
}, true);

const image = document.getElementById("image");
const framework = document.getElementById("framework");
const showImages = () => {
  for (const option of image.options) option.disabled = option.hidden = !option.dataset.frameworks.split(" ").includes(framework.value);
  const fitting = [...image.options].find((option) => !option.disabled);
  if (image.selectedOptions[0]?.disabled && fitting) fitting.selected = true;
};
// What a framework does not have is neither shown nor sent.
const showFrameworkFields = () => {
  for (const place of form.querySelectorAll(".fold [data-frameworks]")) {
    place.hidden = !place.dataset.frameworks.split(" ").includes(framework.value);
    for (const control of place.querySelectorAll("input, select")) control.disabled = place.hidden;
  }
};
framework.addEventListener("change", showImages, true);
framework.addEventListener("change", showFrameworkFields, true);

// A field of the fold that is at fault must be seen.
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

// Enter asks for the quote, it doesn't buy.
form.addEventListener("submit", (event) => event.preventDefault());

document.addEventListener("click", (event) => {
  if (event.target.closest("[data-requote]")) window.htmx.trigger(form, "requote");
});

showDatasets();
showImages();
showFrameworkFields();
showWorld();
