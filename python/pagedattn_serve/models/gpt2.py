"""GPT-2 (Radford et al., 2019)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_serve.models.causal_lm import AttentionMetadata, KVCache, LastRows
from pagedattn_serve.models.layers import (
    ACTIVATIONS,
    TransposedLinear,
    attention,
    check_epsilon,
    choose_activation,
    chunk_by_rows,
    of_rows,
)
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.models.partition import SINGLE, Embedding, Partition, SlicedEmbedding, one_after_another
from pagedattn_serve.models.stages import Trunk


class GPT2Attention(nn.Module):
    def __init__(self, config: Any, partition: Partition, layer_idx: int) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.scale = self.head_size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer_idx + 1
        queries = keys = values = partition.head_features(config.num_attention_heads, self.head_size)
        self.c_attn = TransposedLinear(config.hidden_size, one_after_another(queries, keys, values))
        self.c_proj = TransposedLinear(values, config.hidden_size)

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata, rows: LastRows | None) -> Tensor:
        query, key, value = self.c_attn(hidden).unflatten(-1, (-1, self.head_size)).chunk(3, dim=1)
        return self.c_proj(attention(query, key, value, kv_cache, metadata, self.scale, rows=rows))


class GPT2MLP(nn.Module):
    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        inner = partition.features(config.n_inner or 4 * config.hidden_size)
        self.c_fc = TransposedLinear(config.hidden_size, inner)
        self.activation = choose_activation(ACTIVATIONS, config, "activation_function")
        self.c_proj = TransposedLinear(inner, config.hidden_size)
        self.width = inner.whole

    def forward(self, hidden: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(hidden)))


class GPT2Layer(nn.Module):
    def __init__(self, config: Any, partition: Partition, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, partition, layer_idx)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config, partition)

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata, rows: LastRows | None) -> Tensor:
        hidden = of_rows(hidden, rows) + self.attn(self.ln_1(hidden), kv_cache, metadata, rows)
        return hidden + chunk_by_rows(self.mlp, self.ln_2(hidden), self.mlp.width)


class GPT2Model(Trunk):
    LAYERS: ClassVar = "h"
    BEFORE: ClassVar = ("wte", "wpe")
    BEHIND: ClassVar = ("ln_f",)

    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        self.wte = SlicedEmbedding(partition.vocabulary(config.vocab_size), config.hidden_size)
        self.wpe = Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(GPT2Layer(config, partition, i) for i in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        if metadata.carried is None:
            hidden = self.wte(token_ids) + self.wpe(positions)
        else:
            [hidden] = metadata.carried
        rows_of_layers = metadata.rows_of_layers(len(self.h))
        for layer, kv_cache, rows in zip(self.h, kv_caches, rows_of_layers, strict=True):
            hidden = layer(hidden, kv_cache, metadata, rows)
        return self.ln_f(hidden) if self.is_last else hidden[None]


class GPT2LMHeadModel(NativeCausalLM):
    PREFIX: ClassVar = "transformer."
    NOT_PARAMETERS: ClassVar = (
        ".attn.bias",
        ".attn.masked_bias",
    )  # the causal mask, and what stood for -inf

    def __init__(self, config: Any, dtype: torch.dtype, partition: Partition = SINGLE) -> None:
        check_epsilon(config, "layer_norm_epsilon")
        super().__init__(config, dtype, partition)
        self.max_model_len = config.max_position_embeddings
        self.transformer = GPT2Model(config, partition)
        self.make_lm_head(config, self.transformer.wte)
