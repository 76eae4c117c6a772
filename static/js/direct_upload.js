// An uploader for Uppy in place of Tus: it sends a large file directly to the operator's bucket, in parts.
// The server signs the URL of each part just before it is sent, so that no URL expires. A failed part is sent once more.
// The browser stores the unfinished upload of each target, and resumes it when the same file is chosen again.
import { csrf } from "./shared.js";

const PARALLEL_PARTS = 3; // sent at once: one slow connection then does not stop the upload
/** The signal of requests that a pause does not interrupt. */
const UNINTERRUPTED = new AbortController().signal;

/** A response that a retry does not change. `apiError` is the API's error. */
class Refused extends Error {
  constructor(apiError) {
    super(apiError.message);
    this.apiError = apiError;
  }
}

const callApi = async (method, url, data, signal) => {
  const headers = { Accept: "application/json", "Content-Type": "application/json", "X-CSRFToken": csrf(), "Tus-Resumable": "1.0.0" };
  const response = await fetch(url, { method, headers, signal, body: data && JSON.stringify(data) });
  if (response.status === 204) return null;
  const body = await response.json();
  if (response.ok) return body;
  if (response.status >= 500 || response.status === 429) throw new Error(body.message);
  throw new Refused(body);
};

/** Send a part by PUT. Rejects if the bucket does not confirm it. */
const put = (url, body, signal, onProgress) =>
  new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const abort = () => request.abort();
    signal.addEventListener("abort", abort);
    request.upload.addEventListener("progress", (event) => onProgress(event.loaded));
    request.addEventListener("loadend", () => {
      signal.removeEventListener("abort", abort);
      if (request.status === 200) resolve();
      else reject(new Error(`the bucket responded with ${request.status}`));
    });
    request.open("PUT", url);
    request.send(body);
  });

const wait = (milliseconds, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

/** The key under which the browser stores the unfinished upload of a target. */
export const storageKeyOf = (target) => `direct::${target}`;

export class Direct {
  /** `opts`: endpoint, target, retryDelays. The file's meta has the values that create the upload. */
  constructor(uppy, opts) {
    this.id = "Direct";
    this.type = "uploader";
    this.uppy = uppy;
    this.opts = opts;
    this.storageKey = storageKeyOf(opts.target);
    this.controller = new AbortController();
    this.isPaused = false;
    this.isCancelled = false;
    this.onPause = (_file, isPaused) => {
      this.isPaused = isPaused;
      if (isPaused) this.controller.abort();
      else this.resume?.();
    };
    this.onCancel = () => this.cancel();
    this.upload = ([id]) => this.run(id);
  }

  install() {
    this.uppy.setState({ capabilities: { ...this.uppy.getState().capabilities, resumableUploads: true } });
    this.uppy.addUploader(this.upload);
    this.uppy.on("upload-pause", this.onPause);
    this.uppy.on("cancel-all", this.onCancel);
  }

  uninstall() {
    this.uppy.removeUploader(this.upload);
    this.end();
  }

  /** Remove the listeners. When Uppy is destroyed it cancels all uploads, including those that have ended. */
  end() {
    this.uppy.off("upload-pause", this.onPause);
    this.uppy.off("cancel-all", this.onCancel);
  }

  /** Uppy calls this when its state changes. There is nothing to do. */
  update() {}

  /** Upload a file, over pauses, until the server has all parts. */
  async run(id) {
    const file = this.uppy.getFile(id);
    this.uppy.emit("upload-start", [file]);
    try {
      await this.begin(file);
      while (this.missing.length) {
        if (this.isPaused) await new Promise((resolve) => (this.resume = resolve));
        if (this.isCancelled) return;
        this.controller = new AbortController();
        const { signal } = this.controller;
        await Promise.all(Array.from({ length: PARALLEL_PARTS }, () => this.sendParts(file, signal)));
      }
      if (this.isCancelled) return;
      await this.withRetries(() => callApi("POST", `${this.url}complete/`), UNINTERRUPTED);
      localStorage.removeItem(this.storageKey);
      this.end();
      this.uppy.emit("upload-success", file, { status: 200, uploadURL: this.url });
    } catch (error) {
      if (this.isCancelled) return;
      this.controller.abort(); // the other parts
      this.end();
      if (error instanceof Refused) localStorage.removeItem(this.storageKey);
      this.uppy.emit("upload-error", file, error);
    }
  }

  /** Create the upload, or resume the stored one of this file. */
  async begin(file) {
    const { size, lastModified } = file.data;
    const stored = JSON.parse(localStorage.getItem(this.storageKey) ?? "null");
    let upload = null;
    if (stored?.size === size && stored.lastModified === lastModified && stored.metadata.filename === file.meta.filename)
      upload = await this.withRetries(() => callApi("GET", `${this.opts.endpoint}${stored.id}/parts/`), UNINTERRUPTED).catch((error) => {
        if (!(error instanceof Refused)) throw error;
      });
    if (!upload) {
      const { purpose, name, path = "", filename, unpack } = file.meta;
      const values = { size_bytes: size, purpose, name, path, filename, unpack: unpack !== undefined };
      upload = { ...(await callApi("POST", `${this.opts.endpoint}direct/`, values)), received: [] };
      localStorage.setItem(this.storageKey, JSON.stringify({ id: upload.id, size, lastModified, metadata: { filename } }));
    }
    this.url = `${this.opts.endpoint}${upload.id}/`;
    this.partSize = upload.part_size_bytes;
    this.sent = new Map(upload.received.map((number) => [number, this.part(file, number).size]));
    this.missing = Array.from({ length: upload.part_count }, (_, index) => index + 1).filter((number) => !this.sent.has(number));
    this.report(file);
  }

  part(file, number) {
    return file.data.slice((number - 1) * this.partSize, number * this.partSize);
  }

  /** Send missing parts, one after the other, until there are none. An interrupted part becomes missing. */
  async sendParts(file, signal) {
    while (!signal.aborted && this.missing.length) {
      const number = this.missing.shift();
      const body = this.part(file, number);
      const count = (bytes) => {
        this.sent.set(number, bytes);
        this.report(file);
      };
      try {
        await this.withRetries(async () => {
          const { results } = await callApi("POST", `${this.url}parts/`, { numbers: [number] }, signal);
          await put(results[0].url, body, signal, count);
        }, signal);
        count(body.size);
      } catch (error) {
        this.missing.unshift(number);
        this.sent.delete(number);
        if (!signal.aborted) throw error;
      }
    }
  }

  report(file) {
    const bytesUploaded = [...this.sent.values()].reduce((total, bytes) => total + bytes, 0);
    this.uppy.emit("upload-progress", file, { uploadStarted: Date.now(), bytesUploaded, bytesTotal: file.data.size });
  }

  /** Call `action` until it succeeds, is refused, or has failed too often in a row. */
  async withRetries(action, signal) {
    for (const delay of [...this.opts.retryDelays, null]) {
      try {
        return await action();
      } catch (error) {
        if (error instanceof Refused || delay === null || signal.aborted) throw error;
        await wait(delay, signal);
      }
    }
  }

  cancel() {
    this.isCancelled = true;
    this.controller.abort();
    this.resume?.();
    localStorage.removeItem(this.storageKey);
    if (this.url) callApi("DELETE", this.url).catch(() => {}); // if this fails, the upload expires
  }
}
