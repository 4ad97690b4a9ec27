"""From logits to token ids, for a whole batch at once.

A row costs only what it asks for: random numbers if a token is drawn, a search for the most likely tokens if
top_k or top_p leaves some out, ranks if logprobs are reported. logits_processors.py changes logits before that. No bit
of a row's result depends on another row. The host waits for the device at the end; before the end only if top_k or
top_p may keep more than _NUM_CANDIDATES tokens.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.logits_processors import TokenMasks, process_logits
from pagedattn_serve.outputs import Logprob
from pagedattn_serve.sampling.pooling import Pooled
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import MAX_LOGPROBS, SamplingParams

_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads neighbouring seeds
_STEP_OF_INDEX = 0xD1B54A32D192ED03  # another odd number: spreads the sequences of a request
_SMALLEST = torch.finfo(torch.float32).tiny
# How many of the most likely tokens top_k and top_p look at first. Finding these among 32,000 tokens takes a fifteenth
# of the time of sorting, and for a trained model top_p seldom needs more.
_NUM_CANDIDATES = 256
_CACHED_BYTES = 2**20  # of log-softmax at a time on a CPU, so that it stays in the cache
_PROMPT_BYTES = 4 * 2**20  # of log-softmax of a prompt at a time


@dataclass(slots=True)
class SamplerOutput:
    """One token for each row, and its logprob: the fp32 log-softmax of the logits before they are changed.

    logprobs: NaN for a row with no token to choose: its logits are no numbers, or `errors` says why.
    top_logprobs: for a row with `params.logprobs`, by token id: first the sampled token (with num_candidates, all
        candidates), then as many most likely tokens, most likely first. Tokens of probability 0 are left out. Equally
        likely tokens share a rank. None for other rows.
    candidates: for a row with num_candidates, that many most likely tokens with their log probabilities, most likely
        first, without tokens of probability 0. params and rules change the fp32 log-softmax of such a row, as in
        Hugging Face's beam search, and its token id means nothing. None for other rows.
    errors: by row: its parameters leave no token, or its logits_processors or structured output failed.
    prompt_logprobs: for a sequence with prompt_logprobs, by its place in the batch: the position of a token of the
        prompt, and entries as in `top_logprobs` for each token from there on.
    pooled: for a sequence that is pooled, by its place in the batch.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    candidates: list[list[tuple[int, float]] | None] = field(default_factory=list)
    errors: dict[int, ArgumentError] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[dict[int, Logprob]]]] = field(default_factory=dict)
    pooled: dict[int, Pooled] = field(default_factory=dict)


