"""Which beams survive a step of beam search without logits: the engine's own search, on candidates that are drawn."""

from math import log, log1p
from random import Random

from pagedattn_serve.scheduling.beam_search import BeamSearch

# A beam's likeliest next token has a probability drawn from a beta distribution with these parameters, and each further
# token as large a share of what is left. They are chosen so that beams share about as many blocks as in figure 15 of
# Kwon et al. (SOSP 2023); so what beams share is fitted to the paper.
ALPHA, BETA = 6.0, 1.0


class SimulatedBeams:
    """The beams of one request. All run to the end of the output."""

    def __init__(self, width: int, num_output_tokens: int, seed: int) -> None:
        self.width = width
        self._search = BeamSearch[None](width, num_output_tokens)
        self._random = Random(seed)
        self._scores = [0.0]
        self._num_tokens = 0

    def step(self) -> list[int]:
        """The parent of each beam that runs on, by the parent's place among the beams that ran. Best first. The last
        token ends all beams, and has no step."""
        num_candidates = self._search.num_candidates
        candidates = [self._candidates(num_candidates) for _ in self._scores]
        step = self._search.select(self._scores, self._num_tokens, candidates, lambda beam, token_id: False)
        self._scores = [each.score for each in step.running]
        self._num_tokens += 1
        return [each.beam for each in step.running]

    def num_copies(self) -> int:
        """Take a step where no blocks are shared: how many beams have to be copied into the slots of others."""
        parents = self.step()
        return len(parents) - len(set(parents))

    def _candidates(self, count: int) -> list[tuple[int, float]]:
        likeliest = min(max(self._random.betavariate(ALPHA, BETA), 1e-6), 1 - 1e-6)
        return [(i, log(likeliest) + i * log1p(-likeliest)) for i in range(count)]
