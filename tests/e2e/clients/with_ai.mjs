// Vercel's AI SDK, over Responses and over chats.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";
import { model, run } from "./checks.mjs";

const prompt = "Tell me a story about a fox.";
const providerOf = (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
const kindsOf = (url) => [providerOf(url).responses(model), providerOf(url).chat(model)];

await run({
  async textAndStream(url) {
    for (const kind of kindsOf(url)) {
      const asked = { model: kind, prompt, maxOutputTokens: 8, temperature: 0 };
      const whole = await generateText(asked);
      assert.equal(whole.finishReason, "length");
      assert.equal(whole.usage.outputTokens, 8);
      let text = "";
      for await (const piece of streamText(asked).textStream) text += piece;
      assert.equal(text, whole.text);
    }
  },
  async structuredOutput(url) {
    const schema = z.object({ city: z.enum(["Oslo", "Rome"]) }).strict();
    for (const kind of kindsOf(url)) {
      const asked = { model: kind, prompt, output: Output.object({ schema }) };
      const { output } = await generateText({ ...asked, maxOutputTokens: 100 });
      assert.ok(["Oslo", "Rome"].includes(output.city));
    }
  },
  async tools(url) {
    for (const kind of kindsOf(url)) {
      const called = [];
      const forecast = tool({
        description: "The weather to come.",
        inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }).strict(),
        execute: async ({ city }) => called.push(city),
      });
      await generateText({
        model: kind,
        prompt,
        tools: { forecast },
        toolChoice: "required",
        maxOutputTokens: 100,
      });
      assert.ok(["Oslo", "Rome"].includes(called[0]), `${called}`);
    }
  },
});
