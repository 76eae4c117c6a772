// Spend by day as stacked bars. The one rule: the numbers are in the page; this only draws them, again when theme or size change.
const data = JSON.parse(document.getElementById("cost-data").textContent);
const holder = document.getElementById("cost-chart");
const HUES = ["--tblr-primary", "--tblr-teal", "--tblr-orange", "--tblr-purple", "--tblr-cyan", "--tblr-secondary"];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** A colour variable as a canvas understands it: resolved by the browser, whatever it is made of. */
const colour = (name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const resolved = getComputedStyle(probe).color;
  probe.remove();
  return resolved;
};
const language = document.documentElement.lang;
const money = new Intl.NumberFormat(language, { style: "currency", currency: data.currency });
const short = new Intl.NumberFormat(language, { style: "currency", currency: data.currency, notation: "compact" });
const dayName = (place) => (data.days[place] ? new Date(`${data.days[place]}T12:00`).toLocaleDateString(language, { month: "short", day: "numeric" }) : "");

// Each series is drawn as high as all up to it; the highest is drawn first, so that each shows its own part.
const stacked = [];
data.amounts.forEach((amounts, place) => stacked.push(amounts.map((amount, day) => amount + (stacked[place - 1]?.[day] ?? 0))));

let chart = null;
const draw = () => {
  chart?.destroy();
  const grid = { stroke: colour("--tblr-border-color"), width: 1 };
  const font = `11px ${style("--tblr-font-sans-serif")}`;
  const axis = { stroke: colour("--tblr-secondary"), ticks: { show: false }, font };
  const order = data.names.map((_name, place) => place).reverse();
  chart = new window.uPlot(
    {
      width: holder.clientWidth,
      height: 260,
      scales: { x: { time: false, range: [-0.6, data.days.length - 0.4] }, y: { range: (_plot, _least, most) => [0, most * 1.08 || 1] } },
      cursor: { points: { show: false }, drag: { x: false, y: false } },
      series: [
        { label: holder.dataset.day, value: (_plot, place) => (place === null ? "" : dayName(place)) },
        ...order.map((place) => ({
          label: data.names[place],
          fill: colour(HUES[place % HUES.length]),
          width: 0,
          points: { show: false },
          paths: window.uPlot.paths.bars({ size: [0.7, 40], radius: place === data.names.length - 1 ? 0.1 : 0 }),
          value: (_plot, _value, _series, day) => (day === null ? "" : money.format(data.amounts[place][day])),
        })),
      ],
      axes: [
        { ...axis, grid: { show: false }, values: (_plot, places) => places.map((place) => (Number.isInteger(place) ? dayName(place) : "")) },
        { ...axis, grid, size: 64, values: (_plot, values) => values.map((value) => short.format(value)) },
      ],
    },
    [data.days.map((_day, place) => place), ...order.map((place) => stacked[place])],
    holder,
  );
};
draw();
document.addEventListener("trainyard:theme", draw);
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(draw, 150);
});
