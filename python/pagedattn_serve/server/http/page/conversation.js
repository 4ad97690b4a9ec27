// What is said in the box, shown as it comes.

import { $ } from "./common.js";

// Shows a text, after a heading if there is one. Returns its element.
export function say(kind, heading, text = "") {
  const element = document.createElement("p");
  element.className = kind;
  if (heading) {
    const title = document.createElement("b");
    title.textContent = heading;
    element.append(title, " ");
  }
  element.append(text);
  $("answer").append(element);
  return element;
}

// An answer of the model: its thought, its text and its calls of functions. message: what a chat goes on from.
export class Answer {
  message = { role: "assistant", content: "" };
  #calls = []; // by their index
  #places = []; // where their arguments go on
  #kind = null; // of what came last
  #place = null; // where it goes on

  get hasBegun() {
    return this.#kind !== null;
  }

  // Takes a piece in the API's form.
  add({ content, reasoning_content: thought, tool_calls: calls = [] }) {
    if (thought) {
      this.message.reasoning_content = (this.message.reasoning_content ?? "") + thought;
      this.#extend("thought", "Thought", thought);
    }
    if (content) {
      this.message.content += content;
      this.#extend("assistant", "", content);
    }
    for (const { index, id, function: { name, arguments: text } } of calls) {
      if (name) {
        this.#calls[index] = { id, type: "function", function: { name, arguments: "" } };
        const place = document.createElement("code");
        say("call", `Calls ${name}`, place);
        this.#places[index] = place;
        this.#kind = "call";
      }
      this.#calls[index].function.arguments += text;
      this.#places[index].append(text);
    }
    $("answer").scrollTop = $("answer").scrollHeight;
  }

  // Ends the answer. Returns its calls, which wait for results; none if the answer was cut off.
  finish(isWhole) {
    if (this.#calls.length && isWhole) this.message.tool_calls = this.#calls;
    else if (this.#calls.length) this.#places.at(-1).after(" (cut off: the chat goes on without it)");
    return this.message.tool_calls ?? [];
  }

  #extend(kind, heading, text) {
    if (this.#kind !== kind) this.#place = say(kind, heading);
    this.#kind = kind;
    this.#place.append(text);
  }
}
