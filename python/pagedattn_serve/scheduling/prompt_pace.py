"""How many tokens of a long prompt run in a step, by the time that steps take.

No fixed number of tokens suits all cases. A step shall take 2.25 times as long as the decodes alone (AIM). Then it has
room for 20 tokens of a prompt on one CPU, and for hundreds on a GPU. There is room for fewer tokens if weights are
quantized, for more if more sequences decode, and for a tenth once 20,000 tokens are in the cache, because each token
attends to all of them. So the time of steps is measured, and the number follows from it.

The clock then decides in which step a token is computed. It does not change what is computed, where rows do not depend
on their batch. One scheduler decides; schedulers that are to agree must be told the same seconds.
"""

from collections import deque

# Ratios of the time of a step of decodes with a chunk of a long prompt to the time without the chunk. Above LIMIT,
# twice in a row (once may be a disturbance), the chunk is cut to AIM. Below AIM it is raised. Between the two it stays,
# so that few steps turn out too long; the ratio must not pass 3.
AIM, LIMIT = 2.25, 2.75
# One step in so many runs without the long prompt, to measure what decodes take by themselves.
MEASURE_EVERY = 16
NUM_MEASURED = 3  # the shortest of these steps counts, because a disturbance only makes a step longer
FIRST_NUM_TOKENS = 16
# The time of a step with nothing but a long prompt: a newcomer waits for the end of the step. On the CPU, chunks of 256
# tokens run as fast as longer ones. On a GPU a chunk takes less than a second anyway, and the limit does nothing.
LONE_SECONDS = 1.0
MIN_LONE_TOKENS = 256


class PromptPace:
    """How large the chunks of long prompts are. Call an `observe...` method after each step.

    beside: tokens for a step in which other sequences run; `next_chunk` says when there are more.
    alone: tokens for a step in which no other sequence runs; no limit until such a step was measured.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._decode_seconds: deque[float] = deque(maxlen=NUM_MEASURED)
        self._num_steps = 0
        self._may_raise = True
        self._was_too_long = False
        self.beside = min(FIRST_NUM_TOKENS, max_num_tokens)
        self.alone = max_num_tokens
        self._num_passing_tokens = 0  # of other prompts, since a long prompt last ran as if alone

    def next_chunk(self) -> int:
        """Tokens for the next chunk beside other sequences. When other prompts have run as many tokens as a step holds,
        one chunk is as large as if it were alone."""
        if self._num_passing_tokens < self._max_num_tokens:
            return self.beside
        self._num_passing_tokens = 0
        return self.alone

    def observe_passing(self, num_tokens: int) -> None:
        """Note tokens of other prompts in a step with a long prompt."""
        self._num_passing_tokens += num_tokens

    def is_due_to_measure(self) -> bool:
        """Whether decodes are to run without the long prompt this time. Asked once for each step with both."""
        self._num_steps = (self._num_steps + 1) % MEASURE_EVERY
        return self._num_steps == 0

    def observe_decodes(self, seconds: float) -> None:
        """Note the time of a step with nothing but decodes."""
        self._decode_seconds.append(seconds)
        self._may_raise = True

    def observe_beside(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step of decodes with so many tokens of long prompts."""
        if not self._decode_seconds:
            return
        of_decodes = min(self._decode_seconds)
        taken = seconds - of_decodes  # the time of the chunk
        allowed = (AIM - 1) * of_decodes
        was_too_long, self._was_too_long = self._was_too_long, taken > (LIMIT - 1) * of_decodes
        if self._was_too_long:
            if was_too_long:
                self.beside = max(1, int(num_tokens * allowed / taken))
                self._was_too_long = self._may_raise = False
        elif num_tokens < self.beside:
            pass  # the end of a prompt, which does not show what more tokens would take
        elif taken <= allowed / 2:
            self.beside = min(2 * num_tokens, self._max_num_tokens)
        elif taken <= allowed and self._may_raise:
            # By at least one token, because the first token of a chunk takes longer than the next. One more may be too
            # much; then it is not tried again before the next measurement.
            self.beside = min(max(num_tokens + 1, int(num_tokens * allowed / taken)), self._max_num_tokens)

    def observe_alone(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step with so many tokens of long prompts and nothing else."""
        if num_tokens < self.alone and seconds <= LONE_SECONDS:
            return  # the end of a prompt, whose few tokens take longer each
        in_time = int(num_tokens * LONE_SECONDS / seconds) if seconds > 0 else self._max_num_tokens
        self.alone = min(max(in_time, MIN_LONE_TOKENS), self._max_num_tokens)
