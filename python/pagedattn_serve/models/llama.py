"""LLaMA (Touvron et al., 2023), with grouped KV heads and tied or untied embeddings."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_ext import ops
from pagedattn_serve.layers import FusedLinear, RMSNorm, RotaryEmbedding, attention
from pagedattn_serve.metadata import AttentionMetadata, KVCache


class LlamaAttention(nn.Module):
    def __init__(self, config: Any, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_size = rotary.head_size
        self.rotary = rotary
        query_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_size))
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        self.rotary(positions, query, key)
        return self.o_proj(attention(query, key, value, kv_cache, metadata, scale=self.head_size**-0.5))


class LlamaMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(hidden)))


class LlamaLayer(nn.Module):
    def __init__(self, config: Any, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, kv_cache, metadata)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaModel(nn.Module):
    def __init__(self, config: Any, head_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        rotary = RotaryEmbedding(head_size, config.max_position_embeddings, rope_theta(config), dtype)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, rotary) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        hidden: Tensor = self.embed_tokens(token_ids)
        residual = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, positions, kv_cache, metadata)
        return self.norm(hidden, residual)[0]


class LlamaForCausalLM(nn.Module):
    """Token ids to logits. The names of the parameters are those of the checkpoint, but for the fused layers."""

    TRANSPOSED: ClassVar[tuple[str, ...]] = ()
    NOT_PARAMETERS: ClassVar = (".rotary_emb.inv_freq",)
    PREFIX: ClassVar = ""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act: expected 'silu', got {config.hidden_act!r}")
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.max_model_len: int = config.max_position_embeddings
        self.model = LlamaModel(config, self.head_size, dtype)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """token_ids, positions: int64 [num_tokens]. Returns hidden states, [num_tokens, hidden_size]."""
        return self.model(token_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size]."""
        return self.lm_head(hidden)


def rope_theta(config: Any) -> float:
    """The base of the rotary embedding, from either form of config; ValueError if the positions are to be scaled."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ValueError(f"rope_type: expected 'default' (scaled positions are not supported yet), got {rope_type!r}")
    return float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
