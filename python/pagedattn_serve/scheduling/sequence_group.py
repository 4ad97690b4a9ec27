"""The sequences of one request, which run, wait and are preempted together (Kwon et al., SOSP 2023, section 4.5)."""

from dataclasses import dataclass, field

from pagedattn_serve.scheduling.sequence import ScheduledSequence, Sequence, SequenceRules


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
        None until the first such step.
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