class Sampler:
    """Draws tokens. Requests with a seed of their own get the same tokens whatever else is in the batch."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._request_generator = torch.Generator(device)
        self._device = device
        self._token_masks: TokenMasks | None = None  # made for the first row of structured output

    def sample(self, logits: Tensor, rows: list[SamplingState]) -> SamplerOutput:
        """logits: [num_rows, vocab_size], on the sampler's device; rows with penalties, biases or masks may be changed
        in place. A greedy row takes the lowest of equally likely token ids."""
        # fp32 once: argmax and log_softmax of half precision take four times as long on a CPU.
        logits = logits.float().contiguous()
        output = SamplerOutput(top_logprobs=[None] * len(rows), candidates=[None] * len(rows))
        searching, changed, structured, reporting = [], [], [], []
        for i, row in enumerate(rows):
            params = row.sampling_params
            if row.num_candidates:
                searching.append(i)
                continue
            if _changes(row):
                changed.append(i)
            if row.matcher is not None:
                structured.append(i)
            if params.logprobs is not None:
                reporting.append(i)
        logprobs = None  # of all tokens, before anything is changed
        if searching or changed or structured or reporting:
            logprobs = logits.log_softmax(dim=-1)
        if changed:
            output.errors = process_logits(logits, rows, changed)
        if structured:
            if self._token_masks is None:
                self._token_masks = TokenMasks(self._device)
            output.errors |= self._token_masks.apply(logits, rows, structured)
        token_ids = self._choose(logits, rows)[:, None]
        chosen = _logprobs_of(logits, token_ids) if logprobs is None else logprobs.gather(1, token_ids)
        columns = [token_ids.int(), chosen.view(torch.int32)]
        if changed or structured:
            columns.append((logits.gather(1, token_ids) > -torch.inf).int())
        if reporting:
            assert logprobs is not None
            indices = _to_device(reporting, torch.int64, logits.device)
            counts = [rows[i].sampling_params.logprobs or 0 for i in reporting]
            ranked = _rank(logprobs.index_select(0, indices), token_ids.index_select(0, indices), max(counts))
        # All of the work is under way before the first wait. Ids and logprobs come as one tensor.
        host = torch.cat(columns, dim=1).cpu()
        output.token_ids, output.logprobs = host[:, 0].tolist(), host[:, 1].view(torch.float32).tolist()
        if reporting:
            for i, entries in zip(reporting, _reports(ranked, 1, counts), strict=True):
                output.top_logprobs[i] = entries
        if changed or structured:
            for i in host[:, 2].logical_not().nonzero()[:, 0].tolist():
                if not math.isnan(output.logprobs[i]):
                    causes = "logits_processors or masks" if rows[i].sampling_params.logits_processors else "masks"
                    no_token = ArgumentError("sampling_params", "a token to choose", f"{causes} that leave none")
                    output.errors.setdefault(i, no_token)
        if searching:
            assert logprobs is not None
            _find_candidates(logprobs, rows, searching, output)
        for i in output.errors:
            output.logprobs[i] = math.nan
        return output

    def prompt_logprobs(self, logits: Tensor, token_ids: list[int], num_top: int) -> list[dict[int, Logprob]]:
        """Entries as in `SamplerOutput.top_logprobs` for tokens of a prompt. logits: [num_tokens, vocab_size]; each row
        is the model's output for the token before."""
        entries: list[dict[int, Logprob]] = []
        num_rows = max(_PROMPT_BYTES // (4 * logits.shape[1]), 1)
        for begin in range(0, len(token_ids), num_rows):
            given = _to_device(token_ids[begin : begin + num_rows], torch.int64, logits.device)[:, None]
            logprobs = logits[begin : begin + num_rows].float().log_softmax(dim=-1)
            entries += _reports(_rank(logprobs, given, num_top), 1, [num_top] * len(given))
        return entries

    def _choose(self, logits: Tensor, rows: list[SamplingState]) -> Tensor:
        """A token id a row: int64 [num_rows]."""
        random = [i for i, row in enumerate(rows) if row.sampling_params.temperature]
        if random and len(random) == len(rows):
            return self._draw(logits, rows)
        token_ids = _argmax(logits)
        if random:
            indices = _to_device(random, torch.int64, logits.device)
            token_ids[indices] = self._draw(logits.index_select(0, indices), [rows[i] for i in random])
        return token_ids

    def _draw(self, logits: Tensor, rows: list[SamplingState]) -> Tensor:
        """As `_choose`, for rows of which none is greedy."""
        params = [row.sampling_params for row in rows]
        temperatures = _to_device([max(p.temperature, _SMALLEST) for p in params], torch.float32, logits.device)
        # Relative to the largest logit, which becomes 0 and stays 0 however small the temperature is.
        relative = logits - logits.amax(dim=-1, keepdim=True)
        if processed := [i for i, each in enumerate(params) if each.logits_processors]:
            # A logit of infinity leaves only the tokens that have it. Here they are NaN.
            indices = _to_device(processed, torch.int64, logits.device)
            known = relative.index_select(0, indices).nan_to_num_(nan=0.0, neginf=-math.inf)
            relative.index_copy_(0, indices, known)
        probabilities = restrict(relative.div_(temperatures[:, None]), params).softmax(dim=-1)
        # argmax(p / e) with e ~ Exp(1) draws a token with probability p (the exponential race).
        return _argmax(probabilities.div_(self._exponential_noise(rows, logits)))

    def _exponential_noise(self, rows: list[SamplingState], logits: Tensor) -> Tensor:
        """fp32 [num_rows, vocab_size], positive and finite, in a fifth of the time of Tensor.exponential_ on a CPU."""
        bits = torch.empty_like(logits, dtype=torch.int32)
        if any(row.sampling_params.seed is None for row in rows):
            bits.random_(generator=self._generator)
        for i, row in enumerate(rows):
            if row.sampling_params.seed is not None:
                # Seeded afresh for each token: nothing to keep, so nothing that a preemption could lose.
                place = row.index * _STEP_OF_INDEX + len(row.output_token_ids)
                mixed = (row.sampling_params.seed * _GOLDEN_RATIO + place) % 2**64
                seed = mixed ^ (mixed >> 32)  # the generator looks at the low half
                bits[i].random_(generator=self._request_generator.manual_seed(seed))
        # u = (bits + 1/2) / 2^31 in float32. Its steps are finest near 0, and the smallest noise wins. The last factor
        # keeps u below 1 if the sum rounds up to 2^31. An e of 0 or infinity could draw a token of probability 0.
        return bits.float().add_(0.5).mul_(-(2**-31) * (1 - 2**-24)).log1p_().neg_()


def _argmax(values: Tensor) -> Tensor:
    """The first of the largest in each row of contiguous fp32 [num_rows, num_columns]: int64 [num_rows]."""
    if values.device.type == "cpu":  # there numpy takes a third to an eighth of torch's time
        return torch.from_numpy(values.numpy().argmax(axis=1))
    return values.argmax(dim=-1)


def _logprobs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The log-softmax of one token a row, fp32 [num_rows, 1]. token_ids: int64 [num_rows, 1]."""
    if logits.device.type != "cpu" or logits.numel() * logits.element_size() <= _CACHED_BYTES:
        return logits.log_softmax(dim=-1).gather(1, token_ids)
    num_rows = max(_CACHED_BYTES // (logits.element_size() * logits.shape[1]), 1)
    space = torch.empty_like(logits[:num_rows])
    chosen = torch.empty_like(token_ids, dtype=logits.dtype)
    for begin in range(0, len(logits), num_rows):
        rows = slice(begin, begin + num_rows)
        part = logits[rows]
        torch.gather(torch.log_softmax(part, dim=-1, out=space[: len(part)]), 1, token_ids[rows], out=chosen[rows])
    return chosen


def restrict(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits [num_rows, vocab_size] with -inf for the tokens that min_p, then top_k, then top_p leave out.

    The order is vLLM's. Each of the three sees the probabilities of the tokens that are left. Of equally likely tokens
    at a limit, the lower ids stay.
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
    # A token stays if the more likely tokens do not reach the threshold. The most likely token always stays.
    num_kept = (cumulative < threshold[:, None]).sum(dim=-1).add_(1).minimum(top_k).clamp_(max=num_candidates)[:, None]
    # Compare the whole row with the last token that stays, so that ties do not depend on the order of topk.
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


def _find_candidates(logprobs: Tensor, rows: list[SamplingState], searching: list[int], output: SamplerOutput) -> None:
    """Fill in `candidates`, `errors` and `top_logprobs` of the rows in `searching`."""
    for count in sorted({rows[i].num_candidates for i in searching}):  # topk breaks ties by the count
        indices = [i for i in searching if rows[i].num_candidates == count]
        some = [rows[i] for i in indices]
        own = logprobs.index_select(0, _to_device(indices, torch.int64, logprobs.device))
        scores = own
        if changed := _changed(some):
            scores = own.clone()
            errors = process_logits(scores, some, changed)
            output.errors.update((indices[i], error) for i, error in errors.items())
        top = scores.topk(min(count, scores.shape[1]))
        for i, values, token_ids in zip(indices, top.values.tolist(), top.indices.tolist(), strict=True):
            found = zip(token_ids, values, strict=True)
            output.candidates[i] = [(token_id, value) for token_id, value in found if value > -math.inf]
        if any(row.sampling_params.logprobs is not None for row in some):
            counts = [row.sampling_params.logprobs or 0 for row in some]
            reports = _reports(_rank(own, top.indices, max(counts)), top.indices.shape[1], counts)
            for i, entries in zip(indices, reports, strict=True):
                if rows[i].sampling_params.logprobs is not None:
                    output.top_logprobs[i] = entries


def _changes(row: SamplingState) -> bool:
    """Whether anything changes the logits of the row before the temperature."""
    return row.sampling_params.changes_logits or bool(row.token_rules.bad_words)


def _changed(rows: list[SamplingState]) -> list[int]:
    """The rows whose logits change."""
    return [i for i, row in enumerate(rows) if _changes(row)]


def _rank(logprobs: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Ids, ranks and logprobs (as bits) of some tokens of each row; ids and logprobs of the most likely tokens.

    logprobs: fp32 [num_rows, vocab_size]; token_ids: int64 [num_rows, num_tokens].
    num_top: how many of the most likely tokens some row asks for at most.
    Returns int32 [num_rows, 3 * num_tokens + 2 * num_ranked], with num_ranked >= num_top if there are as many tokens.
    """
    # Which of equally likely tokens topk finds depends on how many it is to find, so this number is one for all rows.
    num_ranked = MAX_LOGPROBS if num_top else 0
    given = logprobs.gather(1, token_ids)
    ranks = [(logprobs > each[:, None]).sum(dim=-1, keepdim=True, dtype=torch.int32) + 1 for each in given.unbind(1)]
    top = logprobs.topk(min(num_ranked, logprobs.shape[1]))
    columns = (token_ids.int(), *ranks, given.view(torch.int32), top.indices.int(), top.values.view(torch.int32))
    return torch.cat(columns, dim=1)


def _reports(ranked: Tensor, num_tokens: int, counts: list[int]) -> list[dict[int, Logprob]]:
    """`SamplerOutput.top_logprobs` from the result of `_rank`, the given tokens first, as with vLLM.

    counts: how many of the most likely, for each row.
    """
    num_ranked = (ranked.shape[1] - 3 * num_tokens) // 2
    of_given = [num_tokens] * 3
    ids, ranks, logprobs, top_ids, top = ranked.cpu().split_with_sizes([*of_given, num_ranked, num_ranked], dim=1)
    rows = zip(
        counts,
        ids.tolist(),
        ranks.tolist(),
        logprobs.view(torch.float32).tolist(),
        top_ids.tolist(),
        top.view(torch.float32).tolist(),
        strict=True,
    )
    reports = []
    for count, row_ids, row_ranks, row_logprobs, row_top_ids, row_top in rows:
        numbers = zip(row_ids, row_ranks, row_logprobs, strict=True)
        given = {token_id: Logprob(logprob, rank) for token_id, rank, logprob in numbers}
        reports.append(given | _most_likely(row_top_ids[:count], row_top[:count]))
    return reports


def _most_likely(token_ids: list[int], logprobs: list[float]) -> dict[int, Logprob]:
    """Entries of the most likely tokens of a row, given in order."""
    entries: dict[int, Logprob] = {}
    rank = 1
    for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        if logprob == -math.inf:
            break
        if logprob < logprobs[i - 1]:
            rank = i + 1
        entries[token_id] = Logprob(logprob, rank)
    return entries


def _to_device(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Not torch.tensor(values, device=device), which waits for all that the device has to do.
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)
