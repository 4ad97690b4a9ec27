"""The clock: requests arrive, and steps of replicas end. Nothing else moves the time."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Protocol

from pagedattn_serve.simulation.cost_model import StepWork
from pagedattn_serve.simulation.metrics import Metrics, Summary
from pagedattn_serve.simulation.systems.system import System
from pagedattn_serve.simulation.workload import SimulatedRequest


class Routing(Protocol):
    """Which replica gets a request, and what the choice depends on. `async_engine.router.Router` is one."""

    def add(self, key: int, prompt: list[int], cache_salt: str) -> int: ...
    def begin(self, key: int) -> None: ...
    def end(self, key: int) -> None: ...


class Simulator:
    """seconds_of: a step's time, from its work. replicas: of one system each."""

    def __init__(self, replicas: Sequence[System], routing: Routing, seconds_of: Callable[[StepWork], float]) -> None:
        self._replicas = replicas
        self._routing = routing
        self._seconds_of = seconds_of
        self._is_stepping = [False] * len(replicas)
        self._events: list[tuple[float, int, int]] = []  # when, a number, and the replica whose step ends
        self._order = count()  # events at the same time come in the order in which they were planned
        self._keys: dict[SimulatedRequest, int] = {}  # of unfinished requests, for the routing
        self._metrics = Metrics()
        self._step_seconds = [0.0] * len(replicas)

    def run(self, requests: Iterable[SimulatedRequest]) -> Summary:
        """requests: in order of arrival. Returns when all are over. Raises ValueError for one that no replica can ever
        serve."""
        for key, request in enumerate(requests):
            while self._events and self._events[0][0] <= request.arrival:
                self._end_step()
            self._keys[request] = key
            replica = self._routing.add(key, request.prompt_token_ids, "")
            self._replicas[replica].add(request)
            if not self._is_stepping[replica]:
                self._begin_step(request.arrival, replica)
        while self._events:
            self._end_step()
        return self._metrics.summary(sum(each.num_preemptions for each in self._replicas))

    def _begin_step(self, now: float, replica: int) -> None:
        system = self._replicas[replica]
        work = system.begin_step()
        self._is_stepping[replica] = work is not None
        if work is None:
            return
        seconds = self._step_seconds[replica] = self._seconds_of(work)
        if self._metrics.begin_step(seconds, system.num_running, system.num_waiting):
            self._metrics.look_at_memory(seconds, system.memory(), system.num_waiting)
        heapq.heappush(self._events, (now + seconds, next(self._order), replica))

    def _end_step(self) -> None:
        now, _, replica = heapq.heappop(self._events)
        result = self._replicas[replica].end_step(self._step_seconds[replica])
        self._metrics.end_step(now, result)
        for request in result.got_tokens:
            if request.first_token == now:
                self._routing.begin(self._keys[request])
        for request in result.finished:
            self._routing.end(self._keys.pop(request))
        self._begin_step(now, replica)
