"""What wrappers with use_cuda_graph keep: memory that a captured `run` reads, and that each `plan` writes anew."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._plan import refusal
from ._positions import Rotation
from ._ragged import RaggedBatch

Tokens = tuple[Tensor, Tensor]  # of each key its page and its place in the page
Buffers = Mapping[str, tuple[str, Tensor | None]]  # by arguments of `plan`: a buffer's name, and the buffer


class GraphMemory:
    """The buffers that a caller gives, and tensors of ours beside them."""

    def __init__(self, function: Callable[..., Any], buffers: Buffers) -> None:
        """Each of function's arguments that `buffers` names must be there."""
        self._buffers: dict[str, tuple[str, Tensor]] = {}
        for argument, (name, buffer) in buffers.items():
            if not isinstance(buffer, Tensor):
                raise refusal(function, name, "a tensor with use_cuda_graph", type(buffer).__name__)
            self._buffers[argument] = name, buffer
        self._kept: dict[str, Tensor] = {}

    def fill(self, function: Callable[..., Any], values: Mapping[str, Tensor], may_be_shorter: str = "") -> None:
        """Copies arguments of `plan` into their buffers, which are as long, but for the argument `may_be_shorter`.
        Nothing is written before all are checked."""
        for argument, (name, buffer) in self._buffers.items():
            size, room = values[argument].shape[0], buffer.shape[0]
            if size > room or (size < room and argument != may_be_shorter):
                most = "at most " if argument == may_be_shorter else ""
                raise refusal(function, argument, f"{most}{room} elements (the size of {name})", size)
        for argument, (_, buffer) in self._buffers.items():
            buffer[: values[argument].shape[0]].copy_(values[argument])

    def room(self, argument: str) -> int:
        return int(self._buffers[argument][1].shape[0])

    def keep_pages(
        self, query_starts: Tensor | None, block_tables: Tensor, seq_lens: Tensor, num_pages: int
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The same in memory that stays where it is, with room for num_pages pages of each sequence. If there are
        query_starts, one sequence more, without keys, is for rows of `run` that no other sequence has."""
        if query_starts is not None:
            query_starts = torch.cat([query_starts, query_starts[-1:]])
            query_starts = self.keep("query_starts", query_starts, *query_starts.shape)
            seq_lens = pad(seq_lens, (0, 1))
        batch = seq_lens.shape[0]
        block_tables = self.keep("block_tables", block_tables, batch, num_pages)
        return query_starts, block_tables, self.keep("seq_lens", seq_lens, batch)

    def keep_ragged(self, batch: RaggedBatch, tokens: Tokens, num_keys: int) -> tuple[RaggedBatch, Tokens]:
        """The same of a rotated batch, with room for num_keys keys. One sequence more, without rows, has the keys that
        no other sequence has."""
        assert batch.rotation is not None
        starts = torch.cat([batch.query_starts, batch.query_starts[-1:]]), pad(batch.key_starts, (0, 1), value=num_keys)
        query_starts, key_starts = (
            self.keep(name, start, *start.shape)
            for name, start in zip(("row_starts", "key_starts"), starts, strict=True)
        )
        rows, keys, cos_sin = batch.rotation.rows, batch.rotation.keys, batch.rotation.cos_sin
        rotation = Rotation(
            self.keep("row_positions", rows, *rows.shape),
            self.keep("key_positions", keys, num_keys),
            self.keep("cos_sin", cos_sin[:num_keys], num_keys, cos_sin.shape[1]),
        )
        pages, offsets = (self.keep(f"tokens {i}", part, num_keys) for i, part in enumerate(tokens))
        return RaggedBatch(query_starts, key_starts, None, rotation), (pages, offsets)

    def keep(self, name: str, values: Tensor, *room: int) -> Tensor:
        """Memory of the shape `room` that is the same at each call of this name, with the values at its start. In one
        dimension zeros stand behind the values. In two dimensions anything does, and memory of a CPU takes up no room
        where nobody has written to it."""
        if name not in self._kept:
            with torch.inference_mode(False):  # what is made in the mode cannot be written to outside of it
                self._kept[name] = values.new_empty(room)
        kept = self._kept[name]
        if len(room) == 1:
            kept.zero_()
        kept[tuple(map(slice, values.shape))].copy_(values)
        return kept
