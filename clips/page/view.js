// The clips: the form that makes a recipe, and what is rendered from it.

import { Meter } from "../js/board.js";
import { el, gigabytes, ms } from "../js/format.js";
import { Clip, STAGES } from "./clip.js";
import { Screen } from "./screen.js";

const $ = (id) => document.getElementById(id);

export class View {
  #screen = new Screen((deadlineMs) => this.#retry(deadlineMs));
  #clip = null;

  constructor(feed) {
    this.feed = feed;
    feed.addEventListener("change", () => this.#look());
    $("clip-deadline").addEventListener("input", () => this.#setDeadline($("clip-deadline").valueAsNumber, { slider: false }));
    $("clip-deadline-s").addEventListener("input", () => {
      const seconds = $("clip-deadline-s").valueAsNumber;
      if (seconds > 0) this.#setDeadline(seconds, { number: false });
    });
    this.#setDeadline(20);
    $("render").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    $("clip-cancel").addEventListener("click", () => this.cancel());
  }

  submit() {
    $("render").requestSubmit();
  }

  // False where nothing runs.
  cancel() {
    if (this.#clip === null || this.#clip.isOver) return false;
    this.#clip.cancel();
    return true;
  }

  #send() {
    this.cancel(); // one at a time is looked at here
    const video = {};
    if ($("clip-size").value) video.size = Number($("clip-size").value);
    if ($("clip-seconds").value) video.seconds = $("clip-seconds").valueAsNumber;
    const clip = new Clip({
      recipe: {
        schema: "1.0",
        text: $("say").value,
        portrait: { prompt: $("portrait").value, seed: $("face").valueAsNumber || 0 },
        video,
        check: { enabled: $("clip-check").checked },
      },
      deadlineMs: 1000 * this.seconds,
      onDeadline: $("render").elements.clip_on_deadline.value,
    });
    this.#clip = clip;
    clip.addEventListener("change", () => this.#drawButtons());
    this.#screen.show(clip);
    clip.start();
    this.#drawButtons();
  }

  #retry(deadlineMs) {
    this.#setDeadline(Math.ceil(deadlineMs / 100) / 10);
    this.submit();
  }

  #drawButtons() {
    $("clip-cancel").disabled = this.#clip === null || this.#clip.isOver;
  }

  #setDeadline(seconds, { slider = true, number = true } = {}) {
    this.seconds = seconds;
    const range = $("clip-deadline");
    if (slider) range.value = seconds;
    if (number) $("clip-deadline-s").value = seconds;
    range.setAttribute("aria-valuetext", ms(1000 * seconds));
    const share = (range.value - range.min) / (range.max - range.min);
    range.style.setProperty("--filled", `${100 * share}%`);
  }

  // Which instances render clips, and how large.
  #look() {
    const slots = this.feed.latest.instances.map(({ slot }) => slot).filter(Boolean);
    $("clips-link").hidden = slots.length === 0 && location.hash !== "#clips";
    $("clips-absent").hidden = slots.some(({ ready }) => ready);
    const most = Math.max(0, ...slots.map(({ max_size: size }) => size));
    for (const option of $("clip-size").options) option.hidden = most > 0 && Number(option.value) > most;
    const seconds = Math.max(0, ...slots.map(({ max_seconds: longest }) => longest));
    if (seconds > 0) $("clip-seconds").placeholder = `${seconds}`;
  }
}

// An instance's slot model, on the instance's card of the board.
export class Card {
  constructor() {
    this.meter = new Meter("clips");
    this.facts = el("dl", { class: "facts" });
    this.elements = [this.meter.element, this.facts];
  }

  show({ slot = null }) {
    this.meter.element.hidden = this.facts.hidden = slot === null;
    if (slot === null) return;
    const taken = slot.slots_total - slot.slots_free;
    this.meter.show(taken, slot.slots_total, slot.state === "up" ? `${taken} of ${slot.slots_total}` : slot.state);
    const facts = [
      ...STAGES.map(([stage, name]) => [`${name} P95`, ms(slot.p95_ms?.[stage])]),
      ["clip memory", gigabytes(slot.memory_used_bytes)],
      ["abort to free", ms(slot.abort_to_free_p99_ms)],
    ];
    this.facts.replaceChildren(
      ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    );
  }
}
