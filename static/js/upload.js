// Uploads files with Uppy: a dataset's archive, or files of a workspace. It uses the tus protocol, or sends large files
// directly to the operator's bucket, if one is configured.
// Several files become one tar: a Blob that refers to the files, so that their bytes are never in memory. The same files
// always become the same tar, so that an upload resumes after a reload once they are chosen again.
import { Tus, Uppy } from "../vendor/uppy/uppy.min.js";
import { Direct, storageKeyOf } from "./direct_upload.js";
import { csrf, toast } from "./shared.js";

const ARCHIVE = /\.(tar|tar\.gz|tgz|zip)$/i;
const BLOCK = 512;
const encoder = new TextEncoder();

const setField = (block, text, offset, length) => block.set(encoder.encode(text).subarray(0, length), offset);

/** Return the ustar header of an entry. `modified` is in milliseconds. */
const header = (name, size, type, modified) => {
  const block = new Uint8Array(BLOCK);
  setField(block, name, 0, 100);
  setField(block, "0000644\0", 100, 8);
  setField(block, "0000000\0", 108, 8);
  setField(block, "0000000\0", 116, 8);
  setField(block, size.toString(8).padStart(11, "0") + "\0", 124, 12);
  setField(block, Math.floor(modified / 1000).toString(8).padStart(11, "0") + "\0", 136, 12);
  setField(block, "        " + type + "", 148, 9);
  setField(block, "ustar\0" + "00", 257, 8);
  const sum = block.reduce((total, byte) => total + byte, 0);
  setField(block, sum.toString(8).padStart(6, "0") + "\0 ", 148, 8);
  return block;
};

const padding = (size) => new Uint8Array((BLOCK - (size % BLOCK)) % BLOCK);

/** Return a pax record. Its length includes the length itself: `<length> path=<name>\n`. */
const pax = (key, value) => {
  const rest = encoder.encode(` ${key}=${value}\n`).length;
  let length = rest + String(rest).length;
  if (rest + String(length).length !== length) length = rest + String(length).length;
  return encoder.encode(`${length} ${key}=${value}\n`);
};

/** Return the files as one tar. Names above 100 bytes and sizes from 8 GiB go into pax headers: ustar has no room. */
const tar = (files) => {
  const parts = [];
  for (const { name, file } of files) {
    const records = [];
    if (encoder.encode(name).length > 100) records.push(pax("path", name));
    if (file.size >= 8 ** 11) records.push(pax("size", String(file.size)));
    const extra = new Blob(records);
    if (records.length) parts.push(header("pax", extra.size, "x", file.lastModified), extra, padding(extra.size));
    parts.push(header(name, file.size < 8 ** 11 ? file.size : 0, "0", file.lastModified), file, padding(file.size));
  }
  parts.push(new Uint8Array(2 * BLOCK));
  return new Blob(parts);
};

/** Return all files below a dropped folder: [{name, file}]. */
const walk = async (entry, prefix = "") => {
  if (entry.isFile) return [{ name: prefix + entry.name, file: await new Promise((resolve, reject) => entry.file(resolve, reject)) }];
  const reader = entry.createReader();
  const files = [];
  for (;;) {
    const batch = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!batch.length) break;
    for (const child of batch) files.push(...(await walk(child, `${prefix}${entry.name}/`)));
  }
  return files;
};

const dropped = async (transfer) => {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  return (await Promise.all(entries.map((entry) => walk(entry)))).flat();
};

/** Return the chosen files. The name of a chosen folder is left out, because its contents are uploaded. */
const picked = (input) =>
  [...input.files].map((file) => ({
    name: input.dataset.pick === "folder" ? file.webkitRelativePath.split("/").slice(1).join("/") : file.name,
    file,
  }));

const RETRY_DELAYS = [0, 1000, 3000, 5000, 10000, 20000, 30000];
const ENDPOINT = new URL("/api/v1/uploads/", location.href).href;
/** The page shows errors, so Uppy need not log them. */
const SILENT = { debug: () => {}, warn: () => {}, error: () => {} };
/** The interval of polls while the server publishes an upload. */
const POLL_MS = 1000;
/** The weight of the newest measurement in the displayed speed, an exponential moving average. */
const NEWEST_WEIGHT = 0.2;

const language = document.documentElement.lang;
const unit = (value, name) =>
  new Intl.NumberFormat(language, { style: "unit", unit: name, maximumFractionDigits: value < 10 ? 1 : 0 }).format(value);
const speedText = (bytes) => (bytes < 1e6 ? unit(bytes / 1e3, "kilobyte-per-second") : unit(bytes / 1e6, "megabyte-per-second"));
const timeText = (seconds) => {
  if (seconds < 60) return unit(Math.max(1, Math.round(seconds)), "second");
  return seconds < 3600 ? unit(Math.round(seconds / 60), "minute") : unit(seconds / 3600, "hour");
};

