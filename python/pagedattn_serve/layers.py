"""What the models share: attention over the paged cache, norm and rotary embedding, on the ops of pagedattn_ext."""

import torch
from torch import Tensor, nn

from pagedattn_ext import ops
from pagedattn_serve.metadata import AttentionMetadata, KVCache


def attention(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Put the new keys and values into the cache, then let the new rows attend to all that they see.

    query: [num_tokens, num_heads, head_size]; key, value: [num_tokens, num_kv_heads, head_size].
    Returns [num_tokens, num_heads * head_size].
    """
    key_cache, value_cache = kv_cache
    ops.reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping)
    out, _ = ops.paged_attention(
        query,
        key_cache,
        value_cache,
        metadata.block_tables,
        metadata.seq_lens,
        query_start_loc=metadata.query_start_loc,
        scale=scale,
    )
    return out.flatten(1)


class FusedLinear(nn.Linear):
    """Several linear layers with the same input as one. `parts`: their names in the checkpoint, and output sizes."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts


class RMSNorm(nn.Module):
    """RMS norm with the residual addition before it."""

    def __init__(self, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, sum); both arguments are overwritten if there is a residual."""
        if residual is None:
            return ops.rms_norm(hidden, self.weight, self.epsilon), hidden
        return ops.fused_add_rms_norm(hidden, residual, self.weight, self.epsilon)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding over whole heads, from a table of cosines and sines."""

    cos_sin_cache: Tensor

    def __init__(self, head_size: int, max_position: int, theta: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_size = head_size
        # The device is named: models are built on "meta", and this table has no checkpoint to come from.
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
        positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, 1.0 / theta**exponents)  # [max_position, head_size / 2]
        cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
        self.register_buffer("cos_sin_cache", cos_sin_cache, persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> None:
        """Rotates query and key in place. positions: int64 [num_tokens]."""
        ops.rotary_embedding_neox(positions, query, key, self.head_size, self.cos_sin_cache)
