// What was submitted, a request or a clip: followed to its end, cancelled. It notifies its views.

import { ApiError, call } from "./api.js";

export class Submission extends EventTarget {
  // `path`: where it is posted to. `word`: what it is called in errors. `asked`: what was asked for.
  constructor(path, word, asked) {
    super();
    this.path = path;
    this.word = word;
    this.asked = asked;
    this.began = performance.now();
    this.stage = "sending"; // queued, running, ended
    this.lastId = "";
    this.id = null;
    this.queuePosition = null;
    this.endedAt = null;
    this.outcome = null; // met, partial, missed, refused, aborted, failed; lost is ours
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
      await this.submit();
      await this.follow();
    } catch (error) {
      this.failed(error);
    }
  }

  // Ends at the service, whatever has been submitted by then.
  async cancel() {
    if (this.isOver || this.cancelling) return;
    this.cancelling = true;
    this.tell();
    if (this.id !== null) await this.#stop();
  }

  #stop() {
    return call("DELETE", `${this.path}/${this.id}`).catch(() => {});
  }

  // ── for a kind of it, which has body(), accepted(answer) that returns its id, and follow() ──

  async submit() {
    const response = await call("POST", this.path, { body: this.body() });
    const answer = await response.json();
    this.id = this.accepted(answer);
    this.correlationId = answer.correlation_id;
    this.queuePosition = answer.queue_position;
    this.stage = "queued";
    this.tell();
    if (this.cancelling) await this.#stop();
  }

  failed(error) {
    if (error instanceof ApiError) {
      const gone = error.status === 404 && this.id !== null;
      this.outcome = gone ? "lost" : "refused";
      this.error = gone
        ? { code: "lost", message: `the service does not know this ${this.word} any more: it was restarted` }
        : { ...error.details, code: error.code, message: error.message };
      this.correlationId = error.headers?.get("X-Correlation-Id") ?? this.correlationId;
    } else {
      this.outcome = "lost";
      this.error = { code: "unreachable", message: "the service cannot be reached" };
    }
    this.over();
  }

  over() {
    this.stage = "ended";
    this.endedAt = performance.now();
    this.tell();
  }

  tell() {
    this.dispatchEvent(new Event("change"));
  }
}
