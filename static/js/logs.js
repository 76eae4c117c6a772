// The log of a job. The script keeps a part of one rank's log in memory, and puts the visible lines into the page.
// Scrolling to an end of that part loads more. An event stream brings new output while the job runs.
// Output is customers' data: it is shown as text with CSS classes, never as markup.
import { toast } from "./shared.js";

const job = document.getElementById("job");
const POLL_MS = 4000;
const PART_BYTES = 262144; // bytes of one request: about 3000 lines
const MAX_PARTS = 6; // of PART_BYTES in memory: one more drops the part at the other end
const MAX_LINES = 20000; // lines in memory while all ranks are shown
const MAX_COLUMNS = 4000; // characters of a line in the page: longer lines are cut
const ROW_PX = 20; // height of a line in pixels, as in the style sheet
const EXTRA_LINES = 30; // lines in the page above and below the visible ones, so that scrolling shows no gap
const TIMES_KEY = "trainyard-log-times"; // of localStorage: present if times are shown

// --- Lines: colours of terminals, and the search ------------------------------------------------------------------------
const ESCAPE = /\x1b(?:\[([0-9;]{0,40})m|\[[0-9;?]{0,40}[A-Za-z]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])/g;
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f]/g;

/** What a terminal would show of a line: the text after the last carriage return. */
const visiblePart = (line) => line.slice(line.lastIndexOf("\r", line.length - 2) + 1).slice(0, MAX_COLUMNS);
const plain = (line) => visiblePart(line).replace(ESCAPE, "").replace(CONTROL, "");

/** Split a line into [text, classes] by its color codes. */
const splitByColour = (line) => {
  const parts = [];
  const style = { fg: "", bg: "", bold: "" };
  let from = 0;
  const push = (text) => text && parts.push([text.replace(CONTROL, ""), Object.values(style).filter(Boolean).join(" ")]);
  for (const match of line.matchAll(ESCAPE)) {
    push(line.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[1] === undefined) continue;
    for (const code of match[1].split(";").map(Number)) {
      if (code === 0) style.fg = style.bg = style.bold = "";
      else if (code === 1) style.bold = "ansi-bold";
      else if (code === 22) style.bold = "";
      else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) style.fg = `ansi-${code}`;
      else if (code === 39) style.fg = "";
      else if ((code >= 40 && code <= 47) || (code >= 100 && code <= 107)) style.bg = `ansi-${code}`;
      else if (code === 49) style.bg = "";
    }
  }
  push(line.slice(from));
  return parts;
};

