"""How many tokens of a long prompt run in a step, by the time that steps take.

No number of tokens suits all: beside the same decodes, a step that is to take no more than three times as long has room
for 20 tokens of a prompt on one CPU and for hundreds on a GPU; for fewer where weights are quantized, for more where
more sequences decode, and for a tenth once 20,000 tokens are in the cache, which each token attends to. So the time of
steps is measured, and the number follows.

Which step a token is computed in then depends on the clock. What is computed does not, where rows do not depend on
their batch. One scheduler decides; schedulers that are to agree must be told the same seconds.
"""

from collections import deque

# Of a step of decodes with a chunk of a long prompt to one without: above LIMIT, twice in a row as one may have been
# disturbed, the chunk is cut to AIM; below AIM it is raised. Between them it stays, so that few steps are tried which
# turn out too long; 3 is what must not be passed.
AIM, LIMIT = 2.25, 2.75
# So often a step beside decodes runs without the long prompt, to measure what decodes take by themselves.
MEASURE_EVERY = 16
NUM_MEASURED = 3  # the shortest counts: what disturbs a step makes it longer
FIRST_NUM_TOKENS = 16
# Of a step with nothing but a long prompt: who comes meanwhile waits for its end. On the CPU, chunks of 256 tokens run
# as fast as longer ones; beside a GPU's chunks, which take less than a second anyway, the limit does nothing.
LONE_SECONDS = 1.0
MIN_LONE_TOKENS = 256


class PromptPace:
    """The chunks of long prompts; `observe...` after each step.

    beside: tokens for a step in which other sequences run.
    alone: tokens for a step in which none does; all of them until such a step was measured.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._decode_seconds: deque[float] = deque(maxlen=NUM_MEASURED)
        self._num_steps = 0
        self._may_raise = True
        self._was_too_long = False
        self.beside = min(FIRST_NUM_TOKENS, max_num_tokens)
        self.alone = max_num_tokens

    def is_due_to_measure(self) -> bool:
        """Whether decodes are to run without the long prompt this time. Asked once for each step with both."""
        self._num_steps = (self._num_steps + 1) % MEASURE_EVERY
        return self._num_steps == 0

    def observe_decodes(self, seconds: float) -> None:
        """Of a step with nothing but decodes."""
        self._decode_seconds.append(seconds)
        self._may_raise = True

    def observe_beside(self, num_tokens: int, seconds: float) -> None:
        """Of a step of decodes with so many tokens of long prompts."""
        if not self._decode_seconds:
            return
        of_decodes = min(self._decode_seconds)
        taken = seconds - of_decodes  # by the chunk
        allowed = (AIM - 1) * of_decodes
        was_too_long, self._was_too_long = self._was_too_long, taken > (LIMIT - 1) * of_decodes
        if self._was_too_long:
            if was_too_long:
                self.beside = max(1, int(num_tokens * allowed / taken))
                self._was_too_long = self._may_raise = False
        elif num_tokens < self.beside:
            pass  # a prompt's end does not show what more tokens would take
        elif taken <= allowed / 2:
            self.beside = min(2 * num_tokens, self._max_num_tokens)
        elif taken <= allowed and self._may_raise:
            # By one at least, as the first token of a chunk takes longer than the next. That may be too much: it is not
            # tried again before the next measurement.
            self.beside = min(max(num_tokens + 1, int(num_tokens * allowed / taken)), self._max_num_tokens)

    def observe_alone(self, num_tokens: int, seconds: float) -> None:
        """Of a step with so many tokens of long prompts and nothing else."""
        in_time = int(num_tokens * LONE_SECONDS / seconds) if seconds > 0 else self._max_num_tokens
        self.alone = min(max(in_time, MIN_LONE_TOKENS), self._max_num_tokens)
