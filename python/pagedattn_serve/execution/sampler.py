"""From logits to token ids, for a whole batch at once.

A row costs only what it asks for: probabilities if a token is drawn, the logprobs of all tokens if some are reported or
the row's logits change. logits_processors.py changes logits before that. No bit of a row's result depends on another
row. The host waits for the device once, at the end.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.logits_processors import TokenMasks, process_logits
from pagedattn_serve.outputs import Logprob
from pagedattn_serve.sampling.pooling import Pooled
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import MAX_LOGPROBS, SamplingParams

_SMALLEST = torch.finfo(torch.float32).tiny
_CACHED_BYTES = 2**20  # of softmax at a time on a thread of a CPU, so that it stays in the cache
_PROMPT_BYTES = 4 * 2**20  # of log-softmax of a prompt at a time


@dataclass(slots=True)
class SamplerOutput:
    """One token for each row, and its logprob: the fp32 log-softmax of the logits before they are changed.

    logprobs: NaN for a row with no token to choose: its logits are no numbers, or `errors` says why.
    top_logprobs: for a row that reports logprobs, by token id: first the sampled token (with num_candidates, all
        candidates), then those of `logprob_token_ids`, or as many most likely tokens as asked for, most likely first.
        Most likely tokens of probability 0 are left out. Equally likely tokens share a rank. None for other rows.
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
        self._generator = torch.Generator().manual_seed(seed)
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
            if row.num_candidates:
                searching.append(i)
                continue
            if _changes(row):
                changed.append(i)
            if row.matcher is not None:
                structured.append(i)
            if row.sampling_params.reports_logprobs:
                reporting.append(i)
        unchanged = _LogprobsOfRows(logits, sorted({*searching, *changed, *structured, *reporting}))
        if changed:
            output.errors = process_logits(logits, rows, changed)
        if structured:
            if self._token_masks is None:
                self._token_masks = TokenMasks(self._device)
            output.errors |= self._token_masks.apply(logits, rows, structured)
        token_ids = self._choose(logits, rows)[:, None]
        chosen = unchanged.of_tokens(token_ids, logits)
        columns = [token_ids.int(), chosen.view(torch.int32)]
        if changed or structured:
            columns.append((logits.gather(1, token_ids) > -torch.inf).int())
        if reporting:
            indices = _to_device(reporting, torch.int64, logits.device)
            asked = [rows[i].sampling_params for i in reporting]
            counts = [params.num_most_likely for params in asked]
            given = _with_asked(token_ids.index_select(0, indices), asked)
            ranked = _rank(unchanged.of(reporting), given, max(counts))
        # All of the work is under way before the first wait. Ids and logprobs come as one tensor.
        host = torch.cat(columns, dim=1).cpu()
        output.token_ids, output.logprobs = host[:, 0].tolist(), host[:, 1].view(torch.float32).tolist()
        if reporting:
            for i, entries in zip(reporting, _reports(ranked, given.shape[1], counts), strict=True):
                output.top_logprobs[i] = entries
        if changed or structured:
            for i in host[:, 2].logical_not().nonzero()[:, 0].tolist():
                if not math.isnan(output.logprobs[i]):
                    causes = "logits_processors or masks" if rows[i].sampling_params.logits_processors else "masks"
                    no_token = ArgumentError("sampling_params", "a token to choose", f"{causes} that leave none")
                    output.errors.setdefault(i, no_token)
        if searching:
            _find_candidates(unchanged, rows, searching, output)
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
        random = [i for i, row in enumerate(rows) if _draws(row.sampling_params)]
        if random and len(random) == len(rows):
            return self._draw(logits, rows)
        token_ids = _argmax(logits)
        if random:
            indices = _to_device(random, torch.int64, logits.device)
            token_ids[indices] = self._draw(logits.index_select(0, indices), [rows[i] for i in random])
        return token_ids

    def _draw(self, logits: Tensor, rows: list[SamplingState]) -> Tensor:
        """As `_choose`, for rows of which each draws its token."""
        params, vocab_size, device = [row.sampling_params for row in rows], logits.shape[1], logits.device
        if processed := [i for i, each in enumerate(params) if each.logits_processors]:
            logits = _without_infinity(logits, _to_device(processed, torch.int64, device))
        temperature = _to_device([max(each.temperature, _SMALLEST) for each in params], torch.float32, device)
        seed, offset, subsequence = (_to_device(each, torch.int64, device) for each in self._numbers(rows))
        least = top_k = top_p = None
        if any(each.min_p > 0 for each in params):
            log_min_p = [math.log(each.min_p) if each.min_p > 0 else -math.inf for each in params]
            least = _to_device(log_min_p, torch.float32, device) * temperature
        counts = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
        shares = [each.top_p for each in params]
        # Both or none: with top_k, top_p is a share of the sum of what is left, which may not be 1 to the bit.
        if min(counts) < vocab_size or min(shares) < 1:
            top_k, top_p = _to_device(counts, torch.int64, device), _to_device(shares, torch.float32, device)
        drawn, parts = [], _cached_parts(logits)
        space = torch.empty_like(logits[parts[0]])
        for part in parts:
            likely = logits[part] if least is None else _without_unlikely(logits[part], least[part])
            tokens, _ = ops.sample_from_probs(
                ops.softmax(likely, temperature=temperature[part], out=space[: len(likely)]),
                top_k=None if top_k is None else top_k[part],
                top_p=None if top_p is None else top_p[part],
                seed=seed[part],
                offset=offset[part],
                subsequence=subsequence[part],
            )
            drawn.append(tokens)
        return torch.cat(drawn).long()

    def _numbers(self, rows: list[SamplingState]) -> tuple[list[int], list[int], list[int]]:
        """The seed, the offset and the subsequence of each row's random number. A number is made afresh for each token:
        there is nothing to keep, so nothing that a preemption could lose."""
        seeds = torch.empty(len(rows), dtype=torch.int64, device="cpu").random_(generator=self._generator).tolist()
        for i, row in enumerate(rows):
            if (seed := row.sampling_params.seed) is not None:
                seeds[i] = (seed + 2**63) % 2**64 - 2**63  # the same bits, with a sign
        return seeds, [len(row.output_token_ids) for row in rows], [row.index for row in rows]


