"""This engine: its own scheduler and block manager, with a runner that only counts."""

from itertools import count

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.scheduling.batch import ScheduledBatch
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import Sequence, SequenceRules, SequenceStatus
from pagedattn_serve.scheduling.sequence_group import SequenceGroup
from pagedattn_serve.simulation.beams import SimulatedBeams
from pagedattn_serve.simulation.cost_model import StepWork
from pagedattn_serve.simulation.systems.system import Memory, StepResult
from pagedattn_serve.simulation.workload import SimulatedRequest


class PagedSystem:
    """Every token that is drawn is unique. Outputs end at their known length."""

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self._scheduler = Scheduler(scheduler_config, cache_config)
        self._block_size = cache_config.block_size
        self._requests: dict[str, tuple[SimulatedRequest, SequenceGroup]] = {}  # unfinished
        self._batch = ScheduledBatch()
        self._num_added = 0
        self._new_token = count(1 << 40)  # beyond the tokens of prompts

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
        self._requests[request_id] = request, group

    def begin_step(self) -> StepWork | None:
        if not self._requests:
            return None
        self._batch = batch = self._scheduler.schedule()
        work = StepWork(
            num_copied_tokens=len(batch.blocks_to_copy) * self._block_size,
            num_swapped_tokens=(len(batch.blocks_to_swap_out) + len(batch.blocks_to_swap_in)) * self._block_size,
        )
        for scheduled in batch.sequences:
            num_computed = scheduled.sequence.num_computed_tokens
            if scheduled.num_new_tokens == 1 and scheduled.num_samples == 1:
                work.add_decode(num_computed + 1)
            else:
                work.add_prompt(num_computed, scheduled.num_new_tokens, scheduled.num_samples)
        return work

    def end_step(self, seconds: float) -> StepResult:
        scheduler, batch = self._scheduler, self._batch
        for copies in (batch.blocks_to_swap_out, batch.blocks_to_swap_in, batch.blocks_to_copy):
            copies.clear()
        scheduler.mark_computed(batch, seconds)
        got_tokens: list[SimulatedRequest] = []
        finished: list[SimulatedRequest] = []
        searched = ""  # the beams of a request follow each other, and take a step together
        for scheduled in batch.sequences:
            request_id = scheduled.sequence.request_id
            if not scheduled.num_samples or request_id == searched:
                continue
            request, group = self._requests[request_id]
            if request.beams is not None:
                searched = request_id
                got_tokens.append(request)
                outputs = self._step_beams(request, request.beams, group)
            else:
                outputs = [scheduled.sequence]
                if scheduled.num_samples > 1:
                    indices = range(1, scheduled.num_samples)
                    outputs += [scheduler.fork(group, scheduled.sequence, index) for index in indices]
                got_tokens += [request] * len(outputs)
            for output in outputs:
                output.output_token_ids.append(next(self._new_token))
                if len(output.output_token_ids) == request.num_output_tokens:
                    request.output_token_ids = output.output_token_ids
                    scheduler.finish(group, output, SequenceStatus.FINISHED_LENGTH)
            if not group.sequences:
                finished.append(request)
                del self._requests[request_id]
        for group in batch.outgrown:
            request, _ = self._requests.pop(group.request_id)
            request.has_failed = True
            scheduler.abort(group.request_id)
            finished.append(request)
        return StepResult(got_tokens, finished)

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

    def memory(self) -> Memory:
        manager = self._scheduler.block_manager
        used = manager.num_used_slots()
        taken = manager.num_used_blocks * self._block_size
        never = 0
        for group in self._scheduler.running:
            request, _ = self._requests[group.request_id]
            for sequence in group.sequences:
                num_slots = len(manager.block_table(sequence)) * self._block_size
                never += max(0, num_slots - request.num_tokens)
        internal = min(never, taken - used)
        free = manager.num_blocks * self._block_size - taken
        saved = manager.num_table_entries * self._block_size - taken
        return Memory(used, taken - used - internal, internal, free, saved)
