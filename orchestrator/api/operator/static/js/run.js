// One request: submitted, followed to its end, cancelled. It tells whoever shows it.

import { ApiError, call, getJson } from "./api.js";
import { follow, pause } from "./follow.js";

const MOST_STREAMS = 3; // a browser has six connections to a host, and others need some
const POLL_MS = 300;

let numbers = 0;
let streams = 0;
let polled = 0;

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
      if (streams < MOST_STREAMS) await this.#follow().finally(() => streams--);
      else await this.#poll().finally(() => polled--);
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

  async #follow() {
    streams++;
    await follow(`/v2/tasks/${this.taskId}/events`, this, (event) => this.#take(event));
  }

  // What has no connection of its own is asked about, the rarer the more there are.
  async #poll() {
    polled++;
    while (!this.isOver) {
      await pause(Math.max(POLL_MS, 25 * polled));
      const task = await getJson(`/v2/tasks/${this.taskId}`);
      if (task.usage.completion_tokens && this.firstAt === null) this.firstAt = performance.now();
      this.text = task.text;
      this.tokens = task.usage.completion_tokens;
      if (task.status === "ended") {
        this.#ended(task, task.error);
      } else if (task.status === "running" && this.stage !== "running") {
        this.stage = "running";
        this.startedAt = performance.now();
        this.waitedMs = this.elapsedMs();
      }
      this.#tell();
    }
  }

  #take({ event, data }) {
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
        this.#ended(data, event === "error" ? data : null);
        return;
      default:
        return;
    }
    this.#tell();
  }

  #ended(told, error) {
    this.outcome = told.outcome;
    this.finish = told.finish_reason;
    this.budget = told.budget;
    this.usage = told.usage;
    this.fitted = told.fitted_max_tokens ?? this.fitted;
    this.error = error ?? null;
    this.#over();
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
