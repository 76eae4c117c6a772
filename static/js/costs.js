// Draws the spend by day as stacked bars, and redraws them when the theme or the size changes. The page has the numbers.
import { axisStyle, colour, onResize } from "./charts.js";

const data = JSON.parse(document.getElementById("cost-data").textContent);
const container = document.getElementById("cost-chart");
const HUES = ["--tblr-primary", "--tblr-teal", "--tblr-orange", "--tblr-purple", "--tblr-cyan", "--tblr-secondary"];
const language = document.documentElement.lang;
const money = new Intl.NumberFormat(language, { style: "currency", currency: data.currency });
const short = new Intl.NumberFormat(language, { style: "currency", currency: data.currency, notation: "compact" });
const dayName = (index) => (data.days[index] ? new Date(`${data.days[index]}T12:00`).toLocaleDateString(language, { month: "short", day: "numeric" }) : "");

// A bar is as high as the sum of the series up to it. The highest is drawn first, so that each shows its own part.
const stacked = [];
data.amounts.forEach((amounts, index) => stacked.push(amounts.map((amount, day) => amount + (stacked[index - 1]?.[day] ?? 0))));

let chart = null;
const draw = () => {
  chart?.destroy();
  const axis = { ...axisStyle(), ticks: { show: false } };
  const order = data.names.map((_name, index) => index).reverse();
  chart = new window.uPlot(
    {
      width: container.clientWidth,
      height: 260,
      scales: { x: { time: false, range: [-0.6, data.days.length - 0.4] }, y: { range: (_plot, _least, most) => [0, most * 1.08 || 1] } },
      cursor: { points: { show: false }, drag: { x: false, y: false } },
      series: [
        { label: container.dataset.day, value: (_plot, index) => (index === null ? "" : dayName(index)) },
        ...order.map((index) => ({
          label: data.names[index],
          fill: colour(HUES[index % HUES.length]),
          width: 0,
          points: { show: false },
          paths: window.uPlot.paths.bars({ size: [0.7, 40], radius: index === data.names.length - 1 ? 0.1 : 0 }),
          value: (_plot, _value, _series, day) => (day === null ? "" : money.format(data.amounts[index][day])),
        })),
      ],
      axes: [
        { ...axis, grid: { show: false }, values: (_plot, indexes) => indexes.map((index) => (Number.isInteger(index) ? dayName(index) : "")) },
        { ...axis, size: 64, values: (_plot, values) => values.map((value) => short.format(value)) },
      ],
    },
    [data.days.map((_day, index) => index), ...order.map((index) => stacked[index])],
    container,
  );
};
draw();
document.addEventListener("trainyard:theme", draw);
onResize(draw);
