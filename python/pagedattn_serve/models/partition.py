"""Tensor parallel (Megatron-LM, Shoeybi et al., 2019): which slice of a model a rank holds, and what joins the slices.

A layer that is split by outputs (column-parallel) needs nothing of the other ranks: each rank goes on with its own
outputs. A layer that is split by inputs (row-parallel) gives terms of a sum, which all ranks add up. So there are two
sums a layer of the model: behind attention and behind the MLP. The embedding is split by the vocabulary: a rank gives
zeros for the tokens of the other ranks, and the sum of all ranks is the embedding. The last layer is split by the
vocabulary as well: the ranks' logits are put together.

A model is built of slices and knows nothing of other ranks. When its weights are loaded, `NativeCausalLM.joins` puts
the sums behind its layers. With one rank every slice is the whole, and there is nothing to join.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.models.quantization import GROUP_SIZE


class Communicator(Protocol):
    """What a model needs of the other ranks. Every rank makes the same calls in the same order."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, with the same bits on each. May overwrite its argument and return it."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks in their order, [world_size, *tensor.shape]."""


@dataclass(slots=True, frozen=True)
class Share:
    """What a rank holds of an axis with `whole` elements: the elements in `ranges`, one range after the other."""

    whole: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    def times(self, number: int) -> Self:
        """The share of an axis where each element has become `number` elements."""
        return type(self)(number * self.whole, tuple((number * begin, number * end) for begin, end in self.ranges))

    def packed(self, number: int) -> Self:
        """The share of an axis where one element holds `number` elements of this axis."""
        return type(self)(
            -(-self.whole // number), tuple((begin // number, -(-end // number)) for begin, end in self.ranges)
        )

    def splits_only_at(self, unit: int) -> bool:
        """Whether every range begins at a multiple of `unit`, and ends at one or where the axis ends."""
        return all(begin % unit == 0 and (end % unit == 0 or end == self.whole) for begin, end in self.ranges)

    def of(self, tensor: Any, dim: int) -> Any:
        """The rank's elements of a tensor along `dim`: a view if they are one range. Or of what has `narrow` as tensors
        have it, if they are one range."""
        if self.is_whole:
            return tensor
        parts = [tensor.narrow(dim, begin, end - begin) for begin, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def everything(size: int) -> Share:
    """An axis of which each rank holds all."""
    return Share(size, ((0, size),))


def one_after_another(*shares: Share) -> Share:
    """The share of an axis that has the axes of these shares one after the other."""
    whole, ranges = 0, []
    for share in shares:
        ranges += [(whole + begin, whole + end) for begin, end in share.ranges]
        whole += share.whole
    return Share(whole, tuple(ranges))


def split(size: int, part: int, num_parts: int, unit: int = 1) -> Share:
    """One of `num_parts` shares of an axis. The parts are as equal as whole units allow, and each has one at least; the
    last part has what is left over of a unit, too."""
    num_units = size // unit
    begin, end = (num_units * i // num_parts * unit for i in (part, part + 1))
    return Share(size, ((begin, size if part + 1 == num_parts else end),))


@dataclass(slots=True, frozen=True)
class Partition:
    """The slice of a model that a rank holds.

    communicator: the other ranks; None for a model that is built and does not run, and where there is one rank.
    group_size: inputs of a layer that stay on one rank together, because the checkpoint has quantized them together.
    stage: which of num_stages the rank is in (`models.stages`). rank, world_size: among the ranks of the stage.

    Each method raises ArgumentError, for tensor_parallel_size or pipeline_parallel_size, if the model cannot be split
    among so many ranks.
    """

    rank: int = 0
    world_size: int = 1
    communicator: Communicator | None = None
    group_size: int = 1
    stage: int = 0
    num_stages: int = 1

    @property
    def is_last_stage(self) -> bool:
        return self.stage + 1 == self.num_stages

    def layers(self, num_layers: int) -> slice:
        """The layers of the stage, among those of the model. Stages differ by one layer at most; the first ones have
        more, as the last one has the head."""
        if self.num_stages > num_layers:
            raise ArgumentError(
                "pipeline_parallel_size", f"at most {num_layers}, the layers of the model", self.num_stages
            )
        begin, end = (-(-num_layers * stage // self.num_stages) for stage in (self.stage, self.stage + 1))
        return slice(begin, end)

    def heads(self, num_heads: int) -> Share:
        """The query heads."""
        if num_heads % self.world_size:
            raise self.refusal(f"a divisor of the {num_heads} query heads of the model")
        return split(num_heads, self.rank, self.world_size)

    def kv_heads(self, num_kv_heads: int) -> Share:
        """The key-value heads that the rank's query heads read. With more ranks than heads, ranks hold copies."""
        if num_kv_heads % self.world_size == 0:
            return split(num_kv_heads, self.rank, self.world_size)
        if self.world_size % num_kv_heads == 0:
            return split(num_kv_heads, self.rank * num_kv_heads // self.world_size, num_kv_heads)
        raise self.refusal(
            f"a divisor or a multiple of the {num_kv_heads} key-value heads of the model, "
            "as the query heads of a rank must read whole key-value heads"
        )

    def head_features(self, num_heads: int, head_size: int) -> Share:
        """The outputs of the query heads, which are the inputs of the layer behind attention."""
        features = self.heads(num_heads).times(head_size)
        if not features.splits_only_at(self.group_size):
            raise self.refusal(
                f"one that leaves each rank whole groups of {self.group_size}, as the checkpoint has quantized them, "
                f"of the {features.whole} elements of {num_heads} heads"
            )
        return features

    def features(self, size: int) -> Share:
        """The hidden features of an MLP, in whole groups of GROUP_SIZE and of the checkpoint if there are as many."""
        unit = math.lcm(GROUP_SIZE, self.group_size)
        if self.world_size == 1 or size // unit >= self.world_size:  # one rank has less than a unit, too
            return split(size, self.rank, self.world_size, unit)
        if self.world_size > size // self.group_size:
            raise self.refusal(f"at most {size // self.group_size}, the groups of the {size} features of an MLP")
        return split(size, self.rank, self.world_size, self.group_size)

    def vocabulary(self, vocab_size: int) -> Share:
        if self.world_size > vocab_size:
            raise self.refusal(f"at most {vocab_size}, the size of the vocabulary")
        return split(vocab_size, self.rank, self.world_size)

    def refusal(self, expected: str) -> ArgumentError:
        return ArgumentError("tensor_parallel_size", expected, self.world_size)


SINGLE = Partition()


# ---- slices ---------------------------------------------------------------------------------------------------------


class Embedding(nn.Embedding):
    """An embedding whose values are the checkpoint's alone. torch's own draws random ones first, on the meta device as
    well, and imports its compiler for that: two seconds."""

    def reset_parameters(self) -> None:
        pass


class SlicedEmbedding(Embedding):
    """The rows of a rank's tokens. With several ranks, `SummedEmbedding` looks up the rows."""

    def __init__(self, vocabulary: Share, embedding_dim: int) -> None:
        super().__init__(vocabulary.size, embedding_dim)
        self.vocabulary = vocabulary

    def checkpoint_shapes(self, name: str, kind: str) -> dict[str, list[Share]]:
        return {f"{name}.{kind}": [self.vocabulary, everything(self.embedding_dim)]}


class SlicedLinear(nn.Linear):
    """A rank's slice of a linear layer, made of what a checkpoint holds. A size that is an int is not split.

    With a share of the inputs, the outputs are a term of a sum: the rank that holds the first inputs adds the bias.

    Subclasses have a checkpoint with several tensors, or with the elements in another order.
    """

    def __init__(self, inputs: Share | int, outputs: Share | int, bias: bool = True) -> None:
        inputs, outputs = (everything(size) if isinstance(size, int) else size for size in (inputs, outputs))
        super().__init__(inputs.size, outputs.size, bias)
        self.inputs = inputs
        self.outputs = outputs

    @property
    def adds_bias(self) -> bool:
        return self.inputs.ranges[0][0] == 0

    def checkpoint_parts(self, name: str) -> dict[str, Share]:
        """Names and outputs of the checkpoint's layers that make up the one called `name`."""
        return {name: self.outputs}

    def checkpoint_shapes(self, name: str, kind: str) -> dict[str, list[Share]]:
        """Names of the checkpoint's tensors for the "weight" or "bias" of the layer called `name`, and the rank's share
        of each of their axes."""
        inputs = [self.inputs] if kind == "weight" else []
        return {f"{part}.{kind}": [outputs, *inputs] for part, outputs in self.checkpoint_parts(name).items()}

    def parts_from_checkpoint(self, kind: str, tensors: list[Tensor]) -> list[Tensor]:
        """The weight or bias as tensors that lie one below the other. To join them would take a copy.

        tensors: the rank's slices of those of `checkpoint_shapes`. If the weight is quantized, kind is a field of
        `Int8Weight` or `Int4Weight`, and dimension 0 of each tensor has the output features.
        """
        return [self.in_own_order(kind, tensor) for tensor in tensors]

    def in_own_order(self, kind: str, tensor: Tensor) -> Tensor:
        """One of the tensors of `parts_from_checkpoint`, with its elements in the order that the layer has."""
        return tensor


# ---- what joins the slices of all ranks -----------------------------------------------------------------------------

Reduce = Callable[[Tensor], Tensor]


class SummedEmbedding(nn.Module):
    """The embedding of each token, whichever rank has its row."""

    def __init__(self, embedding: nn.Module, vocabulary: Share, all_reduce: Reduce) -> None:
        super().__init__()
        self.embedding = embedding
        [(self.begin, end)] = vocabulary.ranges
        self.last = end - self.begin - 1
        self.all_reduce = all_reduce

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = token_ids - self.begin
        own = rows.clamp(0, self.last)
        return self.all_reduce(self.embedding(own).masked_fill_((rows != own)[..., None], 0.0))


class SummedLinear(nn.Module):
    """A linear layer that is split by inputs.

    own_inputs: which of its inputs the rank takes, if it is given those of all ranks.
    """

    def __init__(self, linear: nn.Module, all_reduce: Reduce, own_inputs: Share | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.all_reduce = all_reduce
        self.own_inputs = own_inputs

    def forward(self, hidden: Tensor) -> Tensor:
        if self.own_inputs is not None:
            hidden = self.own_inputs.of(hidden, dim=-1)
        return self.all_reduce(self.linear(hidden))


class GatheredLinear(nn.Module):
    """A linear layer that is split by outputs and gives those of all ranks, as the last layer does.

    Ranks with fewer outputs than others pad them.
    """

    def __init__(self, linear: nn.Module, partition: Partition, num_outputs: int) -> None:
        super().__init__()
        assert partition.communicator is not None
        self.linear = linear
        self.sizes = [split(num_outputs, rank, partition.world_size).size for rank in range(partition.world_size)]
        self.padding = max(self.sizes) - self.sizes[partition.rank]
        self.all_gather = partition.communicator.all_gather

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.linear(hidden)
        if self.padding:
            out = nn.functional.pad(out, (0, self.padding))
        slices = self.all_gather(out)
        return torch.cat([of_rank[..., :size] for of_rank, size in zip(slices, self.sizes, strict=True)], dim=-1)