const element = (name, className, text) => {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

/** Add text to a row, and mark each occurrence of the searched text. */
const addText = (row, text, className, wanted) => {
  const lower = wanted ? text.toLowerCase() : "";
  let from = 0;
  for (let at = wanted ? lower.indexOf(wanted) : -1; at >= 0; at = lower.indexOf(wanted, from)) {
    if (at > from) row.append(element("span", className, text.slice(from, at)));
    from = at + wanted.length;
    row.append(element("mark", "", text.slice(at, from)));
  }
  if (from < text.length) row.append(element("span", className, text.slice(from)));
};

/** Split a chunk of the log into its lines with their times, in seconds (undefined if not known). */
const splitLines = (chunk) => {
  let next = 0;
  let time;
  return chunk.text.split("\n").map((text, number) => {
    while (chunk.times?.[next]?.[0] <= number) time = chunk.times[next++][1];
    return { text, time };
  });
};

const zone = { timeZone: document.documentElement.dataset.timeZone };
const clock = new Intl.DateTimeFormat(document.documentElement.lang, { ...zone, hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 1 });
const fullTime = new Intl.DateTimeFormat(document.documentElement.lang, { ...zone, dateStyle: "full", timeStyle: "long" });

// --- The viewer ---------------------------------------------------------------------------------------------------------
/** Show the log in its tab. Called once htmx has loaded the tab's contents. */
const setUp = () => {
  const log = document.getElementById("log");
  const rank = document.getElementById("log-rank");
  const attempt = document.getElementById("log-attempt");
  const follow = document.getElementById("log-follow");
  const times = document.getElementById("log-times");
  const search = document.getElementById("log-search");
  const found = document.getElementById("log-found");
  const place = document.getElementById("log-place");
  const download = document.getElementById("log-download");
  const sizer = element("div", "log-sizer");
  const page = element("div", "log-page");
  sizer.append(page);
  log.replaceChildren(sizer);

  let parts = []; // contiguous: {chunks, start, end} in bytes
  let lines = []; // {text, time, rank} of all parts, in order
  let isLastLineOpen = false; // the last line has no line feed yet
  let size = null; // bytes of the log, null if not known
  let streamOffset = 0; // the end of the last chunk that the stream has sent
  let ended = false;
  let source = null;
  let fallback = 0;
  let loading = false;
  let generation = 0; // counts the logs that were opened: a response for an earlier one is dropped
  let current = -1; // the line that the search has found

  const isAll = () => rank.value === "all";
  const firstByte = () => parts[0]?.start ?? 0;
  const endByte = () => parts.at(-1)?.end ?? 0;
  const address = (values, path = "") => {
    const url = new URL(job.dataset.logs + path, location.href);
    url.searchParams.set("rank", rank.value);
    if (attempt) url.searchParams.set("attempt", attempt.value);
    if (!path) url.searchParams.set("timestamps", "1");
    for (const [name, value] of Object.entries(values)) url.searchParams.set(name, value);
    return url;
  };
  const requestJson = async (values, path) => {
    const askedGeneration = generation;
    const answer = await fetch(address(values, path), { headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(String(answer.status));
    const data = await answer.json();
    return askedGeneration === generation ? data : null;
  };

  const formatBytes = (bytes) => {
    const power = Math.min(3, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
    return `${(bytes / 1024 ** power).toLocaleString(document.documentElement.lang, { maximumFractionDigits: power ? 1 : 0 })} ${["B", "KiB", "MiB", "GiB"][power]}`;
  };

  // Rows of the page

  const timeOf = (line) => {
    const shown = element("span", "log-time", line.time ? `${clock.format(line.time * 1000)} ` : "– ");
    shown.title = line.time ? fullTime.format(line.time * 1000) : log.dataset.noTime;
    return shown;
  };
  let drawn = "";
  /** Put the visible lines into the page, unless they are there already. */
  const draw = () => {
    const from = Math.max(0, Math.floor(log.scrollTop / ROW_PX) - EXTRA_LINES);
    const to = Math.min(lines.length, Math.ceil((log.scrollTop + log.clientHeight) / ROW_PX) + EXTRA_LINES);
    sizer.style.height = `${lines.length * ROW_PX}px`;
    page.style.transform = `translateY(${from * ROW_PX}px)`;
    const wanted = search.value.toLowerCase();
    const key = [generation, from, to, wanted, current, lines.length, lines.at(-1)?.text.length, times.checked].join(" ");
    if (key === drawn) return;
    drawn = key;
    page.replaceChildren(
      ...lines.slice(from, to).map((line, number) => {
        const row = element("div", from + number === current ? "log-row is-current" : "log-row");
        if (times.checked) row.append(timeOf(line));
        if (line.rank !== undefined) row.append(element("span", `log-rank ansi-${31 + (line.rank % 6)}`, `[${line.rank}] `));
        for (const [text, className] of splitByColour(visiblePart(line.text))) addText(row, text, className, wanted);
        return row;
      }),
    );
    const isEmpty = !lines.length || (lines.length === 1 && !lines[0].text);
    log.classList.toggle("is-empty", isEmpty);
    if (isEmpty) page.replaceChildren(element("div", "log-row", ended ? log.dataset.none : log.dataset.empty));
    if (isAll()) place.textContent = log.dataset.all;
    else place.textContent = size ? `${formatBytes(firstByte())} – ${formatBytes(endByte())} / ${formatBytes(size)}` : "";
  };
  const scrollToEnd = () => {
    sizer.style.height = `${lines.length * ROW_PX}px`;
    log.scrollTop = log.scrollHeight;
  };
  const show = () => {
    if (follow.checked && endByte() >= streamOffset) scrollToEnd();
    draw();
  };
  const goTo = (line) => {
    current = line;
    follow.checked = false;
    sizer.style.height = `${lines.length * ROW_PX}px`;
    log.scrollTop = Math.max(0, line * ROW_PX - log.clientHeight / 2);
    draw();
  };

  // Parts of one rank's log

  /** Add the lines of a chunk. Its first line continues the last one if that has no line feed yet. */
  const addLines = (chunk) => {
    const rows = splitLines(chunk);
    if (isLastLineOpen) lines.at(-1).text += rows.shift().text;
    for (const row of rows) lines.push(row);
    isLastLineOpen = Boolean(lines.at(-1).text);
    if (!isLastLineOpen) lines.pop();
  };
  /** Make the lines again from all parts, after a part was added before them or dropped. */
  const rebuild = () => {
    lines = [];
    isLastLineOpen = false;
    for (const chunk of parts.flatMap((part) => part.chunks)) if (chunk.text) addLines(chunk);
  };
  const countLineFeeds = (part) => part.chunks.reduce((sum, chunk) => sum + chunk.text.split("\n").length - 1, 0);
  /** Add a chunk at the end: to the last part while it is small, or as a new part. */
  const append = (chunk) => {
    if (!chunk.text) return;
    const previous = parts.at(-1);
    if (previous && previous.end - previous.start < PART_BYTES) {
      previous.chunks.push(chunk);
      previous.end = chunk.next_offset;
    } else parts.push({ chunks: [chunk], start: chunk.offset, end: chunk.next_offset });
    if (parts.length > MAX_PARTS) {
      const dropped = countLineFeeds(parts.shift());
      rebuild();
      current = -1;
      log.scrollTop = Math.max(0, log.scrollTop - dropped * ROW_PX);
      return;
    }
    addLines(chunk);
  };
  const loadEarlier = async () => {
    if (loading || isAll() || !firstByte()) return;
    loading = true;
    try {
      const end = firstByte();
      const offset = Math.max(0, end - PART_BYTES);
      const chunk = await requestJson({ offset, limit: end - offset, whole_lines: 1 });
      if (chunk?.text && firstByte() === end) {
        const before = lines.length;
        parts.unshift({ chunks: [chunk], start: chunk.offset, end });
        if (parts.length > MAX_PARTS) parts.pop();
        const added = countLineFeeds(parts[0]);
        rebuild();
        if (current >= 0) current += added;
        sizer.style.height = `${lines.length * ROW_PX}px`;
        log.scrollTop += (before ? added : 0) * ROW_PX;
        draw();
      }
    } catch {
      // The console does not answer now; scrolling asks again.
    }
    loading = false;
  };
  const loadLater = async () => {
    if (loading || isAll() || endByte() >= (size ?? streamOffset)) return;
    loading = true;
    try {
      const offset = endByte();
      const chunk = await requestJson({ offset, limit: PART_BYTES });
      if (chunk && endByte() === offset) {
        size = chunk.size ?? size;
        append(chunk);
        draw();
      }
    } catch {
      // The console does not answer now; scrolling asks again.
    }
    loading = false;
  };
  /** Load the part around an offset in bytes. Return the number of the line at this offset, or -1. */
  const loadAround = async (offset) => {
    const start = Math.max(0, offset - PART_BYTES / 2);
    const chunk = await requestJson({ offset: start, limit: PART_BYTES, whole_lines: 1 });
    if (!chunk) return -1;
    size = chunk.size ?? size;
    parts = [{ chunks: [chunk], start: chunk.offset, end: chunk.next_offset }];
    rebuild();
    return lineAt(offset);
  };
  const encoder = new TextEncoder();
  const lineAt = (offset) => {
    let at = firstByte();
    for (const [number, line] of lines.entries()) {
      at += encoder.encode(line.text).length + 1;
      if (at > offset) return number;
    }
    return lines.length - 1;
  };

  // The stream

  const receive = (chunk) => {
    ended ||= chunk.eof && !isAll();
    if (isAll()) return receiveFromRank(chunk);
    size = chunk.size ?? size;
    if (chunk.next_offset > streamOffset) {
      const isNext = !parts.length || endByte() === chunk.offset;
      streamOffset = chunk.next_offset;
      if (isNext) append(chunk);
    }
    show();
  };
  const unfinished = new Map(); // by rank: the beginning of a line whose line feed has not come
  const receiveFromRank = (chunk) => {
    const rows = splitLines(chunk);
    const begun = unfinished.get(chunk.rank);
    if (begun?.text) rows[0] = { ...begun, text: begun.text + rows[0].text };
    unfinished.set(chunk.rank, chunk.eof ? null : rows.pop());
    if (chunk.eof && rows.at(-1).text === "") rows.pop();
    for (const row of rows) lines.push({ ...row, rank: chunk.rank });
    if (lines.length > MAX_LINES) lines = lines.slice(-MAX_LINES);
    show();
  };
  const poll = async () => {
    try {
      const chunk = await requestJson({ offset: streamOffset });
      if (!chunk) return;
      receive(chunk);
      if (chunk.eof) clearInterval(fallback);
    } catch {
      // The console does not answer now; the next round asks again.
    }
  };
  const close = () => {
    source?.close();
    clearInterval(fallback);
    source = null;
  };
  const open = () => {
    close();
    generation += 1;
    parts = [];
    lines = [];
    isLastLineOpen = false;
    size = null;
    streamOffset = 0;
    ended = false;
    loading = false;
    current = -1;
    unfinished.clear();
    found.textContent = "";
    follow.checked = true;
    download.hidden = isAll();
    download.href = download.dataset.from.replace("rank-0", `rank-${rank.value}`).replace(/attempt-\d+/, `attempt-${attempt?.value ?? download.dataset.attempt}`);
    draw();
    const stream = new EventSource(address({ tail: isAll() ? 16384 : 65536 }));
    source = stream;
    stream.addEventListener("open", () => {
      if (!isAll()) return; // the stream of one rank continues after a break; that of all ranks starts again
      lines = [];
      unfinished.clear();
    });
    let left = isAll() ? rank.options.length - 1 : 1;
    stream.addEventListener("log", (event) => {
      const chunk = JSON.parse(event.data);
      receive(chunk);
      if (chunk.eof) left -= 1;
      if (!left) stream.close();
    });
    stream.addEventListener("error", () => {
      if (stream.readyState !== EventSource.CLOSED || source !== stream || isAll()) return;
      clearInterval(fallback);
      poll();
      fallback = setInterval(poll, POLL_MS);
    });
  };

  // The search: in the lines in memory first, then in the whole log

  const matchingLines = () => {
    const wanted = search.value.toLowerCase();
    if (!wanted) return [];
    return lines.flatMap((line, number) => (plain(line.text).toLowerCase().includes(wanted) ? [number] : []));
  };
  const showCount = (list) => {
    const at = list.indexOf(current);
    found.textContent = list.length ? `${at + 1}/${list.length}` : "0";
  };
  /** Search the log on the server from an offset, and go to the match. An empty query searches for an error. */
  const searchWholeLog = async (query, offset) => {
    let from = offset;
    for (;;) {
      const match = await requestJson({ ...(query && { q: query }), offset: from }, "search/");
      if (!match) return false;
      if (match.offset !== null) {
        const line = await loadAround(match.offset);
        if (line >= 0) goTo(line);
        return line >= 0;
      }
      if (match.eof) return false;
      from = match.next_offset;
    }
  };
  /** Go to the next match, or to the previous one if `by` is negative. */
  const goToMatch = async (by) => {
    const list = matchingLines();
    const next = by > 0 ? list.find((line) => line > current) : list.findLast((line) => line < current);
    if (next !== undefined) goTo(next);
    else if (by > 0 && !isAll() && endByte() < (size ?? 0) && (await searchWholeLog(search.value, endByte()))) return showCount(matchingLines());
    else if (list.length && firstByte() === 0 && endByte() >= (size ?? streamOffset)) goTo(by > 0 ? list[0] : list.at(-1));
    else if (!isAll() && search.value && !(await searchWholeLog(search.value, 0))) toast(log.dataset.notFound, "status");
    showCount(matchingLines());
  };
  let typing = 0;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    current = -1;
    if (!search.value) {
      found.textContent = "";
      return draw();
    }
    const list = matchingLines();
    if (list.length) goTo(list[0]);
    showCount(list);
    draw();
    if (!list.length && !isAll()) typing = setTimeout(() => searchWholeLog(search.value, 0).then((hit) => hit && showCount(matchingLines()), () => {}), 400);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    clearTimeout(typing);
    goToMatch(event.shiftKey ? -1 : 1).catch(() => {});
  });
  document.getElementById("log-error").addEventListener("click", () => {
    const none = () => toast(log.dataset.noError, "status");
    if (isAll()) {
      const line = lines.findIndex((each) => /Traceback \(most recent call last\)|(?:Error|Exception): |\b(?:FATAL|CRITICAL)\b/.test(each.text));
      return line >= 0 ? goTo(line) : none();
    }
    searchWholeLog("", 0).then((hit) => hit || none(), none);
  });
  document.getElementById("log-start").addEventListener("click", () => {
    if (isAll()) return goTo(0);
    loadAround(0).then(() => goTo(0), () => {});
  });
  document.getElementById("log-end").addEventListener("click", open);

  // Scrolling

  let drawing = 0;
  log.addEventListener("scroll", () => {
    cancelAnimationFrame(drawing);
    drawing = requestAnimationFrame(draw);
    if (log.scrollTop < 20 * ROW_PX) loadEarlier();
    if (log.scrollTop + log.clientHeight > log.scrollHeight - 20 * ROW_PX) loadLater();
  }, { passive: true });
  log.addEventListener("wheel", (event) => event.deltaY < 0 && (follow.checked = false), { passive: true });
  log.addEventListener("keydown", (event) => ["ArrowUp", "PageUp", "Home"].includes(event.key) && (follow.checked = false));
  follow.addEventListener("change", () => {
    if (!follow.checked) return;
    if (endByte() < streamOffset) open();
    else show();
  });
  times.checked = localStorage.getItem(TIMES_KEY) !== null;
  times.addEventListener("change", () => {
    if (times.checked) localStorage.setItem(TIMES_KEY, "");
    else localStorage.removeItem(TIMES_KEY);
    draw();
  });
  rank.addEventListener("change", open);
  attempt?.addEventListener("change", open);
  document.getElementById("logs-tab").addEventListener("shown.bs.tab", show);
  addEventListener("resize", draw);
  open();
};

if (document.getElementById("log")) setUp();
else document.addEventListener("htmx:afterSwap", function loaded(event) {
  if (event.target.id !== "job-logs") return;
  document.removeEventListener("htmx:afterSwap", loaded);
  setUp();
});
