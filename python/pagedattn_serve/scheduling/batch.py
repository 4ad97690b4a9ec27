"""What to run in one step. The scheduler makes it and the runner reads it; nothing else passes between the two."""

from dataclasses import dataclass, field

from pagedattn_serve.scheduling.sequence import ScheduledSequence
from pagedattn_serve.scheduling.sequence_group import SequenceGroup
from pagedattn_serve.scheduling.table_array import TableWrite


@dataclass(slots=True)
class ScheduledBatch:
    """One step of the model. Copies of blocks are part of the step: whoever runs the batch makes the copies first,
    even if there is nothing else to run. Pairs that are copied are taken out of their list, and
    `Scheduler.mark_computed` refuses a batch with pairs left.

    sequences: what to run; the sequences of a group follow each other, in the group's order. Row i of the block
        manager's `table_array` is the block table of the i-th one.
    blocks_to_swap_out: (device block, host block) pairs to copy first.
    blocks_to_swap_in: (host block, device block) pairs to copy next.
    blocks_to_copy: (src, dst) pairs within the cache to copy last, in the order of the list (copy-on-write).
    preempted: groups that lost their blocks in this step, to make room.
    outgrown: groups that cannot go on, because they alone need more blocks than the cache has.
    num_decodes: how many of the sequences belong to groups that decode: each runs its last token, and its drafts.
    num_plain: how many of the first sequences are plain decodes. Each is the only sequence of its group, which is no
        group of beams, has output, runs its last token, and draws one token.
    num_long_tokens: how many tokens belong to prompts that do not fit in a step.
    table_writes: what was written to `table_array` since the batch before, as arguments of `TableArray.write`.
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
    table_writes: list[TableWrite] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to run, over all sequences."""
        return sum(scheduled.num_new_tokens + len(scheduled.draft_token_ids) for scheduled in self.sequences)

    @property
    def has_copies(self) -> bool:
        """Whether blocks are still to be copied. There may be some without any sequence to run: the blocks of a group
        that made room for another group, which is `outgrown` nevertheless."""
        return bool(self.blocks_to_swap_out or self.blocks_to_swap_in or self.blocks_to_copy)
