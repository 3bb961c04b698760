// One clip: submitted, followed to its end, cancelled. It tells whoever shows it.

import { ApiError, call } from "./api.js";
import { follow } from "./follow.js";

export const STAGES = [
  ["audio", "speech"],
  ["image", "portrait"],
  ["video", "video"],
  ["clip", "check"],
];

export class Clip extends EventTarget {
  // `asked`: recipe, deadlineMs, onDeadline, preview.
  constructor(asked) {
    super();
    this.asked = asked;
    this.began = performance.now();
    this.stage = "sending"; // queued, running, ended
    this.percents = {};
    this.preview = null; // a Blob, the latest
    this.lastId = "";
    this.slotId = null;
    this.queuePosition = null;
    this.predictedMs = null;
    this.endedAt = null;
    this.outcome = null; // met, partial, missed, refused, aborted, failed; lost is ours
    this.facts = null;
    this.outputs = {};
    this.error = null;
    this.correlationId = null;
    this.cancelling = false;
    this.gone = new AbortController();
  }

  get isOver() {
    return this.stage === "ended";
  }

  elapsedMs(now = performance.now()) {
    return (this.endedAt ?? now) - this.began;
  }

  async start() {
    try {
      await this.#submit();
      await follow(`/v2/slots/${this.slotId}/events`, this, (event) => this.#take(event));
    } catch (error) {
      this.#failed(error);
    }
  }

  // Ends at the service, whatever has been submitted by then.
  async cancel() {
    if (this.isOver || this.cancelling) return;
    this.cancelling = true;
    this.#tell();
    if (this.slotId !== null) await this.#stop();
  }

  // A file of it, as a Blob.
  async file(name) {
    return (await call("GET", this.outputs[name])).blob();
  }

  #stop() {
    return call("DELETE", `/v2/slots/${this.slotId}`).catch(() => {});
  }

  async #submit() {
    const { asked } = this;
    const response = await call("POST", "/v2/slots", {
      body: {
        recipe: asked.recipe,
        deadline_ms: asked.deadlineMs,
        on_deadline: asked.onDeadline,
        preview: asked.preview,
        outputs: ["mp4", "wav", "png"],
        on_disconnect: "cancel",
      },
    });
    const answer = await response.json();
    this.slotId = answer.slot_id;
    this.correlationId = answer.correlation_id;
    this.queuePosition = answer.queue_position;
    this.predictedMs = answer.predicted_ms;
    this.stage = "queued";
    this.#tell();
    if (this.cancelling) await this.#stop();
  }

  #take({ event, data }) {
    switch (event) {
      case "queued":
        this.queuePosition = data.queue_position;
        break;
      case "stage":
        this.stage = "running";
        this.percents[data.stage] = data.percent;
        break;
      case "preview":
        this.preview = new Blob([Uint8Array.from(atob(data.data), (c) => c.charCodeAt(0))], { type: data.mime });
        break;
      case "result":
      case "error":
        this.#ended(data, event === "error" ? data : null);
        return;
      default:
        return;
    }
    this.#tell();
  }

  #ended(told, error) {
    this.outcome = told.outcome;
    this.facts = told.seconds === undefined ? null : told;
    this.outputs = told.outputs ?? {};
    this.error = error;
    this.#over();
  }

  #failed(error) {
    if (error instanceof ApiError) {
      const gone = error.status === 404 && this.slotId !== null;
      this.outcome = gone ? "lost" : "refused";
      this.error = gone
        ? { code: "lost", message: "the service does not know this clip any more: it was restarted" }
        : { ...error.details, code: error.code, message: error.message };
      this.correlationId = error.headers?.get("X-Correlation-Id") ?? this.correlationId;
    } else {
      this.outcome = "lost";
      this.error = { code: "unreachable", message: "the service cannot be reached" };
    }
    this.#over();
  }

  #over() {
    this.stage = "ended";
    this.endedAt = performance.now();
    this.#tell();
  }

  #tell() {
    this.dispatchEvent(new Event("change"));
  }
}
