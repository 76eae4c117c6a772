// Sends files from the browser to the API: a dataset's archive, or a workspace's files one after the other.
// The one rule: bytes are never read into memory here; several files become one tar, a Blob made of the files themselves.
import { csrf, toast } from "./shared.js";

const ARCHIVE = /\.(tar|tar\.gz|tgz|zip)$/i;
const BLOCK = 512;
const encoder = new TextEncoder();

/** Send `body` by PUT; `progress` gets a fraction. Rejects with a sentence to show. */
const put = (url, body, { progress, broken }) =>
  new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", url);
    request.setRequestHeader("X-CSRFToken", csrf());
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.setRequestHeader("Accept", "application/json");
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onload = () => {
      if (request.status < 300) return resolve();
      try {
        const answer = JSON.parse(request.responseText);
        reject(Object.values(answer.fields ?? {}).flat().join(" ") || answer.message);
      } catch {
        reject(broken);
      }
    };
    request.onerror = () => reject(broken);
    request.send(body);
  });

const field = (block, text, offset, length) => block.set(encoder.encode(text).subarray(0, length), offset);

const header = (name, size, type) => {
  const block = new Uint8Array(BLOCK);
  field(block, name, 0, 100);
  field(block, "0000644\0", 100, 8);
  field(block, "0000000\0", 108, 8);
  field(block, "0000000\0", 116, 8);
  field(block, size.toString(8).padStart(11, "0") + "\0", 124, 12);
  field(block, Math.floor(Date.now() / 1000).toString(8).padStart(11, "0") + "\0", 136, 12);
  field(block, "        " + type + "", 148, 9);
  field(block, "ustar\0" + "00", 257, 8);
  const sum = block.reduce((total, byte) => total + byte, 0);
  field(block, sum.toString(8).padStart(6, "0") + "\0 ", 148, 8);
  return block;
};

const padding = (size) => new Uint8Array((BLOCK - (size % BLOCK)) % BLOCK);

/** A pax record counts itself: `<length> path=<name>\n`. */
const pax = (key, value) => {
  const rest = encoder.encode(` ${key}=${value}\n`).length;
  let length = rest + String(rest).length;
  if (rest + String(length).length !== length) length = rest + String(length).length;
  return encoder.encode(`${length} ${key}=${value}\n`);
};

/** Files as one tar. Names of any length and sizes past 8 GiB go into pax headers. */
const tar = (files) => {
  const parts = [];
  for (const { name, file } of files) {
    const records = [];
    if (encoder.encode(name).length > 100) records.push(pax("path", name));
    if (file.size >= 8 ** 11) records.push(pax("size", String(file.size)));
    const extra = new Blob(records);
    if (records.length) parts.push(header("pax", extra.size, "x"), extra, padding(extra.size));
    parts.push(header(name, file.size < 8 ** 11 ? file.size : 0, "0"), file, padding(file.size));
  }
  parts.push(new Uint8Array(2 * BLOCK));
  return new Blob(parts);
};

/** Everything below a dropped folder. Gives [{name, file}]. */
const walk = async (entry, prefix = "") => {
  if (entry.isFile) return [{ name: prefix + entry.name, file: await new Promise((resolve, reject) => entry.file(resolve, reject)) }];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const batch = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!batch.length) break;
    for (const child of batch) found.push(...(await walk(child, `${prefix}${entry.name}/`)));
  }
  return found;
};

const dropped = async (transfer) => {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  return (await Promise.all(entries.map((entry) => walk(entry)))).flat();
};

/** A picked folder's own name is left out: what is in it was meant. */
const picked = (input) =>
  [...input.files].map((file) => ({
    name: input.dataset.pick === "folder" ? file.webkitRelativePath.split("/").slice(1).join("/") : file.name,
    file,
  }));

const meter = (zone) => {
  const holder = zone.querySelector("[data-upload-state]");
  const bar = holder.querySelector("progress");
  return {
    show: (text, fraction) => {
      holder.hidden = false;
      holder.querySelector("[data-upload-text]").textContent = text;
      bar.value = fraction;
    },
    hide: () => (holder.hidden = true),
  };
};

const sendDataset = async (zone, files) => {
  const { show } = meter(zone);
  const single = files.length === 1 && ARCHIVE.test(files[0].name);
  const body = single ? files[0].file : tar(files);
  const label = `${zone.dataset.sending} · ${files.length === 1 ? files[0].name : files.length}`;
  show(label, 0);
  await put(zone.dataset.datasetUpload, body, {
    broken: zone.dataset.broken,
    progress: (fraction) => show(fraction < 1 ? `${label} · ${Math.round(fraction * 100)} %` : zone.dataset.publishing, fraction),
  });
};

const sendWorkspace = async (zone, files) => {
  const { show } = meter(zone);
  const total = files.reduce((sum, { file }) => sum + file.size, 0) || 1;
  let before = 0;
  for (const [at, { name, file }] of files.entries()) {
    const path = [zone.dataset.folder, name].filter(Boolean).join("/");
    const label = `${zone.dataset.sending} · ${name} · ${at + 1}/${files.length}`;
    show(label, before / total);
    await put(zone.dataset.workspaceUpload + path.split("/").map(encodeURIComponent).join("/"), file, {
      broken: zone.dataset.broken,
      progress: (fraction) => show(label, (before + fraction * file.size) / total),
    });
    before += file.size;
  }
};

document.querySelectorAll("[data-dataset-upload], [data-workspace-upload]").forEach((zone) => {
  const send = async (files) => {
    if (!files.length || "busy" in zone.dataset) return;
    zone.dataset.busy = "";
    try {
      await ("datasetUpload" in zone.dataset ? sendDataset : sendWorkspace)(zone, files);
      delete zone.dataset.busy;
      location.reload();
    } catch (sentence) {
      meter(zone).hide();
      toast(String(sentence));
    } finally {
      delete zone.dataset.busy;
    }
  };
  zone.addEventListener("change", (event) => {
    if (!event.target.matches("[data-pick]")) return;
    send(picked(event.target)).finally(() => (event.target.value = ""));
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
    send(await dropped(event.dataTransfer));
  });
  addEventListener("beforeunload", (event) => "busy" in zone.dataset && event.preventDefault());
});
