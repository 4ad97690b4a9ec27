"""Steps that give each of a few sequences its next token, as CPU graphs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedattn_ext import CPUGraph
from pagedattn_serve.models.causal_lm import AttentionMetadata, CausalLM, KVCache

MAX_SEQUENCES = 64  # with more sequences, the time between kernels counts for little
MAX_BYTES = 128 << 20  # of all graphs together, or of the last graph alone


class DecodeGraphs:
    """A graph for each number of sequences, captured when that number comes. A capture takes as long as the same step
    spends between the kernels without a graph, so a graph never loses time.

    block_tables: int32 [max_num_seqs, max_num_blocks_per_seq], whose first rows are the tables of each step.

    A graph keeps the memory of what passes between the layers. When this gets too much, graphs are given up, first of
    all the graph whose number of sequences has not come for longest.
    """

    def __init__(self, model: CausalLM, kv_caches: Sequence[KVCache], block_tables: Tensor) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._block_tables = block_tables
        self._token_ids, self._positions, self._slot_mapping, self._sampling_rows = (
            torch.zeros(MAX_SEQUENCES, dtype=torch.int64) for _ in range(4)
        )
        self._seq_lens = torch.zeros(MAX_SEQUENCES, dtype=torch.int32)
        self._graphs: dict[int, tuple[CPUGraph, Tensor]] = {}  # those that ran last at the end

    def run(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor | None:
        """What the model returns, in memory that the next call overwrites. None if a sequence has several tokens or
        several samples, or if there are too many sequences."""
        num_seqs = len(token_ids)
        if num_seqs > MAX_SEQUENCES or metadata.query_start_loc is not None:
            return None
        if len(metadata.sampling_rows) != num_seqs:
            return None
        for buffer, values in (
            (self._token_ids, token_ids),
            (self._positions, positions),
            (self._slot_mapping, metadata.slot_mapping),
            (self._sampling_rows, metadata.sampling_rows),
            (self._seq_lens, metadata.seq_lens),
        ):
            buffer[:num_seqs] = values
        if num_seqs not in self._graphs:
            self._graphs[num_seqs] = self._capture(num_seqs)
        graph, logits = self._graphs[num_seqs] = self._graphs.pop(num_seqs)  # to the end
        graph.replay()
        return logits

    def clear(self) -> None:
        """Forget what was captured."""
        self._graphs.clear()

    def _capture(self, num_seqs: int) -> tuple[CPUGraph, Tensor]:
        metadata = AttentionMetadata(
            slot_mapping=self._slot_mapping[:num_seqs],
            block_tables=self._block_tables[:num_seqs],
            seq_lens=self._seq_lens[:num_seqs],
            query_start_loc=None,
            sampling_rows=self._sampling_rows[:num_seqs],
        )
        graph = CPUGraph()
        try:
            with graph.capture():
                logits = self._model(self._token_ids[:num_seqs], self._positions[:num_seqs], self._kv_caches, metadata)
        except BaseException:
            graph.reset()  # an interrupt that came as the context was entered or left would leave it by half
            raise
        num_bytes = graph.num_bytes + sum(other.num_bytes for other, _ in self._graphs.values())
        while self._graphs and num_bytes > MAX_BYTES:
            oldest, _ = self._graphs.pop(next(iter(self._graphs)))
            num_bytes -= oldest.num_bytes
        return graph, logits
