// The block map: one square a block, on a canvas. Pointer and keys pick a block.

export const FREE = -1, CACHED = -2, SHARED = -3; // what a block is, if it is not one request's, whose index it has then

const MAX_HEIGHT = 320; // of a map, in pixels of the page
const GAP = 1;

// The colours of requests: one that holds blocks has one of its own, and keeps it as long as it holds some.
export class Palette {
  #places = new Map(); // by the request's name

  // By the request's index, as in the codes of blocks; undefined for one that waits.
  colours(requests) {
    const names = new Set(requests.filter(({ state }) => state !== "waiting").map(({ name }) => name));
    for (const name of this.#places.keys()) if (!names.has(name)) this.#places.delete(name);
    const taken = new Set(this.#places.values());
    let free = 0;
    for (const name of names) {
      if (this.#places.has(name)) continue;
      while (taken.has(free)) free++;
      this.#places.set(name, free);
      taken.add(free);
    }
    return requests.map(({ name }) => names.has(name) ? colourAt(this.#places.get(name)) : undefined);
  }
}

// Hues a golden angle apart fill the circle evenly, however many there are. Among the first 64, those of the same
// lightness are 20 degrees apart or more; with the first at 60 degrees, the two most alike on a screen differ most.
function colourAt(place) {
  return `oklch(${0.46 + 0.11 * (place % 4)} 0.14 ${(60 + place * 137.508) % 360})`;
}

// The blocks of [[what, how many], ...], one number a block.
export function unpack(runs) {
  return runs.flatMap(([what, count]) => Array(count).fill(what));
}

export class BlockMap {
  #canvas; #mark; #onPick; #blocks = []; #columns = 1; #cell = 1;
  #picked = null; // a block's number

  // mark: an element that is laid over the picked block. onPick is called with its number.
  constructor(canvas, mark = null, onPick = null) {
    this.#canvas = canvas;
    this.#mark = mark;
    this.#onPick = onPick;
    if (onPick === null) return;
    canvas.addEventListener("pointermove", (event) => {
      const block = this.#blockAt(event);
      if (block !== null) this.#pick(block);
    });
    canvas.addEventListener("focus", () => this.#pick(this.#picked ?? 0));
    canvas.addEventListener("keydown", (event) => {
      const to = this.#blockOfKey(event.key, this.#picked ?? 0);
      if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      this.#pick(to);
    });
  }

  // colours: of the requests, as blocks name them.
  draw(blocks, colours) {
    this.#blocks = blocks;
    const width = this.#canvas.clientWidth;
    this.#cell = Math.min(16, Math.max(3, Math.floor(Math.sqrt((width * MAX_HEIGHT) / Math.max(1, blocks.length)))));
    this.#columns = Math.max(1, Math.floor(width / this.#cell));
    const height = Math.ceil(blocks.length / this.#columns) * this.#cell;
    const ratio = window.devicePixelRatio || 1;
    this.#canvas.style.height = `${height}px`;
    this.#canvas.width = Math.round(width * ratio);
    this.#canvas.height = Math.round(height * ratio);
    const context = this.#canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const [line, quiet, accent] = ["--line", "--quiet", "--accent"].map((name) => style.getPropertyValue(name));
    blocks.forEach((what, i) => {
      const x = (i % this.#columns) * this.#cell, y = Math.floor(i / this.#columns) * this.#cell;
      drawBlock(context, x, y, this.#cell - GAP, what, colours[what], { line, quiet, accent });
    });
    if (this.#picked !== null) this.#placeMark();
  }

  #pick(block) {
    if (this.#blocks.length === 0) return;
    this.#picked = Math.min(Math.max(block, 0), this.#blocks.length - 1);
    this.#placeMark();
    this.#onPick(this.#picked);
  }

  #placeMark() {
    this.#mark.hidden = false;
    this.#mark.style.left = `${(this.#picked % this.#columns) * this.#cell}px`;
    this.#mark.style.top = `${Math.floor(this.#picked / this.#columns) * this.#cell}px`;
    this.#mark.style.width = this.#mark.style.height = `${this.#cell - GAP}px`;
  }

  // Where a key leads from a block: along the row, across rows, to an end, or to the next block that differs.
  #blockOfKey(key, from) {
    switch (key) {
      case "ArrowLeft": return from - 1;
      case "ArrowRight": return from + 1;
      case "ArrowUp": return from >= this.#columns ? from - this.#columns : from;
      case "ArrowDown": return from + this.#columns < this.#blocks.length ? from + this.#columns : from;
      case "Home": return 0;
      case "End": return this.#blocks.length - 1;
      case "PageUp": return this.#differing(from, -1);
      case "PageDown": return this.#differing(from, 1);
    }
  }

  #differing(from, step) {
    let block = from;
    while (block in this.#blocks && this.#blocks[block] === this.#blocks[from]) block += step;
    return block in this.#blocks ? block : from;
  }

  #blockAt(event) {
    const column = Math.floor(event.offsetX / this.#cell);
    const block = Math.floor(event.offsetY / this.#cell) * this.#columns + column;
    return column < this.#columns && block < this.#blocks.length ? block : null;
  }
}

// What a block is shows in its shape as well as in its colour.
function drawBlock(context, x, y, size, what, colour, { line, quiet, accent }) {
  if (what >= 0) {
    context.fillStyle = colour;
    context.fillRect(x, y, size, size);
    return;
  }
  context.strokeStyle = what === SHARED ? accent : line;
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  if (what === SHARED) {
    context.fillStyle = accent;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + size, y);
    context.lineTo(x, y + size);
    context.fill();
  } else if (what === CACHED) {
    context.fillStyle = quiet;
    context.fillRect(x + size / 3, y + size / 3, size / 3, size / 3);
  }
}