class _LogprobsOfRows:
    """The log-softmax of all tokens in some rows of logits, fp32 [num_all_rows, vocab_size], as they are by now."""

    def __init__(self, logits: Tensor, rows: list[int]) -> None:
        self._places = {row: place for place, row in enumerate(rows)}
        if rows:
            self._indices = _to_device(rows, torch.int64, logits.device)
            own = logits if len(rows) == len(logits) else logits.index_select(0, self._indices)
            self._logprobs = own.log_softmax(dim=-1)

    def of(self, rows: list[int]) -> Tensor:
        """fp32 [len(rows), vocab_size]."""
        places = _to_device([self._places[row] for row in rows], torch.int64, self._logprobs.device)
        return self._logprobs.index_select(0, places)

    def of_tokens(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        """The log-softmax of one token in every row, fp32 [num_all_rows, 1]. token_ids: int64 [num_all_rows, 1].
        logits: in other rows, these are what counts."""
        if not self._places:
            return _logprobs_of(logits, token_ids)
        own = self._logprobs.gather(1, token_ids.index_select(0, self._indices))
        if len(own) == len(logits):
            return own
        return _logprobs_of(logits, token_ids).index_copy_(0, self._indices, own)


def _draws(params: SamplingParams) -> bool:
    return params.temperature > 0 and params.top_k != 1


def _without_infinity(logits: Tensor, indices: Tensor) -> Tensor:
    """Logits whose rows `indices` are relative to their largest. Where this is infinity, only the tokens that have it
    are left."""
    rows = logits.index_select(0, indices)
    relative = rows.sub_(rows.amax(dim=-1, keepdim=True)).nan_to_num_(nan=0.0, neginf=-math.inf)
    return logits.index_copy(0, indices, relative)


def _without_unlikely(logits: Tensor, least: Tensor) -> Tensor:
    """Logits with -inf for those that are less by `least` [num_rows] than the largest of their row: for the tokens that
    min_p leaves out. They go before top_k and top_p, as in vLLM, and top_p is a share of what is left."""
    relative = logits - logits.amax(dim=-1, keepdim=True)
    return logits.masked_fill(relative < least[:, None], -torch.inf)


def _cached_parts(logits: Tensor) -> list[slice]:
    """The rows of fp32 [num_rows, vocab_size] in parts whose softmax stays in the caches of a CPU's threads, each of
    which takes rows of its own; all at once on another device."""
    most = max(len(logits), 1)
    if logits.device.type == "cpu":
        most = max(_CACHED_BYTES // (4 * logits.shape[1]), 1) * torch.get_num_threads()
    return [slice(begin, begin + most) for begin in range(0, max(len(logits), 1), most)]


def _argmax(values: Tensor) -> Tensor:
    """The first of the largest in each row of contiguous fp32 [num_rows, num_columns]: int64 [num_rows]."""
    if values.device.type == "cpu":  # there numpy takes a third to an eighth of torch's time
        return torch.from_numpy(values.numpy().argmax(axis=1))
    return values.argmax(dim=-1)


def _logprobs_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The log-softmax of one token a row, fp32 [num_rows, 1]. token_ids: int64 [num_rows, 1]."""
    parts = _cached_parts(logits)
    if len(parts) == 1:
        return logits.log_softmax(dim=-1).gather(1, token_ids)
    space = torch.empty_like(logits[parts[0]])
    chosen = torch.empty_like(token_ids, dtype=logits.dtype)
    for part in parts:
        rows = logits[part]
        torch.gather(torch.log_softmax(rows, dim=-1, out=space[: len(rows)]), 1, token_ids[part], out=chosen[part])
    return chosen


def _find_candidates(
    logprobs: _LogprobsOfRows, rows: list[SamplingState], searching: list[int], output: SamplerOutput
) -> None:
    """Fill in `candidates`, `errors` and `top_logprobs` of the rows in `searching`."""
    for count in sorted({rows[i].num_candidates for i in searching}):  # topk breaks ties by the count
        indices = [i for i in searching if rows[i].num_candidates == count]
        some = [rows[i] for i in indices]
        own = logprobs.of(indices)
        scores = own
        if changed := _changed(some):
            scores = own.clone()
            errors = process_logits(scores, some, changed)
            output.errors.update((indices[i], error) for i, error in errors.items())
        top = scores.topk(min(count, scores.shape[1]))
        for i, values, token_ids in zip(indices, top.values.tolist(), top.indices.tolist(), strict=True):
            found = zip(token_ids, values, strict=True)
            output.candidates[i] = [(token_id, value) for token_id, value in found if value > -math.inf]
        if any(row.sampling_params.reports_logprobs for row in some):
            counts = [row.sampling_params.num_most_likely for row in some]
            reports = _reports(_rank(own, top.indices, max(counts)), top.indices.shape[1], counts)
            for i, entries in zip(indices, reports, strict=True):
                if rows[i].sampling_params.reports_logprobs:
                    output.top_logprobs[i] = entries


def _changes(row: SamplingState) -> bool:
    """Whether anything changes the logits of the row before the temperature."""
    return row.sampling_params.changes_logits or bool(row.token_rules.bad_words)


def _changed(rows: list[SamplingState]) -> list[int]:
    """The rows whose logits change."""
    return [i for i, row in enumerate(rows) if _changes(row)]


def _with_asked(token_ids: Tensor, params: list[SamplingParams]) -> Tensor:
    """The sampled token ids, int64 [num_rows, 1], and behind them those of each row's `logprob_token_ids`. Rows with
    fewer have the sampled one again."""
    asked = [each.token_ids_to_report for each in params]
    if not (width := max(map(len, asked))):
        return token_ids
    padded = _to_device([[*ids, *[-1] * (width - len(ids))] for ids in asked], torch.int64, token_ids.device)
    return torch.cat([token_ids, torch.where(padded < 0, token_ids, padded)], dim=1)


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


def _to_device(values: list[int] | list[float] | list[list[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Not torch.tensor(values, device=device), which waits for all that the device has to do.
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)
