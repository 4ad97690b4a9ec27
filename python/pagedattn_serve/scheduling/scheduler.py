"""Which sequences run in the next step, and with how many tokens.

First come first served, decided anew at each step (iteration-level scheduling: Orca, Yu et al., OSDI 2022), with the
preemption of PagedAttention (Kwon et al., SOSP 2023, section 4.5): when blocks run out, the latest arrival loses its
own and recomputes them later. Long prompts run in chunks that fill the step's token budget.

Arrival is the order of `add`. `running` followed by `waiting` is always one queue in that order: admission moves the
cut between them to the right, preemption to the left. From this follows what keeps the rest short:
- a victim of preemption comes at or after the sequence that needs its block, so it is never in the batch yet;
- a chunk that leaves a prompt unfinished used up the budget, so only the last running sequence is ever in prefill:
  going through `running` in order puts decodes before prefill;
- the oldest sequence goes first and is never preempted for another, so each step brings it nearer to its end.
"""

from collections import deque

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.scheduling.batch import ScheduledBatch, ScheduledSequence
from pagedattn_serve.scheduling.block_allocator import OutOfBlocksError
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus


class Scheduler:
    """The waiting and running queues, and the blocks of the running.

    Each step: `schedule()`, run the batch, `mark_computed(batch)`, append one token to each sequence that samples, and
    `finish` those that are done, at the latest when they hold max_model_len tokens. Not thread-safe.

    Raises ValueError if max_model_len tokens do not fit in the cache: such a sequence could never end.
    """

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        num_slots = cache_config.num_blocks * cache_config.block_size
        if scheduler_config.max_model_len > num_slots:
            raise ValueError(
                f"max_model_len: expected at most {num_slots} tokens, what {cache_config.num_blocks} blocks of "
                f"{cache_config.block_size} hold, got {scheduler_config.max_model_len}"
            )
        self.config = scheduler_config
        self.block_manager = BlockManager(cache_config)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._unfinished: dict[str, Sequence] = {}  # by request id: both queues

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._unfinished)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks: not started yet, or preempted."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the queue.

        Raises ValueError if it is not new, its request id is taken, its prompt is empty or leaves no room for output.
        """
        if sequence.request_id in self._unfinished:
            raise ValueError(f"request_id: {sequence.request_id!r} is taken by an unfinished request")
        if sequence.status is not SequenceStatus.WAITING:
            raise ValueError(f"status: expected a new sequence, got {sequence.status} for {sequence.request_id!r}")
        # With the constructor's check this also means that it fits in the cache.
        if not 0 < sequence.num_tokens < self.config.max_model_len:
            raise ValueError(
                f"prompt: expected 1 to {self.config.max_model_len - 1} tokens "
                f"(max_model_len {self.config.max_model_len}, one left to generate), got {sequence.num_tokens}"
            )
        self._unfinished[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def schedule(self) -> ScheduledBatch:
        """Choose what runs next; empty only if nothing is unfinished. Preempts and admits as needed."""
        batch = ScheduledBatch()
        budget = self.config.max_num_batched_tokens

        num_done = 0
        while num_done < len(self.running) and budget > 0:
            sequence = self.running[num_done]
            try:
                pair = self.block_manager.append(sequence)
            except OutOfBlocksError:
                batch.preempted.append(self._preempt_latest())  # maybe `sequence` itself, and then the loop is over
                continue
            if pair is not None:
                batch.blocks_to_copy.append(pair)
            budget -= self._add_to_batch(batch, sequence, budget)
            num_done += 1

        while self.waiting and budget > 0 and not batch.preempted and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            # Alone it may use the reserve as well: nobody else runs who could need it.
            if not self.block_manager.can_allocate(sequence, keep_watermark=bool(self.running)):
                break
            self.block_manager.allocate(sequence)
            sequence.status = SequenceStatus.RUNNING
            self.running.append(self.waiting.popleft())
            budget -= self._add_to_batch(batch, sequence, budget)
        return batch

    def mark_computed(self, batch: ScheduledBatch) -> None:
        """Record that the batch ran: the keys and values of its tokens are in the cache."""
        for scheduled in batch.sequences:
            scheduled.sequence.num_computed_tokens += scheduled.num_new_tokens

    def finish(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Take a sequence out, waiting or running, and free its blocks at once.

        Raises ValueError if `status` is not a finished one or the sequence is not unfinished here.
        """
        if not status.is_finished:
            raise ValueError(f"status: expected a finished one, got {status}")
        if self._unfinished.get(sequence.request_id) is not sequence:
            raise ValueError(f"{sequence.request_id!r} is not an unfinished sequence of this scheduler")
        del self._unfinished[sequence.request_id]
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.block_manager.free(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = status

    def abort(self, request_id: str) -> Sequence | None:
        """Finish a request as aborted and return its sequence; None if it is unknown or finished already."""
        sequence = self._unfinished.get(request_id)
        if sequence is not None:
            self.finish(sequence, SequenceStatus.FINISHED_ABORTED)
        return sequence

    def restart(self, sequences: list[Sequence]) -> None:
        """Forget all but these sequences, which wait without blocks, in this order: whatever state things are in."""
        for sequence in sequences:
            sequence.status = SequenceStatus.WAITING
            sequence.num_computed_tokens = 0
        self.block_manager.clear()
        self.running.clear()
        self.waiting = deque(sequences)
        self._unfinished = {sequence.request_id: sequence for sequence in sequences}

    def _add_to_batch(self, batch: ScheduledBatch, sequence: Sequence, budget: int) -> int:
        num_new_tokens = min(sequence.num_uncomputed_tokens, budget)
        assert num_new_tokens > 0, f"{sequence.request_id} has no token to run: was the sampled one not appended?"
        block_table = self.block_manager.block_table(sequence)
        batch.sequences.append(ScheduledSequence(sequence, num_new_tokens, block_table))
        return num_new_tokens

    def _preempt_latest(self) -> Sequence:
        """Send the latest arrival back to the front of `waiting`. Its output stays and is recomputed like a prompt."""
        assert len(self.running) > 1, f"{self.running[0].request_id} outgrew the cache: not finished at max_model_len?"
        sequence = self.running.pop()
        self.block_manager.free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence
