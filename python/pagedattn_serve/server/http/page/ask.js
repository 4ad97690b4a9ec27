// The box where somebody asks the model: a chat, or a text that the model completes.

import { $, number } from "./common.js";
import { complete } from "./completion.js";

const PROMPTS = { completion: "The for statement", chat: "What does the for statement do?" };

// Makes the box work. model(): what requests call the model. headers(): what a request carries beside its body.
export function setUpBox(model, headers) {
  let messages = []; // of the chat so far
  const isChat = () => $("prompt-form").elements.mode.value === "chat";

  function clear() {
    messages = [];
    $("answer").replaceChildren();
    $("timing").textContent = "";
  }

  for (const radio of $("prompt-form").elements.mode) {
    radio.addEventListener("change", () => {
      clear();
      if (Object.values(PROMPTS).includes($("prompt").value)) $("prompt").value = PROMPTS[radio.value];
      $("prompt-label").textContent = isChat() ? "Message" : "Prompt";
      $("clear").hidden = !isChat();
    });
  }

  $("clear").addEventListener("click", () => { clear(); $("prompt").focus(); });

  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    if (!$("send").disabled) $("prompt-form").requestSubmit();
  });

  $("prompt-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const prompt = $("prompt").value;
    const wanted = {
      model: model(), maxTokens: $("max-tokens").valueAsNumber, temperature: $("temperature").valueAsNumber,
    };
    if (isChat()) {
      wanted.messages = [...messages, { role: "user", content: prompt }];
      say("user").append(prompt);
    } else {
      wanted.prompt = prompt;
      clear();
    }
    $("timing").textContent = "";
    const answer = say("assistant");
    const stop = new AbortController();
    const onStop = () => stop.abort();
    $("stop").addEventListener("click", onStop);
    enable(false);
    try {
      const result = await complete(wanted, headers(), stop.signal, (text) => {
        answer.append(text);
        $("answer").scrollTop = $("answer").scrollHeight;
      });
      if (isChat()) $("prompt").value = "";
      $("timing").textContent = `${result.tokens} tokens in ${number.format(result.seconds)} s, the first after ` +
        `${number.format(result.firstTokenSeconds * 1000)} ms; ended by ${result.finishReason}`;
    } catch (error) {
      $("timing").textContent = stop.signal.aborted ? "stopped" : error.message;
    } finally {
      // The chat goes on from what was said, also where it was cut off; a message without an answer was not said.
      if (wanted.messages && answer.textContent) {
        messages = [...wanted.messages, { role: "assistant", content: answer.textContent }];
      } else if (wanted.messages) {
        answer.previousElementSibling.remove();
        answer.remove();
      }
      $("stop").removeEventListener("click", onStop);
      enable(true);
    }
  });
}

function say(role) {
  const text = document.createElement("p");
  text.className = role;
  $("answer").append(text);
  return text;
}

// While an answer streams, nothing else can be asked.
function enable(ready) {
  for (const id of ["send", "clear", "modes"]) $(id).disabled = !ready;
  $("stop").disabled = ready;
}
