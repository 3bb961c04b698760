// One request.

import { getJson, key } from "./api.js";
import { follow, pause } from "./follow.js";
import { Submission } from "./submission.js";

const MAX_STREAMS = 3; // a browser has six connections to a host, and others need some
const POLL_MS = 300;

let numbers = 0;
let streams = 0;
let polled = 0;

export class Run extends Submission {
  // `asked`: prompt, chat, model, maxTokens, deadlineMs, onDeadline, priority, exactly.
  constructor(asked) {
    super("/v2/tasks", "request", asked);
    this.number = ++numbers;
    this.at = new Date();
    this.text = "";
    this.tokens = 0;
    this.predictedStartMs = null;
    this.fitted = null;
    this.waitedMs = 0;
    this.startedAt = null;
    this.firstAt = null;
    this.finish = null;
    this.budget = null;
    this.usage = null;
  }

  body() {
    return bodyOf(this.asked);
  }

  // The same request as a command, by OpenAI's API.
  curl() {
    const { on_disconnect, ...body } = this.body();
    const url = `${location.origin}/v1/${this.asked.chat ? "chat/" : ""}completions`;
    const bearer = key.get() ? ' -H "Authorization: Bearer $TIDEGATE_TOKEN"' : "";
    const said = JSON.stringify({ ...body, stream: true }).replaceAll("'", "'\\''");
    return `curl -N '${url}'${bearer} -H 'Content-Type: application/json' -d '${said}'`;
  }

  // As text, for the next time that this tab loads the page; and from it.
  toJSON() {
    return { ...this, gone: undefined };
  }

  static from(kept) {
    const run = Object.assign(new Run(kept.asked), kept, { at: new Date(kept.at) });
    numbers = Math.max(numbers - 1, run.number);
    return run;
  }

  accepted(answer) {
    this.predictedStartMs = answer.predicted_start_ms;
    this.fitted = answer.fitted_max_tokens ?? null;
    return answer.task_id;
  }

  async follow() {
    if (streams < MAX_STREAMS) await this.#listen().finally(() => streams--);
    else await this.#poll().finally(() => polled--);
  }

  failed(error) {
    this.budget = readBudget(error.headers?.get("X-Deadline-Budget"));
    super.failed(error);
  }

  async #listen() {
    streams++;
    await follow(`/v2/tasks/${this.id}/events`, this, (event) => this.#take(event));
  }

  // What has no connection of its own is asked about, the rarer the more there are.
  async #poll() {
    polled++;
    while (!this.isOver) {
      await pause(Math.max(POLL_MS, 25 * polled));
      const task = await getJson(`/v2/tasks/${this.id}`);
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
      this.tell();
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
    this.tell();
  }

  #ended(told, error) {
    this.outcome = told.outcome;
    this.finish = told.finish_reason;
    this.budget = told.budget;
    this.usage = told.usage;
    this.fitted = told.fitted_max_tokens ?? this.fitted;
    this.error = error ?? null;
    this.over();
  }
}

export function bodyOf(asked) {
  const prompt = asked.chat
    ? { messages: [{ role: "user", content: asked.prompt }] }
    : { prompt: asked.prompt };
  return {
    ...prompt,
    model: asked.model,
    max_tokens: asked.maxTokens,
    temperature: 0.4, // small models babble at 1
    deadline_ms: asked.deadlineMs,
    on_deadline: asked.onDeadline,
    priority: asked.priority,
    ignore_eos: asked.exactly,
    on_disconnect: "cancel",
  };
}

// "queue=1.0;route=…;left=…", in ms, as an object of `queue_ms` and so on.
export function readBudget(header) {
  if (!header) return null;
  const pairs = header.split(";").map((part) => part.split("="));
  return Object.fromEntries(pairs.map(([name, value]) => [`${name}_ms`, Number(value)]));
}
