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
    """replicas: of one system each. seconds_of: the time of a step, from its work."""

    def __init__(self, replicas: Sequence[System], routing: Routing, seconds_of: Callable[[StepWork], float]) -> None:
        self._replicas = replicas
        self._routing = routing
        self._seconds_of = seconds_of
        self._step_seconds: list[float | None] = [None] * len(replicas)  # of the step that runs
        # When, a number, and what: a request that arrives, or the replica whose step ends. Events at the same time come
        # in the order in which they were planned.
        self._events: list[tuple[float, int, SimulatedRequest | int]] = []
        self._order = count()
        self._keys: dict[SimulatedRequest, int] = {}  # of unfinished requests, for the routing
        self._next_key = count()
        self._metrics = Metrics()

    def run(
        self,
        requests: Iterable[SimulatedRequest],
        follow_up: Callable[[SimulatedRequest], SimulatedRequest | None] = lambda request: None,
    ) -> Summary:
        """Returns when all requests are over. Raises ValueError for a request that no replica can ever serve.

        requests: in order of arrival. They are taken one by one, as their time comes.
        follow_up: the request that comes because this one is over, at once or later. For instance, the next turn of a
            conversation.
        """
        for request in requests:
            while self._events and self._events[0][0] <= request.arrival:
                self._next_event(follow_up)
            self._arrive(request)
        while self._events:
            self._next_event(follow_up)
        return self._metrics.summary(self._replicas)

    def _next_event(self, follow_up: Callable[[SimulatedRequest], SimulatedRequest | None]) -> None:
        now, _, event = heapq.heappop(self._events)
        if isinstance(event, SimulatedRequest):
            self._arrive(event)
            return
        for request in self._end_step(now, event):
            next_request = follow_up(request)
            if next_request is not None:
                heapq.heappush(self._events, (next_request.arrival, next(self._order), next_request))
        self._begin_step(now, event)

    def _arrive(self, request: SimulatedRequest) -> None:
        key = self._keys[request] = next(self._next_key)
        replica = self._routing.add(key, request.prompt_token_ids, "")
        self._replicas[replica].add(request)
        if self._step_seconds[replica] is None:
            self._begin_step(request.arrival, replica)

    def _begin_step(self, now: float, replica: int) -> None:
        system = self._replicas[replica]
        work = system.begin_step()
        if work is None:
            self._step_seconds[replica] = None
            return
        seconds = self._step_seconds[replica] = self._seconds_of(work)
        if self._metrics.begin_step(seconds, system.num_running, system.num_waiting):
            self._metrics.look_at_memory(seconds, system.memory(), system.num_waiting)
        heapq.heappush(self._events, (now + seconds, next(self._order), replica))

    def _end_step(self, now: float, replica: int) -> list[SimulatedRequest]:
        """Returns the requests that are over."""
        seconds = self._step_seconds[replica]
        assert seconds is not None
        result = self._replicas[replica].end_step(seconds)
        self._metrics.end_step(now, result)
        for request in result.got_tokens:
            if request.first_token == now:
                self._routing.begin(self._keys[request])
        for request in result.finished:
            self._routing.end(self._keys.pop(request))
        return result.finished
