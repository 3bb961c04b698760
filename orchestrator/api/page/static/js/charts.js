// Curves over the last minutes, drawn by uPlot. Colours are those of the page, asked for at each
// drawing, so that they follow it from light to dark.

import { el } from "./format.js";

const SPANS_S = [60, 300]; // as much as is known, within these
const HEIGHT = 190;

// One of the pair `light-dark(#…, #…)`: a canvas knows of no scheme.
export function colour(name) {
  const { theme } = document.documentElement.dataset;
  const isDark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const pair = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
  return pair.match(/#\w+/g)[Number(isDark)];
}

const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const WHOLE = [1, 2, 5].flatMap((step) => [1, 10, 100, 1000, 10_000].map((ten) => step * ten)).sort((a, b) => a - b);

export class Chart {
  // `series`: [{ label, colour, fill }]; with `stacked` each lies on those before it.
  constructor(box, series, { stacked = false, format = String, most = null, whole = false } = {}) {
    this.box = box;
    this.series = series;
    this.stacked = stacked;
    this.format = format;
    this.most = most;
    this.whole = whole;
    this.values = series.map(() => el("dd"));
    const names = series.map(({ label, colour: name }, index) =>
      el("div", {}, el("dt", {}, el("span", { class: `swatch ${name}` }), label), this.values[index]),
    );
    this.holder = el("div", { class: "canvas", role: "img" });
    box.append(this.holder, el("dl", { class: "legend" }, ...names));
    new ResizeObserver(() => this.#resize()).observe(this.holder);
    document.addEventListener("themechange", () => this.plot?.redraw());
  }

  // `seconds`: epoch; `columns`: one per series.
  show(seconds, columns) {
    this.#say(columns);
    const drawn = this.stacked ? stack(columns) : columns;
    // The highest is drawn first: the others cover what is theirs.
    const data = [seconds, ...(this.stacked ? drawn.toReversed() : drawn)];
    if (this.plot) this.plot.setData(data);
    else if (this.holder.clientWidth) this.plot = this.#make(data);
  }

  #say(columns) {
    const now = columns.map((column) => column.at(-1) ?? null);
    now.forEach((value, index) => (this.values[index].textContent = this.format(value)));
    const words = this.series.map(({ label }, index) => `${label} ${this.format(now[index])}`);
    this.holder.setAttribute("aria-label", `Now: ${words.join(", ")}`);
  }

  #make(data) {
    const drawn = this.series.map(({ label, colour: name, fill }) => ({
      label,
      width: this.stacked ? 0 : 2,
      stroke: () => colour(name),
      fill: fill || this.stacked ? () => colour(name) + (this.stacked ? "" : "28") : undefined,
      points: { show: false },
    }));
    const axis = {
      stroke: () => colour("muted"),
      grid: { stroke: () => colour("line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const options = {
      width: this.holder.clientWidth,
      height: HEIGHT,
      padding: [10, 26, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: true, range: () => lastMinutes(this.plot?.data[0] ?? data[0]) },
        y: { range: (_, low, high) => [0, this.most ?? niceMost(high, this.whole ? 4 : 1)] },
      },
      series: [{}, ...(this.stacked ? drawn.toReversed() : drawn)],
      axes: [
        { ...axis, size: 30, gap: 6, incrs: [15, 60, 120, 300], values: (_, ticks) => ticks.map((tick) => clock.format(1000 * tick)) },
        { ...axis, size: 48, space: 36, ...(this.whole && { incrs: WHOLE }), values: (_, ticks) => ticks.map(this.format) },
      ],
    };
    return new window.uPlot(options, data, this.holder);
  }

  #resize() {
    const width = this.holder.clientWidth;
    if (width && this.plot) this.plot.setSize({ width, height: HEIGHT });
  }
}

function lastMinutes(seconds) {
  const now = seconds.at(-1) ?? Date.now() / 1000;
  const known = now - (seconds[0] ?? now);
  return [now - Math.min(SPANS_S[1], Math.max(SPANS_S[0], known)), now];
}

function niceMost(high, least) {
  return Math.max(least, (high ?? 0) * 1.15);
}

function stack(columns) {
  const sums = [];
  for (const column of columns) {
    const below = sums.at(-1);
    sums.push(column.map((value, at) => (value === null ? null : value + (below?.[at] ?? 0))));
  }
  return sums;
}
