"""OPT (Zhang et al., 2022). Norms come before each block, or after it (350m). Galactica has the same shape."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_serve.models.causal_lm import AttentionMetadata, KVCache, LastRows
from pagedattn_serve.models.layers import ACTIVATIONS, FusedLinear, attention, choose_activation, chunk_by_rows, of_rows
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.models.partition import SINGLE, Embedding, Partition, SlicedEmbedding, SlicedLinear
from pagedattn_serve.models.stages import Trunk

POSITION_OFFSET = 2  # the first rows of the position embedding belonged to padding


class OPTAttention(nn.Module):
    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.enable_bias
        self.head_size = size // config.num_attention_heads
        queries = keys = values = partition.head_features(config.num_attention_heads, self.head_size)
        self.qkv_proj = FusedLinear(size, {"q_proj": queries, "k_proj": keys, "v_proj": values}, bias)
        self.out_proj = SlicedLinear(values, size, bias)

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata, rows: LastRows | None) -> Tensor:
        query, key, value = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_size)).chunk(3, dim=1)
        return self.out_proj(attention(query, key, value, kv_cache, metadata, self.head_size**-0.5, rows=rows))


class OPTLayer(nn.Module):
    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        self.norm_first = config.do_layer_norm_before
        self.self_attn = OPTAttention(config, partition)
        self.self_attn_layer_norm = layer_norm(config)
        inner = partition.features(config.ffn_dim)
        self.fc1 = SlicedLinear(config.hidden_size, inner, config.enable_bias)
        self.activation = choose_activation(ACTIVATIONS, config, "activation_function")
        self.fc2 = SlicedLinear(inner, config.hidden_size, config.enable_bias)
        self.final_layer_norm = layer_norm(config)
        self.width = inner.whole

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata, rows: LastRows | None) -> Tensor:
        residual = of_rows(hidden, rows)
        if self.norm_first:
            hidden = residual + self.self_attn(self.self_attn_layer_norm(hidden), kv_cache, metadata, rows)
            return hidden + chunk_by_rows(self.mlp, self.final_layer_norm(hidden), self.width)
        hidden = self.self_attn_layer_norm(residual + self.self_attn(hidden, kv_cache, metadata, rows))
        return self.final_layer_norm(hidden + chunk_by_rows(self.mlp, hidden, self.width))

    def mlp(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(hidden)))


class OPTDecoder(Trunk):
    LAYERS: ClassVar = "layers"
    BEFORE: ClassVar = ("embed_tokens", "embed_positions", "project_in")
    BEHIND: ClassVar = ("final_layer_norm", "project_out")

    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        size, embedding_size = config.hidden_size, config.word_embed_proj_dim
        is_projected = embedding_size != size
        self.embed_tokens = SlicedEmbedding(partition.vocabulary(config.vocab_size), embedding_size)
        self.embed_positions = Embedding(config.max_position_embeddings + POSITION_OFFSET, size)
        self.project_in = SlicedLinear(embedding_size, size, bias=False) if is_projected else nn.Identity()
        self.layers = nn.ModuleList(OPTLayer(config, partition) for _ in range(config.num_hidden_layers))
        has_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.final_layer_norm = layer_norm(config) if has_norm else nn.Identity()
        self.project_out = SlicedLinear(size, embedding_size, bias=False) if is_projected else nn.Identity()

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        if metadata.carried is None:
            hidden = self.project_in(self.embed_tokens(token_ids)) + self.embed_positions(positions + POSITION_OFFSET)
        else:
            [hidden] = metadata.carried
        rows_of_layers = metadata.rows_of_layers(len(self.layers))
        for layer, kv_cache, rows in zip(self.layers, kv_caches, rows_of_layers, strict=True):
            hidden = layer(hidden, kv_cache, metadata, rows)
        return self.project_out(self.final_layer_norm(hidden)) if self.is_last else hidden[None]


class OPTModel(nn.Module):
    """Holds the decoder alone. It exists because the checkpoints' names have this level."""

    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config, partition)

    def forward(self, *args: Any) -> Tensor:
        return self.decoder(*args)


class OPTForCausalLM(NativeCausalLM):
    PREFIX: ClassVar = "model."

    def __init__(self, config: Any, dtype: torch.dtype, partition: Partition = SINGLE) -> None:
        super().__init__(config, dtype, partition)
        self.max_model_len = config.max_position_embeddings
        self.model = OPTModel(config, partition)
        self.make_lm_head(config, self.model.decoder.embed_tokens)


def layer_norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, elementwise_affine=config.layer_norm_elementwise_affine)
