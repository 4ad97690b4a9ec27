"""GPT-2 (Radford et al., 2019)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_ext import ops
from pagedattn_serve.layers import attention
from pagedattn_serve.metadata import AttentionMetadata, KVCache


class GPT2Attention(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.scale = self.head_size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer_idx + 1
        self.c_attn = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        heads = self.c_attn(hidden).unflatten(-1, (-1, self.head_size))
        query, key, value = heads.chunk(3, dim=1)
        return self.c_proj(attention(query, key, value, kv_cache, metadata, self.scale))


class GPT2MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        inner_size = config.n_inner or 4 * config.hidden_size
        self.c_fc = nn.Linear(config.hidden_size, inner_size)
        self.c_proj = nn.Linear(inner_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.c_fc(hidden)
        return self.c_proj(ops.gelu_new(hidden, out=hidden))


class GPT2Layer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden), kv_cache, metadata)
        return hidden + self.mlp(self.ln_2(hidden))


class GPT2Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(GPT2Layer(config, i) for i in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        hidden = self.wte(token_ids) + self.wpe(positions)
        for layer, kv_cache in zip(self.h, kv_caches, strict=True):
            hidden = layer(hidden, kv_cache, metadata)
        return self.ln_f(hidden)


class GPT2LMHeadModel(nn.Module):
    """Token ids to logits. The names of the parameters are those of the checkpoint."""

    # GPT-2 keeps these weights as [in, out].
    TRANSPOSED: ClassVar = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    # The causal mask, and what old versions wrote into masked places.
    NOT_PARAMETERS: ClassVar = (".attn.bias", ".attn.masked_bias")
    # The published checkpoints have the names of the model without its head.
    PREFIX: ClassVar = "transformer."

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        if config.activation_function != "gelu_new":
            raise ValueError(f"activation_function: expected 'gelu_new', got {config.activation_function!r}")
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_attention_heads
        self.head_size: int = config.hidden_size // config.num_attention_heads
        self.max_model_len: int = config.max_position_embeddings
        self.transformer = GPT2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """token_ids, positions: int64 [num_tokens]. Returns hidden states, [num_tokens, hidden_size]."""
        return self.transformer(token_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size]."""
        return self.lm_head(hidden)
