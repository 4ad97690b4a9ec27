// The charts: what the figures were in the last minute, as lines over one axis of time.

import { $, number } from "./common.js";

const SECONDS = 60; // as the template in index.html has it on the axis of time
const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  #figure; #title; #lines; #paths; #samples = [];

  // figure: an empty element. lines: what each line is called. One line alone is what the title says.
  constructor(figure, title, lines) {
    this.#figure = figure;
    this.#title = title;
    this.#lines = lines;
    figure.append($("chart").content.cloneNode(true));
    figure.querySelector(".title").textContent = title;
    if (lines.length > 1) figure.querySelector(".lines").append(...lines.map(keyOf));
    this.#paths = lines.map(() => document.createElementNS(SVG, "path"));
    this.#paths.forEach((path, i) => { path.setAttribute("class", `line line-${i}`); });
    figure.querySelector("svg").append(...this.#paths);
  }

  // time: in seconds, of the server's clock. values: one a line, null where there is none.
  add(time, values) {
    this.#samples.push({ time, values });
    while (this.#samples[0].time < time - SECONDS) this.#samples.shift();
    const most = roundUp(Math.max(...this.#samples.flatMap((sample) => sample.values)));
    this.#figure.querySelector(".most").textContent = number.format(most);
    this.#figure.querySelector(".half").textContent = number.format(most / 2);
    this.#paths.forEach((path, i) => { path.setAttribute("d", this.#pathOf(i, time, most)); });
    const latest = values.map((value, i) => `${this.#lines[i]} ${value === null ? "no value" : number.format(value)}`);
    const axis = `${this.#title} over the last minute, on an axis to ${number.format(most)}`;
    this.#figure.querySelector("svg").setAttribute("aria-label", `${axis}; now: ${latest.join(", ")}`);
  }

  clear() {
    this.#samples = [];
  }

  // A value joins the value before it, and stands as a dot where there is none.
  #pathOf(line, now, most) {
    let joins = false;
    return this.#samples.map(({ time, values }) => {
      const value = values[line];
      const point = `${SECONDS - (now - time)},${2 - (value / most) * 2}`;
      const piece = value === null ? "" : joins ? `L${point}` : `M${point}h0`;
      joins = value !== null;
      return piece;
    }).join("");
  }
}

function keyOf(line, i) {
  const key = document.createElement("span");
  key.className = `key line-${i}`;
  key.textContent = line;
  return key;
}

// To 1, 2 or 5 times a power of ten, at least 1: the end of an axis.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value);
}
