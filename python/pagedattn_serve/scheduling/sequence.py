"""What the scheduler schedules: sequences, and the groups of those that belong to one request. And what the runner
reads for one step: the batch, and the array of its block tables. Nothing else passes between scheduler and runner.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple, Self

from pagedattn_serve.config import CacheConfig, SchedulerConfig


class SequenceStatus(Enum):
    """Where a sequence is in its life.

    is_finished: whether no more tokens will come.
    finish_reason: in a word, "stop", "length", "abort" or "error"; None while not finished.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, word: str) -> None:
        self.is_finished = self.name.startswith("FINISHED")
        self.finish_reason = word if self.is_finished else None


@dataclass(slots=True, frozen=True)
class SequenceRules:
    """What the parameters of a request mean for the scheduler.

    num_sequences: the most sequences that run at once, beams or samples.
    uses_beams: whether each sequence is a beam, which draws one token even at the end of the prompt.
    width_argument: what the user calls num_sequences.
    max_tokens: the most output tokens of a sequence; None is no limit beside max_model_len.
    takes_drafts: whether a step may run guesses at the next tokens.
    generates: whether there will be output. A prompt without output ends when all of it is computed.
    """

    num_sequences: int = 1
    uses_beams: bool = False
    width_argument: str = "n"
    max_tokens: int | None = None
    takes_drafts: bool = True
    generates: bool = True


@dataclass(slots=True, eq=False)  # compared and hashed by identity: two requests may hold the same tokens
class Sequence:
    """A prompt, one output to it, and how far they are computed.

    prompt_token_ids: one list for all sequences of a request.
    rules: one object for all sequences of a request.
    num_computed_tokens: tokens whose keys and values are in the cache, counted from the first.
    block_hashes: of its first full blocks, as far as they were asked for (`BlockManager`).
    cache_salt: blocks are shared only with sequences of the same salt.
    prompt_logits_from: the first position of the prompt whose logits, or hidden state for a mean, are asked for and
        were not looked at yet; None if there is no such position.
    sampling: what the sampler is told of the sequence (`SamplingState`). The scheduler only forks it.
    pooling: what the pooler is told of a sequence that generates nothing (`PoolingState`).
    """

    request_id: str
    prompt_token_ids: list[int]
    rules: SequenceRules = SequenceRules()
    output_token_ids: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str = ""
    prompt_logits_from: int | None = None
    sampling: Any = None
    pooling: Any = None

    def fork(self, index: int) -> Self:
        """Another sequence with the same tokens so far. index: of the fork within its request."""
        tokens = list(self.output_token_ids)
        sampling = self.sampling and self.sampling.fork(tokens, index)
        return replace(self, output_token_ids=tokens, block_hashes=list(self.block_hashes), sampling=sampling)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to run through the model: 1 while decoding, more while in prefill."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output taken as one list, without building that list. Raises ValueError if
        the range does not lie within the sequence."""
        if not 0 <= start <= end <= self.num_tokens:
            raise ValueError(f"tokens: expected 0 <= start <= end <= {self.num_tokens}, got [{start}, {end})")
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]


@dataclass(slots=True, eq=False)  # compared and hashed by identity
class ScheduledSequence:
    """The next `num_new_tokens` uncomputed tokens of a sequence.

    num_samples: how many tokens to draw from its last row: 0 amid a prompt, more than 1 if a group of several sequences
        is about to fork. The number is fixed when the sequence is scheduled, because the sequence moves on afterwards.
    draft_token_ids: guesses at the tokens after its last one. They run behind it, and a token is drawn from the row of
        each guess, too.
    """

    sequence: Sequence
    num_new_tokens: int
    num_samples: int
    draft_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)  # compared and hashed by identity, as sequences are
class SequenceGroup:
    """A request as the scheduler sees it.

    A group begins with one sequence. When the prompt is computed, the other sequences are forked from it and share its
    blocks.

    sequences: the unfinished sequences, in the order in which they run.
    arrival_time: as the request's metrics tell it.
    priority: lower is served earlier, if the scheduling policy looks at it.
    order: the group's place among all groups, lower is earlier; set by the scheduler.
    num_preemptions: how often the group lost its blocks.
    decode: how its only sequence runs as a plain decode (`ScheduledBatch.num_plain`), which is the same in each step.
        None until the first such step, and again when its blocks are dropped.
    num_cached_tokens: of the prompt, tokens that were in the cache when the group was first let in; None before.
    """

    request_id: str
    prompt_token_ids: list[int]
    rules: SequenceRules
    arrival_time: float
    priority: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    order: tuple[int, int] = (0, 0)
    num_preemptions: int = 0
    decode: ScheduledSequence | None = None
    num_cached_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.sequences:
            self.sequences.append(Sequence(self.request_id, self.prompt_token_ids, self.rules))

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to run through the model, over all sequences."""
        return sum(sequence.num_uncomputed_tokens for sequence in self.sequences)

    @property
    def in_prefill(self) -> bool:
        """Whether a sequence has more to compute than its last token."""
        for sequence in self.sequences:  # inline, because every step asks this of all groups
            if len(sequence.prompt_token_ids) + len(sequence.output_token_ids) > sequence.num_computed_tokens + 1:
                return True
        return False

    @property
    def has_forked(self) -> bool:
        """Whether the group has output. From then on all of its sequences are there."""
        return len(self.sequences) > 1 or bool(self.sequences and self.sequences[0].output_token_ids)

    @property
    def max_num_sequences(self) -> int:
        """The most sequences that the group will run at once from here on."""
        if self.has_forked and not self.rules.uses_beams:
            return len(self.sequences)
        return self.rules.num_sequences


