// What the service tells of itself once a second, kept for curves: one stream for the whole page.

import { ApiError, call, readEvents } from "./api.js";

const MAX_POINTS = 600;
const MAX_FINISHES = 200;
const AGAIN_MS = 1500;
const SILENT_MS = 10_000;
const GAP_MS = 5000; // nobody watched for so long: nothing is known of the time between

export class Feed extends EventTarget {
  // Rows as the service names their columns; `change` is fired after each snapshot.
  columns = [];
  rows = [];
  finishes = [];
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
        if (event === "history") this.begin(data);
        else if (event === "overview") this.#take(data);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  // What was known before this page watched.
  begin({ columns, rows, finishes }) {
    this.columns = columns;
    this.rows = [];
    for (const row of rows) this.#add(row);
    this.finishes = finishes;
  }

  #take(snapshot) {
    this.seenAt = performance.now();
    if (this.latest && this.latest.started_unix !== snapshot.started_unix) this.rows = [];
    this.latest = snapshot;
    const row = this.#rowOf(snapshot);
    if (this.rows.at(-1)?.[0] !== row[0]) this.#add(row);
    this.rows.splice(0, this.rows.length - MAX_POINTS);
    this.finishes.push(...snapshot.finishes);
    this.finishes.splice(0, this.finishes.length - MAX_FINISHES);
    this.dispatchEvent(new Event("change"));
  }

  // With a row of nothing before it where nobody watched, so that no curve is drawn across.
  #add(row) {
    const at = this.columns.indexOf("unix_ms");
    const before = this.rows.at(-1);
    if (before && row[at] - before[at] > GAP_MS) {
      this.rows.push(row.map((_, column) => (column === at ? before[at] + 1000 : null)));
    }
    this.rows.push(row);
  }

  #rowOf({ unix_ms, totals, queue, instances }) {
    const own = { ...totals, unix_ms, depth: queue.depth };
    return this.columns.map(
      (name) => own[name] ?? instances.reduce((sum, instance) => sum + (instance[name] ?? 0), 0),
    );
  }

  // One column of all rows.
  column(name) {
    const at = this.columns.indexOf(name);
    return this.rows.map((row) => row[at]);
  }
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
