"""What sharing, preemption and the size of blocks mean for the engine: experiments of Kwon et al. (SOSP 2023) on it.

All requests come at once, and stop only at their length. What is compared takes turns in each round. Each round draws
new requests. Numbers are medians of the rounds. Throughput counts tokens of a CPU-second, which other processes disturb
less than the clock on the wall.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy
from harness import draw_bars, print_table

from pagedattn_serve import LLMEngine, SamplingParams
from pagedattn_simulate.systems.system import ReservingSystem
from serve.baselines import BaselineRun, make_systems, serve_baseline
from serve.peers import BatchedRun, generate_in_batches, load_model
from serve.run import Run, ServedRun, Server, percentiles, warm_server
from serve.workloads import WORKLOADS, Request, make_requests

SAMPLING: dict[str, dict[str, Any]] = {
    "samples": {"temperature": 1.0},
    "beams": {"temperature": 0.0, "use_beam_search": True},
}
NUM_SEQUENCES = (2, 4, 6)  # samples or beams of a request
SAVED_IN_PAPER = {  # for each of NUM_SEQUENCES, from figure 15; for ShareGPT the paper's text has the ends of the range
    ("samples", "alpaca"): ("6.1%", "8.5%", "9.8%"),
    ("samples", "sharegpt"): ("16.2%", "", "30.5%"),
    ("beams", "alpaca"): ("37.6%", "53.1%", "55.2%"),
    ("beams", "sharegpt"): ("44.3%", "", "66.3%"),
}
PREFIXES = {80: "1.67x", 341: "3.58x"}  # tokens that all prompts begin with; the paper's gain, over Orca (Oracle)
MAX_LEN = 2048  # tokens of prompt and output, as in the paper
BLOCK_SIZES = (8, 16, 32, 64, 128)
CACHE, SMALL_CACHE = 8192, 1024  # slots
SHORT, MAX_SHORT_LEN, SHORT_BLOCK = {"mean_input": 20, "mean_output": 42}, MAX_LEN // 8, 8  # an eighth of ShareGPT
TWO_SHORT, EIGHT_SHORT = 2 * MAX_SHORT_LEN, 8 * MAX_SHORT_LEN  # slots
SWAP_SPACE = 0.125  # GiB; more than is needed
LONG_PROMPT, NEWCOMER = 30_000, 20  # tokens
COMPUTED = (0, 10_000, 20_000, 27_000)  # of the long prompt, when steps are measured
NUM_SETTLING_STEPS, NUM_STEPS = 40, 150


@dataclass(frozen=True)
class Setting:
    model: str  # a directory
    dtype: str
    make_engine: Callable[..., LLMEngine]  # of the model, takes more arguments of LLMEngine by name
    max_model_len: int
    vocab_size: int
    num_requests: int
    num_rounds: int
    seed: int

    def start(self, **arguments: Any) -> Server:
        return warm_server(self.make_engine(max_model_len=self.max_model_len, **arguments))

    def draw(self, workload: str, round_idx: int, **means: float) -> list[Request]:
        seed = self.seed + round_idx
        return make_requests(workload, self.num_requests, self.max_model_len, self.vocab_size, seed, **means)


@dataclass(frozen=True)
class Row:
    place: str  # what varies
    series: str  # what is compared there
    numbers: dict[str, float]  # by title of their column
    runs: list[Run]
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        raw = {
            name: [getattr(run, name) for run in self.runs] for name in ("num_output_tokens", "seconds", "cpu_seconds")
        }
        return {"place": self.place, "series": self.series, **self.numbers, **raw, "note": self.note}


@dataclass(frozen=True)
class Experiment:
    title: str
    measure: Callable[[Setting], Iterator[Row]]
    columns: dict[str, str]  # title of each number, and its format; the first is drawn
    num_requests: tuple[int, int]  # and with --quick
    num_rounds: int = 3
    shape: str = "tiny"
    max_len: int = MAX_LEN


# ---- what they have in common ---------------------------------------------------------------------------------------


def take_turns(
    contenders: Mapping[str, Callable[[list[Request]], Run]], draw: Callable[[int], list[Request]], num_rounds: int
) -> dict[str, list[Run]]:
    """`draw` takes the round and gives the requests, the same for all."""
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for round_idx in range(num_rounds):
        requests = draw(round_idx)
        for name, contender in contenders.items():
            runs[name].append(contender(requests))
    return runs


def compare(
    place: str,
    runs: Mapping[str, list[Run]],
    baseline: str,
    numbers: Mapping[str, str],
    notes: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """A row for each contender: its throughput, also as a ratio to the baseline's, and other properties of its runs."""
    rates = {
        contender: median(run.num_output_tokens / run.cpu_seconds for run in of_contender)
        for contender, of_contender in runs.items()
    }
    for contender, of_contender in runs.items():
        rate = {"tokens/CPU-s": rates[contender], "ratio": rates[contender] / rates[baseline]}
        others = {title: median(getattr(run, name) for run in of_contender) for title, name in numbers.items()}
        yield Row(place, contender, {**rate, **others}, of_contender, (notes or {}).get(contender, ""))


