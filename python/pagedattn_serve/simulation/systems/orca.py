"""Orca (Yu et al., OSDI 2022) as Kwon et al. (SOSP 2023, section 6.1) built it to compare with: batches change at each
step, and each output has adjacent slots for all of its tokens from the start, by a buddy allocator.

How many slots an output has depends on what the system knows of its length:
- oracle: the true length; no real system knows it.
- pow2: the next power of two, at most twice too many.
- max: the longest that a sequence may become.

A prompt is computed whole, in the step that lets it in. Outputs of one prompt share nothing: each has the prompt too. A
beam that takes the place of another is copied whole.
"""

from collections import deque
from dataclasses import dataclass, field

from pagedattn_serve.config import SchedulerConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.simulation.cost_model import StepWork
from pagedattn_serve.simulation.systems.buddy_allocator import BuddyAllocator, next_power_of_two
from pagedattn_serve.simulation.systems.system import Memory, Row, StepResult
from pagedattn_serve.simulation.workload import SimulatedRequest

RESERVATIONS = ("oracle", "pow2", "max")


@dataclass(slots=True)
class _Running:
    """ranges: where the slots of each output begin. num_output_tokens: that each output has so far.
    num_copies: beams that are copied into the slots of others before the next step."""

    request: SimulatedRequest
    ranges: list[int] = field(default_factory=list)
    num_output_tokens: int = 0
    num_copies: int = 0


class OrcaSystem:
    """reservation: one of RESERVATIONS. block_size: the least that is reserved, a power of two: for a real cache, whose
    blocks are not cut."""

    num_preemptions = 0  # who runs has all slots that it will need
    num_looked_up_tokens = num_found_tokens = 0

    def __init__(self, config: SchedulerConfig, num_slots: int, reservation: str, block_size: int = 1) -> None:
        self._config = config
        self._reservation = reservation
        self._block_size = block_size
        self._allocator = BuddyAllocator(num_slots, block_size)
        self._waiting: deque[SimulatedRequest] = deque()
        self._running: list[_Running] = []
        self._has_prompts = False  # in the step

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def num_reserved(self, request: SimulatedRequest) -> int:
        """Slots that are asked for, for each output."""
        if self._reservation == "max":
            return self._config.max_model_len
        num_output = request.num_output_tokens
        if self._reservation == "pow2":
            num_output = next_power_of_two(num_output)
        return min(len(request.prompt_token_ids) + num_output, self._config.max_model_len)

    def add(self, request: SimulatedRequest) -> None:
        largest = BuddyAllocator(self._allocator.num_slots, self._block_size)
        reserved = [largest.allocate(self.num_reserved(request)) for _ in range(request.num_sequences)]
        if None in reserved or request.num_sequences > self._config.max_num_seqs:
            expected = f"what {self._allocator.num_slots} slots and {self._config.max_num_seqs} sequences have room for"
            raise ArgumentError("request", expected, f"{request.num_sequences} x {self.num_reserved(request)} slots")
        self._waiting.append(request)

    def begin_step(self) -> StepWork | None:
        if not self._running and not self._waiting:
            return None
        work = StepWork()
        for running in self._running:
            num_keys = len(running.request.prompt_token_ids) + running.num_output_tokens
            work.num_copied_tokens += running.num_copies * (num_keys - 1)
            work.add_decodes(len(running.ranges), len(running.ranges) * num_keys)
        while self._waiting:
            request = self._waiting[0]
            if work.num_sequences + request.num_sequences > self._config.max_num_seqs:
                break
            num_tokens = work.num_tokens + request.num_sequences * len(request.prompt_token_ids)
            # The first prompt of a step runs, however long it is.
            if work.num_prefill_keys and num_tokens > self._config.max_num_batched_tokens:
                break
            ranges = self._allocate(request)
            if ranges is None:
                break
            self._running.append(_Running(self._waiting.popleft(), ranges))
            for _ in ranges:
                work.add_prompt(0, len(request.prompt_token_ids), num_samples=1)
        self._has_prompts = work.num_prefill_keys > 0
        return work

    def _allocate(self, request: SimulatedRequest) -> list[int] | None:
        """A range for each output, or none at all."""
        ranges: list[int] = []
        for _ in range(request.num_sequences):
            begin = self._allocator.allocate(self.num_reserved(request))
            if begin is None:
                for each in ranges:
                    self._allocator.free(each)
                return None
            ranges.append(begin)
        return ranges

    def rows(self) -> list[Row]:
        return [
            Row(running.request, index, begin, self._allocator.size_of(self.num_reserved(running.request)))
            for running in self._running
            for index, begin in enumerate(running.ranges)
        ]

    def num_alike(self) -> int:
        if self._has_prompts or any(running.request.beams for running in self._running):
            return 0  # without prompts, the first request that waits finds no room until another one ends
        return min(each.request.num_output_tokens - each.num_output_tokens for each in self._running) - 1

    def end_step(self, seconds: float, num_steps: int = 1, growth: float = 0.0) -> StepResult:
        got_tokens: list[SimulatedRequest] = []
        going_on: list[_Running] = []
        finished: list[SimulatedRequest] = []
        for running in self._running:
            request = running.request
            running.num_output_tokens += num_steps
            got_tokens += [request] * (1 if request.beams else len(running.ranges))
            if running.num_output_tokens < request.num_output_tokens:
                if request.beams is not None:
                    num_copies = request.beams.num_copies()
                    running.num_copies = num_copies if running.num_output_tokens > 1 else 0  # all have the prompt
                going_on.append(running)
                continue
            finished.append(request)
            for begin in running.ranges:
                self._allocator.free(begin)
        self._running = going_on
        return StepResult(got_tokens, finished)

    def memory(self, num_steps: int = 0) -> Memory:
        used = reserved = 0
        for running in self._running:
            num_outputs = len(running.ranges)
            num_output = running.num_output_tokens + num_steps
            used += num_outputs * (len(running.request.prompt_token_ids) + num_output)
            reserved += num_outputs * (running.request.num_output_tokens - num_output)
        taken = self._allocator.num_slots - self._allocator.num_free_slots
        return Memory(used, reserved, taken - used - reserved, self._allocator.num_free_slots, saved=0)
