// The look of the charts. Colours come from the theme's variables, which the browser resolves.
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A CSS variable as a colour that a canvas can draw with: the browser resolves references and functions. */
export const colour = (name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const resolved = getComputedStyle(probe).color;
  probe.remove();
  return resolved;
};

/** The time zone if this browser knows it, else the browser's own: browsers are older than some zones. */
const knownZone = (name) => {
  try {
    new Intl.DateTimeFormat("en", { timeZone: name });
    return name;
  } catch {
    return new Intl.DateTimeFormat().resolvedOptions().timeZone;
  }
};

/** The reader's time zone, in which the page shows times; and a Unix time in it, for uPlot. */
export const zone = knownZone(document.documentElement.dataset.timeZone);
export const inZone = (seconds) => window.uPlot.tzDate(new Date(seconds * 1000), zone);

/** A Unix time in the page's language. `options` are those of Intl.DateTimeFormat. */
const timeFormat = (options) => {
  const format = new Intl.DateTimeFormat(document.documentElement.lang, { timeZone: zone, ...options });
  return (seconds) => format.format(new Date(seconds * 1000));
};
export const timeText = timeFormat({ dateStyle: "medium", timeStyle: "medium" });
const dayText = timeFormat({ month: "short", day: "numeric" });
const minuteText = timeFormat({ hour: "numeric", minute: "2-digit" });
const secondText = timeFormat({ hour: "numeric", minute: "2-digit", second: "2-digit" });
const DAY_SECONDS = 86400;

const RESIZE_MS = 150;
/** Call `redraw` once the window has kept its size for RESIZE_MS, because dragging its edge sends many events. */
export const onResize = (redraw) => {
  let timer = 0;
  addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(redraw, RESIZE_MS);
  });
};

/** The style of an axis in the current theme. */
export const axisStyle = () => {
  const grid = { stroke: colour("--tblr-border-color"), width: 1 };
  return { stroke: colour("--tblr-secondary"), grid, ticks: grid, font: `11px ${style("--tblr-font-sans-serif")}` };
};

/** The style of an axis of times: the first mark of a day names the day. uPlot's own marks are those of the US. */
export const timeAxisStyle = () => ({
  ...axisStyle(),
  space: 80,
  values: (_chart, marks, _axis, _space, interval) =>
    marks.map((mark, index) => {
      if (interval >= DAY_SECONDS) return dayText(mark);
      const day = dayText(mark);
      const time = (interval < 60 ? secondText : minuteText)(mark);
      return index && dayText(marks[index - 1]) === day ? time : `${time}\n${day}`;
    }),
});

const COLOURS = ["--tblr-primary", "--tblr-orange", "--tblr-green", "--tblr-purple", "--tblr-red", "--tblr-cyan", "--tblr-yellow", "--tblr-pink"];
/** The colour of the run or node with this index, the same in every chart. Each is readable in both themes. */
export const seriesColour = (index) => colour(COLOURS[index % COLOURS.length]);
