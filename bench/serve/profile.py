"""What the steps of the engine that give each running sequence one token spend their time on.

The engine runs without CPU graphs, because a graph leaves nothing between the kernels to time. So with 64 sequences or
fewer a step takes longer here than in real use. Functions and layers are timed where they are called. The time of a
function excludes the timed functions that it calls. The clock is the CPU clock of this thread; with several threads,
this is the first one. A step has ten timers a layer. A timer costs a microsecond, or several where the weights have
driven all else from the caches. This cost counts as the caller's, mostly as "rest of the model".

Prompts are not computed: the cache holds random numbers, as if a model had put them there.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch
from harness import draw_bars, print_table, write_files
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_serve import LLMEngine, SamplingParams

NUM_WARM_UP_STEPS = 3
BLOCK_SIZE = 16  # the engine's default
STEP, MODEL = "rest of the step", "rest of the model"


class Clock:
    """Adds up the CPU-seconds of the functions that it times, by kind. Time within a function that another one calls
    counts only for the inner function."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._within = 0.0  # of the functions that the one that runs has called so far

    def time(self, owner: Any, name: str, kind: str) -> None:
        """Time the function that an object has by this name."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self._within = self._within, 0.0
            started = time.thread_time()
            result = function(*args, **kwargs)
            seconds = time.thread_time() - started
            self.seconds[kind] += seconds - self._within
            self._within = before + seconds
            return result

        setattr(owner, name, timed)


@dataclass(frozen=True)
class Profile:
    """seconds: of each step, by kind."""

    num_sequences: int
    seconds: dict[str, list[float]]

    def micros(self) -> dict[str, float]:
        return {kind: 1e6 * median(seconds) for kind, seconds in self.seconds.items()}


def time_engine(engine: LLMEngine) -> Clock:
    """Linear layers are told apart by name, other layers by what they are."""
    clock, runner = Clock(), engine.model_runner
    for name, module in runner.model.named_modules():
        if not any(module.children()):
            is_linear = "Linear" in type(module).__name__
            clock.time(module, "forward", name.rpartition(".")[2] if is_linear else type(module).__name__)
        if hasattr(module, "activation"):
            clock.time(module, "activation", "activation")
    clock.time(ops, "paged_attention", "attention")
    clock.time(ops, "reshape_and_cache", "cache writes")
    clock.time(runner.model, "forward", MODEL)
    clock.time(runner.sampler, "sample", "sampler")
    clock.time(runner, "prepare_inputs", "inputs")
    clock.time(engine.scheduler, "schedule", "scheduler")
    clock.time(engine._requests, "append_tokens", "outputs")
    clock.time(engine, "step", STEP)
    return clock


def start_requests(engine: LLMEngine, num_sequences: int, context: int, num_tokens: int) -> None:
    """Each has `context` tokens in the cache afterwards, and one of output."""
    model, rng = engine.model_runner.model, numpy.random.default_rng(0)

    def no_logits(token_ids: Tensor, positions: Tensor, kv_caches: object, metadata: Any) -> Tensor:
        return torch.zeros(len(metadata.sampling_rows), model.vocab_size, dtype=model.dtype)

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i in range(num_sequences):
        prompt = rng.integers(model.vocab_size, size=context).tolist()
        engine.add_request(str(i), None, params, prompt)
    forward, model.forward = model.forward, no_logits
    engine.step()
    model.forward = forward


def profile(engine: LLMEngine, clock: Clock, num_sequences: int, context: int, num_steps: int) -> Profile:
    start_requests(engine, num_sequences, context, NUM_WARM_UP_STEPS + num_steps + 1)
    steps = []
    for _ in range(NUM_WARM_UP_STEPS + num_steps):
        clock.seconds.clear()
        num_outputs = len(engine.step())
        if num_outputs != num_sequences:
            raise RuntimeError(f"{num_outputs} sequences in the step instead of {num_sequences}")
        steps.append(dict(clock.seconds))
    measured = steps[NUM_WARM_UP_STEPS:]
    return Profile(num_sequences, {kind: [step[kind] for step in measured] for kind in measured[0]})


def print_profiles(profiles: Sequence[Profile]) -> None:
    """Microseconds of a step, and shares of it."""
    columns = [profile.micros() for profile in profiles]
    header = [cell for each in profiles for cell in (f"{each.num_sequences} at once, us", "share")]
    table = [["CPU time of a step", *header]]
    totals = [sum(column.values()) for column in columns]
    for kind in columns[0]:
        cells = []
        for column, total in zip(columns, totals, strict=True):
            cells += [f"{column[kind]:.0f}", f"{column[kind] / total:.1%}"]
        table.append([kind, *cells])
    table.append(["all", *(cell for total in totals for cell in (f"{total:.0f}", ""))])
    print_table(table)


def plot_profiles(path: Path, title: str, profiles: Sequence[Profile]) -> None:
    """Bars of the shares, a colour for each number of sequences."""
    shares = {
        f"{each.num_sequences} at once": {kind: us / sum(each.micros().values()) for kind, us in each.micros().items()}
        for each in profiles
    }
    figure, axes = draw_bars(shares, "{:.1%}")
    axes.set_xlabel("share of a step's CPU time")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=120)


def longest_of_profile(args: argparse.Namespace) -> int:
    """Tokens that a sequence has in the end."""
    return args.context + NUM_WARM_UP_STEPS + args.rounds + 1


def limits_of_profile(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of LLMEngine: room for all sequences at once, and all of their prompts in one step; no CPU graphs."""
    most, longest = max(args.sequences), longest_of_profile(args)
    num_blocks = most * -(-longest // BLOCK_SIZE)
    return {
        "max_model_len": longest,
        "max_num_seqs": most,
        "max_num_batched_tokens": most * args.context,
        "num_blocks": num_blocks + num_blocks // 50 + 1,  # new requests must leave a hundredth of the blocks free
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }


def run_profile(args: argparse.Namespace, facts: dict[str, object], engine: LLMEngine) -> None:
    """The command `profile`, with an engine of those limits."""
    for kv_cache in engine.model_runner.cache_engine.kv_caches:
        kv_cache.key_cache.normal_()
        kv_cache.value_cache.normal_()
    clock = time_engine(engine)
    print(f"one token for each sequence, with {args.context} in the cache; medians of {args.rounds} steps")
    profiles = [profile(engine, clock, num_sequences, args.context, args.rounds) for num_sequences in args.sequences]
    print_profiles(profiles)
    raw = [{"num_sequences": each.num_sequences, "seconds": each.seconds} for each in profiles]
    write_files(args, facts, partial(plot_profiles, profiles=profiles), {"profiles": raw})
