// node agent.mjs URL: a loop of two calls, and the same with a typed answer, by each of the AI SDK's ways to ask, as a
// stream and not. A line of JSON for each.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;
const options = { baseURL: process.argv[2] + '/v1', apiKey: 'none' };
const openai = createOpenAI(options);
const compatible = createOpenAICompatible({ ...options, name: 'pagedattn', supportsStructuredOutputs: true });
const models = {
  responses: openai('caller'),
  chat: openai.chat('caller'),
  compatible: compatible('caller'),
  messages: createAnthropic(options)('caller'),
};
const city = z.enum(['Paris', 'Rome']);
const output = Output.object({ schema: z.object({ city, rains: z.boolean() }) });

async function run(model, stream, isTyped) {
  const cities = [];
  const get_weather = tool({
    description: 'The weather of a city.',
    inputSchema: z.object({ city }),
    execute: async (input) => {
      cities.push(input.city);
      return 'rain in ' + input.city;
    },
  });
  const request = {
    model,
    tools: { get_weather },
    prompt: 'Where does it rain, in Paris or in Rome?',
    stopWhen: stepCountIs(5),
    maxRetries: 0,
    maxOutputTokens: 1000,
    ...(isTyped ? { output } : {}),
  };
  let result;
  if (stream) {
    result = streamText({ ...request, onError() {} });
    for await (const part of result.fullStream) if (part.type === 'error') throw part.error;
  } else {
    result = await generateText(request);
  }
  return { cities, answer: isTyped ? await result.output : await result.text };
}

for (const [name, model] of Object.entries(models))
  for (const stream of [false, true])
    for (const isTyped of [false, true])
      console.log(JSON.stringify({ name, stream, isTyped, ...(await run(model, stream, isTyped)) }));
