"""LLaMA 1 to 3 (Touvron et al., 2023), and what differs from it by a switch: Mistral, Qwen2, Qwen3.

Mistral: sliding windows. Qwen2: bias in the query, key and value layers. Qwen3: RMS norm of each query and key head.
A config may have fields of other families, and they count for nothing: `model_type` says which fields are read.
In transformers, InternLM3 and IQuest-Coder are LLaMA under another `model_type`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_serve.models.causal_lm import AttentionMetadata, KVCache, LastRows
from pagedattn_serve.models.layers import (
    GATED_ACTIVATIONS,
    FusedLinear,
    RMSNorm,
    RotaryEmbedding,
    attention,
    check_epsilon,
    choose_activation,
    chunk_by_rows,
    of_rows,
)
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.models.partition import SINGLE, Partition, SlicedEmbedding, SlicedLinear
from pagedattn_serve.models.rope import max_position
from pagedattn_serve.models.stages import Trunk

LLAMA = ("llama", "internlm3", "iquestcoder")  # each model_type that is LLaMA


class LlamaAttention(nn.Module):
    def __init__(self, config: Any, partition: Partition, rotary: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        kv_heads = partition.kv_heads(config.num_key_value_heads)
        self.num_heads = partition.heads(config.num_attention_heads).size
        self.num_kv_heads = kv_heads.size
        self.head_size = rotary.head_size
        self.rotary = rotary
        self.sliding_window = sliding_window_of_layer(config, layer_idx)
        queries = partition.head_features(config.num_attention_heads, self.head_size)
        keys = values = kv_heads.times(self.head_size)
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": values}
        bias = config.model_type in (*LLAMA, "qwen3") and config.attention_bias
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=bias or config.model_type == "qwen2")
        self.o_proj = SlicedLinear(queries, config.hidden_size, bias)
        has_head_norm = config.model_type == "qwen3"
        self.q_norm = RMSNorm(self.head_size, config.rms_norm_eps) if has_head_norm else None
        self.k_norm = RMSNorm(self.head_size, config.rms_norm_eps) if has_head_norm else None

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rows: LastRows | None,
    ) -> Tensor:
        # Not unflatten and split, which take 3 microseconds more: much for a step of one token.
        heads = self.qkv_proj(hidden).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_size)
        query, key, value = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query.contiguous())[0], self.k_norm(key.contiguous())[0]
        self.rotary(positions, query, key)
        scale, window = self.head_size**-0.5, self.sliding_window
        return self.o_proj(attention(query, key, value, kv_cache, metadata, scale, sliding_window=window, rows=rows))


class LlamaMLP(nn.Module):
    def __init__(self, config: Any, partition: Partition) -> None:
        super().__init__()
        bias = config.model_type in LLAMA and config.mlp_bias
        inner = partition.features(config.intermediate_size)
        self.gate_up_proj = FusedLinear(config.hidden_size, {"gate_proj": inner, "up_proj": inner}, bias)
        self.activation = choose_activation(GATED_ACTIVATIONS, config, "hidden_act")
        self.down_proj = SlicedLinear(inner, config.hidden_size, bias)
        self.width = 2 * inner.whole

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))


class LlamaLayer(nn.Module):
    def __init__(self, config: Any, partition: Partition, rotary: RotaryEmbedding, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, partition, rotary, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config, partition)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rows: LastRows | None,
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, kv_cache, metadata, rows)
        hidden, residual = self.post_attention_layernorm(hidden, of_rows(residual, rows))
        return chunk_by_rows(self.mlp, hidden, self.mlp.width), residual


class LlamaModel(Trunk):
    LAYERS: ClassVar = "layers"
    BEFORE: ClassVar = ("embed_tokens",)
    BEHIND: ClassVar = ("norm",)
    NUM_CARRIED: ClassVar = 2

    def __init__(self, config: Any, partition: Partition, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.embed_tokens = SlicedEmbedding(partition.vocabulary(config.vocab_size), config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, partition, rotary, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        hidden: Tensor
        residual: Tensor | None
        residual, hidden = (None, self.embed_tokens(token_ids)) if metadata.carried is None else metadata.carried
        rows_of_layers = metadata.rows_of_layers(len(self.layers))
        for layer, kv_cache, rows in zip(self.layers, kv_caches, rows_of_layers, strict=True):
            hidden, residual = layer(hidden, residual, positions, kv_cache, metadata, rows)
        if self.is_last:
            normed: Tensor = self.norm(hidden, residual)[0]
            return normed
        assert residual is not None
        return torch.stack((residual, hidden))


class LlamaForCausalLM(NativeCausalLM):
    PREFIX: ClassVar = "model."
    NOT_PARAMETERS: ClassVar = (".rotary_emb.inv_freq",)  # in old checkpoints; the config says the same

    def __init__(self, config: Any, dtype: torch.dtype, partition: Partition = SINGLE) -> None:
        check_epsilon(config, "rms_norm_eps")
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        super().__init__(config, dtype, partition, config.num_key_value_heads, head_size)
        self.max_model_len = max_position(config)
        self.model = LlamaModel(config, partition, RotaryEmbedding(config, head_size, dtype))
        self.cache_shapes = [
            replace(shape, window=sliding_window_of_layer(config, layer_idx))
            for layer_idx, shape in enumerate(self.cache_shapes)
        ]
        self.make_lm_head(config, self.model.embed_tokens)


def sliding_window_of_layer(config: Any, layer_idx: int) -> int | None:
    """Tokens that the layer sees; None is all of them, as in LLaMA. `layer_types` may say which layers have windows."""
    if config.model_type in LLAMA:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
