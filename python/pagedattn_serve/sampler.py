"""From logits to token ids, for a whole batch at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn_serve.sampling_params import SamplingParams

_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads neighbouring seeds
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(slots=True)
class SamplingRow:
    """What decides the next token of one sequence, beside its logits.

    num_output_tokens: tokens generated so far; with the seed it determines the random numbers.
    """

    params: SamplingParams
    num_output_tokens: int


class Sampler:
    """Draws tokens. Requests with a seed of their own get the same tokens whatever else is in the batch."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._request_generator = torch.Generator()

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[int]:
        """logits: [num_rows, vocab_size]. Returns one token id a row; ties go to the lower id where greedy."""
        if all(row.params.greedy for row in rows):
            return logits.argmax(dim=-1).tolist()
        greedy = torch.tensor([row.params.greedy for row in rows])
        temperatures = torch.tensor([max(row.params.temperature, _SMALLEST) for row in rows])
        # Relative to the largest, which stays 0 however small the temperature is.
        relative = logits.float() - logits.amax(dim=-1, keepdim=True)
        probabilities = restrict(relative / temperatures[:, None], [row.params for row in rows]).softmax(dim=-1)
        # argmax(p / e) with e ~ Exp(1) draws a token with probability p: the exponential race, as Gumbel-max is.
        drawn = (probabilities / self._exponential_noise(probabilities, rows)).argmax(dim=-1)
        return torch.where(greedy, logits.argmax(dim=-1), drawn).tolist()

    def _exponential_noise(self, probabilities: Tensor, rows: list[SamplingRow]) -> Tensor:
        noise = torch.empty_like(probabilities).exponential_(generator=self._generator)
        for i, row in enumerate(rows):
            if row.params.seed is not None and not row.params.greedy:
                # Seeded afresh for each token: nothing to keep, so nothing that a preemption could lose.
                mixed = (row.params.seed * _GOLDEN_RATIO + row.num_output_tokens) % 2**64
                seed = mixed ^ (mixed >> 32)  # the generator looks at the low half
                noise[i].exponential_(generator=self._request_generator.manual_seed(seed))
        return noise


def restrict(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits [num_rows, vocab_size] with -inf for the tokens that top_k and, after it, top_p leave out."""
    vocab_size = logits.shape[1]
    if all(p.top_k <= 0 and p.top_p == 1.0 for p in params):
        return logits
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params])
    top_p = torch.tensor([p.top_p for p in params])
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocab_size) >= top_k[:, None], -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    # A token stays while the more likely ones do not reach top_p; the most likely always does.
    before = probabilities.cumsum(dim=-1) - probabilities
    before[:, 0] = -1.0
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (top_p < 1.0)[:, None], -torch.inf)
    return torch.empty_like(logits).scatter_(dim=-1, index=order, src=ordered)
