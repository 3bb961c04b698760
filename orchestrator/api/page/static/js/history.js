// One's own requests, for as long as the tab is open.

import { BudgetBar } from "./budget.js";
import { el, ms, plural } from "./format.js";
import { Run } from "./run.js";
import { verdictOf } from "./verdict.js";

const MOST = 100;
const KEPT = "tidegate.history";
const $ = (id) => document.getElementById(id);

export class History {
  #rows = [];
  #running = new Set();
  #drawing = 0;
  #dropped = 0; // of those beyond the last MOST

  // `onPick`: given the run that was chosen.
  constructor(onPick) {
    this.onPick = onPick;
    $("forget").addEventListener("click", () => this.#forget());
    const { dropped, runs } = JSON.parse(sessionStorage.getItem(KEPT) ?? '{"dropped":0,"runs":[]}');
    this.#dropped = dropped;
    for (const kept of runs) this.#insert(Run.from(kept));
    this.#draw();
  }

  get running() {
    return [...this.#running];
  }

  add(run) {
    const row = this.#insert(run);
    this.#trim();
    this.#running.add(run);
    drawRow(row);
    run.addEventListener("change", () => {
      row.stale = true;
      if (run.isOver) this.#running.delete(run);
      this.#drawSoon();
    });
    this.#drawSoon();
  }

  // What still runs stays, so this is done again when something ends.
  #trim() {
    while (this.#rows.length > MOST) {
      const last = this.#rows.findLastIndex(({ run }) => run.isOver);
      if (last <= 0) return;
      this.#rows.splice(last, 1)[0].item.remove();
      this.#dropped++;
    }
  }

  #insert(run) {
    const row = this.#row(run);
    this.#rows.unshift(row);
    $("history").prepend(row.item);
    return row;
  }

  // For a reload. What still runs then is cancelled, and not there afterwards.
  #keep() {
    const runs = this.#rows.map(({ run }) => run).filter((run) => run.isOver);
    try {
      sessionStorage.setItem(KEPT, JSON.stringify({ dropped: this.#dropped, runs: runs.reverse() }));
    } catch {
      // The texts are longer than what a browser keeps: a reload shows the earlier ones.
    }
  }

  pick(run) {
    for (const row of this.#rows) {
      row.button.setAttribute("aria-pressed", String(row.run === run));
    }
  }

  #row(run) {
    const row = {
      run,
      stale: true,
      name: el("span", { class: "verdict small" }),
      deadline: el("span", { class: "figures" }, `of ${ms(run.asked.deadlineMs)}`),
      tokens: el("span", { class: "figures" }),
      bar: new BudgetBar(),
    };
    const prompt = el("span", { class: "prompt" }, run.asked.prompt);
    row.button = el(
      "button",
      { type: "button", "aria-pressed": "false", onclick: () => this.onPick(run) },
      el("span", { class: "line" }, row.name, prompt, row.tokens, row.deadline),
      row.bar.element,
    );
    row.item = el("li", { value: run.number }, row.button);
    return row;
  }

  // Many may run at once: drawn together, and only those that changed.
  #drawSoon() {
    if (this.#drawing) return;
    this.#drawing = setTimeout(() => {
      this.#drawing = 0;
      this.#draw();
    }, 100);
  }

  #draw() {
    const now = performance.now();
    let ended = false;
    for (const row of this.#rows) {
      const { run } = row;
      if (!row.stale && run.isOver) continue;
      row.stale = false;
      ended ||= run.isOver;
      drawRow(row, now);
    }
    if (ended) {
      this.#trim();
      this.#keep();
    }
    this.#drawTally();
    if (this.#running.size) this.#drawSoon();
  }

  #drawTally() {
    const counts = new Map();
    for (const { run } of this.#rows) {
      const { kind, name } = verdictOf(run);
      if (kind !== "live") counts.set(name, (counts.get(name) ?? 0) + 1);
    }
    const words = [...counts].map(([name, number]) => `${number} ${name.toLowerCase()}`);
    if (this.#running.size) words.push(`${this.#running.size} running`);
    if (this.#dropped) words.push(`${this.#dropped} earlier no longer shown`);
    $("tally").textContent = words.join(" · ");
    $("history-empty").hidden = this.#rows.length > 0;
    $("forget").hidden = this.#rows.length === 0;
  }

  #forget() {
    for (const row of this.#rows.filter(({ run }) => run.isOver)) row.item.remove();
    this.#rows = this.#rows.filter(({ run }) => !run.isOver);
    this.#dropped = 0;
    this.#keep();
    this.onPick(this.#rows[0]?.run ?? null);
    this.#drawTally();
    $("prompt").focus();
  }
}

function drawRow({ run, name, tokens, bar }, now) {
  const verdict = verdictOf(run);
  name.textContent = verdict.name;
  name.dataset.kind = verdict.kind;
  tokens.textContent = run.tokens ? plural(run.tokens, "token") : "";
  bar.show(run, now);
}
