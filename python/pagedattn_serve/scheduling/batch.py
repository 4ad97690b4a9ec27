"""What to run in one step. The scheduler makes it and the runner reads it; nothing else passes between the two."""

from dataclasses import dataclass, field

from pagedattn_serve.scheduling.sequence import Sequence
from pagedattn_serve.scheduling.sequence_group import SequenceGroup


@dataclass(slots=True, eq=False)  # compared and hashed by identity
class ScheduledSequence:
    """The next `num_new_tokens` uncomputed tokens of a sequence, and its blocks.

    block_table: physical blocks of all its tokens so far, [num_blocks_of_sequence]. It is the block manager's own list,
        to be read only. If it is the same list as in the step before, nothing but its end may have changed. If the
        whole ScheduledSequence is the same object, nothing has changed.
    num_samples: how many tokens to draw from its last row: 0 amid a prompt, more than 1 if a group of several sequences
        is about to fork. The number is fixed when the sequence is scheduled, because the sequence moves on afterwards.
    draft_token_ids: guesses at the tokens after its last one. They run behind it, and a token is drawn from the row of
        each guess, too.
    """

    sequence: Sequence
    num_new_tokens: int
    block_table: list[int]
    num_samples: int
    draft_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class ScheduledBatch:
    """One step of the model. Copies of blocks are part of the step: whoever runs the batch makes the copies first,
    even if there is nothing else to run. Pairs that are copied are taken out of their list, and
    `Scheduler.mark_computed` refuses a batch with pairs left.

    sequences: what to run; the sequences of a group follow each other, in the group's order.
    blocks_to_swap_out: (device block, host block) pairs to copy first.
    blocks_to_swap_in: (host block, device block) pairs to copy next.
    blocks_to_copy: (src, dst) pairs within the cache to copy last, in the order of the list (copy-on-write).
    preempted: groups that lost their blocks in this step, to make room.
    outgrown: groups that cannot go on, because they alone need more blocks than the cache has.
    num_decodes: how many of the sequences belong to groups that decode: each runs its last token, and its drafts.
    num_plain: how many of the first sequences are plain decodes. Each is the only sequence of its group, which is no
        group of beams, has output, runs its last token, and draws one token.
    num_long_tokens: how many tokens belong to prompts that do not fit in a step.
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

    @property
    def num_tokens(self) -> int:
        """Tokens to run, over all sequences."""
        return sum(scheduled.num_new_tokens + len(scheduled.draft_token_ids) for scheduled in self.sequences)

    @property
    def has_copies(self) -> bool:
        """Whether blocks are still to be copied. There may be some without any sequence to run: the blocks of a group
        that made room for another group, which is `outgrown` nevertheless."""
        return bool(self.blocks_to_swap_out or self.blocks_to_swap_in or self.blocks_to_copy)
