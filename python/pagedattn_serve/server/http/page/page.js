// The live page: asks the server for its state twice a second while somebody looks, and shows it.

import { setUpBox } from "./ask.js";
import { Chart } from "./charts.js";
import { $, number } from "./common.js";
import { BlockMap, CACHED, FREE, Palette, SHARED, unpack } from "./map.js";

const POLL_MILLISECONDS = 500;
const MAX_ROWS = 50; // of the table of requests
const NAMES = { [FREE]: "free", [CACHED]: "cached", [SHARED]: "shared" };

const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

let state = null; // the server's last answer
let picked = null; // the number of a block
const palette = new Palette();
const blocks = new BlockMap($("blocks"), $("mark"), (block) => { picked = block; showPicked(); });
const hostBlocks = new BlockMap($("host-blocks"));
const charts = {
  rates: new Chart($("rates"), "Tokens a second", ["generated"]),
  queues: new Chart($("queues"), "Requests", ["running", "waiting"]),
  between: new Chart($("between-chart"), "Between two tokens, ms", ["mean"]),
  first: new Chart($("first-chart"), "To the first token, ms", ["mean"]),
};

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
  return { between: latency("inter_token_latency"), first: latency("time_to_first_token") };
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
  Object.values(charts).forEach((chart) => chart.clear());
});

function showStatus(text, bad) {
  if ($("status").textContent !== text) $("status").textContent = text; // else a screen reader says it each time
  $("status").classList.toggle("bad", bad);
}

function showFigures({ stats, time, latencies }, last) {
  const set = (id, text) => { $(id).textContent = text; };
  set("running", stats.num_running);
  set("waiting", stats.num_waiting);
  set("swapped", stats.num_swapped);
  set("use", percent.format(stats.num_used_blocks / stats.num_blocks));
  $("states").hidden = stats.num_state_slots === 0;
  set("num-states", number.format(stats.num_used_state_slots));
  set("num-state-slots", number.format(stats.num_state_slots));
  set("preemptions", stats.num_recomputes + stats.num_swaps);
  $("disk").hidden = stats.num_written_blocks + stats.num_read_blocks === 0;
  set("num-read", number.format(stats.num_read_blocks));
  if (stats.num_looked_up_tokens) set("hits", percent.format(stats.num_found_tokens / stats.num_looked_up_tokens));
  if (last === null) return;
  for (const [id, { count, seconds }] of Object.entries(latencies)) { // means since the last poll
    const before = last.latencies[id];
    const milliseconds = count > before.count ? ((seconds - before.seconds) / (count - before.count)) * 1000 : null;
    if (milliseconds !== null) set(id, `${number.format(milliseconds)} ms`);
    charts[id].add(time, [milliseconds]);
  }
  const seconds = time - last.time;
  if (seconds <= 0) return;
  const rate = (stats.num_output_tokens - last.stats.num_output_tokens) / seconds;
  set("rate", number.format(rate));
  charts.rates.add(time, [rate]);
  charts.queues.add(time, [stats.num_running, stats.num_waiting]);
}

function showBlocks() {
  const counts = { free: 0, used: 0, shared: 0, cached: 0 };
  for (const what of state.blocks) counts[NAMES[what] ?? "used"]++;
  for (const [name, value] of Object.entries(counts)) $(`num-${name}`).textContent = number.format(value);
  blocks.draw(state.blocks, state.colours);
  $("blocks").setAttribute("aria-valuemax", state.blocks.length - 1);
  const numHost = state.host_blocks.length;
  const swapped = state.host_blocks.filter((what) => what !== FREE); // the free ones, mostly thousands, tell nothing
  $("host").hidden = swapped.length === 0;
  $("num-swapped").textContent = number.format(swapped.length);
  $("num-host").textContent = number.format(numHost);
  if (swapped.length) hostBlocks.draw(swapped, state.colours);
  showPicked();
}

function showPicked() {
  const what = state?.blocks[picked];
  if (what === undefined) return;
  const owner = what === SHARED ? "shared by several sequences" : NAMES[what] ?? `request ${state.requests[what].name}`;
  const text = `Block ${picked}: ${owner}`;
  if ($("block").textContent === text) return; // a screen reader says a value that is set
  $("block").textContent = text;
  $("blocks").setAttribute("aria-valuenow", picked);
  $("blocks").setAttribute("aria-valuetext", text);
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
  $("requests").parentElement.hidden = rows.length === 0;
  const numMore = state.requests.length - rows.length;
  $("more").textContent = numMore ? `and ${numMore} more` : rows.length ? "" : "None at the moment.";
}

setUpBox(() => state?.model, headers);
pollForEver();
