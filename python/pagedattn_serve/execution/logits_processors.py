"""What changes the logits of a row before the temperature: callables of the user, masks, biases, penalties.

Only rows that ask for a change are changed. Each kind of change, except callables, is made for all rows at once. The
host collects the places that change as flat indices; then one gather reads their logits, and one scatter writes the
changed logits back. So a step reads and writes as many logits as the rows have tokens or biases, whatever the
vocabulary.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.sampling.grammar import error_of
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import takes_prompt


def process_logits(logits: Tensor, rows: list[SamplingState], indices: list[int]) -> dict[int, ArgumentError]:
    """Change logits, fp32 [num_rows, vocab_size] and contiguous, in place: those of the rows in `indices`.

    In vLLM's order: logits_processors, allowed_token_ids, bad_words and min_tokens, logit_bias, penalties. Returns what
    went wrong with the callables of a row, if something did.
    """
    errors = {i: error for i in indices if (error := _call_processors(logits[i], rows[i])) is not None}
    _keep_allowed(logits, {i: ids for i in indices if (ids := rows[i].sampling_params.allowed_token_ids) is not None})
    _keep_out(logits, {i: list(_kept_out(rows[i])) for i in indices})
    _add_bias(logits, {i: bias for i in indices if (bias := rows[i].sampling_params.bias_of_token_ids)})
    _penalise_repetition(logits, {i: rows[i] for i in indices if rows[i].sampling_params.repetition_penalty != 1})
    counting = (
        i for i in indices if rows[i].sampling_params.presence_penalty or rows[i].sampling_params.frequency_penalty
    )
    _penalise_counts(logits, {i: rows[i] for i in counting})
    return errors


def _call_processors(logits: Tensor, row: SamplingState) -> ArgumentError | None:
    """Replace logits, [vocab_size], by what the user's callables make of them; returns what went wrong.

    If a callable fails, only its own request fails: the other rows of the batch go on.
    """
    for processor in row.sampling_params.logits_processors or ():
        arguments = [list(row.output_token_ids), logits.clone()]
        if takes_prompt(processor):
            arguments.insert(0, list(row.prompt_token_ids))
        expected = f"callables that return logits of shape {list(logits.shape)}"
        try:
            result = processor(*arguments)
            if not isinstance(result, Tensor):
                return ArgumentError("logits_processors", expected, type(result).__name__)
            if result.shape != logits.shape:
                return ArgumentError("logits_processors", expected, f"shape {list(result.shape)}")
            logits.copy_(result)
            if logits.isnan().any():
                return ArgumentError("logits_processors", "callables that return numbers", "NaN")
        except Exception as error:  # a user's callable may raise anything
            return ArgumentError("logits_processors", expected, f"{type(error).__name__}: {error}")
    return None


def _keep_allowed(logits: Tensor, allowed: Mapping[int, Collection[int]]) -> None:
    if allowed:
        places = _to_device(_places(logits, allowed), logits)
        kept = logits.view(-1).index_select(0, places)
        logits.index_fill_(0, _to_device(np.fromiter(allowed, np.int64), logits), -torch.inf)
        logits.view(-1).scatter_(0, places, kept)


def _kept_out(row: SamplingState) -> Iterator[int]:
    """The tokens that min_tokens and bad words keep out. With structured output, the mask looks after min_tokens."""
    if row.matcher is None and len(row.output_token_ids) < row.sampling_params.min_tokens:
        yield from row.token_rules.end_token_ids
    previous = (row.output_token_ids or row.prompt_token_ids)[-1]
    for word in row.token_rules.bad_words:
        if len(word) == 1 or (word[-2] == previous and _ends_with(row, word[:-1])):
            yield word[-1]


def _ends_with(row: SamplingState, token_ids: tuple[int, ...]) -> bool:
    """Whether the prompt and the output, taken as one list, end with these token ids."""
    num_in_prompt = max(len(token_ids) - len(row.output_token_ids), 0)
    in_prompt = row.prompt_token_ids[-num_in_prompt:] if num_in_prompt else []
    in_output = row.output_token_ids[max(len(row.output_token_ids) - len(token_ids), 0) :]
    return (*in_prompt, *in_output) == token_ids


def _keep_out(logits: Tensor, token_ids: dict[int, list[int]]) -> None:
    # A tokenizer may have tokens that the model does not have.
    token_ids = {i: [each for each in ids if each < logits.shape[1]] for i, ids in token_ids.items()}
    if any(token_ids.values()):
        logits.view(-1).index_fill_(0, _to_device(_places(logits, token_ids), logits), -torch.inf)


def _add_bias(logits: Tensor, biases: dict[int, tuple[tuple[int, float], ...]]) -> None:
    if biases:
        places = _places(logits, {i: [token_id for token_id, _ in bias] for i, bias in biases.items()})
        values = np.array([value for bias in biases.values() for _, value in bias], np.float32)
        logits.view(-1).index_add_(0, _to_device(places, logits), _to_device(values, logits))


def _penalise_repetition(logits: Tensor, rows: dict[int, SamplingState]) -> None:
    """Keskar et al., "CTRL", 2019, in the form of Hugging Face: negative logits are multiplied, not divided."""
    if rows:
        tokens = {i: row.ids_in_prompt() + row.counts_in_output().token_ids for i, row in rows.items()}
        penalties = [row.sampling_params.repetition_penalty for row in rows.values()]
        places = _to_device(_places(logits, tokens), logits)
        penalty = _to_device(np.repeat(np.array(penalties, np.float32), list(map(len, tokens.values()))), logits)
        values = logits.view(-1).index_select(0, places)
        # A token of both prompt and output is written twice, with the same logit.
        logits.view(-1).scatter_(0, places, torch.where(values < 0, values * penalty, values / penalty))


def _penalise_counts(logits: Tensor, rows: dict[int, SamplingState]) -> None:
    """OpenAI's: logit - count * frequency_penalty - (count > 0) * presence_penalty, of the tokens of the output."""
    if rows:
        counts = {i: row.counts_in_output() for i, row in rows.items()}
        of_rows = [
            [row.sampling_params.frequency_penalty for row in rows.values()],
            [row.sampling_params.presence_penalty for row in rows.values()],
        ]
        lengths = [len(each.token_ids) for each in counts.values()]
        frequency, presence = np.array(of_rows, np.float32).repeat(lengths, axis=1)
        times = np.concatenate([np.asarray(each.counts, np.float32) for each in counts.values()])
        places = _to_device(_places(logits, {i: each.token_ids for i, each in counts.items()}), logits)
        values = logits.view(-1).index_select(0, places)
        values = values - _to_device(frequency * times, logits) - _to_device(presence, logits)
        logits.view(-1).scatter_(0, places, values)


