// One request: submitted, followed to its end, cancelled. It tells whoever shows it.

import { ApiError, call, readEvents } from "./api.js";

const RETRIES_MS = [200, 500, 1000, 2000, 4000];

let numbers = 0;

export class Run extends EventTarget {
  // `asked`: prompt, chat, model, maxTokens, deadlineMs, onDeadline, priority, exactly.
  constructor(asked) {
    super();
    this.number = ++numbers;
    this.asked = asked;
    this.at = new Date();
    this.began = performance.now();
    this.stage = "sending"; // queued, running, ended
    this.text = "";
    this.tokens = 0;
    this.lastId = "";
    this.taskId = null;
    this.queuePosition = null;
    this.predictedStartMs = null;
    this.fitted = null;
    this.waitedMs = 0;
    this.startedAt = null;
    this.firstAt = null;
    this.endedAt = null;
    this.outcome = null; // met, partial, missed, refused, aborted, failed; lost is ours
    this.finish = null;
    this.error = null;
    this.budget = null;
    this.usage = null;
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
      await this.#follow();
    } catch (error) {
      this.#failed(error);
    }
  }

  // Ends at the service, whatever has been submitted by then.
  async cancel() {
    if (this.isOver || this.cancelling) return;
    this.cancelling = true;
    this.#tell();
    if (this.taskId !== null) await this.#stop();
  }

  #stop() {
    return call("DELETE", `/v2/tasks/${this.taskId}`).catch(() => {});
  }

  async #submit() {
    const { asked } = this;
    const prompt = asked.chat
      ? { messages: [{ role: "user", content: asked.prompt }] }
      : { prompt: asked.prompt };
    const response = await call("POST", "/v2/tasks", {
      body: {
        ...prompt,
        model: asked.model,
        max_tokens: asked.maxTokens,
        deadline_ms: asked.deadlineMs,
        on_deadline: asked.onDeadline,
        priority: asked.priority,
        ignore_eos: asked.exactly,
        on_disconnect: "cancel",
      },
    });
    const answer = await response.json();
    this.taskId = answer.task_id;
    this.correlationId = answer.correlation_id;
    this.queuePosition = answer.queue_position;
    this.predictedStartMs = answer.predicted_start_ms;
    this.fitted = answer.fitted_max_tokens ?? null;
    this.stage = "queued";
    this.#tell();
    if (this.cancelling) await this.#stop();
  }

  // Through lost connections, each time from after the last event that came.
  async #follow() {
    for (let tries = 0; ; ) {
      try {
        const headers = this.lastId ? { "Last-Event-ID": this.lastId } : {};
        const response = await call("GET", `/v2/tasks/${this.taskId}/events`, {
          headers,
          signal: this.gone.signal,
        });
        for await (const event of readEvents(response)) {
          tries = 0;
          this.#take(event);
          if (this.isOver) return;
        }
      } catch (error) {
        if (error instanceof ApiError) throw error;
      }
      if (tries >= RETRIES_MS.length) throw new TypeError("connection lost");
      await new Promise((resolve) => setTimeout(resolve, RETRIES_MS[tries++]));
    }
  }

  #take({ id, event, data }) {
    this.lastId = id;
    switch (event) {
      case "queued":
        this.queuePosition = data.queue_position;
        break;
      case "started":
        this.stage = "running";
        this.startedAt = performance.now();
        this.waitedMs = data.waited_ms;
        break;
      case "token":
        this.firstAt ??= performance.now();
        this.text += data.text;
        this.tokens += data.token_ids.length;
        break;
      case "end":
      case "error":
        this.outcome = data.outcome;
        this.finish = data.finish_reason;
        this.budget = data.budget;
        this.usage = data.usage;
        this.fitted = data.fitted_max_tokens ?? this.fitted;
        if (event === "error") this.error = data;
        this.#over();
        return;
      default:
        return;
    }
    this.#tell();
  }

  #failed(error) {
    if (error instanceof ApiError) {
      const gone = error.status === 404 && this.taskId !== null;
      this.outcome = gone ? "lost" : "refused";
      this.error = gone
        ? { code: "lost", message: "the service does not know this request any more: it was restarted" }
        : { ...error.details, code: error.code, message: error.message };
      this.correlationId = error.headers?.get("X-Correlation-Id") ?? this.correlationId;
      this.budget = readBudget(error.headers?.get("X-Deadline-Budget"));
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

// "queue=1.0;route=…;left=…", in ms, as an object of `queue_ms` and so on.
export function readBudget(header) {
  if (!header) return null;
  const pairs = header.split(";").map((part) => part.split("="));
  return Object.fromEntries(pairs.map(([name, value]) => [`${name}_ms`, Number(value)]));
}
