// The box where somebody asks the model: a chat, with functions or without, or a text that the model completes.

import { $, number } from "./common.js";
import { complete } from "./completion.js";
import { Answer, say } from "./conversation.js";

const PROMPTS = {
  completion: "The for statement", chat: "What does the for statement do?", tools: "What is the weather in Paris?",
};

// Makes the box work. model(): what requests call the model. headers(): what a request carries beside its body.
export function setUpBox(model, headers) {
  let messages = []; // of the chat so far
  let calls = []; // that wait for results
  const mode = () => $("prompt-form").elements.mode.value;

  function clear() {
    messages = [];
    waitFor([]);
    $("answer").replaceChildren();
    $("timing").textContent = "";
  }

  // Shows a field for the result of each call, in place of the button that sends a message.
  function waitFor(next) {
    calls = next;
    $("results").replaceChildren(...calls.flatMap((call) => {
      const label = document.createElement("label");
      const field = document.createElement("textarea");
      field.id = label.htmlFor = `result-${call.id}`;
      field.rows = 2;
      field.required = true;
      label.textContent = `Result of ${call.function.name} ${call.function.arguments}`;
      return [label, field];
    }));
    enable(true);
  }

  // While an answer streams, nothing else can be asked.
  function enable(ready) {
    const isWaiting = calls.length > 0;
    for (const id of ["clear", "modes"]) $(id).disabled = !ready;
    $("send").disabled = !ready || isWaiting;
    $("stop").disabled = ready;
    $("results-form").hidden = !ready || !isWaiting;
    $("answer").setAttribute("aria-busy", !ready); // a screen reader says an answer when it has ended
  }

  function showToolsError(text) {
    $("tools-error").textContent = text;
    $("tools").setAttribute("aria-invalid", text !== "");
    if (text) $("tools").focus();
  }

  for (const radio of $("prompt-form").elements.mode) {
    radio.addEventListener("change", () => {
      clear();
      showToolsError("");
      if (Object.values(PROMPTS).includes($("prompt").value)) $("prompt").value = PROMPTS[radio.value];
      $("prompt-label").textContent = mode() === "completion" ? "Prompt" : "Message";
      $("clear").hidden = mode() === "completion";
      $("tools-field").hidden = mode() !== "tools";
    });
  }

  $("clear").addEventListener("click", () => { clear(); $("prompt").focus(); });
  $("tools").addEventListener("input", () => showToolsError(""));

  for (const form of [$("prompt-form"), $("results-form")]) {
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      if (!form.querySelector("button").disabled) form.requestSubmit();
    });
  }

  $("prompt-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const prompt = $("prompt").value;
    if (mode() === "completion") {
      clear();
      await ask({ prompt });
      return;
    }
    const said = say("user", "", prompt);
    if (await ask({ messages: [...messages, { role: "user", content: prompt }] })) $("prompt").value = "";
    else said.remove();
  });

  $("results-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const results = calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: $(`result-${id}`).value }));
    const said = results.map(({ content }, i) => say("result", `Result of ${calls[i].function.name}`, content));
    $("answer").focus(); // the fields go
    if (!await ask({ messages: [...messages, ...results] })) said.forEach((text) => text.remove());
  });

  // Asks for an answer. Resolves to whether something was said, from which a chat then goes on.
  async function ask(wanted) {
    $("timing").textContent = "";
    showToolsError("");
    const answer = new Answer();
    const stop = new AbortController();
    const onStop = () => stop.abort();
    $("stop").addEventListener("click", onStop);
    enable(false);
    let isWhole = false;
    try {
      const result = await complete({
        ...wanted, tools: mode() === "tools" ? parse($("tools").value) : undefined,
        model: model(), max_tokens: $("max-tokens").valueAsNumber, temperature: $("temperature").valueAsNumber,
      }, headers(), stop.signal, (delta) => answer.add(delta));
      isWhole = result.finishReason !== "length";
      $("timing").textContent = `${result.tokens} tokens in ${number.format(result.seconds)} s, the first after ` +
        `${number.format(result.firstTokenSeconds * 1000)} ms; ended by ${result.finishReason}`;
    } catch (error) {
      if (error.param?.startsWith("tools")) showToolsError(error.message);
      else $("timing").textContent = stop.signal.aborted ? "stopped" : error.message;
    }
    $("stop").removeEventListener("click", onStop);
    const next = answer.finish(isWhole);
    if (!answer.hasBegun) {
      enable(true);
      return false;
    }
    if (wanted.messages) messages = [...wanted.messages, answer.message];
    const isHere = document.activeElement === document.body || $("box").contains(document.activeElement);
    waitFor(next);
    if (next.length && isHere) $("results").querySelector("textarea").focus();
    return true;
  }
}

// The functions that are written in their field. Its errors have the field's name, as the server's have.
function parse(tools) {
  try {
    return JSON.parse(tools);
  } catch (error) {
    throw Object.assign(new Error(`This is not JSON: ${error.message}`), { param: "tools" });
  }
}
