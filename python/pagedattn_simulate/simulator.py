"""The clock: requests arrive, and steps of replicas end. Nothing else moves the time."""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from pagedattn_simulate.cost_model import StepWork
from pagedattn_simulate.metrics import MEMORY_EVERY, Metrics, Steps, Summary
from pagedattn_simulate.systems.system import System
from pagedattn_simulate.workload import SimulatedRequest


class Routing(Protocol):
    """Which replica gets a request, and what the choice depends on. `async_engine.router.Router` is one."""

    def add(self, key: int, prompt: list[int], cache_salt: str) -> int: ...
    def begin(self, key: int) -> None: ...
    def end(self, key: int) -> None: ...


@dataclass(slots=True)
class _Replica:
    """steps: the step that runs, and the steps that are sure to follow it alike; None if nothing runs.
    event: number of the event at the end of the last of them.
    num_waiting: requests that waited when they began.
    num_steps: that have ended.
    """

    system: System
    steps: Steps | None = None
    event: int = -1
    num_waiting: int = 0
    num_steps: int = 0


class Simulator:
    """replicas: of one system each. seconds_of: the time of a step, from its work. In steps that differ in nothing but
    the keys of their decodes, it has to grow as these do: by the same time for each key."""

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
        for request in self._end_steps(replica, now):
            next_request = follow_up(request)
            if next_request is not None:
                heapq.heappush(self._events, (next_request.arrival, next(self._order), next_request))
        self._begin_steps(now, event)

    def _arrive(self, request: SimulatedRequest) -> None:
        key = self._keys[request] = next(self._next_key)
        index = self._routing.add(key, request.prompt_token_ids, "")
        replica = self._replicas[index]
        replica.system.add(request)
        steps = replica.steps
        if steps is None:
            self._begin_steps(request.arrival, index)
            return
        num_over = bisect_right(range(1, steps.count), request.arrival, key=steps.end)
        num_steps = num_over + 1  # with the one that runs now
        if num_steps < steps.count:
            steps.count = num_steps
            self._plan_end(index, steps)

    def _begin_steps(self, now: float, index: int) -> None:
        """Begin a step. Steps that are sure to be like it are planned with it."""
        replica = self._replicas[index]
        system = replica.system
        work = system.begin_step()
        if work is None:
            replica.steps = None
            return
        replica.num_waiting = system.num_waiting
        self._metrics.begin_step(replica.num_waiting)
        steps = replica.steps = Steps(now, self._seconds_of(work), 1 + system.num_alike())
        if steps.count > 1:
            work.go_on()
            steps.growth = self._seconds_of(work) - steps.seconds
        self._plan_end(index, steps)

    def _plan_end(self, index: int, steps: Steps) -> None:
        event = self._replicas[index].event = next(self._order)
        heapq.heappush(self._events, (steps.end(steps.count), event, index))

    def _end_steps(self, replica: _Replica, now: float) -> list[SimulatedRequest]:
        """Returns the requests that are over."""
        system, steps = replica.system, replica.steps
        assert steps is not None
        for number in range(-replica.num_steps % MEMORY_EVERY, steps.count, MEMORY_EVERY):
            self._metrics.look_at_memory(steps.seconds_of(number), system.memory(number), replica.num_waiting)
        replica.num_steps += steps.count
        num_running = system.num_running
        result = system.end_step(steps.seconds, steps.count, steps.growth)
        for request in self._metrics.end_steps(steps, now, num_running, result):
            self._routing.begin(self._keys[request])
        for request in result.finished:
            self._routing.end(self._keys.pop(request))
        return result.finished
