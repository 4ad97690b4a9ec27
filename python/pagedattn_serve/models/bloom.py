"""BLOOM (BigScience, 2022): no position embedding, but ALiBi (Press et al., 2022) in attention."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_ext import ops
from pagedattn_serve.models.causal_lm import AttentionMetadata, KVCache, LastRows
from pagedattn_serve.models.layers import InterleavedQKVLinear, attention, check_epsilon, chunk_by_rows, of_rows
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.models.partition import SINGLE, Partition, SlicedEmbedding, SlicedLinear
from pagedattn_serve.models.stages import Trunk

DEFAULT_MAX_MODEL_LEN = 2048  # what BLOOM was trained on; ALiBi itself has no end


class BloomAttention(nn.Module):
    alibi_slopes: Tensor

    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        num_heads = config.num_attention_heads
        heads = partition.heads(num_heads)
        self.head_size = config.hidden_size // num_heads
        self.query_key_value = InterleavedQKVLinear(config.hidden_size, heads, self.head_size)
        self.dense = SlicedLinear(partition.head_features(num_heads, self.head_size), config.hidden_size)
        self.register_buffer("alibi_slopes", heads.of(alibi_slopes(num_heads), dim=0), persistent=False)

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata, rows: LastRows | None) -> Tensor:
        query, key, value = self.query_key_value(hidden).unflatten(-1, (-1, self.head_size)).chunk(3, dim=1)
        scale, slopes = self.head_size**-0.5, self.alibi_slopes
        return self.dense(attention(query, key, value, kv_cache, metadata, scale, alibi_slopes=slopes, rows=rows))


class BloomMLP(nn.Module):
    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        inner = partition.features(4 * config.hidden_size)
        self.dense_h_to_4h = SlicedLinear(config.hidden_size, inner)
        self.dense_4h_to_h = SlicedLinear(inner, config.hidden_size)
        self.width = inner.whole

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(ops.gelu_fast(self.dense_h_to_4h(hidden)))


class BloomLayer(nn.Module):
    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.self_attention = BloomAttention(config, partition)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = BloomMLP(config, partition)

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata, rows: LastRows | None) -> Tensor:
        normed = self.input_layernorm(hidden)
        residual = of_rows(normed if self.residual_after_norm else hidden, rows)
        hidden = residual + self.self_attention(normed, kv_cache, metadata, rows)
        normed = self.post_attention_layernorm(hidden)
        residual = normed if self.residual_after_norm else hidden
        return residual + chunk_by_rows(self.mlp, normed, self.mlp.width)


class BloomModel(Trunk):
    LAYERS: ClassVar = "h"
    BEFORE: ClassVar = ("word_embeddings", "word_embeddings_layernorm")
    BEHIND: ClassVar = ("ln_f",)

    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        self.word_embeddings = SlicedEmbedding(partition.vocabulary(config.vocab_size), config.hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.h = nn.ModuleList(BloomLayer(config, partition) for _ in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        if metadata.carried is None:
            hidden = self.word_embeddings_layernorm(self.word_embeddings(token_ids))
        else:
            [hidden] = metadata.carried
        rows_of_layers = metadata.rows_of_layers(len(self.h))
        for layer, kv_cache, rows in zip(self.h, kv_caches, rows_of_layers, strict=True):
            hidden = layer(hidden, kv_cache, metadata, rows)
        return self.ln_f(hidden) if self.is_last else hidden[None]


class BloomForCausalLM(NativeCausalLM):
    PREFIX: ClassVar = "transformer."

    def __init__(self, config: Any, dtype: torch.dtype, partition: Partition = SINGLE) -> None:
        check_epsilon(config, "layer_norm_epsilon")
        if config.slow_but_exact and config.pretraining_tp > 1:  # where transformers leaves out biases
            raise ValueError(f"slow_but_exact: expected false with pretraining_tp {config.pretraining_tp}, got true")
        super().__init__(config, dtype, partition)
        self.max_model_len = getattr(config, "seq_length", None) or DEFAULT_MAX_MODEL_LEN
        self.transformer = BloomModel(config, partition)
        self.make_lm_head(config, self.transformer.word_embeddings)


def alibi_slopes(num_heads: int) -> Tensor:
    """The slope of each head, fp32 [num_heads], on the CPU.

    For a power of two the slopes are 2 ** (-8 i / num_heads), for i from 1. Any other number of heads has the slopes of
    the power of two below, then every second slope of the power above (Press et al., 2022, section 3, and their
    published code).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    exponents = [8 * i / power for i in range(1, power + 1)]
    exponents += [8 * i / (2 * power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32, device="cpu")