def print_rows(experiment: Experiment, rows: Sequence[Row]) -> None:
    table = [[experiment.title, "", *experiment.columns]]
    for row in rows:
        cells = [form.format(row.numbers[title]) for title, form in experiment.columns.items()]
        table.append([row.place, row.series, *cells])
    print_table(table, [row.note for row in rows])


def plot_rows(path: Path, title: str, experiment: Experiment, rows: Sequence[Row]) -> None:
    """Bars of the first number, at the places of the rows, a colour for each series."""
    column, form = next(iter(experiment.columns.items()))
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        bars.setdefault(row.series, {})[row.place] = row.numbers[column]
    figure, axes = draw_bars(bars, form)
    axes.set_xlabel(column)
    axes.set_title(f"{experiment.title}\n{title}", fontsize=8)
    figure.savefig(path, dpi=120)


# ---- experiments ----------------------------------------------------------------------------------------------------


def measure_sharing(setting: Setting) -> Iterator[Row]:
    """Shares of the blocks of all steps.

    What samples share follows from lengths alone, whatever the model. What beams share depends on which parents
    survive: with random weights their last common ancestor is a few tokens back, and little but the last block is
    their own.
    """
    server = setting.start(enable_prefix_caching=False)
    for method, sampling in SAMPLING.items():
        for i, n in enumerate(NUM_SEQUENCES):
            for workload in WORKLOADS:
                run = server(setting.draw(workload, 0), n=n, **sampling)
                numbers = {"saved": run.shared_blocks, "peak blocks": run.peak_used_blocks}
                in_paper = SAVED_IN_PAPER[method, workload][i]
                yield Row(f"{n} {method}", workload, numbers, [run], in_paper and f"(paper: {in_paper})")


def measure_samples(setting: Setting) -> Iterator[Row]:
    """Several samples of one request beside separate requests; for beams, the separate requests are greedy."""
    n = NUM_SEQUENCES[-1]
    server, caching_server = setting.start(enable_prefix_caching=False), setting.start(enable_prefix_caching=True)

    def separate(requests: list[Request], server: Server, temperature: float) -> ServedRun:
        return server([request for request in requests for _ in range(n)], temperature=temperature)

    for workload in WORKLOADS:
        for method, sampling in SAMPLING.items():
            contenders: dict[str, Server] = {
                f"{n} requests": partial(separate, server=server, temperature=sampling["temperature"]),
                f"{n} requests, prefix caching": partial(
                    separate, server=caching_server, temperature=sampling["temperature"]
                ),
                "one request": partial(server, n=n, **sampling),
            }
            runs = take_turns(contenders, partial(setting.draw, workload), setting.num_rounds)
            place = f"{n} {method}, {workload}"
            yield from compare(place, runs, f"{n} requests", {"peak blocks": "peak_used_blocks"})


def measure_prefix(setting: Setting) -> Iterator[Row]:
    """After the prefix, prompts have the lengths of Alpaca; the paper translates sentences. The baseline is this
    engine."""
    servers = {
        "no caching": setting.start(enable_prefix_caching=False),
        "prefix caching": setting.start(enable_prefix_caching=True),
    }
    for num_tokens, in_paper in PREFIXES.items():

        def draw(round_idx: int, num_tokens: int = num_tokens) -> list[Request]:
            rng = numpy.random.default_rng([setting.seed, round_idx, num_tokens])
            prefix = rng.integers(setting.vocab_size, size=num_tokens).tolist()
            requests = setting.draw("alpaca", round_idx)
            return [replace(each, prompt_token_ids=prefix + each.prompt_token_ids) for each in requests]

        runs = take_turns(servers, draw, setting.num_rounds)
        numbers = {"prompt tokens hit": "prefix_hits", "peak blocks": "peak_used_blocks"}
        notes = {"prefix caching": f"(paper: {in_paper} of Orca)"}
        yield from compare(f"{num_tokens} shared tokens", runs, "no caching", numbers, notes)


