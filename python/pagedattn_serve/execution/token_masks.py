"""Structured output in a batch: llguidance fills in what the forms of the rows allow next, and one op applies it."""

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.sampling.grammar import error_of
from pagedattn_serve.sampling.state import SamplingState


class TokenMasks:
    """Masks on the host, for one step at a time, and llguidance's threads: as many as torch has."""

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
                _keep_out(rows[i].token_rules.end_token_ids, masks.numpy()[place])
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


def _keep_out(token_ids: Collection[int], mask: npt.NDArray[np.int32]) -> None:
    """Clear the bits of these tokens, unless no bit would be left."""
    words = mask.view(np.uint32)
    others = words.copy()
    for token_id in token_ids:
        if token_id < 32 * len(others):  # the model may have more tokens than the tokenizer
            others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if others.any():
        words[:] = others
