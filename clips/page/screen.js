// The clip that is looked at: its stages as they run, then the clip itself.

import { STAGES } from "./clip.js";
import { el, ms } from "../js/format.js";

const $ = (id) => document.getElementById(id);
const TICK_MS = 100;
const NAMES = {
  met: "Rendered",
  partial: "Rendered, with less",
  missed: "Too late",
  refused: "Refused",
  aborted: "Cancelled",
  failed: "Failed",
  lost: "Lost",
};
const LIVE = { sending: "Sending …", queued: "Waiting …", running: "Rendering …" };
const FILES = { mp4: "clip.mp4", wav: "speech.wav", png: "portrait.png" };

export class Screen {
  #clip = null;
  #rows = new Map();
  #timer = 0;
  #url = "";
  #listen = () => this.#draw();

  // `onRetry`: given the deadline in ms that the service named as feasible.
  constructor(onRetry) {
    this.onRetry = onRetry;
    for (const [stage, name] of STAGES) {
      const fill = el("span", { class: `part ${stage}` });
      const track = el("div", { class: "track", role: "progressbar", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
      const figure = el("span", { class: "figures" });
      $("clip-stages").append(el("li", {}, el("span", {}, name), track, figure));
      this.#rows.set(stage, { fill, track, figure });
    }
    $("clip-video").addEventListener("error", () => {
      if ($("clip-video").hasAttribute("src")) this.#say("This browser cannot play the clip; the file below can be saved.");
    });
  }

  show(clip) {
    this.#clip?.removeEventListener("change", this.#listen);
    this.#clip = clip;
    this.#forget();
    $("clip-empty").hidden = true;
    $("clip-body").hidden = false;
    $("clip-files").replaceChildren();
    clip.addEventListener("change", this.#listen);
    this.#draw();
    clearInterval(this.#timer);
    this.#timer = setInterval(() => this.#drawFigures(), TICK_MS);
  }

  #forget() {
    const video = $("clip-video");
    video.pause();
    video.removeAttribute("src");
    video.load();
    video.hidden = true;
    if (this.#url) URL.revokeObjectURL(this.#url);
    this.#url = "";
  }

  #draw() {
    const clip = this.#clip;
    const name = clip.isOver ? (NAMES[clip.outcome] ?? clip.outcome) : clip.cancelling ? "Cancelling …" : LIVE[clip.stage];
    const verdict = $("clip-verdict");
    if (verdict.textContent !== name) verdict.textContent = name;
    verdict.dataset.kind = clip.isOver ? clip.outcome : "live";
    $("clip").setAttribute("aria-busy", String(!clip.isOver));
    this.#drawFigures();
    this.#drawStages(clip);
    this.#drawReason(clip);
    this.#drawFacts(clip);
    if (clip.isOver) {
      clearInterval(this.#timer);
      this.#drawFiles(clip);
    }
  }

  #drawFigures() {
    const clip = this.#clip;
    const left = clip.asked.deadlineMs - clip.elapsedMs();
    let words = left >= 0 ? `${ms(left)} left` : `${ms(-left)} too late`;
    if (clip.isOver) {
      words = `after ${ms(clip.elapsedMs())}`;
      if (clip.facts) words += left >= 0 ? `, ${ms(left)} to spare` : `, ${ms(-left)} too late`;
    }
    if (clip.stage === "queued" && clip.queuePosition > 0) words = `${clip.queuePosition} ahead of it · ${words}`;
    $("clip-figures").textContent = words;
  }

  #drawStages({ percents, facts, outcome, id }) {
    $("clip-stage").hidden = id === null && outcome !== null; // refused: nothing was begun
    const isDone = outcome === "met" || outcome === "partial";
    for (const [stage, row] of this.#rows) {
      const took = facts?.[`${stage}_ms`];
      const isSkipped = isDone && stage === "clip" && !facts?.check;
      const percent = isSkipped ? 0 : isDone ? 100 : (percents[stage] ?? 0);
      row.fill.style.width = `${percent}%`;
      row.track.setAttribute("aria-valuenow", percent);
      row.figure.textContent = isSkipped ? "left out" : took ? ms(took) : percents[stage] === undefined ? "–" : `${percent} %`;
    }
  }

  #drawReason(clip) {
    const given = clip.facts?.given_up ?? [];
    if (clip.error) this.#say(clip.error.message, clip.error);
    else if (given.length) this.#say(`Given up to be in time: ${given.join(", ")}.`);
    else if (clip.facts?.check?.passed === false) this.#say("The picture does not fit its prompt well: the clip is marked as such.");
    else $("clip-reason").hidden = true;
  }

  #say(words, error = null) {
    const reason = $("clip-reason");
    reason.hidden = false;
    reason.replaceChildren(words);
    if (error?.code) reason.append(" ", el("code", {}, error.code));
    const at = error?.earliest_feasible_deadline;
    if (!at) return;
    const clip = this.#clip;
    const needMs = Math.max(1, Math.ceil(at - (performance.timeOrigin + clip.began)));
    reason.append(el("button", { type: "button", onclick: () => this.onRetry(needMs) }, `Try again with ${ms(needMs)}`));
  }

  #drawFacts(clip) {
    const { facts } = clip;
    const shown = [];
    if (clip.predictedMs !== null && !clip.isOver) shown.push(["predicted", ms(clip.predictedMs)]);
    if (facts) {
      shown.push(["length", `${facts.seconds.toFixed(1)} s`]);
      if (facts.frames) shown.push(["picture", `${facts.size} × ${facts.size}, ${facts.fps} frames/s`]);
      if (facts.check) shown.push(["check", `${facts.check.score?.toFixed(2) ?? "–"}${facts.check.passed ? "" : ", not passed"}`]);
      shown.push(["in all", ms(facts.total_ms)]);
    }
    if (clip.correlationId) shown.push(["correlation id", clip.correlationId]);
    $("clip-facts").replaceChildren(
      ...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    );
  }

  async #drawFiles(clip) {
    const names = Object.keys(clip.outputs);
    $("clip-files").replaceChildren(
      ...names.map((name) => el("button", { type: "button", onclick: () => this.#save(clip, name) }, `Save ${FILES[name] ?? name}`)),
    );
    if (!names.includes("mp4") || this.#url) return;
    const blob = await clip.file("mp4").catch(() => null);
    if (this.#clip !== clip) return;
    if (blob === null) return this.#say("The clip was rendered, but it could not be fetched.");
    // As a blob, since a <video> could not send the key.
    this.#url = URL.createObjectURL(blob);
    const video = $("clip-video");
    video.src = this.#url;
    video.hidden = false;
  }

  async #save(clip, name) {
    const blob = await clip.file(name).catch(() => null);
    if (blob === null) return this.#say(`${FILES[name] ?? name} is no longer there.`);
    const url = URL.createObjectURL(blob);
    el("a", { href: url, download: FILES[name] ?? name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }
}
