"""The model and its cache on one device: runs the numbers of a step, whichever process made them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.execution.cache_engine import CacheEngine, choose_cache_dtype
from pagedattn_serve.execution.decode_graphs import DecodeGraphs
from pagedattn_serve.models.causal_lm import CausalLM, NativeCausalLM
from pagedattn_serve.models.metadata import AttentionMetadata, LastRows
from pagedattn_serve.scheduling.table_array import TableArray

BlockPairs = list[tuple[int, int]]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """The tokens of a step, one sequence after the other.

    token_ids, positions, slot_mapping: int64 [num_tokens].
    seq_lens, query_start_loc, sampling_rows, max_seq_len: as in `AttentionMetadata`.

    The block tables are the first rows of the runner's `TableArray`, one for each sequence.
    """

    token_ids: Int64s
    positions: Int64s
    slot_mapping: Int64s
    seq_lens: Int32s
    query_start_loc: Int32s | None
    sampling_rows: Int64s
    max_seq_len: int

    def rows_of_last_layer(self) -> tuple[npt.NDArray[Any], ...] | None:
        """The fields of `LastRows`. None, which is all rows, where few or none could be left out."""
        if self.query_start_loc is None or len(self.sampling_rows) >= len(self.token_ids):
            return None
        ends = self.query_start_loc[1:]
        begins = ends.astype(np.int64)
        sequences = np.searchsorted(ends, self.sampling_rows, side="right")
        np.minimum.at(begins, sequences, self.sampling_rows)
        starts = np.zeros_like(self.query_start_loc)
        np.cumsum(ends - begins, out=starts[1:])
        if starts[-1] == ends[-1]:
            return None
        left_out = begins - starts[:-1]  # of the rows before those of each sequence
        of_step = np.arange(starts[-1]) + np.repeat(left_out, ends - begins)
        return of_step, starts, self.sampling_rows - left_out[sequences]


class StepRunner:
    """Copies blocks and runs the model. Knows neither sequences nor requests.

    table_array: whoever owns it writes the block tables of a step into it before the step runs.
    block_tables: the same memory as a tensor.
    """

    def __init__(
        self,
        model: CausalLM,
        cache_config: CacheConfig,
        table_array: TableArray,
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
        tables = torch.frombuffer(table_array.memory, dtype=torch.int32)
        self.block_tables = tables.view(table_array.num_rows, table_array.num_columns)
        # A graph needs a model whose Python code does not depend on the content of a tensor.
        has_graphs = device == "cpu" and isinstance(model, NativeCausalLM) and not enforce_eager
        self._graphs: DecodeGraphs | None = None
        if has_graphs:
            self._graphs = DecodeGraphs(model, self.cache_engine.kv_caches, self.block_tables)

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
            block_tables=self.tables_of(inputs).to(self.device),
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

    def tables_of(self, inputs: StepInputs) -> Tensor:
        """The block tables of a step, as far as its longest sequence needs them, int32 [num_seqs, num_blocks]."""
        return self.block_tables[: len(inputs.seq_lens), : -(-inputs.max_seq_len // self.block_size)]

    def drop_graphs(self) -> None:
        """Capture anew: the model computes with another group of ranks from now on."""
        if self._graphs is not None:
            self._graphs.clear()

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
