"""The model and its cache on one device: copies blocks, runs the model, samples.

`StepRunner` runs the numbers of a step, whichever process made them. `ModelRunner` makes them itself, from a scheduled
batch: its new tokens, flat and unpadded.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.execution.cache_engine import CacheEngine, choose_cache_dtype
from pagedattn_serve.execution.decode_graphs import DecodeGraphs
from pagedattn_serve.execution.pooler import pool, pooled_rows
from pagedattn_serve.execution.sampler import Sampler, SamplerOutput
from pagedattn_serve.execution.state_cache import StateCache
from pagedattn_serve.models.cache_shape import CacheGroups
from pagedattn_serve.models.causal_lm import (
    AttentionMetadata,
    CausalLM,
    LastRows,
    ModelOutput,
    SequenceRows,
    StepStates,
)
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.scheduling.sequence import ScheduledBatch, StateCheckpoint, StateCopies, TableArray

BlockPairs = list[tuple[int, int]]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """The tokens of a step, one sequence after the other.

    token_ids, positions: int64 [num_tokens]. slot_mappings: int64 [num_groups, num_tokens].
    seq_lens, query_start_loc, sampling_rows, max_seq_len: as in `AttentionMetadata`.
    state_slots: of the sequences' states; none if the model keeps no states. state_checkpoints: as in `ScheduledBatch`.
    num_pooled: how many of the sampling_rows, the last of them, are pooled: their hidden states are wanted, no logits.

    The block tables are rows of the runner's `TableArray`, one for each sequence, from first_table on.
    """

    token_ids: Int64s
    positions: Int64s
    slot_mappings: Int64s
    seq_lens: Int32s
    query_start_loc: Int32s | None
    sampling_rows: Int64s
    max_seq_len: int
    state_slots: list[int] = field(default_factory=list)
    state_checkpoints: list[StateCheckpoint] = field(default_factory=list)
    num_pooled: int = 0
    first_table: int = 0

    def between(self, begin: int, end: int) -> tuple["StepInputs", Int64s]:
        """Some of the tokens as a step of their own, for models that keep no states; and which of the sampling_rows
        these are. A sequence that is cut is one whose other tokens come in another step."""
        num_tokens = len(self.token_ids)
        starts = np.arange(num_tokens + 1) if self.query_start_loc is None else self.query_start_loc
        first = int(np.searchsorted(starts, begin, side="right")) - 1
        last = int(np.searchsorted(starts, end))
        counts = np.diff(starts[first : last + 1].clip(begin, end))
        seq_lens = self.seq_lens[first:last].copy()
        seq_lens[-1] -= starts[last] - end
        query_start_loc = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        [picked] = ((self.sampling_rows >= begin) & (self.sampling_rows < end)).nonzero()
        part = StepInputs(
            token_ids=self.token_ids[begin:end],
            positions=self.positions[begin:end],
            slot_mappings=np.ascontiguousarray(self.slot_mappings[:, begin:end]),
            seq_lens=seq_lens,
            query_start_loc=None if (counts == 1).all() else query_start_loc,
            sampling_rows=self.sampling_rows[picked] - begin,
            max_seq_len=int(seq_lens.max()),
            num_pooled=int((picked >= len(self.sampling_rows) - self.num_pooled).sum()),
            first_table=self.first_table + first,
        )
        return part, picked

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

    def rows_of_states(self) -> list[SequenceRows]:
        """The rows of each sequence, for layers that keep states; in pieces that end where a state is to be kept."""
        num_seqs = len(self.seq_lens)
        starts = np.arange(num_seqs + 1) if self.query_start_loc is None else self.query_start_loc
        counts = np.diff(starts)
        is_new = self.seq_lens == counts
        ends_of: dict[int, list[tuple[int, int | None]]] = {}  # by sequence: rows before the end of a piece, and slot
        for i, num_new_tokens, kept_in in self.state_checkpoints:
            ends_of.setdefault(i, []).append((num_new_tokens, kept_in))
        pieces = []
        rows = zip(starts[:-1].tolist(), counts.tolist(), self.state_slots, is_new.tolist(), strict=True)
        for i, (start, count, slot, begins) in enumerate(rows):
            done = 0
            for end, kept_in in [*ends_of.get(i, ()), (count, None)]:
                if end > done:
                    pieces.append(SequenceRows(start + done, end - done, slot, begins and not done, kept_in))
                done = end
        return pieces


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
        self.windows = cache_config.windows
        groups = CacheGroups.single(model.cache_shapes)
        if len(cache_config.windows) > 1:
            groups = model.cache_groups()
            assert groups.windows == cache_config.windows, f"expected {cache_config.windows}, got {groups.windows}"
        self.cache_engine = CacheEngine(
            groups,
            cache_config.num_blocks,
            self.block_size,
            choose_cache_dtype(cache_config.kv_cache_dtype, model.dtype),
            device,
            cache_config.num_host_blocks,
            None if cache_config.kv_scales is None else cache_config.kv_scales[model.own_caches],
        )
        self.state_cache: StateCache | None = None
        if model.states:
            num_slots, num_host_slots = cache_config.num_state_slots, cache_config.num_host_state_slots
            self.state_cache = StateCache(model.states, num_slots, device, num_host_slots)
        tables = torch.frombuffer(table_array.memory, dtype=torch.int32)
        self.block_tables = tables.view(table_array.num_groups, table_array.num_rows, table_array.num_columns)
        # A graph needs a model whose Python code does not depend on the content of a tensor.
        # Of the others, those with states alone are tested.
        has_graphs = device == "cpu" and (isinstance(model, NativeCausalLM) or bool(model.states)) and not enforce_eager
        self._graphs: DecodeGraphs | None = None
        if has_graphs:
            states = () if self.state_cache is None else self.state_cache.tensors
            self._graphs = DecodeGraphs(model, self.cache_engine.kv_caches, self.block_tables, states)

    @property
    def has_graphs(self) -> bool:
        """Whether steps of decodes may run as CPU graphs."""
        return self._graphs is not None

    def make_copies(
        self, to_swap_out: BlockPairs, to_swap_in: BlockPairs, to_copy: BlockPairs, of_states: StateCopies
    ) -> None:
        """Make the copies of a batch, of blocks and of states. Pairs that are copied are taken out of their list."""
        for copy, blocks in (
            (self.cache_engine.swap_out, to_swap_out),
            (self.cache_engine.swap_in, to_swap_in),
            (self.cache_engine.copy, to_copy),
        ):
            if blocks:
                copy(blocks)
                blocks.clear()  # if the model fails and the batch comes again, the blocks have changed
        if self.state_cache is not None:
            self.state_cache.copy(of_states)

    def run_model(self, inputs: StepInputs, carried: Tensor | None = None) -> ModelOutput:
        """What the rows that sample or are pooled give, valid until the next call. A CPU graph runs if one fits the
        batch.

        carried: what the stage before gave, in a stage that is not the first. A stage that is not the last gives what
        the next one takes, in place of logits.
        """
        is_last = self.model.is_last_stage
        token_ids, positions = self._tensor(inputs.token_ids), self._tensor(inputs.positions)
        query_start_loc, last_rows = inputs.query_start_loc, inputs.rows_of_last_layer() if is_last else None
        states = self.state_cache
        metadata = AttentionMetadata(
            slot_mappings=self._tensor(inputs.slot_mappings).unbind(),
            block_tables=self.tables_of(inputs).to(self.device).unbind(),
            seq_lens=self._tensor(inputs.seq_lens),
            query_start_loc=None if query_start_loc is None else self._tensor(query_start_loc),
            sampling_rows=self._tensor(inputs.sampling_rows),
            max_seq_len=inputs.max_seq_len,
            last_rows=None if last_rows is None else LastRows(*map(self._tensor, last_rows)),
            states=None if states is None else StepStates(states.tensors, inputs.rows_of_states()),
            carried=carried,
        )
        kv_caches = self.cache_engine.kv_caches
        if inputs.num_pooled and is_last:
            return self.model.with_hidden(token_ids, positions, kv_caches, metadata, inputs.num_pooled)
        logits = None if self._graphs is None else self._graphs.run(token_ids, positions, metadata, inputs.first_table)
        if logits is None:
            logits = self.model(token_ids, positions, kv_caches, metadata)
        return ModelOutput(logits)

    def tables_of(self, inputs: StepInputs) -> Tensor:
        """The block tables of a step, as far as its longest sequence needs them, int32 [num_groups, num_seqs,
        num_blocks]."""
        rows = slice(inputs.first_table, inputs.first_table + len(inputs.seq_lens))
        return self.block_tables[:, rows, : -(-inputs.max_seq_len // self.block_size)]

    def drop_graphs(self) -> None:
        """Capture anew: the model computes with another group of ranks from now on."""
        if self._graphs is not None:
            self._graphs.clear()

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


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
        self._groups = np.arange(len(self._tables))[:, None]  # as a slice, numpy would let the groups change fastest
        self.sampler = Sampler(seed, device)

    @property
    def can_run_again(self) -> bool:
        return self.state_cache is None  # of some layers, the states may be those after the batch

    def check_health(self) -> None:
        pass

    def find_hang(self) -> str | None:
        return None

    def at_work(self) -> bool:
        return False

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> SamplerOutput:
        self.make_copies(*batch.copies)
        if not batch.sequences:
            return SamplerOutput()
        return self.sample(batch, self.run_model(self.prepare_inputs(batch)))

    def prepare_inputs(self, batch: ScheduledBatch) -> StepInputs:
        """What the model reads, beside the block tables."""
        plain, others = batch.sequences[: batch.num_plain], batch.sequences[batch.num_plain :]
        begins = _integers([scheduled.sequence.num_computed_tokens for scheduled in batch.sequences])
        token_ids = [scheduled.sequence.output_token_ids[-1] for scheduled in plain]
        if not others:
            return self._plain_inputs(_integers(token_ids), begins, batch.state_slots)
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
        pooled = pooled_rows(batch)
        prompt_rows = [
            np.arange(*positions) + (query_start_loc[i] - begins[i]) for i, positions in [*_reported(batch), *pooled]
        ]

        seq_of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(token_ids)) + (begins - query_start_loc[:-1])[seq_of_token]
        blocks = self._tables[self._groups, seq_of_token, positions // self.block_size].astype(np.int64)
        seq_lens = begins + counts
        return StepInputs(
            token_ids=_integers(token_ids),
            positions=positions,
            slot_mappings=blocks * self.block_size + positions % self.block_size,
            seq_lens=seq_lens.astype(np.int32),
            query_start_loc=None if (counts == 1).all() else query_start_loc,
            sampling_rows=np.concatenate([rows, *prompt_rows]),
            max_seq_len=int(seq_lens.max()),
            state_slots=batch.state_slots,
            state_checkpoints=batch.state_checkpoints,
            num_pooled=sum(end - begin for _, (begin, end) in pooled),
        )

    def _plain_inputs(self, token_ids: Int64s, positions: Int64s, state_slots: list[int]) -> StepInputs:
        """Of a step of plain decodes: what `prepare_inputs` makes, in fewer operations."""
        rows, columns = np.arange(len(token_ids)), positions // self.block_size
        seq_lens = (positions + 1).astype(np.int32)
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mappings=positions + (self._tables[self._groups, rows, columns] - columns) * self.block_size,
            seq_lens=seq_lens,
            query_start_loc=None,
            sampling_rows=rows,
            max_seq_len=int(seq_lens.max()),
            state_slots=state_slots,
        )

    def sample(self, batch: ScheduledBatch, ran: ModelOutput) -> SamplerOutput:
        """Of a batch that has run: the tokens, the prompt_logprobs that it asks for, and what is pooled."""
        logits = ran.logits
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
        if ran.hidden is not None:
            output.pooled = pool(batch, ran.hidden)
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
            rows.append(state.with_output([*state.output_token_ids, *scheduled.draft_token_ids[:i]]))
    return rows


def _reported(batch: ScheduledBatch) -> list[tuple[int, tuple[int, int]]]:
    """The sequences, by index in the batch, with rows that prompt_logprobs asks for, and the positions [begin, end) of
    these rows. The prompt's last position, and positions that were looked at before a preemption, are left out."""
    found = []
    for i, scheduled in enumerate(batch.sequences[batch.num_plain :], batch.num_plain):
        sequence = scheduled.sequence
        if sequence.prompt_logits_from is not None and sequence.pooling is None:
            begin = max(sequence.num_computed_tokens, sequence.prompt_logits_from)
            end = min(sequence.num_computed_tokens + scheduled.num_new_tokens, len(sequence.prompt_token_ids) - 1)
            if begin < end:
                found.append((i, (begin, end)))
    return found
