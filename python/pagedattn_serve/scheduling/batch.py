"""What to run in one step: made by the scheduler, read by the runner, and all that passes between them."""

from dataclasses import dataclass, field

from pagedattn_serve.scheduling.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """The next `num_new_tokens` uncomputed tokens of a sequence, and its blocks.

    block_table: physical blocks of all its tokens so far, [num_blocks_of_sequence]. It is the block manager's own list:
        one object from the time when the sequence gets blocks until it loses them, to be read only.
    samples: whether these reach its last token, so that the logits there give the next one. Fixed when scheduled, as
        the sequence moves on afterwards.
    """

    sequence: Sequence
    num_new_tokens: int
    block_table: list[int]
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        self.samples = self.num_new_tokens == self.sequence.num_uncomputed_tokens


@dataclass(slots=True)
class ScheduledBatch:
    """One step of the model.

    sequences: what to run, in arrival order.
    blocks_to_copy: (src, dst) pairs to copy in the cache before the model runs, in this order (copy-on-write).
    preempted: sequences that lost their blocks in this step, to make room.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to run, over all sequences."""
        return sum(scheduled.num_new_tokens for scheduled in self.sequences)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.sequences
