"""FasterTransformer with a dynamic batcher, as Kwon et al. (SOSP 2023, section 6.1) compare with: the earliest requests
become a batch, and the next batch begins when the longest output of this one is done.

The batch is padded: each row has the length of the longest prompt, and runs until the end. Each row has slots for the
longest sequence. The batch has as many rows as memory has room for. A request is told at the end of its batch.
"""

from collections import deque

from pagedattn_serve.config import SchedulerConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_simulate.cost_model import StepWork
from pagedattn_simulate.systems.system import Memory, Row, StepResult
from pagedattn_simulate.workload import SimulatedRequest


class FasterTransformerSystem:
    num_preemptions = num_looked_up_tokens = num_found_tokens = 0

    def __init__(self, config: SchedulerConfig, num_slots: int) -> None:
        self._num_slots = num_slots
        self._row_slots = config.max_model_len
        self._max_num_rows = min(num_slots // self._row_slots, config.max_num_seqs)
        self._waiting: deque[SimulatedRequest] = deque()
        self._batch: list[SimulatedRequest] = []
        self._num_copied_tokens = 0  # of beams, before the next step
        self._num_steps = 0  # of the batch: tokens that each row has so far

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: SimulatedRequest) -> None:
        if request.num_sequences > self._max_num_rows:
            expected = f"at most {self._max_num_rows} sequences, each with {self._row_slots} of {self._num_slots} slots"
            raise ArgumentError("request", expected, request.num_sequences)
        self._waiting.append(request)

    def begin_step(self) -> StepWork | None:
        if not self._batch:
            self._begin_batch()
        if not self._batch:
            return None
        work = StepWork(num_copied_tokens=self._num_copied_tokens)
        num_prompt = max(len(request.prompt_token_ids) for request in self._batch)
        num_rows = sum(request.num_sequences for request in self._batch)
        if self._num_steps > 0:
            work.add_decodes(num_rows, num_rows * (num_prompt + self._num_steps))
            return work
        for _ in range(num_rows):
            work.add_prompt(0, num_prompt, num_samples=1)
        return work

    def _begin_batch(self) -> None:
        num_rows = 0
        while self._waiting and num_rows + self._waiting[0].num_sequences <= self._max_num_rows:
            request = self._waiting.popleft()
            num_rows += request.num_sequences
            self._batch.append(request)
        self._num_steps = 0

    def rows(self) -> list[Row]:
        outputs = [(request, index) for request in self._batch for index in range(request.num_sequences)]
        return [Row(*output, row * self._row_slots, self._row_slots) for row, output in enumerate(outputs)]

    def num_alike(self) -> int:
        if self._num_steps == 0 or any(request.beams for request in self._batch):
            return 0
        num_left = [request.num_output_tokens - self._num_steps for request in self._batch]
        return min(each for each in num_left if each > 0) - 1

    def end_step(self, seconds: float, num_steps: int = 1, growth: float = 0.0) -> StepResult:
        self._num_steps += num_steps
        got_tokens: list[SimulatedRequest] = []
        self._num_copied_tokens = 0
        for request in self._batch:
            if self._num_steps <= request.num_output_tokens:
                got_tokens += [request] * (1 if request.beams else request.num_sequences)
            if request.beams is not None and self._num_steps < request.num_output_tokens:
                num_copies = request.beams.num_copies()
                if self._num_steps > 1:  # before, all have the prompt alone
                    self._num_copied_tokens += num_copies * (len(request.prompt_token_ids) + self._num_steps - 1)
        finished: list[SimulatedRequest] = []
        if self._num_steps >= max(request.num_output_tokens for request in self._batch):
            finished, self._batch = self._batch, []
        return StepResult(got_tokens, finished)

    def memory(self, num_steps: int = 0) -> Memory:
        used = reserved = num_rows = 0
        for request in self._batch:
            num_output = min(self._num_steps + num_steps, request.num_output_tokens)
            used += request.num_sequences * (len(request.prompt_token_ids) + num_output)
            reserved += request.num_sequences * (request.num_output_tokens - num_output)
            num_rows += request.num_sequences
        taken = num_rows * self._row_slots
        return Memory(used, reserved, taken - used - reserved, self._num_slots - taken, saved=0)
