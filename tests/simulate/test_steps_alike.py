"""Steps that are alike are taken together: whatever happens must be what happens where each is taken by itself."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from random import Random
from typing import Any

import pytest
from simulated import HARDWARE, SHAPE, routing, scheduler_config

from pagedattn_serve.config import CacheConfig
from pagedattn_simulate.cost_model import CostModel, StepWork
from pagedattn_simulate.metrics import Summary
from pagedattn_simulate.simulator import Simulator
from pagedattn_simulate.systems.faster_transformer import FasterTransformerSystem
from pagedattn_simulate.systems.orca import RESERVATIONS, OrcaSystem
from pagedattn_simulate.systems.paged import PagedSystem
from pagedattn_simulate.systems.system import System
from pagedattn_simulate.workload import SimulatedBeams, SimulatedRequest

NUM_REQUESTS = 60
NUM_SLOTS = 256


def paged(limits: dict[str, Any] | None = None, **cache: Any) -> PagedSystem:
    block_size = cache.pop("block_size", 8)
    blocks = NUM_SLOTS // block_size
    return PagedSystem(scheduler_config(**limits or {}), CacheConfig(num_blocks=blocks, block_size=block_size, **cache))


SYSTEMS: dict[str, Callable[[], System]] = {
    "prefix caching": paged,
    "no prefix caching": lambda: paged(enable_prefix_caching=False),
    "blocks of 16": lambda: paged(block_size=16),
    "blocks of 32": lambda: paged(block_size=32, enable_prefix_caching=False),
    "swapping": lambda: paged({"preemption_mode": "swap"}, num_host_blocks=20),
    "priority": lambda: paged({"policy": "priority"}),
    "small steps": lambda: paged({"max_num_batched_tokens": 24, "max_num_seqs": 12}),
    "steps that leave some out": lambda: paged({"max_num_batched_tokens": 6, "max_num_seqs": 6}),
    "long prompts": lambda: paged({"max_num_batched_tokens": 16, "max_num_seqs": 10}),
    **{each: (lambda each=each: OrcaSystem(scheduler_config(), NUM_SLOTS, each)) for each in RESERVATIONS},
    "fastertransformer": lambda: FasterTransformerSystem(scheduler_config(), NUM_SLOTS),
}


class Counted:
    """A system, whose steps are counted. If `alone`, each step is taken by itself, and scheduled by the engine."""

    def __init__(self, system: System, alone: bool) -> None:
        self._system = system
        self._alone = alone
        self.num_ends = 0
        if alone and isinstance(system, PagedSystem):
            vars(system)["_goes_on"] = lambda batch: False

    def num_alike(self) -> int:
        return 0 if self._alone else self._system.num_alike()

    def end_step(self, seconds: float, num_steps: int = 1, growth: float = 0.0) -> Any:
        self.num_ends += 1
        return self._system.end_step(seconds, num_steps, growth)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)


def requests(interval: float, form: str, has_priorities: bool) -> Iterator[SimulatedRequest]:
    """Some prompts begin alike."""
    random = Random(0)
    arrival, token = 0.0, 1000
    for _ in range(NUM_REQUESTS):
        arrival += random.expovariate(1 / interval)
        num_prompt, num_output = random.randint(1, 30), random.randint(1, 30)
        prompt = [*range(random.choice((0, 9, 20))), *range(token, token + num_prompt)][:33]
        token += num_prompt
        beams = SimulatedBeams(3, num_output, random.getrandbits(60)) if form == "beams" else None
        num_sequences = 1 if form == "one output" else 3
        priority = random.randint(0, 2) if has_priorities else 0
        yield SimulatedRequest(arrival, prompt, num_output, num_sequences, priority, beams)


def run(name: str, interval: float, form: str, alone: bool) -> tuple[Summary, list[SimulatedRequest], int]:
    """Also the requests in the order of their ends, and how often steps were taken. What has few tokens goes on: a
    prompt begins with prompt and output of a request that is over, which a cache of prefixes has in part. Systems that
    only count tokens have no outputs to go on from."""
    ended: list[SimulatedRequest] = []

    def end(request: SimulatedRequest) -> SimulatedRequest | None:
        ended.append(request)
        said = [*request.prompt_token_ids, *request.output_token_ids, len(ended)]
        if form != "one output" or len(said) > 40 or not request.output_token_ids:
            return None
        assert request.finished is not None
        return SimulatedRequest(request.finished + interval, said, 7)

    def seconds_of(work: StepWork) -> float:
        return 0.010003 * CostModel(SHAPE, HARDWARE).seconds(work)  # no time lies just between two microseconds

    systems = [Counted(SYSTEMS[name](), alone) for _ in range(2)]
    made = requests(interval, form, name == "priority")
    summary = Simulator(systems, routing(2), seconds_of).run(made, end)
    return summary, ended, sum(system.num_ends for system in systems)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *product(SYSTEMS, ("one output", "samples")),
        *product(("prefix caching", "oracle", "fastertransformer"), ("beams",)),
    ],
)
def test_together_as_one_by_one(name: str, form: str) -> None:
    """Requests that come one by one, and all at once: each has its tokens at the same times, and the summaries are
    the same but for the rounding of sums. Catches steps that are taken together although a request has come, an output
    is done, a block is missing or somebody waits who could go on; and blocks that are not filled, found or given back
    as in single steps."""
    for interval in (3e-4, 1e-9):
        alike, ended, num_ends = run(name, interval, form, alone=False)
        alone, ended_alone, num_steps = run(name, interval, form, alone=True)
        assert len(ended) >= NUM_REQUESTS and num_steps == alone.num_steps
        if form == "beams":
            assert num_ends == num_steps
        elif name != "steps that leave some out":
            assert num_ends < num_steps
        for one, other in zip(ended, ended_alone, strict=True):
            times = (other.arrival, other.first_token, other.last_token)
            assert (one.arrival, one.first_token, one.last_token) == pytest.approx(times, rel=1e-9)
            assert len(one.output_token_ids) == len(other.output_token_ids)
            assert one.has_failed == other.has_failed
        for field in fields(Summary):
            assert as_numbers(getattr(alike, field.name)) == pytest.approx(as_numbers(getattr(alone, field.name)))


def as_numbers(value: Any) -> Any:
    return vars(value) if hasattr(value, "__dict__") else value
