// Events of something that runs, through lost connections, each time from after the last that came.

import { ApiError, call, readEvents } from "./api.js";

const RETRIES_MS = [200, 500, 1000, 2000, 4000];

// `run` has `lastId`, `isOver` and `gone`, an AbortController; `take` is given each event.
export async function follow(path, run, take) {
  for (let tries = 0; ; ) {
    try {
      const headers = run.lastId ? { "Last-Event-ID": run.lastId } : {};
      const response = await call("GET", path, { headers, signal: run.gone.signal });
      for await (const event of readEvents(response)) {
        tries = 0;
        run.lastId = event.id;
        take(event);
        if (run.isOver) return;
      }
    } catch (error) {
      if (error instanceof ApiError) throw error;
    }
    if (tries >= RETRIES_MS.length) throw new TypeError("connection lost");
    await pause(RETRIES_MS[tries++]);
  }
}

export function pause(waitMs) {
  return new Promise((resolve) => setTimeout(resolve, waitMs));
}
