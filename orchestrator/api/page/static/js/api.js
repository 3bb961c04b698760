// Calls to the service that this page came from: JSON, server-sent events by fetch, the key.

const KEY = "tidegate.key";

export class ApiError extends Error {
  // The service's error: `code`, `message`, and its figures.
  constructor(status, body, headers) {
    const error = body?.error ?? {};
    super(error.message ?? `the service answered with status ${status}`);
    this.status = status;
    this.code = error.code ?? "";
    this.details = error;
    this.headers = headers;
  }
}

export const key = {
  // For this tab only: gone when it is closed.
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// Asked when the service wants a key; resolves to whether there is one to try now.
let askForKey = async () => false;
export function onKeyWanted(ask) {
  askForKey = ask;
}

export async function call(method, path, { body, signal, headers = {}, quiet = false } = {}) {
  for (;;) {
    const used = key.get();
    const sent = { ...headers };
    if (used) sent.Authorization = `Bearer ${used}`;
    if (body !== undefined) sent["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
    if (response.ok) return response;
    const said = await response.json().catch(() => null);
    const error = new ApiError(response.status, said, response.headers);
    if (response.status === 401 && !quiet && (await askForKey(error, used))) continue;
    throw error;
  }
}

export async function getJson(path, options) {
  return (await call("GET", path, options)).json();
}

// Events of a stream, as { id, event, data }, until it or `signal` ends. Comments are skipped.
export async function* readEvents(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  signal?.addEventListener("abort", () => reader.cancel().catch(() => {}));
  let rest = "";
  let event = { id: "", event: "message", data: "" };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (event.data) yield { ...event, data: JSON.parse(event.data) };
          event = { id: event.id, event: "message", data: "" };
          continue;
        }
        const colon = line.indexOf(": ");
        const name = line.slice(0, colon);
        if (name === "data") event.data += line.slice(colon + 2);
        else if (name === "id" || name === "event") event[name] = line.slice(colon + 2);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
