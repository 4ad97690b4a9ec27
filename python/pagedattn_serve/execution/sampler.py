"""From logits to token ids, for a whole batch at once.

Work is done only for the rows that ask for it: random numbers where a token is drawn, a search for the most likely
tokens where top_k or top_p leaves some out, ranks where logprobs are reported. No row's result depends on the logits
or parameters of another, not in the last bit either. The host waits for the device at the end; before that only where
top_k or top_p may keep more than _NUM_CANDIDATES tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn_serve.outputs import Logprob
from pagedattn_serve.sampling_params import SamplingParams

_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads neighbouring seeds
_SMALLEST = torch.finfo(torch.float32).tiny
# How many of the most likely tokens top_k and top_p look at first. Of 32,000, these are found in a fifteenth of the
# time that sorting takes, and the top_p of a trained model seldom needs more.
_NUM_CANDIDATES = 256


@dataclass(slots=True)
class SamplingRow:
    """What decides the next token of one sequence, beside its logits.

    num_output_tokens: tokens generated so far; with the seed it determines the random numbers.
    """

    params: SamplingParams
    num_output_tokens: int


@dataclass(slots=True)
class SamplerOutput:
    """One token a row, and how likely the model found it: the fp32 log-softmax of the logits as they came.

    top_logprobs: for a row with `params.logprobs`, the sampled token and that many most likely ones by token id, most
        likely first; those of probability 0 are left out, equally likely ones share a rank. None for other rows.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, Logprob] | None]


class Sampler:
    """Draws tokens. Requests with a seed of their own get the same tokens whatever else is in the batch."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._request_generator = torch.Generator(device)

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> SamplerOutput:
        """logits: [num_rows, vocab_size], on the sampler's device. Ties go to the lower token id where greedy."""
        logits = logits.float()  # once: on a CPU, argmax and log_softmax of half precision take four times as long
        token_ids = self._choose(logits, rows)[:, None]
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs.gather(1, token_ids)
        reporting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if reporting:
            num_top = min(max(rows[i].params.logprobs or 0 for i in reporting), logits.shape[1])
            indices = _to_device(reporting, torch.int64, logits.device)
            ranked = _rank(logprobs.index_select(0, indices), chosen.index_select(0, indices), num_top)
        # All of the work is under way before the first wait. Ids and logprobs come as one tensor.
        host = torch.cat((token_ids.int(), chosen.view(torch.int32)), dim=1).cpu()
        output = SamplerOutput(host[:, 0].tolist(), host[:, 1].view(torch.float32).tolist(), [None] * len(rows))
        if reporting:
            ranks, top_ids, top_logprobs = torch.split(ranked.cpu(), [1, num_top, num_top], dim=1)
            top = zip(ranks[:, 0].tolist(), top_ids.tolist(), top_logprobs.view(torch.float32).tolist(), strict=True)
            for i, (rank, ids, values) in zip(reporting, top, strict=True):
                count = rows[i].params.logprobs
                sampled = Logprob(output.logprobs[i], rank)
                output.top_logprobs[i] = _entries(ids[:count], values[:count], output.token_ids[i], sampled)
        return output

    def _choose(self, logits: Tensor, rows: list[SamplingRow]) -> Tensor:
        """A token id a row: int64 [num_rows]."""
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if random and len(random) == len(rows):
            return self._draw(logits, rows)
        token_ids = logits.argmax(dim=-1)
        if random:
            indices = _to_device(random, torch.int64, logits.device)
            token_ids[indices] = self._draw(logits.index_select(0, indices), [rows[i] for i in random])
        return token_ids

    def _draw(self, logits: Tensor, rows: list[SamplingRow]) -> Tensor:
        """As `_choose`, for rows of which none is greedy."""
        params = [row.params for row in rows]
        temperatures = _to_device([max(p.temperature, _SMALLEST) for p in params], torch.float32, logits.device)
        # Relative to the largest, which stays 0 however small the temperature is.
        relative = logits - logits.amax(dim=-1, keepdim=True)
        probabilities = restrict(relative.div_(temperatures[:, None]), params).softmax(dim=-1)
        # argmax(p / e) with e ~ Exp(1) draws a token with probability p: the exponential race, as Gumbel-max is.
        return probabilities.div_(self._exponential_noise(rows, logits)).argmax(dim=-1)

    def _exponential_noise(self, rows: list[SamplingRow], logits: Tensor) -> Tensor:
        """fp32 [num_rows, vocab_size], positive and finite: Tensor.exponential_ takes five times as long on a CPU."""
        bits = torch.empty_like(logits, dtype=torch.int32)
        if any(row.params.seed is None for row in rows):
            bits.random_(generator=self._generator)
        for i, row in enumerate(rows):
            if row.params.seed is not None:
                # Seeded afresh for each token: nothing to keep, so nothing that a preemption could lose.
                mixed = (row.params.seed * _GOLDEN_RATIO + row.num_output_tokens) % 2**64
                seed = mixed ^ (mixed >> 32)  # the generator looks at the low half
                bits[i].random_(generator=self._request_generator.manual_seed(seed))
        # u = (bits + 1/2) / 2^31 in float32, which has the finest steps where they decide: the smallest noise wins. The
        # last factor keeps u below 1 where the sum rounds up to 2^31. An e of 0 or infinity could draw the impossible.
        return bits.float().add_(0.5).mul_(-(2**-31) * (1 - 2**-24)).log1p_().neg_()


