"""Runs one scheduled batch: its new tokens, flat and unpadded, through the model; then samples."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.execution.block_tables import BlockTables
from pagedattn_serve.execution.cache_engine import CacheEngine, choose_cache_dtype
from pagedattn_serve.execution.decode_graphs import DecodeGraphs
from pagedattn_serve.execution.sampler import Sampler, SamplerOutput
from pagedattn_serve.models.causal_lm import CausalLM, NativeCausalLM
from pagedattn_serve.models.metadata import AttentionMetadata
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.scheduling.batch import ScheduledBatch


class ModelRunner:
    """The computing side of the engine: model, cache tensors, sampler, all on one device."""

    def __init__(
        self,
        model: CausalLM,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        device: str,
        seed: int,
        enforce_eager: bool = False,
    ) -> None:
        self.model = model
        self.device = device
        self.block_size = cache_config.block_size
        self.cache_engine = CacheEngine(
            model.num_layers,
            cache_config.num_blocks,
            model.num_kv_heads,
            model.head_size,
            self.block_size,
            choose_cache_dtype(cache_config.kv_cache_dtype, model.dtype),
            device,
            cache_config.num_host_blocks,
            cache_config.kv_scales,
        )
        max_num_blocks_per_seq = -(-scheduler_config.max_model_len // self.block_size)
        self.block_tables = BlockTables(scheduler_config.max_num_seqs, max_num_blocks_per_seq)
        self.sampler = Sampler(seed, device)
        # A graph needs a model whose Python code does not depend on the content of a tensor.
        has_graphs = device == "cpu" and isinstance(model, NativeCausalLM) and not enforce_eager
        self._graphs = DecodeGraphs(model, self.cache_engine.kv_caches, max_num_blocks_per_seq) if has_graphs else None

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> SamplerOutput:
        """Copy the blocks of the batch, and run its sequences. Returns the tokens that the sequences sample, in order.

        A sequence with drafts samples a token after its last token, and one after each draft as if the drafts so far
        were right. For a sequence with prompt_logprobs, the result has those of the tokens after the prompt's rows.
        """
        for copy, blocks in (
            (self.cache_engine.swap_out, batch.blocks_to_swap_out),
            (self.cache_engine.swap_in, batch.blocks_to_swap_in),
            (self.cache_engine.copy, batch.blocks_to_copy),
        ):
            if blocks:
                copy(blocks)
                blocks.clear()  # if the model fails and the batch comes again, the blocks have changed
        if not batch.sequences:
            return SamplerOutput()
        token_ids, positions, metadata = self.prepare_inputs(batch)
        logits = self.run_model(token_ids, positions, metadata)
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

    def run_model(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """The logits of the rows that sample, valid until the next call. A CPU graph runs if one fits the batch."""
        logits = None if self._graphs is None else self._graphs.run(token_ids, positions, metadata)
        if logits is None:
            logits = self.model(token_ids, positions, self.cache_engine.kv_caches, metadata)
        return logits

    def prepare_inputs(self, batch: ScheduledBatch) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """token_ids and positions, int64 [num_tokens], and the metadata of a batch."""
        token_ids: list[int] = []
        for scheduled in batch.sequences:
            sequence, num_new_tokens = scheduled.sequence, scheduled.num_new_tokens
            if num_new_tokens == 1 and scheduled.num_samples and sequence.output_token_ids:
                token_ids.append(sequence.output_token_ids[-1])  # the usual case, in a fifth of the time
            else:
                begin = sequence.num_computed_tokens
                token_ids += sequence.tokens(begin, begin + num_new_tokens)
            token_ids += scheduled.draft_token_ids
        begins = _integers([scheduled.sequence.num_computed_tokens for scheduled in batch.sequences])
        num_drafts = _integers([len(scheduled.draft_token_ids) for scheduled in batch.sequences])
        counts = _integers([scheduled.num_new_tokens for scheduled in batch.sequences]) + num_drafts
        query_start_loc = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        block_tables = self.block_tables.update(batch.sequences)
        num_samples = _integers([scheduled.num_samples for scheduled in batch.sequences])
        num_rows = num_samples + num_drafts
        rows = np.repeat(query_start_loc[1:].astype(np.int64) - 1, num_rows)
        if num_drafts.any():  # a sequence with drafts samples from its last rows, once from each
            from_end = np.repeat(np.cumsum(num_rows), num_rows) - np.arange(len(rows)) - 1
            rows -= np.minimum(from_end, np.repeat(num_drafts, num_rows))
        prompt_rows = [np.arange(*positions) + (query_start_loc[i] - begins[i]) for i, positions in _reported(batch)]

        seq_of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(token_ids)) + (begins - query_start_loc[:-1])[seq_of_token]
        blocks = block_tables[seq_of_token, positions // self.block_size].astype(np.int64)
        seq_lens = begins + counts
        metadata = AttentionMetadata(
            slot_mapping=self._tensor(blocks * self.block_size + positions % self.block_size),
            block_tables=self._tensor(block_tables),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            query_start_loc=None if (counts == 1).all() else self._tensor(query_start_loc),
            sampling_rows=self._tensor(np.concatenate([rows, *prompt_rows])),
            max_seq_len=int(seq_lens.max()),
        )
        return self._tensor(_integers(token_ids)), self._tensor(positions), metadata

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _integers(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)  # a given type saves a quarter of the time


def sampling_rows(batch: ScheduledBatch) -> list[SamplingState]:
    """The state for each token to draw: at the end of a sequence, one state for each fork; then one for each draft, as
    if the drafts so far were output."""
    rows: list[SamplingState] = []
    for scheduled in batch.sequences:
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
    for i, scheduled in enumerate(batch.sequences):
        sequence = scheduled.sequence
        if sequence.prompt_logits_from is not None:
            begin = max(sequence.num_computed_tokens, sequence.prompt_logits_from)
            end = min(sequence.num_computed_tokens + scheduled.num_new_tokens, len(sequence.prompt_token_ids) - 1)
            if begin < end:
                found.append((i, (begin, end)))
    return found
