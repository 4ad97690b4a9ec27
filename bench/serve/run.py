"""A timed run of the engine: its steps, the times of its requests, and their summary."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy
from harness import load_pyplot

import pagedattn_ext
from pagedattn_serve import EngineStats, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from serve.workloads import Request

FULL = 0.9  # a step with this share of the largest batch counts as full


@dataclass(frozen=True)
class Run:
    """What a system took for a list of requests, and the outputs of each, one after the other."""

    seconds: float
    cpu_seconds: float
    token_ids: list[list[int]]

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True)
class Step:
    end: float  # seconds after the start
    seconds: float
    host_seconds: float  # of the CPU, as other processes disturb the clock on the wall more
    batch_size: int
    num_waiting: int
    num_used_blocks: int
    num_unshared_blocks: int  # that the same sequences would hold if they shared none
    num_used_slots: int


@dataclass(frozen=True)
class RequestTimes:
    """Seconds after the start of the run."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrival: float
    first_token: float
    finished: float

    @property
    def normalized(self) -> float:
        return (self.finished - self.arrival) / self.num_output_tokens


@dataclass(frozen=True)
class ServedRun(Run):
    steps: list[Step]
    requests: list[RequestTimes]
    block_size: int
    before: EngineStats
    after: EngineStats

    @property
    def peak_used_blocks(self) -> int:
        return max(step.num_used_blocks for step in self.steps)

    @property
    def tokens_per_step(self) -> float:
        return self.num_output_tokens / len(self.steps)

    @property
    def shared_blocks(self) -> float:
        """Blocks saved by sharing, as a share of the blocks without sharing, over all steps."""
        return 1 - sum(s.num_used_blocks for s in self.steps) / sum(s.num_unshared_blocks for s in self.steps)

    @property
    def wasted_slots(self) -> float:
        """Slots not in use, as a share of the slots in used blocks, over all steps."""
        num_slots = sum(step.num_used_blocks for step in self.steps) * self.block_size
        return 1 - sum(step.num_used_slots for step in self.steps) / num_slots

    @property
    def used_slots(self) -> float:
        """Slots in use, as a share of all slots; mean of all steps."""
        return mean(step.num_used_slots for step in self.steps) / (self.after.num_blocks * self.block_size)

    @property
    def normalized_latency(self) -> float:
        """Seconds from a request's arrival to its end, for each of its tokens; mean of all requests."""
        return mean(times.normalized for times in self.requests)

    @property
    def mean_batch_size(self) -> float:
        return mean(step.batch_size for step in self.steps)

    @property
    def num_recomputes(self) -> int:
        return self.after.num_recomputes - self.before.num_recomputes

    @property
    def num_swaps(self) -> int:
        return self.after.num_swaps - self.before.num_swaps

    @property
    def prefix_hits(self) -> float:
        """Share of the prompt tokens that were found in the cache."""
        num_found = self.after.num_found_tokens - self.before.num_found_tokens
        return num_found / (self.after.num_prompt_tokens - self.before.num_prompt_tokens)


FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")  # of weights


def engine_options(weight_format: str) -> dict[str, str]:
    """Arguments of LLMEngine, which are options of `pagedattn serve` as well; int8 and int4 meet rows in bf16 where the
    CPU has instructions for it, in fp32 where it has not."""
    if weight_format in ("int8", "int4"):
        has_bfloat16 = pagedattn_ext.cpu_capability() in ("avx512_bf16", "amx")
        return {"dtype": "bfloat16" if has_bfloat16 else "float32", "quantization": weight_format}
    return {"dtype": weight_format}


Server = Callable[..., ServedRun]  # takes requests and, by name, more of SamplingParams


