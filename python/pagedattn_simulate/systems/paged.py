"""This engine: its own scheduler and block manager, with a runner that only counts.

Where steps are sure to be alike, the scheduler decides the first of them alone, and their sequences become steady
decodes (`steady_decodes.py`), with the block manager's own methods. That the results are the same is tested
(`tests/simulate/test_steps_alike.py`).
"""

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.scheduling.prompt_pace import NUM_MEASURED
from pagedattn_serve.scheduling.sequence import ScheduledBatch, Sequence, SequenceGroup, SequenceRules, SequenceStatus
from pagedattn_simulate.cost_model import StepWork
from pagedattn_simulate.systems.steady_decodes import SteadyScheduler
from pagedattn_simulate.systems.system import Memory, StepResult
from pagedattn_simulate.workload import SimulatedBeams, SimulatedRequest


class PagedSystem:
    """No two outputs draw the same token. Outputs end at their known length."""

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self._scheduler = SteadyScheduler(scheduler_config, cache_config)
        self._steady = self._scheduler.steady
        self._block_size = cache_config.block_size
        self._requests: dict[str, tuple[SimulatedRequest, SequenceGroup]] = {}  # unfinished
        self._batch = ScheduledBatch()
        self._num_added = 0
        # Who finds no room waits until somebody ends. The blocks that are filled meanwhile are no help: they hold new
        # tokens, which no prompt has. With priorities, who waits may make others give up their blocks.
        self._waits_for_an_end = scheduler_config.policy == "fcfs"
        self._num_searches = 0  # beam searches, unfinished
        # Of the step: whether all of its outputs are steady, and the requests of those that became so with it; and how
        # many were steady before.
        self._is_steady = False
        self._joined: list[SimulatedRequest] = []
        self._num_going_on = 0
        self._ended: list[SequenceGroup] = []  # in this step, with their requests still in `_requests`

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_recomputes + self._scheduler.num_swaps

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._scheduler.swapped)

    @property
    def num_looked_up_tokens(self) -> int:
        return self._scheduler.num_looked_up_tokens

    @property
    def num_found_tokens(self) -> int:
        return self._scheduler.num_found_tokens

    def add(self, request: SimulatedRequest) -> None:
        request_id = str(self._num_added)
        rules = SequenceRules(
            num_sequences=request.num_sequences,
            uses_beams=request.beams is not None,
            width_argument="n" if request.beams is None else "beam_width",
            max_tokens=request.num_output_tokens,
        )
        group = SequenceGroup(request_id, request.prompt_token_ids, rules, request.arrival, request.priority)
        self._scheduler.add(group)
        self._num_added += 1
        self._num_searches += request.beams is not None
        self._requests[request_id] = request, group

    def begin_step(self) -> StepWork | None:
        if not self._requests:
            return None
        self._batch = batch = self._scheduler.schedule()
        work = StepWork(
            num_copied_tokens=len(batch.blocks_to_copy) * self._block_size,
            num_swapped_tokens=(len(batch.blocks_to_swap_out) + len(batch.blocks_to_swap_in)) * self._block_size,
        )
        self._num_going_on = num_decodes = len(self._steady)
        num_keys, num_begun = self._steady.num_keys, 0
        for scheduled in batch.sequences:
            sequence = scheduled.sequence
            if scheduled.num_new_tokens == 1 == scheduled.num_samples:
                num_decodes += 1
                num_begun += len(sequence.output_token_ids) > 0
                num_keys += sequence.num_computed_tokens
            else:
                work.add_prompt(sequence.num_computed_tokens, scheduled.num_new_tokens, scheduled.num_samples)
        work.add_decodes(num_decodes, num_keys + num_decodes)
        self._is_steady = num_begun == len(batch.sequences) and self._goes_on(batch)
        self._joined = []
        if self._is_steady:
            for scheduled in batch.sequences:
                request, group = self._requests[scheduled.sequence.request_id]
                self._steady.join(request, group, scheduled.sequence)
                self._joined.append(request)
            batch.sequences.clear()
        return work

    def _goes_on(self, batch: ScheduledBatch) -> bool:
        """If all of the batch are decodes after their first token: whether the next steps run the same sequences."""
        if not batch.num_decodes or batch.has_copies or batch.preempted or batch.outgrown:
            return False
        if self._num_searches or (self.num_waiting and not self._waits_for_an_end):
            return False
        # Else some were left out: no budget, or a long prompt that pauses.
        return sum([len(group.sequences) for group in self._scheduler.not_steady()]) == len(batch.sequences)

    def num_alike(self) -> int:
        """As far as there are free blocks, too."""
        if not self._is_steady:
            return 0
        count, num_free = self._steady.num_left_steps - 1, self._scheduler.block_manager.num_free_blocks
        while count and self._steady.num_blocks_for(1, count) > num_free:
            count //= 2
        return count

    def end_step(self, seconds: float, num_steps: int = 1, growth: float = 0.0) -> StepResult:
        batch, steady = self._batch, self._steady
        for copies in (batch.blocks_to_swap_out, batch.blocks_to_swap_in, batch.blocks_to_copy):
            copies.clear()
        left, got_tokens, num_going_on = steady.take_left(), self._joined, self._num_going_on
        if self._is_steady:
            for number in range(max(0, num_steps - NUM_MEASURED), num_steps):  # nobody looks back at more of them
                self._scheduler.observe(batch, seconds + number * growth)
        else:
            self._scheduler.mark_computed(batch, seconds)
            got_tokens = self._add_tokens(batch)
        first_step = steady.num_steps
        steady.go_on(num_steps)
        for decode in steady.take_done():
            if decode.joined < first_step:
                num_going_on -= 1
                left.append(decode.request)
                got_tokens.append(decode.request)
            self._finish(decode.request, decode.group, decode.sequence)
        return StepResult(got_tokens, self._take_ended(), num_going_on, left)

    def _add_tokens(self, batch: ScheduledBatch) -> list[SimulatedRequest]:
        """Returns the requests that got tokens, once for each output."""
        scheduler = self._scheduler
        got_tokens: list[SimulatedRequest] = []
        searched = ""  # the beams of a request follow each other, and take a step together
        for scheduled in batch.sequences:
            request_id = scheduled.sequence.request_id
            if not scheduled.num_samples or request_id == searched:
                continue
            request, group = self._requests[request_id]
            if scheduled.num_samples == 1 and request.beams is None:
                got_tokens.append(request)
                outputs = [scheduled.sequence]
            elif request.beams is not None:
                searched = request_id
                got_tokens.append(request)
                outputs = self._step_beams(request, request.beams, group)
            else:
                forks = range(1, scheduled.num_samples)
                outputs = [scheduled.sequence]
                outputs += [scheduler.fork(group, scheduled.sequence, index) for index in forks]
                got_tokens += [request] * len(outputs)
            for output in outputs:
                output.output_token_ids.append(self._steady.new_token())
                if len(output.output_token_ids) == request.num_output_tokens:
                    self._finish(request, group, output)
        for group in batch.outgrown:
            self._requests[group.request_id][0].has_failed = True
            scheduler.abort(group.request_id)
            self._ended.append(group)
        return got_tokens

    def _finish(self, request: SimulatedRequest, group: SequenceGroup, output: Sequence) -> None:
        request.output_token_ids = output.output_token_ids
        self._scheduler.finish(group, output, SequenceStatus.FINISHED_LENGTH)
        if not group.sequences:
            self._ended.append(group)

    def _take_ended(self) -> list[SimulatedRequest]:
        """The requests that are over with this step, in order."""
        requests = []
        for group in sorted(self._ended, key=lambda group: group.order):
            request, _ = self._requests.pop(group.request_id)
            self._num_searches -= request.beams is not None
            requests.append(request)
        self._ended.clear()
        return requests

    def _step_beams(self, request: SimulatedRequest, beams: SimulatedBeams, group: SequenceGroup) -> list[Sequence]:
        """The beams that run on, without their new tokens. Before the last token, all do."""
        before = list(group.sequences)
        if len(before[0].output_token_ids) + 1 == request.num_output_tokens:
            return before
        running: list[Sequence] = []
        for parent in beams.step():
            sequence = before[parent]
            running.append(self._scheduler.fork(group, sequence, 0) if sequence in running else sequence)
        for sequence in before:
            if sequence not in running:
                self._scheduler.finish(group, sequence, SequenceStatus.FINISHED_STOPPED)
        group.sequences = running
        return list(running)

    def memory(self, num_steps: int = 0) -> Memory:
        manager, size = self._scheduler.block_manager, self._block_size
        never = self._steady.num_slots_never_used(num_steps)
        for group in self._scheduler.not_steady():
            num_request_tokens = self._requests[group.request_id][0].num_tokens
            for sequence in group.sequences:
                never += max(0, len(manager.block_table(sequence)) * size - num_request_tokens)
        used = manager.num_used_slots() + self._steady.num_slots_behind() + num_steps * len(self._steady)
        taken = (manager.num_used_blocks + self._steady.num_blocks_for(1, num_steps)) * size
        internal = min(never, taken - used)
        free = manager.num_blocks * size - taken
        saved = (manager.num_table_entries - manager.num_used_blocks) * size
        return Memory(used, taken - used - internal, internal, free, saved)
