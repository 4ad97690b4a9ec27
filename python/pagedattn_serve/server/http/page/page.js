// The live page: asks the server for its state twice a second while somebody looks, and shows it.

import { complete } from "./completion.js";
import { BlockMap, CACHED, FREE, Palette, SHARED, unpack } from "./map.js";

const POLL_MILLISECONDS = 500;
const HISTORY_SECONDS = 60; // as index.html has it on the axis of time
const MAX_ROWS = 50; // of the table of requests
const NAMES = { [FREE]: "free", [CACHED]: "cached", [SHARED]: "shared" };

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

let state = null; // the server's last answer
let pointed = null; // the block under the pointer
const rates = []; // of the last minute: {time, rate} in tokens a second, the latest last
const palette = new Palette();
const blocks = new BlockMap($("blocks"), (block) => { pointed = block; showPointed(); });
const hostBlocks = new BlockMap($("host-blocks"), () => {});

// ---- the API key, where the server asks for one

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  $("key-form").hidden = true;
});

// ---- the state

async function poll() {
  try {
    const response = await fetch(`state?replica=${$("replica").value || 0}`, { headers: headers() });
    if (response.status === 401) {
      $("key-form").hidden = false;
      return showStatus("needs an API key", true);
    }
    const answer = await response.json();
    if (response.ok) show(answer, await fetchLatencies());
    else showStatus(answer.error.message, true);
  } catch (error) {
    showStatus(`no answer from the server (${error.message})`, true);
  }
}

// Of what clients wait for: how often so far, and how many seconds together.
async function fetchLatencies() {
  const metrics = await (await fetch("metrics")).text();
  const read = (name) => {
    const line = metrics.match(new RegExp(`^pagedattn:${name}\\{.*\\} (.+)$`, "m"));
    return line ? Number(line[1]) : 0;
  };
  const latency = (name) => ({ count: read(`${name}_seconds_count`), seconds: read(`${name}_seconds_sum`) });
  return { first: latency("time_to_first_token"), between: latency("inter_token_latency") };
}

async function pollForEver() {
  for (;;) {
    if (document.visibilityState === "visible") await poll();
    await new Promise((resolve) => setTimeout(resolve, POLL_MILLISECONDS));
  }
}

function show(next, latencies) {
  showFigures({ ...next, latencies }, state);
  state = {
    ...next, latencies, blocks: unpack(next.blocks), host_blocks: unpack(next.host_blocks),
    colours: palette.colours(next.requests),
  };
  $("model").textContent = state.model;
  showReplicas();
  showStatus(`on ${state.device}, blocks of ${state.block_size} tokens`, false);
  showBlocks();
  showRequests();
}

function showReplicas() {
  $("replicas").hidden = state.replicas.length === 1;
  for (let i = $("replica").length; i < state.replicas.length; i++) $("replica").add(new Option(i, i));
  state.replicas.forEach((runs, i) => { $("replica").options[i].text = runs ? i : `${i}, which does not run`; });
}

$("replica").addEventListener("change", () => {
  state = null; // figures of another replica are no past of this one
  rates.length = 0;
});

function showStatus(text, bad) {
  if ($("status").textContent !== text) $("status").textContent = text; // else a screen reader says it each time
  $("status").classList.toggle("bad", bad);
}

function showFigures({ stats, time, latencies }, last) {
  const set = (id, text) => { $(id).textContent = text; };
  const milliseconds = (seconds) => `${number.format(seconds * 1000)} ms`;
  set("running", stats.num_running);
  set("waiting", stats.num_waiting);
  set("swapped", stats.num_swapped);
  set("use", percent.format(stats.num_used_blocks / stats.num_blocks));
  set("preemptions", stats.num_recomputes + stats.num_swaps);
  if (stats.num_looked_up_tokens) set("hits", percent.format(stats.num_found_tokens / stats.num_looked_up_tokens));
  if (last === null) return;
  for (const [id, { count, seconds }] of Object.entries(latencies)) { // means since the last poll
    const before = last.latencies[id];
    if (count > before.count) set(id, milliseconds((seconds - before.seconds) / (count - before.count)));
  }
  const seconds = time - last.time;
  if (seconds <= 0) return;
  rates.push({ time, rate: (stats.num_output_tokens - last.stats.num_output_tokens) / seconds });
  while (rates[0].time < time - HISTORY_SECONDS) rates.shift();
  set("rate", number.format(rates.at(-1).rate));
  const most = roundUp(Math.max(...rates.map(({ rate }) => rate)));
  set("most", number.format(most));
  set("half", number.format(most / 2));
  const points = rates.map(({ time: then, rate }) => `${HISTORY_SECONDS - (time - then)},${2 - (rate / most) * 2}`);
  document.querySelector("#history polyline").setAttribute("points", points.join(" "));
}