/** Measures bytes per second, smoothed, from the bytes sent so far. Call `restart` after a pause. */
const speedometer = () => {
  let last = null;
  let speed = null;
  return {
    restart: () => (last = null),
    add: (bytes) => {
      const now = performance.now();
      if (last && now - last.at < 250) return speed;
      if (last) {
        const current = ((bytes - last.bytes) * 1000) / (now - last.at);
        speed = speed === null ? current : NEWEST_WEIGHT * current + (1 - NEWEST_WEIGHT) * speed;
      }
      last = { at: now, bytes };
      return speed;
    },
  };
};

/** The progress and the buttons of one drop zone. */
const display = (zone) => {
  const holder = zone.querySelector("[data-upload-state]");
  const part = (name) => holder.querySelector(`[data-upload-${name}]`);
  return {
    pause: part("pause"),
    cancel: part("cancel"),
    show: (text, fraction) => {
      holder.hidden = false;
      part("text").textContent = text;
      holder.querySelector("progress").value = fraction;
    },
    paused: (isPaused) => (part("pause").textContent = isPaused ? zone.dataset.resume : zone.dataset.pause),
    buttons: (isShown) => [part("pause"), part("cancel")].forEach((button) => (button.hidden = !isShown)),
    hide: () => (holder.hidden = true),
  };
};

/** Return the messages of an error of the API. */
const messagesOf = (body) => Object.values(body.fields ?? {}).flat().join(" ") || body.message;

