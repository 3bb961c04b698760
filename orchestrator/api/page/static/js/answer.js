// The request that is looked at: verdict, budget, text, facts.

import { BudgetBar } from "./budget.js";
import { copy } from "./copy.js";
import { el, ms } from "./format.js";
import { figuresOf, reasonOf, verdictOf } from "./verdict.js";

const $ = (id) => document.getElementById(id);
const STILL_MS = 250;

export class Answer {
  #run = null;
  #bar = new BudgetBar({ legend: true });
  #textNode = document.createTextNode("");
  #frame = 0;
  #listen = () => this.#draw();

  // `onRetry`: given the deadline in ms that the service named as feasible.
  constructor(onRetry) {
    this.onRetry = onRetry;
    $("answer-bar").append(this.#bar.element);
    $("text").append(this.#textNode);
    $("copy").addEventListener("click", () => copy($("copy"), this.#run.curl()));
  }

  get run() {
    return this.#run;
  }

  show(run) {
    this.#run?.removeEventListener("change", this.#listen);
    this.#run = run;
    $("answer-empty").hidden = run !== null;
    $("answer-body").hidden = run === null;
    if (run === null) return;
    run.addEventListener("change", this.#listen);
    this.#textNode.data = "";
    this.#draw();
    this.#tick();
  }

  // The bar moves while a request runs; slowly where the system asks for little motion.
  #tick() {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.timer);
    const run = this.#run;
    if (run === null || run.isOver) return;
    const again = () => {
      this.#drawTimes();
      this.#tick();
    };
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.timer = setTimeout(again, STILL_MS);
    } else {
      this.#frame = requestAnimationFrame(again);
    }
  }

  #drawTimes() {
    const now = performance.now();
    this.#bar.show(this.#run, now);
    $("verdict-figures").textContent = figuresOf(this.#run, now);
  }

  #draw() {
    const run = this.#run;
    const { kind, name } = verdictOf(run);
    const verdict = $("verdict");
    if (verdict.textContent !== name) verdict.textContent = name;
    verdict.dataset.kind = kind;
    $("answer").setAttribute("aria-busy", String(!run.isOver));
    this.#drawTimes();
    this.#drawReason(run);
    this.#drawText(run);
    this.#drawFacts(run);
  }

  #drawText(run) {
    const box = $("text");
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
    const shown = this.#textNode.data;
    if (run.text.startsWith(shown)) this.#textNode.appendData(run.text.slice(shown.length));
    else this.#textNode.data = run.text;
    box.hidden = run.text === "" && run.isOver;
    box.classList.toggle("live", !run.isOver);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  #drawReason(run) {
    const reason = $("reason");
    const words = reasonOf(run);
    reason.hidden = words === null;
    if (words === null || reason.dataset.of === `${run.number} ${words}`) return;
    reason.dataset.of = `${run.number} ${words}`;
    reason.replaceChildren(run.error ? el("q", {}, words) : words);
    if (run.error?.code) reason.append(" ", el("code", {}, run.error.code));
    const feasible = run.error?.earliest_feasible_deadline;
    if (feasible) {
      const needMs = Math.max(1, Math.ceil(feasible - run.at.getTime()));
      const words = `Try again with ${ms(needMs)}`;
      reason.append(el("button", { type: "button", onclick: () => this.onRetry(run, needMs) }, words));
    }
  }

  #drawFacts(run) {
    const facts = [["tokens", run.usage ? `${run.usage.prompt_tokens} + ${run.tokens}` : `${run.tokens}`]];
    const { budget } = run;
    if (run.firstAt !== null) facts.push(["first token", ms(firstMs(run))]);
    const decodeMs = budget ? budget.decode_ms : run.elapsedMs() - (run.firstAt - run.began);
    if (run.tokens > 1 && decodeMs > 0) {
      facts.push(["tokens/s", ((1000 * (run.tokens - 1)) / decodeMs).toFixed(0)]);
    }
    if (run.predictedStartMs !== null) facts.push(["start, predicted", ms(run.predictedStartMs)]);
    if (run.finish) facts.push(["ended by", run.finish]);
    if (run.correlationId) facts.push(["correlation id", run.correlationId]);
    const list = $("facts");
    if (list.children.length !== facts.length) {
      list.replaceChildren(...facts.map(([name]) => el("div", {}, el("dt", {}, name), el("dd"))));
    }
    facts.forEach(([name, value], index) => {
      const [term, shown] = list.children[index].children;
      if (term.textContent !== name) term.textContent = name;
      if (shown.textContent !== value) shown.textContent = value;
    });
  }
}

// By the service's own figures once they are known.
function firstMs({ budget, firstAt, began }) {
  return budget ? budget.queue_ms + budget.route_ms + budget.prefill_ms : firstAt - began;
}