def measure_preemption(setting: Setting) -> Iterator[Row]:
    """Lengths are half of ShareGPT's, in a cache that holds one of the longest sequences. So there are as many
    preemptions as with ShareGPT's lengths, of half as many tokens."""
    setting = replace(setting, max_model_len=min(setting.max_model_len, SMALL_CACHE))
    draw = partial(setting.draw, "sharegpt", mean_input=80, mean_output=169)
    for block_size in BLOCK_SIZES:
        servers = {
            mode: setting.start(
                block_size=block_size, num_blocks=SMALL_CACHE // block_size, preemption_mode=mode,
                swap_space=SWAP_SPACE, enable_prefix_caching=False,
            )
            for mode in ("recompute", "swap")
        }  # fmt: skip
        runs = take_turns(servers, draw, setting.num_rounds)
        numbers = {"recomputes": "num_recomputes", "swaps": "num_swaps"}
        yield from compare(f"block size {block_size}", runs, "recompute", numbers)


def measure_block_sizes(setting: Setting) -> Iterator[Row]:
    servers = {
        f"block size {size}": setting.start(block_size=size, num_blocks=CACHE // size, enable_prefix_caching=False)
        for size in BLOCK_SIZES
    }
    for workload in WORKLOADS:
        runs = take_turns(servers, partial(setting.draw, workload), setting.num_rounds)
        numbers = {
            "wasted slots": "wasted_slots",
            "mean batch": "mean_batch_size",
            "recomputes": "num_recomputes",
        }
        yield from compare(workload, runs, "block size 16", numbers)


def measure_baselines(setting: Setting) -> Iterator[Row]:
    """The engine beside the systems of the paper, all with one cache. Outputs have to be the same.

    The cache has room for two of the longest sequences, so that memory binds. The weights lie outside of the CPU's
    caches, so that a larger batch saves reads of them; such a model is slow, and so requests are short."""
    engine = setting.make_engine(
        max_model_len=setting.max_model_len,
        num_blocks=TWO_SHORT // SHORT_BLOCK,
        block_size=SHORT_BLOCK,
        enable_prefix_caching=False,
    )
    baselines = {name: partial(serve_with, engine, make) for name, make in make_systems(engine).items()}
    draw = partial(setting.draw, "sharegpt", **SHORT)
    runs = take_turns({"paged": warm_server(engine), **baselines}, draw, setting.num_rounds)
    for name, of_system in runs.items():
        if any(run.token_ids != ours.token_ids for run, ours in zip(of_system, runs["paged"], strict=True)):
            raise RuntimeError(f"{name}: expected the engine's tokens, got others")
    numbers = {"s/token": "normalized_latency", "mean batch": "mean_batch_size", "used slots": "used_slots"}
    yield from compare("an eighth of sharegpt", runs, "paged", numbers)


def measure_transformers(setting: Setting) -> Iterator[Row]:
    """The engine beside `generate`, which has as many rows as the same cache holds of the longest sequences, or one.
    `generate` gets the first requests alone: how many come does not change how fast it is.

    Tokens a step, over the 1 of one row, is the bound by a count: so many times as fast were a step that took as long
    with many rows as with one, that is, whose only cost is to read the weights."""
    model = load_model(setting.model, setting.dtype)
    engine = setting.start(num_blocks=EIGHT_SHORT // SHORT_BLOCK, block_size=SHORT_BLOCK, enable_prefix_caching=False)
    num_rows = EIGHT_SHORT // MAX_SHORT_LEN

    def generate(requests: list[Request], batch_size: int) -> BatchedRun:
        return generate_in_batches(model, batch_size, requests[: 2 * num_rows])

    contenders = {
        "generate, one by one": partial(generate, batch_size=1),
        f"generate, padded batches of {num_rows}": partial(generate, batch_size=num_rows),
        "engine": engine,
    }
    runs = take_turns(contenders, partial(setting.draw, "sharegpt", **SHORT), setting.num_rounds)
    for row in compare("an eighth of sharegpt", runs, "generate, one by one", {"tokens a step": "tokens_per_step"}):
        is_same = [
            theirs == mine
            for run, ours in zip(row.runs, runs["engine"], strict=True)
            for theirs, mine in zip(run.token_ids, ours.token_ids, strict=False)
        ]
        yield replace(row, numbers={**row.numbers, "same output": mean(is_same)})


def serve_with(engine: LLMEngine, make_system: Callable[[], ReservingSystem], requests: list[Request]) -> BaselineRun:
    return serve_baseline(engine, make_system(), requests)


def measure_long_prompt(setting: Setting) -> Iterator[Row]:
    """A step is as long as the time between two tokens of a decoding request; all columns are CPU time. The whole
    prompt would take minutes. So some stretches are measured; the tokens before a stretch count as computed, whatever
    the
    cache holds."""
    decodes = f"{setting.num_requests} decodes"
    for computed in COMPUTED:
        loads = {decodes: (True, False), "beside the prompt": (True, True), "the prompt alone": (False, True)}
        numbers = {name: measure_steps(setting, computed, *load) for name, load in loads.items()}
        for name, of_load in numbers.items():
            ratio = of_load["p99 ms"] / numbers[decodes]["p99 ms"]
            yield Row(f"after {computed:,} tokens", name, {**of_load, "ratio": ratio}, [])


def measure_steps(setting: Setting, computed: int, has_decodes: bool, has_prompt: bool) -> dict[str, float]:
    engine = setting.make_engine(max_model_len=setting.max_model_len, enable_prefix_caching=False)
    rng = numpy.random.default_rng(setting.seed)

    def add(request_id: str, num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=setting.max_model_len - num_tokens, ignore_eos=True)
        engine.add_request(request_id, rng.integers(setting.vocab_size, size=num_tokens).tolist(), params)

    for i in range(setting.num_requests if has_decodes else 0):
        add(f"decode {i}", NEWCOMER)
    for _ in range(NUM_SETTLING_STEPS if has_decodes else 0):
        engine.step()
    num_steps, num_settling_steps = (NUM_STEPS * setting.num_rounds, NUM_SETTLING_STEPS) if has_decodes else (2, 1)
    prompt = None
    if has_prompt:
        add("prompt", LONG_PROMPT)
        engine.step()
        [prompt] = engine.scheduler.running[-1].sequences
        prompt.num_computed_tokens = max(prompt.num_computed_tokens, computed)
    for _ in range(num_settling_steps):
        engine.step()
    num_before = prompt.num_computed_tokens if prompt else 0
    milliseconds = []
    for _ in range(num_steps):
        started = time.process_time()
        engine.step()
        milliseconds.append((time.process_time() - started) * 1000)
    num_tokens = prompt.num_computed_tokens - num_before if prompt else 0
    add("newcomer", NEWCOMER)
    num_newcomer_steps = 1
    while all(output.request_id != "newcomer" for output in engine.step()):
        num_newcomer_steps += 1
    p50, p99 = percentiles(milliseconds, 50, 99).values()
    return {
        "p50 ms": p50,
        "p99 ms": p99,
        "prompt tokens/step": num_tokens / num_steps,
        "prompt tokens/CPU-s": num_tokens / sum(milliseconds) * 1000,
        "newcomer's steps": num_newcomer_steps,
    }


RATES = {"tokens/CPU-s": "{:.0f}", "ratio": "{:.2f}x"}
EXPERIMENTS = {
    "sharing": Experiment(
        "blocks saved by sharing",
        measure_sharing,
        {"saved": "{:.1%}", "peak blocks": "{:.0f}"},
        num_requests=(64, 4),
        num_rounds=1,
        shape="micro",
    ),
    "samples": Experiment(
        "several sequences of a prompt", measure_samples, {**RATES, "peak blocks": "{:.0f}"}, num_requests=(4, 2)
    ),
    "prefix": Experiment(
        "a prefix shared by all prompts",
        measure_prefix,
        {**RATES, "prompt tokens hit": "{:.1%}", "peak blocks": "{:.0f}"},
        num_requests=(64, 4),
    ),
    "preemption": Experiment(
        f"preemption, {SMALL_CACHE} slots",
        measure_preemption,
        {**RATES, "recomputes": "{:.0f}", "swaps": "{:.0f}"},
        num_requests=(16, 16),
    ),
    "block-size": Experiment(
        f"block sizes, {CACHE} slots",
        measure_block_sizes,
        {**RATES, "wasted slots": "{:.1%}", "mean batch": "{:.0f}", "recomputes": "{:.0f}"},
        num_requests=(32, 4),
    ),
    "baselines": Experiment(
        f"the paper's systems, {TWO_SHORT} slots",
        measure_baselines,
        {**RATES, "s/token": "{:.3f}", "mean batch": "{:.1f}", "used slots": "{:.1%}"},
        num_requests=(96, 40),
        shape="small",
        max_len=MAX_SHORT_LEN,
    ),
    "transformers": Experiment(
        f"beside generate, {EIGHT_SHORT} slots",
        measure_transformers,
        {**RATES, "tokens a step": "{:.1f}", "same output": "{:.0%}"},
        num_requests=(320, 160),
        shape="small",
        max_len=MAX_SHORT_LEN,
    ),
    "long-prompt": Experiment(
        f"time between tokens beside a prompt of {LONG_PROMPT:,} tokens",
        measure_long_prompt,
        {
            "p99 ms": "{:.1f}",
            "ratio": "{:.2f}x",
            "p50 ms": "{:.1f}",
            "prompt tokens/step": "{:.1f}",
            "prompt tokens/CPU-s": "{:.0f}",
            "newcomer's steps": "{:.0f}",
        },
        num_requests=(8, 8),
        num_rounds=1,
        max_len=32_768,
    ),
}
