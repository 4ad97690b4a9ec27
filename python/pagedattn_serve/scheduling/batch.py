"""What to run in one step: made by the scheduler, read by the runner, and all that passes between them."""

from dataclasses import dataclass, field

from pagedattn_serve.scheduling.sequence import Sequence
from pagedattn_serve.scheduling.sequence_group import SequenceGroup


@dataclass(slots=True)
class ScheduledSequence:
    """The next `num_new_tokens` uncomputed tokens of a sequence, and its blocks.

    block_table: physical blocks of all its tokens so far, [num_blocks_of_sequence]. It is the block manager's own list,
        to be read only; the same object as in the step before only if nothing but its end may have changed.
    num_samples: how many tokens to draw where its last row is: 0 amid a prompt, more than 1 where a group of several
        sequences is about to fork. Fixed when scheduled, as the sequence moves on afterwards.
    draft_token_ids: guesses at the tokens after its last one, run behind it; a token is drawn in the row of each, too.
    """

    sequence: Sequence
    num_new_tokens: int
    block_table: list[int]
    num_samples: int
    draft_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class ScheduledBatch:
    """One step of the model. Its copies are part of it: whoever runs the batch makes them first, whatever else there is
    to run, and takes each list's pairs out when they are copied (`Scheduler.mark_computed` refuses a batch that has any
    left).

    sequences: what to run, those of a group one after the other and in its order.
    blocks_to_swap_out: (device block, host block) pairs to copy first of all;
    blocks_to_swap_in: then these, (host block, device block);
    blocks_to_copy: then these, (src, dst) within the cache, in this order (copy-on-write).
    preempted: groups that lost their blocks in this step, to make room.
    outgrown: groups that cannot go on, as they need more blocks than the cache has with nobody else in it.
    num_decodes: how many of the sequences belong to groups that decode: each runs its last token alone, but for drafts.
    num_long_tokens: how many tokens belong to prompts that do not fit in a step.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    outgrown: list[SequenceGroup] = field(default_factory=list)
    num_decodes: int = 0
    num_long_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens to run, over all sequences."""
        return sum(scheduled.num_new_tokens + len(scheduled.draft_token_ids) for scheduled in self.sequences)

    @property
    def has_copies(self) -> bool:
        """Whether blocks are still to be copied. They may be without any sequence to run: those of a group that made
        room for one that is `outgrown` all the same."""
        return bool(self.blocks_to_swap_out or self.blocks_to_swap_in or self.blocks_to_copy)