// To 1, 2 or 5 times a power of ten, at least 1: the end of an axis.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value);
}

function showBlocks() {
  const counts = { free: 0, used: 0, shared: 0, cached: 0 };
  for (const what of state.blocks) counts[NAMES[what] ?? "used"]++;
  for (const [name, value] of Object.entries(counts)) $(`num-${name}`).textContent = number.format(value);
  const told = Object.entries(counts).map(([name, value]) => `${value} ${name}`).join(", ");
  blocks.draw(state.blocks, state.colours, `${state.blocks.length} blocks: ${told}`);
  const numHost = state.host_blocks.length;
  const swapped = state.host_blocks.filter((what) => what !== FREE); // the free ones, mostly thousands, tell nothing
  $("host").hidden = swapped.length === 0;
  $("num-swapped").textContent = number.format(swapped.length);
  $("num-host").textContent = number.format(numHost);
  if (swapped.length) hostBlocks.draw(swapped, state.colours, `${swapped.length} of ${numHost} blocks of host memory`);
  showPointed();
}

function showPointed() {
  const what = state?.blocks[pointed];
  const owner = what === SHARED ? "shared by several sequences" : NAMES[what] ?? `request ${state?.requests[what]?.name}`;
  $("block").textContent = what === undefined ? "Point at a block to see whose it is." : `Block ${pointed}: ${owner}`;
}

function showRequests() {
  const owned = new Map();
  for (const what of state.blocks) owned.set(what, (owned.get(what) ?? 0) + 1);
  const rows = state.requests.slice(0, MAX_ROWS).map((request, i) => {
    const row = document.createElement("tr");
    const texts = [request.name, request.state, request.num_prompt_tokens, request.num_output_tokens, owned.get(i) ?? 0];
    for (const text of texts) row.insertCell().textContent = text;
    const chip = document.createElement("i");
    chip.className = "cell";
    if (state.colours[i]) chip.style.background = chip.style.borderColor = state.colours[i];
    row.cells[0].prepend(chip);
    return row;
  });
  $("requests").replaceChildren(...rows);
  const numMore = state.requests.length - rows.length;
  $("more").textContent = numMore ? `and ${numMore} more` : rows.length ? "" : "None at the moment.";
}

// ---- the prompt box

$("prompt-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const stop = new AbortController();
  const onStop = () => stop.abort();
  $("stop").addEventListener("click", onStop);
  $("send").disabled = true;
  $("stop").disabled = false;
  $("answer").textContent = "";
  $("timing").textContent = "";
  try {
    const wanted = {
      model: state?.model, prompt: $("prompt").value,
      maxTokens: $("max-tokens").valueAsNumber, temperature: $("temperature").valueAsNumber,
    };
    const result = await complete(wanted, headers(), stop.signal, (text) => $("answer").append(text));
    $("timing").textContent = `${result.tokens} tokens in ${number.format(result.seconds)} s, the first after ` +
      `${number.format(result.firstTokenSeconds * 1000)} ms; ended by ${result.finishReason}`;
  } catch (error) {
    $("timing").textContent = stop.signal.aborted ? "stopped" : error.message;
  } finally {
    $("stop").removeEventListener("click", onStop);
    $("send").disabled = false;
    $("stop").disabled = true;
  }
});

pollForEver();
