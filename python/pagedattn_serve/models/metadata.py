"""What attention needs to know of the batch: the runner makes it, the layers read it. And the cache of a layer."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class KVCache(NamedTuple):
    """The cache of one layer; the layout is that of `pagedattn_ext.ops`.

    k_scale, v_scale: an fp8 cache holds keys and values divided by these scales; fp32, one element. None is 1.
    """

    key_cache: Tensor
    value_cache: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class LastRows(NamedTuple):
    """The rows that the last layer computes: of each sequence those from the first that samples to its end.

    of_step: int64 [n], which rows of the step these are, ascending.
    query_start_loc: int32 [num_seqs + 1], offsets of the sequences' rows among the n. A sequence may have none.
    sampling: int64 [num_samples], which of the n each of the step's sampling_rows is.
    """

    of_step: Tensor
    query_start_loc: Tensor
    sampling: Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """Where the new tokens of one step go in the cache, and what they see there.

    slot_mapping: int64 [num_tokens], slot of each new token.
    block_tables: int32 [num_seqs, max_num_blocks_per_seq]; entries beyond a sequence's own blocks may be anything.
    seq_lens: int32 [num_seqs], tokens of each sequence, the new ones included.
    query_start_loc: int32 [num_seqs + 1], row offsets of the sequences' new tokens. None: one token each.
    sampling_rows: int64 [n], the rows whose logits are asked for; none if every sequence is amid its prompt.
    max_seq_len: at least each of seq_lens. None in a graph that is replayed with other lengths: as long as the tables.
    last_rows: the rows of the last layer, which no other layer attends to. None: all.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    sampling_rows: Tensor
    max_seq_len: int | None = None
    last_rows: LastRows | None = None

    def rows_of_layers(self, num_layers: int) -> list[LastRows | None]:
        """The rows that each layer has to return; None is all."""
        return [None] * (num_layers - 1) + [self.last_rows]

    def of_samples(self, hidden: Tensor) -> Tensor:
        """Of what the last layer returns, the rows that sample."""
        return hidden[self.sampling_rows if self.last_rows is None else self.last_rows.sampling]
