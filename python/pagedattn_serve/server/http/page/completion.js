// One streamed answer, as any client of the API would ask for it.

// What is wanted has messages, for a chat, or a prompt. Calls onText with each piece of text. Resolves to {tokens,
// firstTokenSeconds, seconds, finishReason}; rejects with the server's message.
export async function complete({ model, messages, prompt, maxTokens, temperature }, headers, signal, onText) {
  const started = performance.now();
  const response = await fetch(messages ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({
      model, messages, prompt, max_tokens: maxTokens, temperature,
      stream: true, stream_options: { include_usage: true },
    }),
    signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const result = { tokens: 0, firstTokenSeconds: null, finishReason: null };
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) result.tokens = event.usage.completion_tokens;
    for (const choice of event.choices) {
      if (choice.delta?.role) continue; // a chat begins with whose answer it is, before there is a token
      result.firstTokenSeconds ??= (performance.now() - started) / 1000;
      result.finishReason = choice.finish_reason ?? result.finishReason;
      onText(choice.text ?? choice.delta.content ?? "");
    }
  }
  return { ...result, seconds: (performance.now() - started) / 1000 };
}

// The objects of a stream of server-sent events, up to "[DONE]".
async function* events(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection was closed before the end");
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice("data: ".length));
    }
  }
}