def restrict(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits [num_rows, vocab_size] with -inf for the tokens that min_p, then top_k, then top_p leave out.

    In vLLM's order: each sees the probabilities of what the one before it left. Of equally likely tokens at the limit,
    those with the lower ids stay.
    """
    vocab_size, device = logits.shape[1], logits.device
    if any(p.min_p > 0 for p in params):
        log_min_p = _to_device([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], torch.float32, device)
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + log_min_p[:, None], -torch.inf)
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1]
    if not limited:
        return logits
    counts = [params[i].top_k if 0 < params[i].top_k < vocab_size else vocab_size for i in limited]
    shares = [params[i].top_p if params[i].top_p < 1 else math.inf for i in limited]  # inf: no sum reaches it
    indices = _to_device(limited, torch.int64, device)
    rows = logits.index_select(0, indices)
    top_k, top_p = _to_device(counts, torch.int64, device), _to_device(shares, torch.float32, device)
    kept = _keep_top(rows, top_k, top_p, min(max(counts), _NUM_CANDIDATES), max(counts))
    return logits.index_copy(0, indices, kept)


def _keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int, most: int) -> Tensor:
    """Logits [num_rows, vocab_size] with -inf for what top_k and top_p leave out, tried on the likeliest tokens first.

    top_k, top_p: [num_rows]; vocab_size and inf for no limit. most: the largest of top_k.
    """
    candidates, token_ids = logits.topk(num_candidates)
    cumulative = logits.softmax(dim=-1, dtype=torch.float32).gather(1, token_ids).cumsum(dim=-1)
    # top_p is a share of what top_k leaves.
    of_top_k = cumulative.gather(1, top_k.clamp(max=num_candidates)[:, None] - 1)[:, 0]
    threshold = top_p * torch.where(top_k <= num_candidates, of_top_k, 1.0)
    # A token stays while the more likely ones do not reach the threshold; the most likely always does.
    num_kept = (cumulative < threshold[:, None]).sum(dim=-1).add_(1).minimum(top_k).clamp_(max=num_candidates)[:, None]
    # From the last one that stays back to the whole row, so that ties do not depend on the order topk gives them.
    last = candidates.gather(1, num_kept - 1)
    num_tied = num_kept - (candidates > last).sum(dim=-1, keepdim=True)
    tied = logits == last
    keep = (logits > last) | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= num_tied))
    kept = torch.where(keep, logits, -torch.inf)
    if num_candidates < most:
        enough = (top_k <= num_candidates) | ((top_k == logits.shape[1]) & (cumulative[:, -1] >= threshold))
        rest = enough.logical_not().nonzero()[:, 0]  # waits for the device
        if len(rest) > 0:
            more = min(16 * num_candidates, most)
            kept[rest] = _keep_top(logits[rest], top_k[rest], top_p[rest], more, most)
    return kept


def _rank(logprobs: Tensor, chosen: Tensor, num_top: int) -> Tensor:
    """Rank of the chosen token, ids of the most likely ones, bits of their logprobs: int32 [num_rows, 1 + 2 * num_top].

    logprobs: fp32 [num_rows, vocab_size]; chosen: fp32 [num_rows, 1], one of each row.
    """
    rank = (logprobs > chosen).sum(dim=-1, keepdim=True, dtype=torch.int32) + 1
    top = logprobs.topk(num_top)
    return torch.cat((rank, top.indices.int(), top.values.view(torch.int32)), dim=1)


def _entries(token_ids: list[int], logprobs: list[float], sampled_id: int, sampled: Logprob) -> dict[int, Logprob]:
    """`SamplerOutput.top_logprobs` of one row, from its most likely tokens in order and the sampled one."""
    entries: dict[int, Logprob] = {}
    rank = 1
    for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        if logprob == -math.inf:
            break
        if logprob < logprobs[i - 1]:
            rank = i + 1
        entries[token_id] = Logprob(logprob, rank)
    entries.setdefault(sampled_id, sampled)
    return entries


def _to_device(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Not torch.tensor(values, device=device), which waits for all that the device has to do.
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)
