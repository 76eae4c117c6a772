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

/** An axis in the colours of now. */
export const axes = () => {
  const grid = { stroke: colour("--tblr-border-color"), width: 1 };
  return { stroke: colour("--tblr-secondary"), grid, ticks: grid, font: `11px ${style("--tblr-font-sans-serif")}` };
};
