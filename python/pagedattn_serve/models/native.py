"""What the families with a file of their own share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_serve.models.cache_shape import CacheGroups, CacheShape, widest
from pagedattn_serve.models.causal_lm import AttentionMetadata, CausalLM, KVCache, ModelOutput
from pagedattn_serve.models.partition import (
    GatheredLinear,
    Partition,
    SlicedEmbedding,
    SlicedLinear,
    SummedEmbedding,
    SummedLinear,
)
from pagedattn_serve.models.stages import Trunk


class NativeCausalLM(CausalLM):
    """A family of this package; each of its layers has a cache, all of one shape. Parameters have the names of the
    checkpoint, except in converted layers.

    PREFIX: what all names but lm_head's begin with: that of the module that computes the rows of the last layer, before
        lm_head, [n, hidden_size]. Checkpoints of the model without its head leave the prefix out.
    NOT_PARAMETERS: endings of the names of tensors that a checkpoint may hold and the model does not use.

    elsewhere: what the names of tensors begin with that other stages have.
    carried_shape: of what a stage takes of the one before: without the rows, which are dimension 1.

    num_kv_heads: by default as many as query heads. head_size: by default a head's share of hidden_size.

    Raises ValueError if the number of heads does not divide hidden_size, or that of KV heads the number of heads.
    """

    PREFIX: ClassVar[str]
    NOT_PARAMETERS: ClassVar[tuple[str, ...]] = ()

    runs = "native"
    head = "lm_head"
    lm_head: SlicedLinear
    elsewhere: tuple[str, ...] = ()
    carried_shape: tuple[int, int]

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
        shape = CacheShape(partition.kv_heads(num_kv_heads).size, head_size or config.hidden_size // num_heads)
        self.cache_shapes = [shape] * self.num_layers
        self.cache_of_layer = list(range(self.num_layers))
        self._groups: CacheGroups | None = None  # None: those of cache_shapes

    def make_lm_head(self, config: Any, embedding: SlicedEmbedding) -> None:
        """The last layer, to the vocabulary; it has the weight of `embedding` if the config ties them."""
        self.embedding_size = embedding.embedding_dim
        self.lm_head = SlicedLinear(self.embedding_size, embedding.vocabulary, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = embedding.weight

    def drop_head(self) -> None:
        """For a checkpoint of the model without its last layer."""
        del self.lm_head
        self.head = ""

    def keep_stage(self, config: Any) -> None:
        """Give up what other stages than that of the partition have, before weights are loaded."""
        partition, windows = self.partition, self.cache_groups().windows
        [(prefix, trunk)] = [(name, each) for name, each in self.named_modules() if isinstance(each, Trunk)]
        self.carried_shape = trunk.NUM_CARRIED, config.hidden_size
        self.own_caches = partition.layers(self.num_layers)
        self.is_last_stage = partition.is_last_stage
        tied = [each for each in trunk.children() if self.head and getattr(each, "weight", None) is self.lm_head.weight]
        names = [f"{prefix}.{name}" for name in trunk.keep_stage(partition, tied if self.is_last_stage else ())]
        if not self.is_last_stage and self.head:
            names.append(self.head)
            self.drop_head()
        self.elsewhere = tuple(f"{name}." for name in names)
        # All stages have the same block tables, so that layers of different windows share theirs.
        self._groups = CacheGroups.single(self.cache_shapes[self.own_caches])._replace(windows=(widest(windows),))
        self.cache_shapes = self.cache_shapes[self.own_caches]

    def layers_of_caches(self) -> list[int]:
        """As that of `CausalLM`, of the caches of all stages."""
        return list(range(self.num_layers))

    def cache_groups(self) -> CacheGroups:
        return super().cache_groups() if self._groups is None else self._groups

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        hidden = self._hidden(token_ids, positions, kv_caches, metadata)
        return self._logits(hidden) if self.is_last_stage else hidden

    def with_hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
        num_pooled: int,
    ) -> ModelOutput:
        hidden = self._hidden(token_ids, positions, kv_caches, metadata)
        of_logits, of_pooled = hidden.split_with_sizes((len(hidden) - num_pooled, num_pooled))
        return ModelOutput(self._logits(of_logits), of_pooled)

    def _hidden(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        trunk = self.get_submodule(self.PREFIX.removesuffix("."))
        hidden: Tensor = trunk(token_ids, positions, kv_caches, metadata)
        return metadata.of_samples(hidden) if self.is_last_stage else hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden) if self.head else hidden.new_empty(0, self.vocab_size)

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
        if self.head and not self.lm_head.outputs.is_whole:
            joins["lm_head"] = partial(GatheredLinear, partition=self.partition, num_outputs=self.vocab_size)
        return joins
