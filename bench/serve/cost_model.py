"""How well the cost model of `pagedattn simulate` tells what steps of the engine take on this CPU.

The numbers of the hardware are fitted to some of the steps, and the other steps check them. Decodes read random numbers
from the cache, as if a model had put them there (`serve.profile`). Prompts are computed. Times are CPU-seconds of the
process, with one thread: other processes disturb them less than the clock on the wall, but they do, as all share the
memory's bandwidth.
"""

import argparse
import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy
from harness import draw_bars, print_table, write_files

from pagedattn_serve import LLMEngine, SamplingParams
from pagedattn_simulate.cost_model import CostModel, Hardware, ModelShape, StepWork
from serve.profile import BLOCK_SIZE, NUM_WARM_UP_STEPS, start_requests

MAX_CACHED = 1 << 19  # tokens of all sequences together, 6 GB in the cache of shape small in 16 bits
SEQUENCES, CONTEXTS = (1, 8, 32, 64, 256), (128, 1024, 2048, 8192)
LONGEST = 8192 + 128  # positions of the model made
PROMPTS = (128, 512, 1024, 2048)
FITTED = {(1, 128), (1, 8192), (8, 2048), (32, 128), (32, 8192), (64, 1024), (256, 128)}  # sequences and contexts
FITTED_PROMPTS = {128, 2048}
TOLERANCE = 0.15
# What the search for the numbers begins with.
START = {
    "weight_bytes": 2e10,
    "weight_flops": 2e11,
    "attention_bytes": 1e10,
    "attention_flops": 1e11,
    "step_seconds": 1e-3,
    "sequence_seconds": 1e-5,
}


@dataclass(frozen=True)
class Case:
    """A step: `num_sequences` decodes with `context` tokens in the cache, or, if there are none, one prompt."""

    num_sequences: int
    context: int

    @property
    def is_fitted(self) -> bool:
        if self.num_sequences:
            return (self.num_sequences, self.context) in FITTED
        return self.context in FITTED_PROMPTS

    def __str__(self) -> str:
        return f"{self.num_sequences} x {self.context}" if self.num_sequences else f"prompt of {self.context}"

    def work(self) -> StepWork:
        work = StepWork()
        if not self.num_sequences:
            work.add_prompt(0, self.context, num_samples=1)
        for _ in range(self.num_sequences):
            work.add_decodes(1, self.context + 1)
        return work


def cases_of(args: argparse.Namespace) -> list[Case]:
    decodes = [Case(n, context) for n in SEQUENCES for context in CONTEXTS if n * context <= MAX_CACHED]
    cases = [*decodes, *(Case(0, length) for length in PROMPTS)]
    return [case for case in cases if case.num_sequences * case.context <= 8192] if args.quick else cases


