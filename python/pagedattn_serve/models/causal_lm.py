"""What the engine needs of a model, whichever way it runs, and what it gives the model: the metadata of a step, and the
caches of its layers.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagedattn_serve.models.cache_shape import CacheGroups, CacheShape, group_caches


class KVCache(NamedTuple):
    """The cache of a layer, or of several that share it; the layout is that of `pagedattn_ext.ops`.

    group: of the caches whose block tables say where a sequence's tokens are (`CacheGroups`).
    value_cache: without elements where key_cache holds latents, [num_blocks, block_size, head_size].
    k_scale, v_scale: an fp8 cache holds keys and values divided by these scales; fp32, one element. None is 1.
    """

    key_cache: Tensor
    value_cache: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    group: int = 0


class LastRows(NamedTuple):
    """The rows that the last layer computes: of each sequence those from the first that samples to its end.

    of_step: int64 [n], which rows of the step these are, ascending.
    query_start_loc: int32 [num_seqs + 1], offsets of the sequences' rows among the n. A sequence may have none.
    sampling: int64 [num_samples], which of the n each of the step's sampling_rows is.
    """

    of_step: Tensor
    query_start_loc: Tensor
    sampling: Tensor


class ModelOutput(NamedTuple):
    """What a step of the model gives. logits: [num_rows, vocab_size]. hidden: of the pooled rows, the model's last
    hidden states, [num_pooled, embedding_size]; None if there are none."""

    logits: Tensor
    hidden: Tensor | None = None


class StateShape(NamedTuple):
    """What one state of a sequence is, for a layer that keeps more between tokens than keys and values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SequenceRows(NamedTuple):
    """A sequence in a step: its first row, how many rows it has, and the slot of its states.

    is_new: whether these are its first tokens. Then what the slot holds does not count.
    kept_in: another slot, which gets the states after these rows, too. The sequence may have more rows then, which
        follow as another `SequenceRows`.
    """

    begin: int
    num_rows: int
    slot: int
    is_new: bool
    kept_in: int | None = None


class StepStates(NamedTuple):
    """The states of the model, each [num_slots, *shape] in the order of `CausalLM.states`, and who has rows in the
    step.

    slots: in the place of rows, where each sequence has a row that follows others: int64 [num_seqs].
    """

    tensors: Sequence[Tensor]
    rows: list[SequenceRows]
    slots: Tensor | None = None


@dataclass(slots=True)
class AttentionMetadata:
    """Where the new tokens of one step go in the caches, and what they see there.

    slot_mappings: for each group of caches, int64 [num_tokens], slot of each new token.
    block_tables: for each group of caches, int32 [num_seqs, max_num_blocks_per_seq]; entries beyond a sequence's own
        blocks, and of blocks behind the group's window, may be anything.
    seq_lens: int32 [num_seqs], tokens of each sequence, the new ones included.
    query_start_loc: int32 [num_seqs + 1], row offsets of the sequences' new tokens. None: one token each.
    sampling_rows: int64 [n], the rows whose logits are asked for; none if every sequence is amid its prompt.
    max_seq_len: at least each of seq_lens. None in a graph that is replayed with other lengths: as long as the tables.
    last_rows: the rows of the last layer, which no other layer attends to. None: all.
    states: for a model that keeps states; else None.
    carried: in a stage that is not the first (`models.stages`): what the stage before returned.
    """

    slot_mappings: Sequence[Tensor]
    block_tables: Sequence[Tensor]
    seq_lens: Tensor
    query_start_loc: Tensor | None
    sampling_rows: Tensor
    max_seq_len: int | None = None
    last_rows: LastRows | None = None
    states: StepStates | None = None
    carried: Tensor | None = None

    def rows_of_layers(self, num_layers: int) -> list[LastRows | None]:
        """The rows that each layer has to return; None is all."""
        return [None] * (num_layers - 1) + [self.last_rows]

    def of_samples(self, hidden: Tensor) -> Tensor:
        """Of what the last layer returns, the rows that sample."""
        return hidden[self.sampling_rows if self.last_rows is None else self.last_rows.sampling]


class CausalLM(nn.Module):
    """Token ids to logits.

    runs: what computes the model, in words. max_model_len: positions that the model knows.
    num_heads: query heads of a layer, the most that one has.
    cache_shapes: of the caches that the engine keeps for the model. All have a slot for each token of a sequence.
    cache_of_layer: which of the caches each layer attends to. Several layers may attend to one cache, which the first
        of them writes. None: the layer does not attend.
    embedding_size: features of a row's last hidden state.
    head: the name of the last layer, to the vocabulary; empty for a model without, which gives hidden states alone.
    states: what a sequence keeps between tokens beside keys and values.
    forgets_states: whether a chunk of a prompt runs token by token, because the model would begin it without states.
    is_last_stage: False of a stage (`models.stages`) which another one follows: it returns what that one reads.
    own_caches: which of the caches of the model those of the stage are.
    Where ranks share the model, heads and shapes are those of this rank. vocab_size is always the whole.
    """

    runs: str
    architecture: str
    dtype: torch.dtype
    num_layers: int
    num_heads: int
    cache_shapes: list[CacheShape]
    cache_of_layer: list[int | None]
    vocab_size: int
    max_model_len: int
    embedding_size: int
    head: str
    states: Sequence[StateShape] = ()
    forgets_states: bool = False
    is_last_stage: bool = True
    own_caches: slice = slice(None)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """token_ids, positions: int64 [num_tokens]. kv_caches: one for each of cache_shapes. Returns the logits of the
        rows that sample, [n, vocab_size]."""
        raise NotImplementedError

    def with_hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
        num_pooled: int,
    ) -> ModelOutput:
        """As `forward`, but the last num_pooled of the rows that sample give their hidden states instead of logits."""
        raise NotImplementedError

    def layers_of_caches(self) -> list[int]:
        """The layer that writes each of the caches."""
        return [self.cache_of_layer.index(cache) for cache in range(len(self.cache_shapes))]

    def cache_groups(self) -> CacheGroups:
        """Which of the caches share block tables."""
        return group_caches(self.cache_shapes)

    def describe_layers(self) -> str:
        """How many layers there are, and how many of them have no cache of their own."""
        without = self.cache_of_layer.count(None)
        sharing = self.num_layers - without - len(self.cache_shapes)
        notes = [f"{sharing} attend to an earlier layer's cache"] * (sharing > 0)
        notes += [f"{without} do not attend"] * (without > 0)
        return f"{self.num_layers}" + (f" ({', '.join(notes)})" if notes else "")

    def describe_caches(self) -> str:
        """The heads of the caches, and, where the caches differ, how many have them."""
        counts = Counter(replace(shape, window=None) for shape in self.cache_shapes)
        return "; ".join(
            (f"{shape.num_kv_heads} key-value" if shape.has_values else "1 latent with a rotary part for all")
            + f", of size {shape.head_size}"
            + (f" ({count} of {len(self.cache_shapes)} caches)" if len(counts) > 1 else "")
            for shape, count in counts.items()
        )


def misfit(directory: Path, architecture: str, problems: list[str]) -> str:
    """The message about weights that are not those of the model."""
    shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
    return f"model: the weights in {directory} do not fit {architecture}: {shown}"
