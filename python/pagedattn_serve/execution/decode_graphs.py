"""Steps that give each of a few sequences its next token, as CPU graphs."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from pagedattn_ext import CPUGraph
from pagedattn_ext.cpu_graph import CaptureError
from pagedattn_serve.models.causal_lm import AttentionMetadata, CausalLM, KVCache, StepStates

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 64  # with more sequences, the time between kernels counts for little
MAX_BYTES = 128 << 20  # of all graphs together, or of the last graph alone


class DecodeGraphs:
    """A graph for each number of sequences, and place of their tables, captured when these come. A capture takes as
    long as the same step spends between the kernels without a graph, so a graph never loses time.

    block_tables: int32 [num_groups, max_num_seqs, max_num_blocks_per_seq], which has the tables of a step.
    states: of the model, as in `StepStates`; none if the model keeps none.

    A graph keeps the memory of what passes between the layers. When this gets too much, graphs are given up, first of
    all the graph whose number of sequences has not come for longest.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[KVCache],
        block_tables: Tensor,
        states: Sequence[Tensor] = (),
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._block_tables = block_tables
        self._states = states
        self._cannot_capture = False
        self._token_ids, self._positions, self._sampling_rows, self._state_slots, *self._slot_mappings = (
            torch.zeros(MAX_SEQUENCES, dtype=torch.int64) for _ in range(4 + len(block_tables))
        )
        self._seq_lens = torch.zeros(MAX_SEQUENCES, dtype=torch.int32)
        self._carried: Tensor | None = None  # of the stage before
        self._graphs: dict[tuple[int, int], tuple[CPUGraph, Tensor]] = {}  # those that ran last at the end

    def run(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, first_table: int = 0
    ) -> Tensor | None:
        """What the model returns, in memory that the next call overwrites. None if a sequence has several tokens or
        several samples, begins, or leaves a checkpoint; if there are too many sequences; or if the model cannot be
        captured.

        first_table: of the rows of block_tables, that of the first sequence.
        """
        num_seqs = len(token_ids)
        if num_seqs > MAX_SEQUENCES or metadata.query_start_loc is not None or self._cannot_capture:
            return None
        if len(metadata.sampling_rows) != num_seqs:
            return None
        if metadata.states is not None:
            if any(rows.is_new or rows.kept_in is not None for rows in metadata.states.rows):
                return None
            self._state_slots[:num_seqs] = torch.tensor([rows.slot for rows in metadata.states.rows])
        for buffer, values in (
            (self._token_ids, token_ids),
            (self._positions, positions),
            (self._sampling_rows, metadata.sampling_rows),
            (self._seq_lens, metadata.seq_lens),
            *zip(self._slot_mappings, metadata.slot_mappings, strict=True),
        ):
            buffer[:num_seqs] = values
        if metadata.carried is not None:
            if self._carried is None:
                num_carried, _, hidden_size = metadata.carried.shape
                self._carried = metadata.carried.new_zeros(num_carried, MAX_SEQUENCES, hidden_size)
            self._carried[:, :num_seqs] = metadata.carried
        key = first_table, num_seqs
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(first_table, num_seqs)
            except CaptureError as error:  # a model of transformers may do what it likes
                logger.info("no CPU graphs: %s", error)
                self._cannot_capture = True
                return None
        graph, logits = self._graphs[key] = self._graphs.pop(key)  # to the end
        graph.replay()
        return logits

    def clear(self) -> None:
        """Forget what was captured."""
        self._graphs.clear()

    def _capture(self, first_table: int, num_seqs: int) -> tuple[CPUGraph, Tensor]:
        slots = self._state_slots[:num_seqs]
        metadata = AttentionMetadata(
            slot_mappings=[mapping[:num_seqs] for mapping in self._slot_mappings],
            block_tables=self._block_tables[:, first_table : first_table + num_seqs].unbind(),
            seq_lens=self._seq_lens[:num_seqs],
            query_start_loc=None,
            sampling_rows=self._sampling_rows[:num_seqs],
            states=StepStates(self._states, [], slots) if self._states else None,
            carried=None if self._carried is None else self._carried[:, :num_seqs],
        )
        kept = [states[slots] for states in self._states]
        graph = CPUGraph()
        try:
            with graph.capture():
                logits = self._model(self._token_ids[:num_seqs], self._positions[:num_seqs], self._kv_caches, metadata)
        except BaseException:
            graph.reset()  # an interrupt that came as the context was entered or left would leave it by half
            raise
        finally:
            for states, before in zip(self._states, kept, strict=True):
                states[slots] = before  # functions of torch have run, and run again at the replay
        num_bytes = graph.num_bytes + sum(other.num_bytes for other, _ in self._graphs.values())
        while self._graphs and num_bytes > MAX_BYTES:
            oldest, _ = self._graphs.pop(next(iter(self._graphs)))
            num_bytes -= oldest.num_bytes
        return graph, logits
