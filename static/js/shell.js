// A terminal with a shell in a job's node. Customers' code decides what it shows: xterm.js draws it as text, and ignores
// sequences that open links or write to the clipboard.
import { FitAddon } from "../vendor/xterm/addon-fit.mjs";
import { Terminal } from "../vendor/xterm/xterm.mjs";

const MAX_INPUT_BYTES = 16 * 1024; // of one message; the server refuses larger ones
const ACKNOWLEDGE_BYTES = 64 * 1024; // after so many drawn bytes the server gets an acknowledgement; it waits for them

const container = document.getElementById("shell");
const notice = document.getElementById("shell-notice");
const style = getComputedStyle(document.documentElement);
const terminal = new Terminal({
  cursorBlink: !window.matchMedia("(prefers-reduced-motion: reduce)").matches,
  fontFamily: style.getPropertyValue("--tblr-font-monospace") || "monospace",
  fontSize: 14,
  screenReaderMode: true,
  scrollback: 5000,
});
for (const sequence of [8, 52]) terminal.parser.registerOscHandler(sequence, () => true); // links and the clipboard
const fit = new FitAddon();
terminal.loadAddon(fit);
terminal.open(container);
fit.fit();

const address = new URL(container.dataset.socket, window.location.href);
address.protocol = address.protocol.replace("http", "ws");
const socket = new WebSocket(address);
socket.binaryType = "arraybuffer";
const send = (data) => socket.readyState === WebSocket.OPEN && socket.send(data);
const sendSize = () => send(JSON.stringify({ rows: terminal.rows, columns: terminal.cols }));

terminal.write(container.dataset.connecting);
let isOpen = false;
let drawn = 0;
let acknowledged = 0;
socket.addEventListener("message", (event) => {
  const data = new Uint8Array(event.data);
  terminal.write(data, () => {
    drawn += data.length;
    if (drawn - acknowledged < ACKNOWLEDGE_BYTES) return;
    acknowledged = drawn;
    send(JSON.stringify({ seen: drawn }));
  });
});
socket.addEventListener("open", () => {
  isOpen = true;
  terminal.write("\x1b[2K\r"); // removes the line that says that it connects
  sendSize();
  terminal.focus();
});
socket.addEventListener("close", (event) => {
  const message = isOpen ? notice.dataset[`code${event.code}`] : notice.dataset.failed;
  if (message) notice.querySelector("span").textContent = message;
  notice.hidden = false;
  container.scrollIntoView({ block: "nearest" }); // the notice pushes its last line down
  terminal.options.disableStdin = true;
});

const encoder = new TextEncoder();
const sendInput = (bytes) => {
  for (let start = 0; start < bytes.length; start += MAX_INPUT_BYTES) send(bytes.subarray(start, start + MAX_INPUT_BYTES));
};
terminal.onData((text) => sendInput(encoder.encode(text)));
terminal.onBinary((text) => sendInput(Uint8Array.from(text, (character) => character.charCodeAt(0)))); // mouse reports
terminal.onResize(sendSize);
new ResizeObserver(() => fit.fit()).observe(container);
