// The editor of one file: CodeMirror, saving with Ctrl-S, and a warning before unsaved text is left.
// Line ends are saved as they were loaded. If the session has ended, app.js restores the text after the log-in.
import { csrf, toast } from "./shared.js";

const area = document.getElementById("editor");
const state = document.getElementById("save-state");
const button = document.getElementById("save");
const original = JSON.parse(document.getElementById("editor-text").textContent);
const lineEnd = original.includes("\r\n") ? "\r\n" : "\n";

const restored = area.value; // empty unless app.js has restored a text
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
// The page of a failed job links to a line.
const lineHash = /^#L(\d{1,9})$/.exec(location.hash);
if (lineHash) {
  editor.setCursor(Number(lineHash[1]) - 1, 0);
  editor.scrollIntoView(null, 200);
  editor.focus();
}
let saved = editor.changeGeneration();
let isKept = false;
let isNew = Boolean(area.dataset.new);
// The version of the file that the text was loaded from, empty while it is new. It is kept with the text.
const version = area.form.elements.namedItem("version");
const conflict = document.getElementById("conflict");

const isDirty = () => isNew || !editor.isClean(saved);

/** Show how the file's text now differs from the one in the editor. Nothing is saved until the user decides. */
const showConflict = (current) => {
  state.textContent = area.dataset.textChanged;
  document.getElementById("conflict-title").textContent = current.message;
  document.getElementById("conflict-text").value = current.text;
  document.getElementById("conflict-diff").replaceChildren(
    ...current.diff.map(([sign, text]) => {
      const line = document.createElement("span");
      line.className = { "+": "diff-new", "-": "diff-old", "@": "diff-gap" }[sign] ?? "";
      line.textContent = sign === "@" ? "⋯" : `${sign === "-" ? "−" : sign} ${text}`;
      return line;
    }),
  );
  conflict.querySelector("[data-resolve=theirs]").onclick = () => {
    editor.setValue(current.text);
    version.value = current.version;
    isNew = !version.value;
    saved = editor.changeGeneration();
    state.textContent = "";
    conflict.hidden = true;
    editor.focus();
  };
  conflict.querySelector("[data-resolve=mine]").onclick = () => {
    version.value = current.version;
    save();
  };
  conflict.hidden = false;
  conflict.focus();
};

const save = async () => {
  if (!area.dataset.writable) return;
  const text = editor.getValue(lineEnd);
  if (new Blob([text]).size > Number(area.dataset.limit)) return toast(area.dataset.textTooLarge);
  const generation = editor.changeGeneration();
  state.textContent = area.dataset.textSaving;
  try {
    const response = await fetch(area.dataset.save, {
      method: "POST",
      // With the header of htmx, the response is a 401 once the session has ended, and not a redirect to the log-in page.
      headers: { "Content-Type": "application/json", "X-CSRFToken": csrf(), "HX-Request": "true" },
      body: JSON.stringify({ text, version: version.value }),
    });
    if (response.status === 401) {
      area.value = text;
      isKept = true;
      state.textContent = area.dataset.textChanged;
      document.dispatchEvent(new Event("trainyard:signed-out"));
      return;
    }
    const result = await response.json();
    if (response.status === 409) return showConflict(result);
    if (!response.ok) throw new Error(result.message);
    conflict.hidden = true;
    version.value = result.version;
    saved = generation;
    isNew = false;
    for (const link of ["download", "train"]) document.getElementById(link)?.removeAttribute("hidden");
    state.textContent = editor.isClean(saved) ? result.message : area.dataset.textChanged;
    const here = new URL(location.href);
    here.searchParams.delete("new");
    history.replaceState(null, "", here);
  } catch (error) {
    state.textContent = area.dataset.textChanged;
    toast(error instanceof TypeError || error instanceof SyntaxError ? area.dataset.textFailed : error.message);
  }
};

editor.on("change", () => (state.textContent = isDirty() ? area.dataset.textChanged : ""));
if (restored) editor.setValue(restored);
button?.addEventListener("click", save);
document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "s") {
    event.preventDefault();
    save();
  }
});
addEventListener("beforeunload", (event) => area.dataset.writable && !isKept && !editor.isClean(saved) && event.preventDefault());
