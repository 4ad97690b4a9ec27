"""What a simulation tells: latencies, batches, memory, money."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from pagedattn_simulate.systems.system import Memory, StepResult, System
from pagedattn_simulate.workload import SimulatedRequest

PERCENTILES = (50, 90, 99)
MEMORY_EVERY = 16  # steps of a replica; looking at all blocks takes longer than a step


@dataclass(frozen=True)
class Distribution:
    """Of seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """normalized_latency: seconds from the arrival to the end, over output tokens, of each request. Mean over requests.
    time_to_first_token, inter_token_latency: None if there was none.
    batch_size: requests in a step, and most_waiting: requests that waited at one time on one replica.
    memory: shares of the slots: used, reserved and internal as in `Memory`; external: free while a request waits;
        free: all other. Batch size and memory are means over the time in which steps ran.
    shared: of the slots that would be taken if no block were shared, the share that sharing saves.
    found: of the tokens of all prompts, the share that was found in the cache of prefixes.
    seconds: until the last request is over. tokens_per_second: of output.
    """

    num_requests: int
    num_failed: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    normalized_latency: Distribution | None
    time_to_first_token: Distribution | None
    inter_token_latency: Distribution | None
    batch_size: float
    most_waiting: int
    memory: dict[str, float]
    shared: float
    found: float
    num_preemptions: int
    num_steps: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Steps:
    """Steps one after the other, each of which takes `growth` seconds more than the one before.

    begin, seconds: of the first.
    """

    begin: float
    seconds: float
    count: int = 1
    growth: float = 0.0

    def end(self, num_steps: int) -> float:
        """When so many of the steps are over."""
        return self.begin + num_steps * (self.seconds + (num_steps - 1) / 2 * self.growth)

    def seconds_of(self, number: int) -> float:
        """Of the step before which so many are over."""
        return self.seconds + number * self.growth


@dataclass(slots=True)
class Metrics:
    """Takes what happens."""

    num_requests: int = 0
    num_failed: int = 0
    num_steps: int = 0
    num_output_tokens: int = 0
    most_waiting: int = 0
    last: float = 0.0
    _normalized: Counter[float] = field(default_factory=Counter)
    _first: Counter[float] = field(default_factory=Counter)
    _between: Counter[int] = field(default_factory=Counter)  # in microseconds: there are too many steps to keep each
    _batch_seconds: float = 0.0  # requests times seconds
    _seconds: float = 0.0  # of all steps
    _memory: Counter[str] = field(default_factory=Counter)  # slots times seconds

    def begin_step(self, num_waiting: int) -> None:
        self.most_waiting = max(self.most_waiting, num_waiting)

    def look_at_memory(self, seconds: float, memory: Memory, num_waiting: int) -> None:
        slots = memory._asdict()
        if num_waiting:
            slots["external"] = slots.pop("free")
        for kind, num_slots in slots.items():
            self._memory[kind] += num_slots * seconds

    def end_steps(self, steps: Steps, now: float, num_running: int, result: StepResult) -> list[SimulatedRequest]:
        """Note the tokens of steps that are alike, and the requests that the last one ended, at this moment. Returns
        the requests with their first token."""
        self.last = now
        self.num_steps += steps.count
        seconds = now - steps.begin
        self._seconds += seconds
        self._batch_seconds += seconds * num_running
        num_tokens = len(result.got_tokens) + result.num_going_on  # in each step
        self.num_output_tokens += num_tokens * steps.count
        begun: list[SimulatedRequest] = []
        between = self._between
        num_after_step = num_tokens  # of the first step's tokens, those that come after a token of the step before
        begin = steps.begin
        for request in result.left:
            request.last_token = begin
        before: float | None = None
        previous = None
        for request in result.got_tokens:
            if request is not previous:  # the outputs of a request follow each other
                previous, before = request, request.last_token
                request.last_token = now
            if before == begin:
                continue
            num_after_step -= 1
            if before is not None:
                between[_micros(steps.end(1) - before)] += 1
            elif request.first_token is None:
                request.first_token = steps.end(1)
                self._first[request.first_token - request.arrival] += 1
                begun.append(request)
        if num_after_step:
            between[_micros(steps.seconds)] += num_after_step
        for number in range(1, steps.count):
            between[_micros(steps.seconds_of(number))] += num_tokens
        for request in result.finished:
            request.finished = now
            self._finish(request)
        return begun

    def _finish(self, request: SimulatedRequest) -> None:
        self.num_requests += 1
        assert request.finished is not None
        if request.has_failed:
            self.num_failed += 1
        else:
            self._normalized[(request.finished - request.arrival) / request.num_output_tokens] += 1

    def summary(self, systems: Sequence[System]) -> Summary:
        """systems: all replicas."""
        num_looked_up = sum(system.num_looked_up_tokens for system in systems)
        saved = self._memory.pop("saved", 0)
        taken = sum(self._memory[kind] for kind in ("used", "reserved", "internal"))
        slots = sum(self._memory.values())
        kinds = ("used", "reserved", "internal", "external", "free")
        return Summary(
            num_requests=self.num_requests,
            num_failed=self.num_failed,
            seconds=self.last,
            requests_per_second=self.num_requests / self.last if self.last else 0.0,
            tokens_per_second=self.num_output_tokens / self.last if self.last else 0.0,
            normalized_latency=distribution(self._normalized),
            time_to_first_token=distribution(self._first),
            inter_token_latency=distribution({micros / 1e6: count for micros, count in self._between.items()}),
            batch_size=self._batch_seconds / self._seconds if self._seconds else 0.0,
            most_waiting=self.most_waiting,
            memory={kind: self._memory[kind] / slots if slots else 0.0 for kind in kinds},
            shared=saved / (taken + saved) if saved else 0.0,
            found=sum(system.num_found_tokens for system in systems) / num_looked_up if num_looked_up else 0.0,
            num_preemptions=sum(system.num_preemptions for system in systems),
            num_steps=self.num_steps,
        )


def _micros(seconds: float) -> int:
    return int(seconds * 1e6 + 0.5)


def distribution(counts: Mapping[float, int]) -> Distribution | None:
    """Of values, each as often as it is counted."""
    if not counts:
        return None
    values = sorted(counts)
    ends = list(accumulate(counts[value] for value in values))
    total = ends[-1]
    percentiles = [values[bisect_left(ends, total * rank / 100)] for rank in PERCENTILES]
    return Distribution(sum(value * counts[value] for value in values) / total, *percentiles)