/** Wait until the server has published the upload. Rejects with a message if it fails. */
const waitForPublication = async (url, broken) => {
  for (;;) {
    const response = await fetch(url, { headers: { Accept: "application/json" } }).catch(() => null);
    const upload = response?.ok ? await response.json() : null;
    if (upload?.state === "complete") return;
    if (upload?.state === "failed") throw upload.error.message;
    if (response && !response.ok) throw broken;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
};

/** Return the body to send for the chosen files: {body, name, unpack}. */
const prepare = (zone, files) => {
  const [{ name, file }] = files;
  const isDataset = zone.dataset.upload === "dataset";
  if (files.length === 1 && (!isDataset || ARCHIVE.test(name))) return { body: file, name, unpack: false };
  const lastModified = Math.max(...files.map((each) => each.file.lastModified));
  return { body: new File([tar(files)], "files.tar", { lastModified }), name: files.length === 1 ? name : String(files.length), unpack: !isDataset };
};

const target = (zone) => ["upload", zone.dataset.upload, zone.dataset.name, zone.dataset.folder].filter(Boolean).join("-");

const metadata = (zone, { name, unpack }) => ({
  purpose: zone.dataset.upload,
  name: zone.dataset.name,
  filename: unpack ? "files.tar" : name.split("/").pop(),
  ...(zone.dataset.upload === "workspace" && { path: [zone.dataset.folder, unpack ? "" : name].filter(Boolean).join("/") }),
  ...(unpack && { unpack: "" }),
});

/** Upload files into a zone. Resolves when the server has published them, and to false if the person cancelled. */
const send = async (zone, files) => {
  const prepared = prepare(zone, files);
  const label = `${zone.dataset.sending} · ${prepared.name}`;
  const view = display(zone);
  const speed = speedometer();
  const meta = metadata(zone, prepared);
  const uppy = new Uppy({ id: target(zone), autoProceed: false, logger: SILENT });
  if (prepared.body.size >= Number(zone.dataset.directFrom ?? Infinity))
    uppy.use(Direct, { endpoint: ENDPOINT, target: target(zone), retryDelays: RETRY_DELAYS });
  else
    uppy.use(Tus, {
      endpoint: ENDPOINT,
      headers: { "X-CSRFToken": csrf(), Accept: "application/json" },
      retryDelays: RETRY_DELAYS,
      removeFingerprintOnSuccess: true,
      allowedMetaFields: Object.keys(meta),
    });
  const id = uppy.addFile({ name: meta.filename, type: "application/octet-stream", data: prepared.body, source: "local" });
  uppy.setFileMeta(id, meta);
  let isPaused = false;
  let isCancelled = false;
  const onPause = () => {
    isPaused = uppy.pauseResume(id);
    view.paused(isPaused);
    speed.restart();
    if (isPaused) view.show(`${label} · ${zone.dataset.paused}`, zone.querySelector("progress").value);
  };
  const onCancel = () => {
    isCancelled = true;
    uppy.cancelAll();
  };
  uppy.on("upload-progress", (_file, { bytesUploaded, bytesTotal }) => {
    if (isPaused) return;
    if (bytesUploaded >= bytesTotal) return view.show(zone.dataset.publishing, 1);
    const rate = speed.add(bytesUploaded);
    const fraction = bytesUploaded / bytesTotal;
    const left = rate > 0 ? [speedText(rate), zone.dataset.left.replace("{time}", timeText((bytesTotal - bytesUploaded) / rate))] : [];
    view.show([label, `${Math.round(fraction * 100)} %`, ...left].join(" · "), fraction);
  });
  view.pause.addEventListener("click", onPause);
  view.cancel.addEventListener("click", onCancel);
  view.paused(false);
  view.buttons(true);
  view.show(label, 0);
  try {
    let failure = null;
    uppy.on("upload-error", (_file, error, response) => {
      try {
        failure = messagesOf(error.apiError ?? JSON.parse(response.body.xhr.responseText));
        storedKeys(zone).forEach((key) => localStorage.removeItem(key)); // the server has ended this upload
      } catch {
        failure = zone.dataset.broken;
      }
    });
    const done = await uppy.upload();
    if (isCancelled) return false;
    if (failure !== null || !done?.successful?.length) throw failure ?? zone.dataset.broken;
    view.buttons(false);
    view.show(zone.dataset.publishing, 1);
    await waitForPublication(done.successful[0].uploadURL, zone.dataset.broken);
    return true;
  } finally {
    view.pause.removeEventListener("click", onPause);
    view.cancel.removeEventListener("click", onCancel);
    uppy.destroy();
  }
};

/** Return the paths of files of the workspace that an upload would replace. Returns null or throws if they are unknown. */
const existing = async (zone, form, files) => {
  const paths = files.map(({ name }) => [zone.dataset.folder, name].filter(Boolean).join("/"));
  const headers = { "Content-Type": "application/json", "X-CSRFToken": csrf() };
  const response = await fetch(form.action, { method: "POST", headers, body: JSON.stringify(paths) });
  if (!response.ok) throw new Error(response.statusText);
  return response.json();
};

/** Ask before files of a workspace are replaced, also if it is unknown whether any is. Resolves to the answer. */
const mayReplace = async (zone, files) => {
  const form = document.getElementById("replace-files");
  if (!form) return true; // a new version of a dataset replaces no file
  const paths = await existing(zone, form, files).catch(() => null);
  if (paths?.length === 0) return true;
  form.dataset.confirmDetail = [form.dataset.detail, paths?.join(", ")].filter(Boolean).join(" ");
  return new Promise((resolve) => {
    const closed = () => resolve("confirmed" in form.dataset);
    document.getElementById("confirm").addEventListener("hidden.bs.modal", closed, { once: true });
    delete form.dataset.confirmed;
    form.requestSubmit(); // app.js asks, and submits the form again after a yes
  });
};

document.getElementById("replace-files")?.addEventListener("submit", (event) => {
  if ("confirmed" in event.target.dataset) event.preventDefault();
});

/** Return the keys under which the browser stores unfinished uploads into a zone. */
const storedKeys = (zone) =>
  Object.keys(localStorage).filter((name) => name.startsWith(`tus::tus-${target(zone)}-`) || name === storageKeyOf(target(zone)));

/** Show which upload is unfinished. It resumes when the same file is chosen. */
const showUnfinished = (zone) => {
  const [key] = storedKeys(zone);
  if (!key) return;
  const view = display(zone);
  view.buttons(false);
  view.show(zone.dataset.unfinished.replace("{name}", JSON.parse(localStorage.getItem(key)).metadata.filename), 0);
};

document.querySelectorAll("[data-upload]").forEach((zone) => {
  const start = async (files) => {
    if (!files.length || "busy" in zone.dataset) return;
    zone.dataset.busy = "";
    try {
      const isDone = (await mayReplace(zone, files)) && (await send(zone, files));
      delete zone.dataset.busy;
      if (isDone) location.reload();
      else display(zone).hide();
    } catch (message) {
      display(zone).hide();
      toast(String(message));
    } finally {
      delete zone.dataset.busy;
    }
  };
  showUnfinished(zone);
  zone.addEventListener("change", (event) => {
    if (!event.target.matches("[data-pick]")) return;
    start(picked(event.target)).finally(() => (event.target.value = ""));
  });
  zone.addEventListener("dragover", (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    zone.classList.add("is-over");
  });
  zone.addEventListener("dragleave", (event) => zone.contains(event.relatedTarget) || zone.classList.remove("is-over"));
  zone.addEventListener("drop", async (event) => {
    event.preventDefault();
    zone.classList.remove("is-over");
    start(await dropped(event.dataTransfer));
  });
  addEventListener("beforeunload", (event) => "busy" in zone.dataset && event.preventDefault());
});