def _places(logits: Tensor, token_ids: Mapping[int, Collection[int]]) -> np.ndarray:
    """Flat indices in `logits` of the token ids of each row: int64, in order."""
    return np.concatenate([np.asarray(ids, np.int64) + i * logits.shape[1] for i, ids in token_ids.items()])


def _to_device(array: np.ndarray, logits: Tensor) -> Tensor:
    return torch.from_numpy(array).to(logits.device, non_blocking=True)


class TokenMasks:
    """Structured output in a batch: llguidance fills in what the forms of the rows allow next, and one op applies it.

    Masks on the host, for one step at a time, and llguidance's threads: as many as torch has.
    """

    def __init__(self, device: torch.device | str) -> None:
        from llguidance import LLExecutor  # rows with a matcher come only if it is installed

        self._executor = LLExecutor(torch.get_num_threads())
        self._pin_memory = torch.device(device).type == "cuda"
        self._masks = torch.empty(0, 0, dtype=torch.int32)

    def apply(self, logits: Tensor, rows: list[SamplingState], indices: list[int]) -> dict[int, ArgumentError]:
        """In the rows in `indices`, tokens that the row's form does not allow get -inf, in place. Before min_tokens,
        tokens that end an output get -inf as well, unless the form allows nothing else.

        logits: [num_rows, vocab_size]; each of these rows has a matcher. The rows of one sequence follow each other. A
        sequence that is about to fork has several rows, all at its end. A sequence with drafts has its own row, then a
        row after each draft. A draft that the form does not allow is never drawn, so the rows after it count for
        nothing and may stay as they are.

        Returns the errors of llguidance, by row.
        """
        errors: dict[int, ArgumentError] = {}
        runs: list[tuple[int, Any, int, list[int]]] = []  # for each sequence: row, matcher, place of its mask, drafts
        last, num_tokens = None, 0
        for place, i in enumerate(indices):
            matcher, token_ids = rows[i].matcher, rows[i].output_token_ids
            assert matcher is not None
            if matcher is last and len(token_ids) > num_tokens:
                runs[-1][3].append(token_ids[-1])
                continue
            own = matcher.fork() if matcher is last else matcher
            runs.append((i, own.advance(token_ids), place, []))
            last, num_tokens = matcher, len(token_ids)
        assert last is not None
        masks = self._fill(runs, len(indices), last.num_mask_words)
        for place, i in enumerate(indices):
            if len(rows[i].output_token_ids) < rows[i].sampling_params.min_tokens:
                _clear_bits(rows[i].token_rules.end_token_ids, masks.numpy()[place])
        for i, matcher, _, _ in runs:
            if error := error_of(matcher):
                errors[i] = error
        of_rows = None
        if len(indices) < len(logits):
            of_rows = torch.tensor(indices, device="cpu").to(logits.device, non_blocking=True)
        ops.apply_token_bitmask(logits, masks.to(logits.device, non_blocking=True), of_rows)
        return errors

    def _fill(self, runs: list[tuple[int, Any, int, list[int]]], num_masks: int, num_words: int) -> Tensor:
        """int32 [num_masks, num_words] on the host; all ones where no run has a mask."""
        from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

        if num_masks > len(self._masks):
            self._masks = torch.empty(num_masks, num_words, dtype=torch.int32, pin_memory=self._pin_memory)
        masks = self._masks[:num_masks].fill_(-1)
        plain = [(matcher, place) for _, matcher, place, drafts in runs if not drafts]
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, masks.numpy())
        with_drafts = [(matcher, place, drafts) for _, matcher, place, drafts in runs if drafts]
        if with_drafts:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, with_drafts, masks.numpy())
        return masks


def _clear_bits(token_ids: Collection[int], mask: npt.NDArray[np.int32]) -> None:
    """Clear the bits of these tokens, unless no bit would be left."""
    words = mask.view(np.uint32)
    others = words.copy()
    for token_id in token_ids:
        if token_id < 32 * len(others):  # the model may have more tokens than the tokenizer
            others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if others.any():
        words[:] = others
