"""Runs one scheduled batch: its new tokens, flat and unpadded, through the model; then samples."""

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.execution.sampler import Sampler, SamplerOutput
from pagedattn_serve.execution.step_runner import Int64s, StepInputs, StepRunner
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.scheduling.batch import ScheduledBatch
from pagedattn_serve.scheduling.table_array import TableArray


class BatchRunner(Protocol):
    """What the engine asks of the computing side: of a `ModelRunner`, or of an `Executor` if there are several ranks.

    can_run_again: whether a batch that raised may run again: the caches hold what the batch expects.
    """

    @property
    def can_run_again(self) -> bool: ...

    def execute(self, batch: ScheduledBatch) -> SamplerOutput:
        """Copy the blocks of the batch, and run its sequences. Returns the tokens that the sequences sample, in order.

        A sequence with drafts samples a token after its last token, and one after each draft as if the drafts so far
        were right. For a sequence with prompt_logprobs, the result has those of the tokens after the prompt's rows.
        """

    def check_health(self) -> None:
        """Raise ExecutorDeadError if there are other processes to run batches with, and one has ended."""

    def find_hang(self) -> str | None:
        """Which of these processes hang, and how; None if none does."""

    def at_work(self) -> bool:
        """Whether one of these processes computes."""


class ModelRunner(StepRunner):
    """The computing side of one process: model, cache tensors, sampler, all on one device. A `BatchRunner`."""

    def __init__(
        self,
        model: CausalLM,
        cache_config: CacheConfig,
        table_array: TableArray,
        device: str,
        seed: int,
        enforce_eager: bool = False,
    ) -> None:
        super().__init__(model, cache_config, table_array, device, enforce_eager)
        self._tables = self.block_tables.numpy()
        self.sampler = Sampler(seed, device)

    @property
    def can_run_again(self) -> bool:
        return True

    def check_health(self) -> None:
        pass

    def find_hang(self) -> str | None:
        return None

    def at_work(self) -> bool:
        return False

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> SamplerOutput:
        self.copy_blocks(batch.blocks_to_swap_out, batch.blocks_to_swap_in, batch.blocks_to_copy)
        if not batch.sequences:
            return SamplerOutput()
        return self.sample(batch, self.run_model(self.prepare_inputs(batch)))

    def prepare_inputs(self, batch: ScheduledBatch) -> StepInputs:
        """What the model reads, beside the block tables."""
        plain, others = batch.sequences[: batch.num_plain], batch.sequences[batch.num_plain :]
        begins = _integers([scheduled.sequence.num_computed_tokens for scheduled in batch.sequences])
        token_ids = [scheduled.sequence.output_token_ids[-1] for scheduled in plain]
        if not others:
            return self._plain_inputs(_integers(token_ids), begins)
        for scheduled in others:
            sequence, begin = scheduled.sequence, scheduled.sequence.num_computed_tokens
            token_ids += sequence.tokens(begin, begin + scheduled.num_new_tokens)
            token_ids += scheduled.draft_token_ids
        num_drafts, counts, num_samples = np.zeros_like(begins), np.ones_like(begins), np.ones_like(begins)
        num_drafts[len(plain) :] = [len(scheduled.draft_token_ids) for scheduled in others]
        counts[len(plain) :] = [scheduled.num_new_tokens for scheduled in others]
        num_samples[len(plain) :] = [scheduled.num_samples for scheduled in others]
        counts += num_drafts
        query_start_loc = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        num_rows = num_samples + num_drafts
        rows = np.repeat(query_start_loc[1:].astype(np.int64) - 1, num_rows)
        if num_drafts.any():  # a sequence with drafts samples from its last rows, once from each
            from_end = np.repeat(np.cumsum(num_rows), num_rows) - np.arange(len(rows)) - 1
            rows -= np.minimum(from_end, np.repeat(num_drafts, num_rows))
        prompt_rows = [np.arange(*positions) + (query_start_loc[i] - begins[i]) for i, positions in _reported(batch)]

        seq_of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(token_ids)) + (begins - query_start_loc[:-1])[seq_of_token]
        blocks = self._tables[seq_of_token, positions // self.block_size].astype(np.int64)
        seq_lens = begins + counts
        return StepInputs(
            token_ids=_integers(token_ids),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            seq_lens=seq_lens.astype(np.int32),
            query_start_loc=None if (counts == 1).all() else query_start_loc,
            sampling_rows=np.concatenate([rows, *prompt_rows]),
            max_seq_len=int(seq_lens.max()),
        )

    def _plain_inputs(self, token_ids: Int64s, positions: Int64s) -> StepInputs:
        """Of a step of plain decodes: what `prepare_inputs` makes, in fewer operations."""
        rows, columns = np.arange(len(token_ids)), positions // self.block_size
        seq_lens = (positions + 1).astype(np.int32)
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=positions + (self._tables[rows, columns] - columns) * self.block_size,
            seq_lens=seq_lens,
            query_start_loc=None,
            sampling_rows=rows,
            max_seq_len=int(seq_lens.max()),
        )

    def sample(self, batch: ScheduledBatch, logits: Tensor) -> SamplerOutput:
        """The tokens of a batch that has run, and the prompt_logprobs that it asks for."""
        rows = sampling_rows(batch)
        output = self.sampler.sample(logits[: len(rows)], rows) if rows else SamplerOutput()
        logits = logits[len(rows) :]
        for i, (begin, end) in _reported(batch):
            state: SamplingState = batch.sequences[i].sequence.sampling
            following = state.prompt_token_ids[begin + 1 : end + 1]
            num_top = state.sampling_params.prompt_logprobs or 0
            entries = self.sampler.prompt_logprobs(logits[: end - begin], following, num_top)
            output.prompt_logprobs[i] = begin + 1, entries
            logits = logits[end - begin :]
        return output


def _integers(values: list[int]) -> Int64s:
    return np.array(values, dtype=np.int64)  # a given type saves a quarter of the time


def sampling_rows(batch: ScheduledBatch) -> list[SamplingState]:
    """The state for each token to draw: at the end of a sequence, one state for each fork; then one for each draft, as
    if the drafts so far were output."""
    rows: list[SamplingState] = [scheduled.sequence.sampling for scheduled in batch.sequences[: batch.num_plain]]
    for scheduled in batch.sequences[batch.num_plain :]:
        state: SamplingState = scheduled.sequence.sampling
        if scheduled.num_samples:
            rows.append(state)
            if scheduled.num_samples == 1 and not scheduled.draft_token_ids:
                continue
        # All share the matcher of the sequence, because the rows of a sequence follow each other.
        rows += [replace(state, index=index) for index in range(1, scheduled.num_samples)]
        for i in range(1, len(scheduled.draft_token_ids) + 1):
            rows.append(replace(state, output_token_ids=[*state.output_token_ids, *scheduled.draft_token_ids[:i]]))
    return rows


def _reported(batch: ScheduledBatch) -> list[tuple[int, tuple[int, int]]]:
    """The sequences, by index in the batch, with rows that prompt_logprobs asks for, and the positions [begin, end) of
    these rows. The prompt's last position, and positions that were looked at before a preemption, are left out."""
    found = []
    for i, scheduled in enumerate(batch.sequences[batch.num_plain :], batch.num_plain):
        sequence = scheduled.sequence
        if sequence.prompt_logits_from is not None:
            begin = max(sequence.num_computed_tokens, sequence.prompt_logits_from)
            end = min(sequence.num_computed_tokens + scheduled.num_new_tokens, len(sequence.prompt_token_ids) - 1)
            if begin < end:
                found.append((i, (begin, end)))
    return found
