// How the service is: asked of /health, which costs it nothing and needs no key.

const EVERY_MS = 2000;
const WAIT_MS = 4000;
const WORDS = {
  ready: "ready",
  not_ready: "no instance is up yet",
  near_exhaustion: "the queue is almost full",
  exhausted: "the queue is full: new requests are refused",
  degraded: "no durable tasks: the journal cannot be written",
  draining: "draining: no new work",
  unreachable: "not reachable, trying again",
};
const NOTICES = {
  draining: "The service is draining: what runs is finished, new requests are refused. This page waits for it to come back.",
  unreachable: "The service cannot be reached. This page continues when it is back.",
};

export class Status extends EventTarget {
  // "ready" and so on; `change` is fired with each new one.
  state = "waiting";
  #timer = 0;

  // `feed` knows as long as it is heard; only then nothing is asked.
  constructor(feed) {
    super();
    this.feed = feed;
    feed.addEventListener("change", () => this.#set(feed.latest.status));
  }

  start() {
    document.addEventListener("visibilitychange", () => !document.hidden && this.#look());
    this.#look();
  }

  async #look() {
    clearTimeout(this.#timer);
    if (performance.now() - this.feed.seenAt > EVERY_MS) {
      const state = await ask();
      if (performance.now() - this.feed.seenAt > EVERY_MS) this.#set(state);
    }
    clearTimeout(this.#timer);
    if (!document.hidden) this.#timer = setTimeout(() => this.#look(), EVERY_MS);
  }

  #set(state) {
    if (state === this.state) return;
    this.state = state;
    draw(state);
    this.dispatchEvent(new Event("change"));
  }
}

async function ask() {
  try {
    const signal = AbortSignal.timeout(WAIT_MS);
    const response = await fetch("/health", { cache: "no-store", credentials: "omit", signal });
    return (await response.json()).status ?? "unreachable";
  } catch {
    return "unreachable";
  }
}

function draw(state) {
  const status = document.getElementById("status");
  status.dataset.state = state;
  status.textContent = WORDS[state] ?? state;
  const notice = document.getElementById("notice");
  notice.textContent = NOTICES[state] ?? "";
  notice.hidden = !(state in NOTICES);
}
