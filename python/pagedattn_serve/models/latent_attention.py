"""Multi-head latent attention (MLA) of transformers' models on a cache of latents.

A layer computes a latent and a rotary part of each token, and from the latent a key and a value for each head. The
cache holds the latent and the rotary part alone. The weights that make keys of latents are applied to the queries
instead, and those that make values to what attention gives: they are absorbed (DeepSeek-AI, "DeepSeek-V2", 2024,
section 2.1). The results are the same but for rounding.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_ext import ops
from pagedattn_ext.kv_cache import MAX_HEAD_SIZE
from pagedattn_serve.models.causal_lm import AttentionMetadata, KVCache


class LatentProjection(nn.Module):
    """In the place of a layer's `kv_b_proj`, whose weight makes keys and values of latents: a layer for each head.

    keys: [nope_size] to [latent_size], of the queries. values: [latent_size] to [value_size], of what attention gives.
    """

    def __init__(self, kv_b_proj: nn.Linear, nope_size: int, value_size: int) -> None:
        super().__init__()
        weight = kv_b_proj.weight.detach()
        of_heads = weight.view(-1, nope_size + value_size, weight.shape[1])
        self.keys = nn.ModuleList(linear(of_head[:nope_size].T.contiguous()) for of_head in of_heads)
        self.values = nn.ModuleList(linear(of_head[nope_size:].clone()) for of_head in of_heads)

    def forward(self, latent: Tensor) -> Tensor:
        """What kv_b_proj computes, as long as the layers of the heads are no packed ones: for transformers' own
        attention."""
        of_heads: Any = zip(self.keys, self.values, strict=True)
        weights = [weight for keys, values in of_heads for weight in (keys.weight.T, values.weight)]
        return nn.functional.linear(latent, torch.cat(weights))


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def keep_latents(model: nn.Module, names: tuple[str, ...]) -> None:
    """Let the MLA layers of a model hand latents to the attention functions called `names`, as keys and values of one
    head, in the place of keys and values of all heads."""
    module: Any
    for module in model.modules():
        if has_latents(module):
            module.expand_kv = partial(keys_and_values, module, names)


def has_latents(module: Any) -> bool:
    projection = getattr(module, "kv_b_proj", None)
    return (
        hasattr(module, "expand_kv")
        and isinstance(projection, nn.Linear)
        and projection.bias is None
        and max(module.kv_lora_rank, module.qk_rope_head_dim) <= MAX_HEAD_SIZE
    )


def is_latent(module: Any) -> bool:
    """Whether a layer hands latents to its attention function."""
    return isinstance(getattr(module, "expand_kv", None), partial)


def keys_and_values(module: Any, names: tuple[str, ...], latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """latent, rope: [1, 1, num_tokens, size]. In the place of a layer's `expand_kv`."""
    if module.config._attn_implementation not in names:
        expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, rope)
        return expanded
    return torch.cat([latent, rope], dim=3), latent


def absorb(model: nn.Module) -> None:
    """Take the weights of `kv_b_proj` apart in all layers that hand latents to attention."""
    module: Any
    for module in model.modules():
        if is_latent(module) and isinstance(module.kv_b_proj, nn.Linear):
            module.kv_b_proj = LatentProjection(module.kv_b_proj, module.qk_nope_head_dim, module.v_head_dim)


def attend_to_latents(
    module: Any, query: Tensor, key: Tensor, kv_cache: KVCache, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Put the new latents into the cache, then let the new rows attend to all that they see.

    query: [num_heads, num_tokens, nope_size + rope_size]. key: [num_tokens, latent_size + rope_size].
    Returns [num_tokens, num_heads, value_size].
    """
    projection, latent_size, cache = module.kv_b_proj, module.kv_lora_rank, kv_cache.key_cache
    q_nope, q_pe = torch.split(query, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=2)
    absorbed = torch.stack([of_head(rows) for of_head, rows in zip(projection.keys, q_nope, strict=True)])
    ops.concat_and_cache_mla(key[:, :latent_size], key[:, latent_size:], cache, metadata.slot_mappings[kv_cache.group])
    latents, _ = ops.mla_attention(
        absorbed.transpose(0, 1),
        q_pe.transpose(0, 1),
        cache[..., :latent_size],
        cache[..., latent_size:],
        metadata.block_tables[kv_cache.group],
        metadata.seq_lens,
        query_start_loc=metadata.query_start_loc,
        scale=scale,
    )
    of_heads = zip(projection.values, latents.unbind(1), strict=True)
    return torch.stack([of_head(rows) for of_head, rows in of_heads], dim=1)
