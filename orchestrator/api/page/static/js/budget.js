// A request's deadline as a bar: where its time went, and what was left of it.

import { el, ms } from "./format.js";

export const STAGES = [
  ["queue", "queue"],
  ["route", "network"],
  ["prefill", "prefill"],
  ["decode", "decode"],
];

// By stage, in ms. Exact once the service has told its own figures, else as seen from here.
export function spentBy(run, now = performance.now()) {
  const { budget } = run;
  if (budget) {
    return Object.fromEntries(STAGES.map(([stage]) => [stage, Math.max(0, budget[`${stage}_ms`] ?? 0)]));
  }
  const end = run.endedAt ?? now;
  const started = run.startedAt ?? end;
  const first = run.firstAt ?? end;
  const before = Math.max(0, started - run.began);
  const queue = run.startedAt === null ? before : Math.min(before, run.waitedMs);
  return {
    queue,
    route: before - queue,
    prefill: run.startedAt === null ? 0 : Math.max(0, first - started),
    decode: run.firstAt === null ? 0 : Math.max(0, end - first),
  };
}

export function leftMs(run, now = performance.now()) {
  if (run.budget) return run.budget.left_ms;
  return run.asked.deadlineMs - run.elapsedMs(now);
}

export class BudgetBar {
  // `legend`: figures below it, which say the same in words.
  constructor({ legend = false } = {}) {
    this.parts = Object.fromEntries(
      STAGES.map(([stage]) => [stage, el("span", { class: `part ${stage}` })]),
    );
    this.mark = el("span", { class: "mark", "aria-hidden": "true" });
    this.track = el("div", { class: "track", role: "img" }, ...Object.values(this.parts), this.mark);
    this.element = el("div", { class: "budget" }, this.track);
    if (legend) {
      this.values = {};
      const list = el("dl", { class: "legend" });
      for (const [stage, name] of [...STAGES, ["left", "left"]]) {
        this.values[stage] = el("dd");
        const swatch = el("span", { class: `swatch ${stage}`, "aria-hidden": "true" });
        list.append(el("div", {}, el("dt", {}, swatch, name), this.values[stage]));
      }
      this.element.append(list);
    }
  }

  show(run, now = performance.now()) {
    const spent = spentBy(run, now);
    const left = leftMs(run, now);
    const total = STAGES.reduce((sum, [stage]) => sum + spent[stage], 0);
    const deadline = run.asked.deadlineMs;
    // A late one continues past the mark.
    const scale = Math.max(deadline, total) || 1;
    for (const [stage] of STAGES) {
      this.parts[stage].style.width = `${(100 * spent[stage]) / scale}%`;
    }
    this.mark.style.left = `${(100 * deadline) / scale}%`;
    this.mark.hidden = total <= deadline * 1.002;
    this.track.classList.toggle("late", left < 0);
    const words = STAGES.filter(([stage]) => spent[stage] >= 0.05).map(
      ([stage, name]) => `${name} ${ms(spent[stage])}`,
    );
    const rest = left < 0 ? `${ms(-left)} too late` : `${ms(left)} left`;
    this.track.setAttribute("aria-label", [...words, rest].join(", ") + ` of ${ms(deadline)}`);
    if (this.values) {
      for (const [stage] of STAGES) this.values[stage].textContent = ms(spent[stage]);
      this.values.left.textContent = left < 0 ? `−${ms(-left)}` : ms(left);
    }
  }
}