@dataclass(slots=True)
class StateCopies:
    """Pairs of state slots to copy, in this order: (device, host), then (host, device), then (source, target)."""

    to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    to_copy: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.to_swap_out or self.to_swap_in or self.to_copy)


class StateCheckpoint(NamedTuple):
    """A state to keep: of the i-th sequence of the batch, after so many of its new tokens, in this slot."""

    sequence: int
    num_new_tokens: int
    slot: int


TableWrite = tuple[int, int, int, list[int]]  # group of layers, row, column of the first block, blocks


class TableArray:
    """The block tables of a step, which the ops read in place. The block manager writes what changes.

    int32 [num_groups, max_num_seqs, max_num_blocks_per_seq], zeros at first, with a table for each group of layers.

    memory: the array, one row after the other, at the same address for ever.

    Raises MemoryError, which names max_num_seqs, if there is not enough memory.
    """

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self.num_groups = len(cache_config.windows)
        self.num_rows = scheduler_config.max_num_seqs
        self.num_columns = -(-scheduler_config.max_model_len // cache_config.block_size)
        num_entries = self.num_groups * self.num_rows * self.num_columns
        try:
            # The system gives a page of it when a row there is written, so rows that nobody uses take no memory.
            memory = mmap(-1, 4 * num_entries, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        except (OSError, OverflowError):  # an OverflowError is of more bytes than an index can count
            raise MemoryError(
                f"max_num_seqs: expected sequences whose block tables fit in memory, got {self.num_rows:,} of up to "
                f"{self.num_columns:,} blocks, {4 * num_entries:,} bytes"
            ) from None
        self.memory = memoryview(memory).cast("i")

    def write(self, group: int, row: int, column: int, blocks: list[int]) -> None:
        """Put blocks into a row of a group's table, from this column on."""
        begin = (group * self.num_rows + row) * self.num_columns + column
        for i, block in enumerate(blocks, begin):
            self.memory[i] = block

    def row(self, group: int, row: int, length: int) -> list[int]:
        """The first blocks of a row of a group's table."""
        begin = (group * self.num_rows + row) * self.num_columns
        return self.memory[begin : begin + length].tolist()


@dataclass(slots=True)
class ScheduledBatch:
    """One step of the model. Copies of blocks are part of the step: whoever runs the batch makes the copies first,
    even if there is nothing else to run. Pairs that are copied are taken out of their list, and
    `Scheduler.mark_computed` refuses a batch with pairs left.

    sequences: what to run; the sequences of a group follow each other, in the group's order. Row i of the block
        manager's `table_array` has the block tables of the i-th one.
    blocks_to_swap_out: (device block, host block) pairs to copy first.
    blocks_to_swap_in: (host block, device block) pairs to copy next.
    blocks_to_copy: (src, dst) pairs within the cache to copy last, in the order of the list (copy-on-write).
    preempted: groups that lost their blocks in this step, to make room.
    outgrown: groups that cannot go on, because they alone need more blocks than the cache has.
    num_decodes: how many of the sequences belong to groups that decode: each runs its last token, and its drafts.
    num_plain: how many of the first sequences are plain decodes. Each is the only sequence of its group, which is no
        group of beams, has output, runs its last token, and draws one token.
    to_merge: logical blocks [first, last) of sequences. Others were published for tokens of these, so the blocks are to
        be merged after the step.
    num_long_tokens: how many tokens belong to prompts that do not fit in a step.
    table_writes: what was written to `table_array` since the batch before, as arguments of `TableArray.write`.
    state_slots: the slot of each sequence's state; none if the model keeps no states.
    state_copies: slots to copy, at the time of the blocks. Whoever has copied them clears the lists.
    state_checkpoints: states to keep amid the step, in the order of the sequences and of the tokens.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    outgrown: list[SequenceGroup] = field(default_factory=list)
    num_decodes: int = 0
    num_plain: int = 0
    num_long_tokens: int = 0
    to_merge: list[tuple[Sequence, int, int]] = field(default_factory=list)
    table_writes: list[TableWrite] = field(default_factory=list)
    state_slots: list[int] = field(default_factory=list)
    state_copies: StateCopies = field(default_factory=StateCopies)
    state_checkpoints: list[StateCheckpoint] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to run, over all sequences."""
        return sum(scheduled.num_new_tokens + len(scheduled.draft_token_ids) for scheduled in self.sequences)

    @property
    def copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]], StateCopies]:
        """All that is to be copied, in this order."""
        return self.blocks_to_swap_out, self.blocks_to_swap_in, self.blocks_to_copy, self.state_copies

    @property
    def has_copies(self) -> bool:
        """Whether blocks or states are still to be copied. There may be some without any sequence to run: those of a
        group that made room for another group, which is `outgrown` nevertheless."""
        return any(self.copies)