def limits_of_cost_model(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of LLMEngine: room for the largest case, and for all of its prompts in one step."""
    cases = cases_of(args)
    most = max(case.num_sequences for case in cases)
    longest = max(case.context for case in cases) + NUM_WARM_UP_STEPS + args.rounds + 1
    num_blocks = max(max(case.num_sequences, 1) * -(-(case.context + longest % 128) // BLOCK_SIZE) for case in cases)
    return {
        "max_model_len": longest,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(case.num_sequences * case.context for case in cases),
        "num_blocks": num_blocks + 2 * most,
        "enable_prefix_caching": False,
    }


def measure(engine: LLMEngine, case: Case, num_steps: int) -> float:
    """The median of CPU-seconds."""
    seconds: list[float] = []
    if case.num_sequences:
        start_requests(engine, case.num_sequences, case.context, NUM_WARM_UP_STEPS + num_steps + 1)
        seconds = [timed_step(engine) for _ in range(NUM_WARM_UP_STEPS + num_steps)][NUM_WARM_UP_STEPS:]
    else:
        prompt = numpy.random.default_rng(0).integers(engine.model_runner.model.vocab_size, size=case.context).tolist()
        for i in range(max(2, num_steps // 4)):
            engine.add_request(str(i), None, SamplingParams(temperature=0, max_tokens=1), prompt)
            seconds.append(timed_step(engine))
    assert not engine.has_unfinished_requests()
    return median(seconds)


def timed_step(engine: LLMEngine) -> float:
    started = time.process_time()
    engine.step()
    return time.process_time() - started


def fit(shape: ModelShape, measured: dict[Case, float]) -> dict[str, float]:
    """The numbers whose logarithms of predicted over measured have the least sum of squares: each number in turn is
    made larger and smaller, by smaller and smaller factors."""

    def error(numbers: dict[str, float]) -> float:
        predicted = predict(shape, numbers, measured)
        return sum(math.log(predicted[case] / seconds) ** 2 for case, seconds in measured.items())

    numbers = dict(START)
    best, factor = error(numbers), 2.0
    while factor > 1.001:
        before = best
        for name in numbers:
            for changed in (numbers[name] * factor, numbers[name] / factor):
                trial = numbers | {name: changed}
                if (found := error(trial)) < best - 1e-9:
                    best, numbers = found, trial
        if best == before:
            factor **= 0.5
    return numbers


def hardware_of(numbers: dict[str, float], name: str, source: str) -> Hardware:
    """What is not measured: blocks are swapped as fast as attention reads them, twice; ranks send as fast as they read,
    and a sum takes 60 us."""
    return Hardware(
        name=name,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        host_bytes=numbers["attention_bytes"] / 2,
        link_bytes=numbers["weight_bytes"],
        link_seconds=60e-6,
        source=source,
        **numbers,
    )


def predict(
    shape: ModelShape, numbers: dict[str, float], cases: Sequence[Case] | dict[Case, float]
) -> dict[Case, float]:
    model = CostModel(shape, hardware_of(numbers, "cpu", "fitted"))
    return {case: model.seconds(case.work()) for case in cases}


def plot_ratios(path: Path, title: str, ratios: dict[str, dict[str, float]]) -> None:
    """Bars of predicted over measured."""
    figure, axes = draw_bars(ratios, "{:.2f}")
    axes.set_xlabel("predicted / measured")
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=120)


def run_cost_model(args: argparse.Namespace, facts: dict[str, object], engine: LLMEngine, shape: ModelShape) -> None:
    """The command `cost-model`, with an engine of those limits."""
    for kv_cache in engine.model_runner.cache_engine.kv_caches:
        kv_cache.key_cache.normal_()
        kv_cache.value_cache.normal_()
    measured = {case: measure(engine, case, args.rounds) for case in cases_of(args)}
    numbers = fit(shape, {case: seconds for case, seconds in measured.items() if case.is_fitted})
    predicted = predict(shape, numbers, measured)
    table = [["step", "measured, ms", "predicted", "ratio", ""]]
    for case, seconds in measured.items():
        ratio = predicted[case] / seconds
        note = "fitted" if case.is_fitted else "checked" if abs(ratio - 1) <= TOLERANCE else "checked: OFF"
        table.append([str(case), f"{1e3 * seconds:.2f}", f"{1e3 * predicted[case]:.2f}", f"{ratio:.2f}", note])
    print_table(table)
    checked = [case for case in measured if not case.is_fitted]
    num_near = sum(abs(predicted[case] / measured[case] - 1) <= TOLERANCE for case in checked)
    print(f"\n{num_near} of {len(checked)} steps that were not fitted are within {TOLERANCE:.0%}")
    print(", ".join(f"{name} {value:.3g}" for name, value in numbers.items()))
    if args.hardware:
        source = f"fitted to steps of the engine on {facts['cpu']}, {args.threads} thread, load {facts['load']}"
        hardware = hardware_of(numbers, "cpu", source)
        args.hardware.write_text(json.dumps(dataclasses.asdict(hardware), indent=1) + "\n")
    ratios: dict[str, dict[str, float]] = {"fitted": {}, "checked": {}}
    for case, seconds in measured.items():
        ratios["fitted" if case.is_fitted else "checked"][str(case)] = predicted[case] / seconds
    steps = [
        {"step": str(case), "is_fitted": case.is_fitted, "seconds": seconds, "predicted": predicted[case]}
        for case, seconds in measured.items()
    ]
    write_files(args, facts, partial(plot_ratios, ratios=ratios), {"hardware_numbers": numbers, "steps": steps})
