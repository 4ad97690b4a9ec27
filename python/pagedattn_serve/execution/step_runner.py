"""The model and its cache on one device: runs the numbers of a step, whoever made them."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.execution.cache_engine import CacheEngine, choose_cache_dtype
from pagedattn_serve.execution.decode_graphs import DecodeGraphs
from pagedattn_serve.execution.step_inputs import StepInputs
from pagedattn_serve.models.causal_lm import CausalLM, NativeCausalLM
from pagedattn_serve.models.metadata import AttentionMetadata, LastRows

BlockPairs = list[tuple[int, int]]


class StepRunner:
    """Copies blocks and runs the model. Knows neither sequences nor requests."""

    def __init__(
        self,
        model: CausalLM,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        device: str,
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
        # A graph needs a model whose Python code does not depend on the content of a tensor.
        has_graphs = device == "cpu" and isinstance(model, NativeCausalLM) and not enforce_eager
        self._graphs: DecodeGraphs | None = None
        if has_graphs:
            most_blocks = max_num_blocks_per_seq(scheduler_config, cache_config)
            self._graphs = DecodeGraphs(model, self.cache_engine.kv_caches, most_blocks)

    def copy_blocks(self, to_swap_out: BlockPairs, to_swap_in: BlockPairs, to_copy: BlockPairs) -> None:
        """Make the copies of a batch. Pairs that are copied are taken out of their list."""
        for copy, blocks in (
            (self.cache_engine.swap_out, to_swap_out),
            (self.cache_engine.swap_in, to_swap_in),
            (self.cache_engine.copy, to_copy),
        ):
            if blocks:
                copy(blocks)
                blocks.clear()  # if the model fails and the batch comes again, the blocks have changed

    def run_model(self, inputs: StepInputs) -> Tensor:
        """The logits of the rows that sample, valid until the next call. A CPU graph runs if one fits the batch."""
        token_ids, positions = self._tensor(inputs.token_ids), self._tensor(inputs.positions)
        query_start_loc, last_rows = inputs.query_start_loc, inputs.rows_of_last_layer()
        metadata = AttentionMetadata(
            slot_mapping=self._tensor(inputs.slot_mapping),
            block_tables=self._tensor(inputs.block_tables),
            seq_lens=self._tensor(inputs.seq_lens),
            query_start_loc=None if query_start_loc is None else self._tensor(query_start_loc),
            sampling_rows=self._tensor(inputs.sampling_rows),
            max_seq_len=inputs.max_seq_len,
            last_rows=None if last_rows is None else LastRows(*map(self._tensor, last_rows)),
        )
        logits = None if self._graphs is None else self._graphs.run(token_ids, positions, metadata)
        if logits is None:
            logits = self.model(token_ids, positions, self.cache_engine.kv_caches, metadata)
        return logits

    def drop_graphs(self) -> None:
        """Capture anew: the model computes with another group of ranks from now on."""
        if self._graphs is not None:
            self._graphs.clear()

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def max_num_blocks_per_seq(scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> int:
    """Columns of an array of block tables."""
    return -(-scheduler_config.max_model_len // cache_config.block_size)
