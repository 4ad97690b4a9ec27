"""What the engine needs of a model, whichever way it runs; and what the families with a file of their own share."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_serve.models.metadata import AttentionMetadata, KVCache
from pagedattn_serve.models.partition import (
    GatheredLinear,
    Partition,
    SlicedEmbedding,
    SlicedLinear,
    SummedEmbedding,
    SummedLinear,
)


class CausalLM(nn.Module):
    """Token ids to logits.

    runs: what computes the model, in words. max_model_len: positions that the model knows.
    head_size: the size of a key in the cache. A narrower value is padded to this size.
    head: the name of the last layer, to the vocabulary.
    num_heads, num_kv_heads: where ranks share the model, those of this rank. vocab_size is always the whole.
    """

    runs: str
    architecture: str
    dtype: torch.dtype
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    head: str

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """token_ids, positions: int64 [num_tokens]. Returns the logits of the rows that sample, [n, vocab_size]."""
        raise NotImplementedError


class NativeCausalLM(CausalLM):
    """A family of this package. Parameters have the names of the checkpoint, except in converted layers.

    PREFIX: what all names but lm_head's begin with: that of the module that computes the rows of the last layer, before
        lm_head, [n, hidden_size]. Checkpoints of the model without its head leave the prefix out.
    NOT_PARAMETERS: endings of the names of tensors that a checkpoint may hold and the model does not use.

    num_kv_heads: by default as many as query heads. head_size: by default a head's share of hidden_size.

    Raises ValueError if the number of heads does not divide hidden_size, or that of KV heads the number of heads.
    """

    PREFIX: ClassVar[str]
    NOT_PARAMETERS: ClassVar[tuple[str, ...]] = ()

    runs = "native"
    head = "lm_head"
    lm_head: SlicedLinear

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        partition: Partition,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
    ) -> None:
        super().__init__()
        self.architecture = config.architectures[0]
        self.dtype = dtype
        self.num_layers = config.num_hidden_layers
        num_heads: int = config.num_attention_heads
        num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size or config.hidden_size // num_heads
        self.vocab_size = config.vocab_size
        if head_size is None and config.hidden_size % num_heads:
            raise ValueError(
                f"num_attention_heads: expected a divisor of hidden_size {config.hidden_size}, got {num_heads}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads {num_heads}, got {num_kv_heads}"
            )
        self.partition = partition
        self.num_heads = partition.heads(num_heads).size
        self.num_kv_heads = partition.kv_heads(num_kv_heads).size

    def make_lm_head(self, config: Any, embedding: SlicedEmbedding) -> None:
        """The last layer, to the vocabulary; it has the weight of `embedding` if the config ties them."""
        self.lm_head = SlicedLinear(embedding.embedding_dim, embedding.vocabulary, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = embedding.weight

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        trunk = self.get_submodule(self.PREFIX.removesuffix("."))
        return self.lm_head(metadata.of_samples(trunk(token_ids, positions, kv_caches, metadata)))

    def joins(self) -> dict[str, Callable[[nn.Module], nn.Module]]:
        """What the layers that give slices become, by name: modules that join the slices of all ranks. To be asked for
        before weights are loaded, while the layers are those of the constructor.
        """
        joins: dict[str, Callable[[nn.Module], nn.Module]] = {}
        ranks = self.partition.communicator
        if ranks is None:
            assert self.partition.world_size == 1
            return joins
        for name, layer in self.named_modules():
            if isinstance(layer, SlicedEmbedding) and not layer.vocabulary.is_whole:
                joins[name] = partial(SummedEmbedding, vocabulary=layer.vocabulary, all_reduce=ranks.all_reduce)
            elif isinstance(layer, SlicedLinear) and not layer.inputs.is_whole:
                joins[name] = partial(SummedLinear, all_reduce=ranks.all_reduce)
        if not self.lm_head.outputs.is_whole:
            joins["lm_head"] = partial(GatheredLinear, partition=self.partition, num_outputs=self.vocab_size)
        return joins


def misfit(directory: Path, architecture: str, problems: list[str]) -> str:
    """The message about weights that are not those of the model."""
    shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
    return f"model: the weights in {directory} do not fit {architecture}: {shown}"
