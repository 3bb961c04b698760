// The playground: the form, and what is sent from it.

import { Answer } from "./answer.js";
import { call, getJson } from "./api.js";
import { copy } from "./copy.js";
import { ms, percent } from "./format.js";
import { History } from "./history.js";
import { bodyOf, Run } from "./run.js";

const $ = (id) => document.getElementById(id);
const MIN_MS = 50;
const MAX_MS = 50_000;
const STEPS = 200;
const STILL_MS = 300; // nothing was typed for so long

// Requests that show what can become of one. What is cut has `share` of the time in which half
// such requests would be done, on whatever machine, or `deadlineMs` where that is not known.
const TRIES = {
  met: { prompt: "Tell me a story about a lighthouse.", deadlineMs: 10_000, maxTokens: 120, onDeadline: "error", exactly: false },
  fit: { prompt: "Tell me a long story about the sea.", deadlineMs: 400, share: 0.5, maxTokens: 400, onDeadline: "fit", exactly: true },
  partial: { prompt: "Tell me a long story about the tide.", deadlineMs: 400, share: 0.5, maxTokens: 400, onDeadline: "partial", exactly: true },
  refused: { prompt: "Tell me a very long story, at once.", deadlineMs: 60, maxTokens: 400, onDeadline: "error", exactly: true },
};

export class Playground {
  #history = new History((run) => this.#look(run));
  #answer = new Answer((run, deadlineMs) => this.#retry(run, deadlineMs));
  #deadlineMs = 5000;
  #quoting = 0;

  constructor() {
    this.#setDeadline(5000);
    $("deadline").addEventListener("input", () => {
      this.#setDeadline(round(ofStep($("deadline").valueAsNumber)), { slider: false });
    });
    $("deadline-s").addEventListener("input", () => {
      const seconds = $("deadline-s").valueAsNumber;
      if (seconds > 0) this.#setDeadline(1000 * seconds, { number: false });
    });
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    $("ask").addEventListener("input", () => this.#quoteSoon());
    $("cancel").addEventListener("click", () => this.cancel());
    $("real-copy").addEventListener("click", () => copy($("real-copy"), "make demo MODEL=smollm2"));
    for (const button of document.querySelectorAll("[data-try]")) {
      button.addEventListener("click", async () => {
        const { share, ...asked } = TRIES[button.dataset.try];
        if (share) asked.deadlineMs = round(Math.max(MIN_MS, share * (await this.#middleMs(asked))));
        this.#fill(asked);
        this.submit();
      });
    }
  }

  // The service is there (again): which models has it?
  async refresh() {
    const { data } = await getJson("/v1/models");
    const select = $("model");
    const chosen = select.value;
    const options = data.map(({ id }) => new Option(id, id, false, id === chosen));
    select.replaceChildren(...options);
    select.disabled = options.length < 2;
    $("real").hidden = data.some(({ id }) => id !== "demo");
    $("version").textContent = `version ${(await getJson("/v2/capabilities")).version}`;
    this.#quoteSoon();
  }

  submit() {
    $("ask").requestSubmit();
  }

  // Everything of ours that has not ended. False where there is nothing.
  cancel() {
    const { running } = this.#history;
    for (const run of running) run.cancel();
    return running.length > 0;
  }

  #send() {
    const asked = this.#asked();
    const runs = Array.from({ length: $("copies").valueAsNumber }, () => new Run(asked));
    for (const run of runs) {
      this.#history.add(run);
      run.addEventListener("change", () => this.#drawButtons());
      run.start();
    }
    this.#look(runs[0]);
    this.#drawButtons();
  }

  #asked() {
    return {
      prompt: $("prompt").value,
      chat: !$("plain").checked,
      model: $("model").value,
      maxTokens: $("max-tokens").valueAsNumber,
      deadlineMs: this.#deadlineMs,
      onDeadline: $("ask").elements.on_deadline.value,
      priority: $("ask").elements.priority.value,
      exactly: $("exactly").checked,
    };
  }

  #quoteSoon() {
    clearTimeout(this.#quoting);
    this.#quoting = setTimeout(() => this.#quote(this.#quoting), STILL_MS);
  }

  async #quoted(asked) {
    return (await call("POST", "/v2/quote", { body: bodyOf(asked), quiet: true })).json();
  }

  // The time in which half such requests are done whole; `deadlineMs` where it is not known.
  async #middleMs(asked) {
    const quoted = this.#quoted({ ...this.#asked(), ...asked, onDeadline: "error" });
    const { earliest } = await quoted.catch(() => ({ earliest: [] }));
    return earliest.find(({ chance }) => chance >= 0.5)?.within_ms ?? 2 * asked.deadlineMs;
  }

  // The chance of being in time, as the form stands.
  async #quote(number) {
    let words = "";
    if (!document.hidden && $("model").value && $("ask").checkValidity()) {
      try {
        const { stated, earliest } = await this.#quoted(this.#asked());
        const likely = earliest.find(({ chance }) => chance >= 0.9);
        words = stated ? `${percent(stated.chance)} likely in time` : "";
        if (likely) words += `; 90 % within ${ms(likely.within_ms)}`;
      } catch {
        // Not now: a request would be refused, too, and say why.
      }
    }
    if (number === this.#quoting) $("odds").textContent = words;
  }

  #retry(run, deadlineMs) {
    this.#fill({ ...run.asked, deadlineMs });
    this.submit();
  }

  #fill(asked) {
    $("prompt").value = asked.prompt;
    $("max-tokens").value = asked.maxTokens;
    $("exactly").checked = asked.exactly;
    $("ask").elements.on_deadline.value = asked.onDeadline;
    this.#setDeadline(asked.deadlineMs);
    this.#quoteSoon();
    $("send").focus();
  }

  #look(run) {
    this.#answer.show(run);
    this.#history.pick(run);
    // On a phone it is below the form, and above the requests.
    const { top } = $("answer").getBoundingClientRect();
    if (run && (top < 0 || top > 0.6 * innerHeight)) $("answer").scrollIntoView();
  }

  #drawButtons() {
    $("cancel").disabled = this.#history.running.length === 0;
  }

  #setDeadline(deadlineMs, { slider = true, number = true } = {}) {
    this.#deadlineMs = deadlineMs;
    const range = $("deadline");
    if (slider) range.value = stepOf(deadlineMs);
    if (number) $("deadline-s").value = +(deadlineMs / 1000).toPrecision(4);
    range.setAttribute("aria-valuetext", ms(deadlineMs));
    const share = range.value / STEPS;
    range.style.setProperty("--filled", `${100 * share}%`);
  }
}

// The slider is logarithmic: a tenth matters as much at 50 ms as at 50 s.
function ofStep(step) {
  return MIN_MS * (MAX_MS / MIN_MS) ** (step / STEPS);
}

function stepOf(deadlineMs) {
  const step = (STEPS * Math.log(deadlineMs / MIN_MS)) / Math.log(MAX_MS / MIN_MS);
  return Math.round(Math.min(STEPS, Math.max(0, step)));
}

function round(deadlineMs) {
  return Number(deadlineMs.toPrecision(2));
}
