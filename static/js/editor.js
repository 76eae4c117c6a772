// The editor of one file: CodeMirror, saving with Ctrl-S, and a warning before unsaved text is left.
// The one rule: text is saved as it came, line ends included.
import { csrf, toast } from "./shared.js";

const area = document.getElementById("editor");
const state = document.getElementById("save-state");
const button = document.getElementById("save");
const original = JSON.parse(document.getElementById("editor-text").textContent);
const lineEnd = original.includes("\r\n") ? "\r\n" : "\n";

area.value = original;
const editor = window.CodeMirror.fromTextArea(area, {
  mode: area.dataset.mode || null,
  lineNumbers: true,
  indentUnit: 4,
  matchBrackets: true,
  styleActiveLine: true,
  lineWrapping: area.dataset.mode === "markdown",
  readOnly: !area.dataset.writable,
  extraKeys: {
    Tab: (cm) => (cm.somethingSelected() ? cm.indentSelection("add") : cm.execCommand("insertSoftTab")),
    "Shift-Tab": (cm) => cm.indentSelection("subtract"),
    "Ctrl-/": "toggleComment",
    "Cmd-/": "toggleComment",
    Esc: () => button?.focus(),
  },
});
editor.getInputField().setAttribute("aria-label", area.getAttribute("aria-label"));
let saved = editor.changeGeneration();
let isNew = Boolean(area.dataset.new);

const dirty = () => isNew || !editor.isClean(saved);

const save = async () => {
  if (!area.dataset.writable) return;
  const text = editor.getValue(lineEnd);
  if (new Blob([text]).size > Number(area.dataset.limit)) return toast(area.dataset.saysLarge);
  const generation = editor.changeGeneration();
  state.textContent = area.dataset.saysSaving;
  try {
    const answer = await fetch(area.dataset.save, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-CSRFToken": csrf() },
      body: JSON.stringify({ text }),
    });
    const { message } = await answer.json();
    if (!answer.ok) throw new Error(message);
    saved = generation;
    isNew = false;
    state.textContent = editor.isClean(saved) ? message : area.dataset.saysChanged;
    const here = new URL(location.href);
    here.searchParams.delete("new");
    history.replaceState(null, "", here);
  } catch (error) {
    state.textContent = area.dataset.saysChanged;
    toast(error instanceof TypeError || error instanceof SyntaxError ? area.dataset.saysFailed : error.message);
  }
};

editor.on("change", () => (state.textContent = dirty() ? area.dataset.saysChanged : ""));
button?.addEventListener("click", save);
document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "s") {
    event.preventDefault();
    save();
  }
});
addEventListener("beforeunload", (event) => area.dataset.writable && !editor.isClean(saved) && event.preventDefault());