class ModelTimer:
    """Adds up the CPU-seconds of this thread that an engine spends in the model and the sampler."""

    def __init__(self, engine: LLMEngine) -> None:
        self.seconds = 0.0
        runner = engine.model_runner
        for owner, name in ((runner, "run_model"), (runner.sampler, "sample")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            result = function(*args, **kwargs)
            self.seconds += time.thread_time() - started
            return result

        return timed


def serve(
    engine: LLMEngine, timer: ModelTimer, requests: list[Request], *, temperature: float = 0, **sampling: Any
) -> ServedRun:
    """`sampling`: more of SamplingParams, the same for all requests."""
    outputs: dict[int, RequestOutput] = {}
    steps = []
    arriving = deque(enumerate(requests))
    before = engine.stats()
    cpu_started, started = time.process_time(), time.monotonic()
    while arriving or engine.has_unfinished_requests():
        now = time.monotonic() - started
        while arriving and arriving[0][1].arrival <= now:
            i, request = arriving.popleft()
            params = SamplingParams(
                temperature=temperature,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,  # as `LLM.generate` has it
                **sampling,
            )
            engine.add_request(str(i), None, params, request.prompt_token_ids, started + request.arrival)
        if not engine.has_unfinished_requests():
            time.sleep(arriving[0][1].arrival - now)
            continue
        timer.seconds, thread_started, step_started = 0.0, time.thread_time(), time.monotonic()
        finished = engine.step()
        ended, thread_seconds = time.monotonic(), time.thread_time() - thread_started
        outputs |= {int(output.request_id): output for output in finished}
        stats = engine.stats()
        steps.append(
            Step(
                end=ended - started,
                seconds=ended - step_started,
                host_seconds=thread_seconds - timer.seconds,
                batch_size=stats.num_running_sequences + sum(len(output.outputs) for output in finished),
                num_waiting=stats.num_waiting,
                num_used_blocks=stats.num_used_blocks,
                num_unshared_blocks=stats.num_blocks_without_sharing,
                num_used_slots=stats.num_used_slots,
            )
        )
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started

    times, token_ids = [], []
    for i in range(len(requests)):
        metrics = outputs[i].metrics
        moments = (metrics.arrival_time, metrics.first_token_time, metrics.finished_time)
        token_ids += [output.token_ids for output in outputs[i].outputs]
        lengths = (len(outputs[i].prompt_token_ids), len(token_ids[-1]))
        times.append(RequestTimes(*lengths, *(moment - started for moment in moments)))
    block_size = engine.scheduler.block_manager.block_size
    return ServedRun(seconds, cpu_seconds, token_ids, steps, times, block_size, before, engine.stats())


def warm_server(engine: LLMEngine) -> Server:
    server = partial(serve, engine, ModelTimer(engine))
    server([Request([0, 1, 2], 2)] * 2)
    return server


def percentiles(values: list[float], *ranks: int) -> dict[str, float | None]:
    """By rank ("p50"); None each where there is no value."""
    found = map(float, numpy.percentile(values, ranks)) if values else [None] * len(ranks)
    return {f"p{rank}": value for rank, value in zip(ranks, found, strict=True)}


def host_time(steps: list[Step]) -> dict[str, Any]:
    micros = [step.host_seconds * 1e6 for step in steps]
    per_sequence = [us / step.batch_size for us, step in zip(micros, steps, strict=True)]
    return {
        "num_steps": len(steps),
        "mean_batch_size": mean(step.batch_size for step in steps),
        "us": percentiles(micros, 50, 99),
        "us_per_sequence": percentiles(per_sequence, 50, 99),
    }


def summarize(run: ServedRun) -> dict[str, Any]:
    normalized = [times.normalized for times in run.requests]
    to_first = [times.first_token - times.arrival for times in run.requests]
    between = [(times.finished - times.first_token) / (times.num_output_tokens - 1) for times in run.requests]
    full = [step for step in run.steps if step.batch_size >= FULL * max(step.batch_size for step in run.steps)]
    return {
        "num_requests": len(run.requests),
        "num_output_tokens": run.num_output_tokens,
        "seconds": run.seconds,
        "tokens_per_s": run.num_output_tokens / run.seconds,
        "requests_per_s": len(run.requests) / run.seconds,
        "tokens_per_cpu_s": run.num_output_tokens / run.cpu_seconds,
        "normalized_latency_s": {"mean": mean(normalized), **percentiles(normalized, 50, 99)},
        "ttft_s": percentiles(to_first, 50, 90, 99),
        "tpot_s": percentiles(between, 50, 90, 99),
        "host": {"all steps": host_time(run.steps), "full steps": host_time(full)},
        "peak_used_blocks": run.peak_used_blocks,
        "num_blocks": run.after.num_blocks,
        "wasted_slots": run.wasted_slots,
        "num_preemptions": run.num_recomputes + run.num_swaps,
    }


def print_summary(summary: dict[str, Any]) -> None:
    def show(values: dict[str, float], scale: int, digits: int) -> str:
        return ", ".join(f"{name} {value * scale:.{digits}f}" for name, value in values.items())

    lines = {
        "throughput": f"{summary['tokens_per_s']:.0f} tokens/s, {summary['requests_per_s']:.2f} requests/s, "
        f"{summary['tokens_per_cpu_s']:.0f} tokens per CPU-second; {summary['seconds']:.1f} s",
        "normalized latency": f"{show(summary['normalized_latency_s'], 1, 4)} s per output token",
        "first token": f"{show(summary['ttft_s'], 1000, 0)} ms",
        "each later token": f"{show(summary['tpot_s'], 1000, 2)} ms",
    }
    for name, host in summary["host"].items():
        lines[f"host, {name}"] = (
            f"{show(host['us'], 1, 0)} us a step; {show(host['us_per_sequence'], 1, 1)} us a sequence; "
            f"{host['num_steps']} steps, mean batch {host['mean_batch_size']:.1f}"
        )
    lines["cache"] = (
        f"peak {summary['peak_used_blocks']} of {summary['num_blocks']} blocks; of the slots in used blocks "
        f"{summary['wasted_slots']:.1%} wasted; {summary['num_preemptions']} preemptions"
    )
    print()
    for name, text in lines.items():
        print(f"{name:20}{text}")


def plot_run(path: Path, title: str, run: ServedRun) -> None:
    """Batch, queue and cache over time."""
    panels = {
        "sequences in the step": [step.batch_size for step in run.steps],
        "requests waiting": [step.num_waiting for step in run.steps],
        "blocks in use, %": [100 * step.num_used_blocks / run.after.num_blocks for step in run.steps],
    }
    figure, rows = load_pyplot().subplots(len(panels), sharex=True, figsize=(9, 7), layout="constrained")
    for axes, (label, values) in zip(rows, panels.items(), strict=True):
        axes.plot([step.end for step in run.steps], values)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    rows[0].set_title(title, fontsize=8)
    rows[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=120)
