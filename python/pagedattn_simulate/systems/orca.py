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
from pagedattn_simulate.cost_model import StepWork
from pagedattn_simulate.systems.system import Memory, Row, StepResult
from pagedattn_simulate.workload import SimulatedRequest

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


class BuddyAllocator:
    """Ranges of adjacent slots, by the buddy system (Knowlton, 1965).

    A range of 2^k slots begins at a multiple of 2^k. A range that is too large is split into two buddies; when both
    buddies are free, they are one range again. What is not a power of two at the end of the memory is ranges of its
    own.

    smallest: slots of the smallest range, a power of two.
    """

    def __init__(self, num_slots: int, smallest: int = 1) -> None:
        self.num_slots = num_slots
        self._smallest = smallest
        self.num_free_slots = num_slots
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]  # where ranges begin, by exponent
        self._taken: dict[int, int] = {}  # exponent, by where the range begins
        begin = 0
        for exponent in reversed(range(num_slots.bit_length())):
            if num_slots & (1 << exponent):
                self._free[exponent].add(begin)
                begin += 1 << exponent

    def size_of(self, num_slots: int) -> int:
        """Slots of the range that so many slots take."""
        return max(next_power_of_two(num_slots), self._smallest)

    def allocate(self, num_slots: int) -> int | None:
        """Where a range of at least so many slots begins. None, with nothing changed, if no free range is as large."""
        wanted = self.size_of(num_slots).bit_length() - 1
        exponent = next((each for each in range(wanted, len(self._free)) if self._free[each]), None)
        if exponent is None:
            return None
        begin = min(self._free[exponent])  # the first, so that the same calls give the same ranges
        self._free[exponent].remove(begin)
        while exponent > wanted:
            exponent -= 1
            self._free[exponent].add(begin + (1 << exponent))
        self._taken[begin] = wanted
        self.num_free_slots -= 1 << wanted
        return begin

    def free(self, begin: int) -> None:
        """Give back the range that begins there. KeyError if none does."""
        exponent = self._taken.pop(begin)
        self.num_free_slots += 1 << exponent
        while exponent + 1 < len(self._free) and (buddy := begin ^ (1 << exponent)) in self._free[exponent]:
            self._free[exponent].remove(buddy)
            begin = min(begin, buddy)
            exponent += 1
        self._free[exponent].add(begin)


def next_power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()
