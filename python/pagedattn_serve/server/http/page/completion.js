// One streamed answer, as any client of the API would ask for it.

// The body is that of a request, with messages for a chat, else with a prompt. Calls onDelta with each piece of a
// message; the text of a completion comes as its content. Resolves to {tokens, firstTokenSeconds, seconds,
// finishReason}; rejects with the server's message, and the field that the server names as param.
export async function complete(body, headers, signal, onDelta) {
  const started = performance.now();
  const response = await fetch(body.messages ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) {
    const { error } = await response.json();
    throw Object.assign(new Error(error.message), { param: error.param });
  }
  const result = { tokens: 0, firstTokenSeconds: null, finishReason: null };
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) result.tokens = event.usage.completion_tokens;
    for (const choice of event.choices) {
      if (choice.delta?.role) continue; // a chat begins with whose answer it is, before there is a token
      result.firstTokenSeconds ??= (performance.now() - started) / 1000;
      result.finishReason = choice.finish_reason ?? result.finishReason;
      onDelta(choice.delta ?? { content: choice.text });
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
