// A terminal with a shell in a job's node. What it shows is decided by customers' code: xterm.js draws it as text, and
// nothing in it opens a link or writes to the clipboard.
import { FitAddon } from "../vendor/xterm/addon-fit.mjs";
import { Terminal } from "../vendor/xterm/xterm.mjs";

const MAX_INPUT_BYTES = 16 * 1024; // of one message; the server refuses larger ones
const SEEN_EVERY = 64 * 1024; // bytes between two reports of what was drawn; the server waits for them

const place = document.getElementById("shell");
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
terminal.open(place);
fit.fit();

const address = new URL(place.dataset.socket, window.location.href);
address.protocol = address.protocol.replace("http", "ws");
const socket = new WebSocket(address);
socket.binaryType = "arraybuffer";
const send = (data) => socket.readyState === WebSocket.OPEN && socket.send(data);
const sendSize = () => send(JSON.stringify({ rows: terminal.rows, columns: terminal.cols }));

let drawn = 0;
let reported = 0;
socket.addEventListener("message", (event) => {
  const data = new Uint8Array(event.data);
  terminal.write(data, () => {
    drawn += data.length;
    if (drawn - reported < SEEN_EVERY) return;
    reported = drawn;
    send(JSON.stringify({ seen: drawn }));
  });
});
socket.addEventListener("open", () => {
  sendSize();
  terminal.focus();
});
socket.addEventListener("close", (event) => {
  const sentence = notice.dataset[`code${event.code}`];
  if (sentence) notice.querySelector("span").textContent = sentence;
  notice.hidden = false;
  terminal.options.disableStdin = true;
});

const encoder = new TextEncoder();
const type = (bytes) => {
  for (let start = 0; start < bytes.length; start += MAX_INPUT_BYTES) send(bytes.subarray(start, start + MAX_INPUT_BYTES));
};
terminal.onData((text) => type(encoder.encode(text)));
terminal.onBinary((text) => type(Uint8Array.from(text, (character) => character.charCodeAt(0)))); // reports of the mouse
terminal.onResize(sendSize);
new ResizeObserver(() => fit.fit()).observe(place);
