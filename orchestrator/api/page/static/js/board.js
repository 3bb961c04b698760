// The board: how the service is, drawn from its feed while somebody looks.

import { call } from "./api.js";
import { Chart } from "./charts.js";
import { rates } from "./feed.js";
import { count, el, ms, percent, plural } from "./format.js";
import { drawSlack } from "./slack.js";

const $ = (id) => document.getElementById(id);
const OUTCOMES = ["met", "partial", "missed", "refused", "aborted", "failed"];
const WORDS = { partial: "cut short", aborted: "cancelled" };
const CODES = {
  deadline_infeasible: "certain to miss: refused",
  deadline_exceeded: "the deadline passed",
  cancelled: "cancelled by the client",
  client_disconnected: "the client went away",
  queue_full: "the queue was full",
  rate_limited: "over a limit",
  draining: "the service was draining",
  no_capacity: "no room at an instance",
  not_ready: "no instance was up",
};
const MOST_REASONS = 8;
const BLAMED = {
  queue: "in the queue",
  route: "on the way",
  prefill: "in prefill",
  decode: "in decode",
  retry: "by a second try",
  prediction: "against the prediction",
};

export class Board {
  #charts = null;
  #cards = new Map();

  cards = []; // classes of what rooms add to an instance

  constructor(feed) {
    this.feed = feed;
    feed.addEventListener("change", () => this.draw());
  }

  draw() {
    const { latest } = this.feed;
    if ($("board").hidden || latest === null) return;
    const now = this.#figures();
    this.#drawTiles(now);
    this.#drawCharts(now);
    drawSlack($("slack"), latest.queue);
    this.#drawWhy(latest);
    this.#drawInstances(latest);
  }

  // What is drawn more than once: columns and rates.
  #figures() {
    const { feed } = this;
    const seconds = feed.column("unix_ms").map((at) => at / 1000);
    const rate = (name) => rates(feed.column(name), seconds);
    const cached = rate("cached_tokens_total");
    const computed = rate("prefill_tokens_total");
    return {
      seconds,
      outcomes: OUTCOMES.map(rate),
      tokens: rate("tokens_total"),
      hits: cached.map((hit, at) => (hit + computed[at] > 0 ? hit / (hit + computed[at]) : null)),
    };
  }

  #drawTiles({ tokens, hits }) {
    const { latest } = this.feed;
    const minute = latest.windows["1m"];
    const used = sum(latest, "kv_blocks_used");
    const total = sum(latest, "kv_blocks_total");
    const tiles = [
      ["goodput", minute ? (minute.met / Math.max(1, minute.seconds)).toFixed(1) : "0.0", "met/s in 1 min"],
      ["attainment", minute?.ended ? percent(minute.met / minute.ended) : "–", minute?.ended ? `of ${count(minute.ended)} ended` : "none ended"],
      ["running", count(sum(latest, "running")), `of ${count(sum(latest, "slots_total"))} slots`],
      ["waiting", count(latest.queue.depth), latest.queue.bound > 0 ? `of ${latest.queue.bound}` : ""],
      ["tokens/s", count(tokens.at(-1) ?? 0), "all instances"],
      ["KV in use", total ? percent(used / total) : "–", plural(used, "block")],
      ["prefix hits", percent(hits.findLast((hit) => hit !== null) ?? null), "of prompt tokens"],
    ];
    const list = $("tiles");
    if (list.children.length !== tiles.length) {
      list.replaceChildren(
        ...tiles.map(([name]) => el("div", { class: "card" }, el("dt", {}, name), el("dd", {}, el("b"), el("span")))),
      );
    }
    tiles.forEach(([, value, unit], index) => {
      const [big, small] = list.children[index].lastElementChild.children;
      big.textContent = value;
      small.textContent = unit;
    });
  }

  #drawCharts({ seconds, outcomes, hits }) {
    this.#charts ??= {
      outcomes: new Chart(
        $("outcomes"),
        OUTCOMES.map((name) => ({ label: WORDS[name] ?? name, colour: name })),
        { stacked: true, format: (value) => (value === null ? "–" : value < 99.5 ? value.toFixed(1) : count(value)) },
      ),
      requests: new Chart(
        $("requests"),
        [
          { label: "running", colour: "decode", fill: true },
          { label: "waiting", colour: "queue" },
        ],
        { whole: true, format: (value) => count(value) },
      ),
      memory: new Chart(
        $("memory"),
        [
          { label: "in use", colour: "decode", fill: true },
          { label: "cached", colour: "route" },
          { label: "prefix hits", colour: "prefill" },
        ],
        { most: 1, format: (value) => (value === null ? "–" : `${Math.round(100 * value)} %`) },
      ),
    };
    const { feed } = this;
    const total = feed.column("kv_blocks_total");
    const share = (name) => feed.column(name).map((blocks, at) => (total[at] ? blocks / total[at] : null));
    this.#charts.outcomes.show(seconds, outcomes);
    this.#charts.requests.show(seconds, [feed.column("running"), feed.column("depth")]);
    this.#charts.memory.show(seconds, [share("kv_blocks_used"), share("kv_blocks_cached"), hits]);
  }

  #drawWhy({ codes, blame }) {
    const rows = [
      ...Object.entries(codes).map(([code, number]) => [CODES[code] ?? code.replaceAll("_", " "), number]),
      ...Object.entries(blame).map(([stage, number]) => [`missed ${BLAMED[stage] ?? stage}`, number]),
    ]
      .sort(([, one], [, other]) => other - one)
      .slice(0, MOST_REASONS);
    const most = Math.max(1, ...rows.map(([, number]) => number));
    $("why").replaceChildren(
      ...rows.map(([words, number]) => {
        const bar = el("span", { class: "share" });
        bar.style.width = `${(100 * number) / most}%`;
        return el("div", {}, el("dt", {}, words), el("dd", {}, count(number)), bar);
      }),
    );
    $("why").hidden = rows.length === 0;
    $("why-none").hidden = rows.length > 0;
  }

  #drawInstances({ instances, instances_total: total }) {
    const known = new Set(instances.map(({ address }) => address));
    for (const [address, card] of this.#cards) {
      if (!known.has(address)) {
        card.item.remove();
        this.#cards.delete(address);
      }
    }
    for (const instance of instances) {
      if (!this.#cards.has(instance.address)) {
        const card = new InstanceCard(instance.address, this.cards);
        this.#cards.set(instance.address, card);
        $("instances").append(card.item);
      }
      this.#cards.get(instance.address).show(instance, this.feed.seenAt);
    }
    document.querySelector("h2.section").textContent =
      total > instances.length ? `Instances, the first ${instances.length} of ${total}` : "Instances";
  }
}

