"""What the simulation asks of a system."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagedattn_simulate.cost_model import StepWork
from pagedattn_simulate.workload import SimulatedRequest


class Memory(NamedTuple):
    """What the slots of the cache are taken for, at one moment. A slot holds the keys and values of one token.

    used: hold tokens; slots of a shared block count once.
    reserved: kept for tokens that will come.
    internal: kept for tokens that will never come.
    free: not kept for anybody.
    saved: that sharing saves: if no block were shared, so many more would be taken.
    """

    used: int
    reserved: int
    internal: int
    free: int
    saved: int


class StepResult(NamedTuple):
    """After a step, or after several alike.

    got_tokens: requests, once for each output that got a token, in each of the steps; once for all beams.
    finished: requests that are over, with the last of the steps.
    num_going_on: outputs beside these that got a token in each of the steps, and in the step before the first.
    left: requests that were among these, and are not any more. They had a token in the step before the first.
    """

    got_tokens: list[SimulatedRequest]
    finished: list[SimulatedRequest]
    num_going_on: int = 0
    left: Sequence[SimulatedRequest] = ()


class Row(NamedTuple):
    """An output that a step runs, in a system that keeps adjacent slots for each output.

    output_idx: of the output within its request. first_slot, num_slots: that are kept for the output.
    """

    request: SimulatedRequest
    output_idx: int
    first_slot: int
    num_slots: int


class System(Protocol):
    """One replica. Call `begin_step`, let the time of its work pass, call `end_step`, and begin anew.

    A step of nothing but decodes is often followed by others of the same outputs. They may be taken together.
    """

    @property
    def num_preemptions(self) -> int:
        """Of requests, so far."""
        ...

    @property
    def num_looked_up_tokens(self) -> int:
        """Of prompts that were let in, so far, if there is a cache of prefixes."""
        ...

    @property
    def num_found_tokens(self) -> int:
        """Of these, how many were in the cache."""
        ...

    def add(self, request: SimulatedRequest) -> None:
        """Queue a request. Raises ValueError if it can never be served."""
        ...

    def begin_step(self) -> StepWork | None:
        """Choose what runs. None if there is nothing to do."""
        ...

    def num_alike(self) -> int:
        """After `begin_step`: how many more steps are sure to run the same outputs, with a token for each, and to give
        the same requests tokens, unless a request is added. Requests end with the last of them alone."""
        ...

    def end_step(self, seconds: float, num_steps: int = 1, growth: float = 0.0) -> StepResult:
        """What the step gave, and so many more steps, at most `num_alike`, that they are num_steps together. The first
        took `seconds`, and each of the others `growth` seconds more than the one before."""
        ...

    def memory(self, num_steps: int = 0) -> Memory:
        """Between `begin_step` and `end_step`: in this step, or so many steps after it, at most `num_alike`."""
        ...

    @property
    def num_running(self) -> int:
        """Requests that the step runs."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and do not run."""
        ...


class ReservingSystem(System, Protocol):
    """One that keeps adjacent slots for each output, so that its steps can run on a real cache."""

    def rows(self) -> list[Row]:
        """Between `begin_step` and `end_step`: what the step runs."""
        ...
