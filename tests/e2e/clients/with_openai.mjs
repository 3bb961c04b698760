// OpenAI's SDK for JavaScript.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { model, run } from "./checks.mjs";

const messages = [{ role: "user", content: "Tell me a story about a fox." }];
const clientOf = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });

await run({
  async chat(url) {
    const asked = { model, messages, max_tokens: 8 };
    const answer = await clientOf(url).chat.completions.create(asked);
    assert.ok(answer.choices[0].message.content);
    assert.equal(answer.usage.completion_tokens, 8);
  },
  async stream(url) {
    const asked = { model, messages, max_tokens: 8, temperature: 0 };
    const client = clientOf(url);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    const whole = await client.chat.completions.create(asked);
    assert.equal(text, whole.choices[0].message.content);
  },
  async responses(url) {
    const asked = { model, max_output_tokens: 8, temperature: 0 };
    const client = clientOf(url);
    const first = await client.responses.create({ ...asked, input: "Tell me a story." });
    assert.ok(first.output_text);
    const more = { ...asked, input: "Go on.", previous_response_id: first.id };
    const kinds = [];
    for await (const event of await client.responses.create({ ...more, stream: true })) {
      kinds.push(event.type);
    }
    assert.equal(kinds[0], "response.created");
    assert.equal(kinds.at(-1), "response.incomplete");
  },
  async aTimeoutIsADeadline(url) {
    const asked = { model, messages, max_tokens: 4 };
    const promise = clientOf(url).chat.completions.create(asked, { timeout: 20_000 });
    const { response } = await promise.withResponse();
    const left = Number(response.headers.get("x-deadline-budget").split("left=")[1]);
    assert.ok(left > 0 && left <= 20_000, `${left} ms`);
  },
});
