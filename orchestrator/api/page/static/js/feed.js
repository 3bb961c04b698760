// What the service tells of itself once a second, kept for curves from the moment that the page opens:
// one stream for the whole page.

import { ApiError, call, readEvents } from "./api.js";

const MAX_POINTS = 600;
const AGAIN_MS = 1500;
const SILENT_MS = 10_000;
const GAP_MS = 5000; // nobody watched for so long: nothing is known of the time between
const SUMMED = [
  ...["running", "kv_blocks_used", "kv_blocks_cached", "kv_blocks_total"],
  ...["tokens_total", "cached_tokens_total", "prefill_tokens_total"],
];

export class Feed extends EventTarget {
  // One row of figures for each snapshot; `change` is fired after each.
  rows = [];
  latest = null;
  seenAt = -Infinity;
  #stop = null;

  // Goes on by itself until `stop`, through restarts of the service.
  async start() {
    if (this.#stop) return;
    const stop = (this.#stop = new AbortController());
    while (!stop.signal.aborted) {
      try {
        await this.#follow(stop.signal);
      } catch (error) {
        // Without a key there is nothing to watch; the page asks for one elsewhere.
        if (error instanceof ApiError && (error.status === 401 || error.status === 403)) break;
      }
      this.seenAt = -Infinity;
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
    if (this.#stop === stop) this.#stop = null;
  }

  stop() {
    this.#stop?.abort();
    this.#stop = null;
    this.seenAt = -Infinity;
  }

  async #follow(signal) {
    const response = await call("GET", "/v2/overview/events", { signal, quiet: true });
    const silent = new AbortController();
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
    };
    heard();
    try {
      for await (const { event, data } of readEvents(response, silent.signal)) {
        heard();
        if (event === "overview") this.#take(data);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  #take(snapshot) {
    this.seenAt = performance.now();
    if (this.latest && this.latest.started_unix !== snapshot.started_unix) this.rows = [];
    this.latest = snapshot;
    if (this.rows.at(-1)?.unix_ms !== snapshot.unix_ms) this.#add(rowOf(snapshot));
    this.rows.splice(0, this.rows.length - MAX_POINTS);
    this.dispatchEvent(new Event("change"));
  }

  // With a row of nothing before it where nobody watched, so that no curve is drawn across.
  #add(row) {
    const before = this.rows.at(-1);
    if (before && row.unix_ms - before.unix_ms > GAP_MS) {
      this.rows.push({ unix_ms: before.unix_ms + 1000 });
    }
    this.rows.push(row);
  }

  // One column of all rows.
  column(name) {
    return this.rows.map((row) => row[name] ?? null);
  }
}

function rowOf({ unix_ms, totals, queue, instances }) {
  const row = { ...totals, unix_ms, depth: queue.depth };
  for (const name of SUMMED) {
    row[name] = instances.reduce((sum, instance) => sum + (instance[name] ?? 0), 0);
  }
  return row;
}

// Change per second over the last `span` rows; null where there is no earlier one, or where nobody
// watched in between.
export function rates(totals, seconds, span = 5) {
  let begin = 0; // of the rows that follow each other
  return totals.map((total, at) => {
    if (total === null) {
      begin = at + 1;
      return null;
    }
    const from = Math.max(begin, at - span);
    const passed = seconds[at] - seconds[from];
    return passed > 0 ? Math.max(0, (total - totals[from]) / passed) : null;
  });
}
