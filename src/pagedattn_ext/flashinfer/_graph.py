"""What wrappers with use_cuda_graph keep: memory that a captured `run` reads, and that each `plan` writes anew."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._plan import Plan, refusal
from ._positions import Rotation
from ._ragged import RaggedBatch

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
        self._ends: dict[str, int] = {}  # of the first plan, or of `limit`
        self.first: Plan | None = None

    def check_sizes(self, function: Callable[..., Any], values: Mapping[str, Tensor], may_be_shorter: str = "") -> None:
        """The arguments of `plan` are as long as their buffers, but for the argument `may_be_shorter`."""
        for argument, (name, buffer) in self._buffers.items():
            size, room = values[argument].shape[0], buffer.shape[0]
            if size > room or (size < room and argument != may_be_shorter):
                most = "at most " if argument == may_be_shorter else ""
                raise refusal(function, argument, f"{most}{room} elements (the size of {name})", size)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copies arguments of `plan`, which `check_sizes` has seen, into their buffers."""
        for argument, (_, buffer) in self._buffers.items():
            buffer[: values[argument].shape[0]].copy_(values[argument])

    def room(self, argument: str) -> int:
        return int(self._buffers[argument][1].shape[0])

    def keep_pages(
        self, query_starts: Tensor | None, block_tables: Tensor, seq_lens: Tensor, num_pages: int
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The same in memory that stays where it is, with room for num_pages pages of each sequence."""
        if query_starts is not None:
            query_starts = self.keep("query_starts", query_starts, *query_starts.shape)
        batch = seq_lens.shape[0]
        block_tables = self.keep("block_tables", block_tables, batch, num_pages)
        return query_starts, block_tables, self.keep("seq_lens", seq_lens, batch)

    def limit(self, argument: str, end: int) -> None:
        """No plan may end behind `end`, in place of what the first plan would say."""
        self._ends[argument] = end

    def check_kind(self, plan: Plan) -> None:
        """A captured `run` computes as its own plan says, whatever later plans say of masks and positions."""
        if self.first is None:
            return
        if plan.has_mask != self.first.has_mask:
            expected, got = ("a mask", "None") if self.first.has_mask else ("None", "a mask")
            raise refusal(plan.function, "custom_mask", f"{expected}, as in the first plan", got)
        if plan.pos_encoding_mode != self.first.pos_encoding_mode:
            expected = f"{self.first.pos_encoding_mode!r}, as in the first plan"
            raise refusal(plan.function, "pos_encoding_mode", expected, repr(plan.pos_encoding_mode))
        if plan.biases_future != self.first.biases_future:
            raise refusal(plan.function, "causal", f"{self.first.causal}, as in the first plan", plan.causal)

    def check_ends(self, function: Callable[..., Any], **starts: Tensor) -> None:
        """The first plan of a ragged batch says how many rows, and how many keys without pages, there may be, unless
        `limit` does."""
        for argument, start in starts.items():
            end = int(start[-1])
            if end > self._ends.get(argument, end):
                most = f"at most {self._ends[argument]} last, the room of the graph"
                raise refusal(function, argument, most, end)

    def keep_ragged(self, batch: RaggedBatch, num_keys: int | None = None) -> RaggedBatch:
        """The same, with room for as many rows as a plan may have, and for num_keys keys, or those of the first plan.
        Two sequences more have the rows that no other has, without keys, and the keys that no other has, without
        rows."""
        num_rows = self._ends.setdefault("qo_indptr", batch.num_rows)
        if num_keys is None:
            num_keys = self._ends.setdefault("kv_indptr", batch.num_keys)
        query_starts = torch.cat([batch.query_starts, batch.query_starts.new_tensor([num_rows, num_rows])])
        key_starts = torch.cat([batch.key_starts, batch.key_starts[-1:], batch.key_starts.new_tensor([num_keys])])
        visible, rotation, tokens = batch.visible, batch.rotation, batch.tokens
        if visible is not None:
            kept = self.keep("visible", visible[0], num_rows, num_keys)
            visible = kept, self.keep("num_visible", visible[1], num_rows)
        if rotation is not None:
            head_dim = rotation.cos_sin.shape[1]
            rotation = Rotation(
                self.keep("row_positions", rotation.rows, num_rows),
                self.keep("key_positions", rotation.keys, num_keys),
                self.keep("cos_sin", rotation.cos_sin, 2 ** max(num_rows, num_keys).bit_length(), head_dim),
            )
        if tokens is not None:
            tokens = self.keep("pages", tokens[0], num_keys), self.keep("offsets", tokens[1], num_keys)
        query_starts = self.keep("row_starts", query_starts, *query_starts.shape)
        key_starts = self.keep("key_starts", key_starts, *key_starts.shape)
        return RaggedBatch(query_starts, key_starts, num_rows, num_keys, visible, rotation, tokens)

    def keep(self, name: str, values: Tensor, *room: int) -> Tensor:
        """Memory of the shape `room` that is the same at each call of this name, with the values at its start. A plan
        with pages or heads of another size, which no captured `run` can have, gets other memory. In one dimension
        zeros stand behind the values. In two dimensions anything does, and memory of a CPU takes up no room where
        nobody has written to it."""
        if name not in self._kept or self._kept[name].shape != room:
            with torch.inference_mode(False):  # what is made in the mode cannot be written to outside of it
                self._kept[name] = values.new_empty(room)
        kept = self._kept[name]
        if len(room) == 1:
            kept.zero_()
        kept[tuple(map(slice, values.shape))].copy_(values)
        return kept
