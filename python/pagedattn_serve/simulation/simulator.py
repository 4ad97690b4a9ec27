"""The clock: requests arrive, and steps of replicas end. Nothing else moves the time."""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from pagedattn_serve.simulation.cost_model import StepWork
from pagedattn_serve.simulation.metrics import MEMORY_EVERY, Metrics, Summary
from pagedattn_serve.simulation.systems.system import System
from pagedattn_serve.simulation.workload import SimulatedRequest


class Routing(Protocol):
    """Which replica gets a request, and what the choice depends on. `async_engine.router.Router` is one."""

    def add(self, key: int, prompt: list[int], cache_salt: str) -> int: ...
    def begin(self, key: int) -> None: ...
    def end(self, key: int) -> None: ...


@dataclass(slots=True)
class _Replica:
    """ends: when the step that runs will end, and the steps that are sure to follow it alike; empty if nothing runs.
    seconds: of each of these steps.
    event: number of the event at the end of the last of them.
    num_steps: that have ended.
    """

    system: System
    ends: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    event: int = -1
    num_steps: int = 0


class Simulator:
    """replicas: of one system each. seconds_of: the time of a step, from its work."""

    def __init__(self, replicas: Sequence[System], routing: Routing, seconds_of: Callable[[StepWork], float]) -> None:
        self._replicas = [_Replica(system) for system in replicas]
        self._routing = routing
        self._seconds_of = seconds_of
        # When, a number, and what: a request that arrives, or the replica whose steps end. Events at the same time come
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
        return self._metrics.summary([replica.system for replica in self._replicas])

    def _next_event(self, follow_up: Callable[[SimulatedRequest], SimulatedRequest | None]) -> None:
        now, number, event = heapq.heappop(self._events)
        if isinstance(event, SimulatedRequest):
            self._arrive(event)
            return
        replica = self._replicas[event]
        if number != replica.event:  # a request came, and the steps end earlier
            return
        for request in self._end_steps(replica):
            next_request = follow_up(request)
            if next_request is not None:
                heapq.heappush(self._events, (next_request.arrival, next(self._order), next_request))
        self._begin_steps(now, event)

    def _arrive(self, request: SimulatedRequest) -> None:
        key = self._keys[request] = next(self._next_key)
        index = self._routing.add(key, request.prompt_token_ids, "")
        replica = self._replicas[index]
        replica.system.add(request)
        if not replica.ends:
            self._begin_steps(request.arrival, index)
            return
        num_steps = bisect_right(replica.ends, request.arrival) + 1  # with the one that runs now
        if num_steps < len(replica.ends):
            del replica.ends[num_steps:], replica.seconds[num_steps:]
            self._plan_end(index)

    def _begin_steps(self, now: float, index: int) -> None:
        """Begin a step. Steps that are sure to be like it are planned with it."""
        replica = self._replicas[index]
        system = replica.system
        work = system.begin_step()
        replica.ends, replica.seconds = [], []
        if work is None:
            return
        self._metrics.begin_step(system.num_waiting)
        num_steps_until_look = MEMORY_EVERY - replica.num_steps % MEMORY_EVERY
        for i in range(min(1 + system.num_alike(), num_steps_until_look)):
            if i > 0:
                work.go_on()
            seconds = self._seconds_of(work)
            now += seconds
            replica.ends.append(now)
            replica.seconds.append(seconds)
        if num_steps_until_look == MEMORY_EVERY:
            self._metrics.look_at_memory(replica.seconds[0], system.memory(), system.num_waiting)
        self._plan_end(index)

    def _plan_end(self, index: int) -> None:
        replica = self._replicas[index]
        replica.event = next(self._order)
        heapq.heappush(self._events, (replica.ends[-1], replica.event, index))

    def _end_steps(self, replica: _Replica) -> list[SimulatedRequest]:
        """Returns the requests that are over."""
        num_running = replica.system.num_running
        result = replica.system.end_step(*replica.seconds)
        replica.num_steps += len(replica.ends)
        for request in self._metrics.end_steps(replica.ends, replica.seconds, num_running, result):
            self._routing.begin(self._keys[request])
        for request in result.finished:
            self._routing.end(self._keys.pop(request))
        return result.finished