class InstanceCard {
  #last = null;

  constructor(address, cards) {
    this.address = address;
    this.state = el("span", { class: "state" });
    this.what = el("p", { class: "figures" });
    this.load = new Meter("jobs");
    this.kv = new Meter("KV");
    this.added = cards.map((Card) => new Card());
    this.facts = el("dl", { class: "facts" });
    this.button = el("button", { type: "button", class: "quiet", onclick: () => this.#drain() });
    this.item = el(
      "li",
      { class: "card instance" },
      el("div", { class: "label-row" }, el("h3", {}, address), this.state),
      this.what,
      this.load.element,
      this.kv.element,
      this.facts,
      ...this.added.flatMap((card) => card.elements),
      this.button,
    );
  }

  show(instance, seenAt) {
    const { state, draining, ready } = instance;
    this.draining = draining;
    // What serves no text may serve a room's work, and nothing is wrong with it then.
    const works = Object.values(instance.gates).every(({ open }) => open);
    this.state.textContent = draining && state === "up" ? "draining" : state;
    this.state.dataset.state = ready || works ? "ready" : draining ? "draining" : state;
    const why = [instance.reason, instance.fault, instance.chat_fault].filter(Boolean).join("; ");
    this.what.textContent =
      why || [instance.model, instance.engine, instance.device].filter(Boolean).join(" · ");
    this.load.show(instance.load, instance.slots_total, `${instance.load} of ${count(instance.slots_total)}`);
    const used = instance.kv_blocks_used;
    const total = instance.kv_blocks_total;
    this.kv.show(used ?? 0, total, total ? percent(used / total) : "–");
    const facts = [
      ["tokens/s now", count(this.#pace(instance, seenAt))],
      ["recent best", count(instance.perf_tokens_per_s)],
      ["first token", ms(instance.first_token_ms)],
      ["breaker", instance.breaker],
    ];
    this.facts.replaceChildren(
      ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    );
    for (const card of this.added) card.show(instance);
    this.button.textContent = draining ? "Take back into use" : "Drain";
    this.button.setAttribute("aria-label", `${this.button.textContent}: ${this.address}`);
  }

  #pace({ tokens_total }, at) {
    const last = this.#last;
    this.#last = { tokens_total, at, pace: last?.pace ?? null };
    if (last === null || tokens_total === null || at === last.at) return this.#last.pace;
    const pace = Math.max(0, (1000 * (tokens_total - last.tokens_total)) / (at - last.at));
    return (this.#last.pace = last.pace === null ? pace : 0.5 * (last.pace + pace));
  }

  async #drain() {
    const action = this.draining ? "undrain" : "drain";
    if (action === "drain" && !confirm(`Give ${this.address} no new work? What runs there finishes.`)) return;
    const path = `/v2/instances/${encodeURIComponent(this.address)}/${action}`;
    try {
      await call("POST", path);
    } catch (error) {
      this.what.textContent = error.message;
    }
  }
}

export class Meter {
  constructor(name) {
    this.fill = el("span", { class: "part decode" });
    this.value = el("span");
    const track = el("span", { class: "track", "aria-hidden": "true" }, this.fill);
    this.element = el("p", { class: "meter" }, el("span", { class: "figures" }, name), track, this.value);
  }

  show(value, most, words) {
    this.fill.style.width = most ? `${Math.min(100, (100 * value) / most)}%` : "0";
    this.value.textContent = words;
  }
}

function sum({ instances }, name) {
  return instances.reduce((total, instance) => total + (instance[name] ?? 0), 0);
}
