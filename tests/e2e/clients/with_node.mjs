// OpenAI's SDK for JavaScript: node with_node.mjs URL
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = "demo";
const messages = [{ role: "user", content: "Tell me a story about a fox." }];
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused" });

const checks = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
    assert.ok(answer.choices[0].message.content);
    assert.equal(answer.usage.completion_tokens, 8);
  },
  async stream() {
    const asked = { model, messages, max_tokens: 8, temperature: 0 };
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    const whole = await client.chat.completions.create(asked);
    assert.equal(text, whole.choices[0].message.content);
  },
  async responses() {
    const asked = { model, max_output_tokens: 8, temperature: 0 };
    const first = await client.responses.create({ ...asked, input: "Tell me a story." });
    assert.ok(first.output_text);
    const kinds = [];
    const stream = await client.responses.create({
      ...asked,
      input: "Go on.",
      previous_response_id: first.id,
      stream: true,
    });
    for await (const event of stream) kinds.push(event.type);
    assert.equal(kinds[0], "response.created");
    assert.equal(kinds.at(-1), "response.incomplete");
  },
  async a_timeout_is_a_deadline() {
    const asked = { model, messages, max_tokens: 4 };
    const promise = client.chat.completions.create(asked, { timeout: 20_000 });
    const { response } = await promise.withResponse();
    const left = Number(response.headers.get("x-deadline-budget").split("left=")[1]);
    assert.ok(left > 0 && left <= 20_000, `${left} ms`);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.error(error);
    console.log(`FAILED ${name}`);
  }
}
process.exit(failed);
