// The queue by slack, as SVG: one bar for each waiting request.

import { el, ms } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 216;
const EDGE = { left: 52, right: 14, top: 8, bottom: 26 };

function draw(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function text(x, y, words, anchor = "end") {
  return draw("text", { x, y, "text-anchor": anchor }, words);
}

function canvas(width, label) {
  return draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
}

function legend(names) {
  const parts = names.map(([name, words]) =>
    el("div", {}, el("dt", {}, el("span", { class: `swatch ${name}` }), words)),
  );
  return el("dl", { class: "legend" }, ...parts);
}

// Powers of ten and three times those within a range, as logarithms tick.
function ticks(low, high) {
  const found = [];
  for (let ten = 10 ** Math.floor(Math.log10(low)); ten <= high; ten *= 10) {
    for (const tick of [ten, 3 * ten]) if (tick >= low && tick <= high) found.push(tick);
  }
  return found.length > 6 ? found.filter((tick) => Math.log10(tick) % 1 < 1e-9) : found;
}

function scaleOf(low, high, from, to) {
  const share = (to - from) / Math.log(high / low);
  return (value) => from + share * Math.log(Math.min(high, Math.max(low, value)) / low);
}

function tickWords(tick) {
  return tick < 1000 ? `${tick} ms` : `${tick / 1000} s`;
}

// `waiting`: as the service orders them.
export function drawSlack(box, { first, depth }) {
  const width = box.clientWidth || 480;
  const plot = canvas(
    width,
    depth ? `${depth} wait; the next can wait for ${ms(first[0]?.slack_ms)}` : "nobody waits",
  );
  const low = 10;
  const high = Math.max(10_000, ...first.map(({ slack_ms }) => slack_ms));
  const y = scaleOf(low, high, HEIGHT - EDGE.bottom, EDGE.top);
  for (const tick of ticks(low, high)) {
    plot.append(
      draw("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }),
      text(EDGE.left - 6, y(tick) + 4, tickWords(tick)),
    );
  }
  const room = width - EDGE.left - EDGE.right;
  const step = Math.min(18, room / Math.max(1, first.length));
  first.forEach((task, index) => {
    const top = Math.min(y(Math.max(low, task.slack_ms)), HEIGHT - EDGE.bottom - 2);
    const kind = task.background ? "background" : task.paused ? "paused" : task.priority;
    const bar = draw("rect", {
      class: `bar ${kind}`,
      x: EDGE.left + index * step + 1,
      y: top,
      width: Math.max(1, step - 2),
      height: HEIGHT - EDGE.bottom - top,
      rx: 1.5,
    });
    const who = task.tenant ? ` for ${task.tenant}` : "";
    const hint = `${kind}${who}: can wait ${ms(task.slack_ms)}, has waited ${ms(task.waited_ms)}`;
    bar.append(draw("title", {}, hint));
    plot.append(bar);
  });
  const rest = depth > first.length ? `, ${depth - first.length} more` : "";
  const words = depth ? `${depth} wait${rest}` : "nobody waits";
  plot.append(text(width - EDGE.right, HEIGHT - 8, words));
  const kinds = [["decode", "interactive"], ["prefill", "batch"], ["queue", "paused"], ["route", "no chance"]];
  box.replaceChildren(plot, legend(kinds));
}
