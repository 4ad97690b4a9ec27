"""Runs one scheduled batch: its new tokens, flat and unpadded, through the model; then samples."""

import torch
from torch import Tensor

from pagedattn_serve.batch import ScheduledBatch
from pagedattn_serve.cache_engine import CacheEngine
from pagedattn_serve.metadata import AttentionMetadata
from pagedattn_serve.models.loader import CausalLM
from pagedattn_serve.sampler import Sampler, SamplingRow


class ModelRunner:
    """The computing side of the engine: model, cache tensors, sampler."""

    def __init__(self, model: CausalLM, cache_engine: CacheEngine, block_size: int, seed: int) -> None:
        self.model = model
        self.cache_engine = cache_engine
        self.block_size = block_size
        self.sampler = Sampler(seed)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> list[int]:
        """One token id for each sequence of the batch that samples, in order. The batch must not be empty."""
        if batch.blocks_to_copy:
            self.cache_engine.copy(batch.blocks_to_copy)
        token_ids, positions, metadata = prepare_inputs(batch, self.block_size)
        hidden = self.model(token_ids, positions, self.cache_engine.kv_caches, metadata)
        sampling = [i for i, scheduled in enumerate(batch.sequences) if scheduled.samples]
        if not sampling:
            return []
        last_rows = metadata.query_start_loc[1:][sampling].long() - 1
        logits = self.model.compute_logits(hidden[last_rows])
        sequences = [batch.sequences[i].sequence for i in sampling]
        rows = [SamplingRow(s.sampling_params, len(s.output_token_ids)) for s in sequences]
        return self.sampler.sample(logits, rows)


def prepare_inputs(batch: ScheduledBatch, block_size: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """token_ids and positions, int64 [num_tokens], and the metadata of a batch."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    seq_lens: list[int] = []
    query_start_loc = [0]
    for scheduled in batch.sequences:
        begin = scheduled.sequence.num_computed_tokens
        end = begin + scheduled.num_new_tokens
        table = scheduled.block_table
        token_ids += scheduled.sequence.tokens(begin, end)
        positions += range(begin, end)
        slot_mapping += [table[p // block_size] * block_size + p % block_size for p in range(begin, end)]
        seq_lens.append(end)
        query_start_loc.append(len(token_ids))
    width = max(len(scheduled.block_table) for scheduled in batch.sequences)
    block_tables = [scheduled.block_table + [0] * (width - len(scheduled.block_table)) for scheduled in batch.sequences]
    metadata = AttentionMetadata(
        slot_mapping=torch.tensor(slot_mapping),
        block_tables=torch.tensor(block_tables, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32),
    )
    return torch.tensor(token_ids), torch.tensor(positions), metadata
