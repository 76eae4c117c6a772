// How a chart of ours looks: colours come from the theme's variables, resolved by the browser.
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A colour variable as a canvas understands it, whatever it is made of. */
export const colour = (name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const resolved = getComputedStyle(probe).color;
  probe.remove();
  return resolved;
};

/** The reader's time zone, which the page was written in; and a moment in it, as uPlot wants one. */
export const zone = document.documentElement.dataset.timeZone;
export const inZone = (seconds) => window.uPlot.tzDate(new Date(seconds * 1000), zone);

/** An axis in the colours of now. */
export const axes = () => {
  const grid = { stroke: colour("--tblr-border-color"), width: 1 };
  return { stroke: colour("--tblr-secondary"), grid, ticks: grid, font: `11px ${style("--tblr-font-sans-serif")}` };
};

const COLOURS = ["--tblr-primary", "--tblr-orange", "--tblr-green", "--tblr-purple", "--tblr-red", "--tblr-cyan", "--tblr-yellow", "--tblr-pink"];
/** The colour of the run or node at a place, the same in every chart. Each is readable in both themes. */
export const hue = (place) => colour(COLOURS[place % COLOURS.length]);
