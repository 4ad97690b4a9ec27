"""What the models share: attention over the paged cache, norms, rotary embedding, and linear layers that load fused."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_ext import ops
from pagedattn_serve.models.causal_lm import AttentionMetadata, KVCache, LastRows
from pagedattn_serve.models.partition import Share, SlicedLinear, one_after_another
from pagedattn_serve.models.rope import cos_sin_cache


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    *,
    is_written: bool = False,
    sliding_window: int | None = None,
    attention_chunk: int = 0,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rows: LastRows | None = None,
) -> Tensor:
    """Put the new keys and values into the cache, unless an earlier layer has (is_written); then let new rows attend to
    all that they see.

    query: [num_tokens, num_heads, head_size]; key, value: [num_tokens, num_kv_heads, head_size]. Values may have any
        head size up to the cache's.
    alibi_slopes, sinks: fp32 [num_heads]. sliding_window: tokens that a row sees, its own included.
    attention_chunk: tokens of a chunk, outside of which a row sees nothing; 0 is no chunks. softcap: 0 is none.
    rows: the n new rows that attend. None: all of them. Whether others do changes no bit of a row's result on the CPU.
    Returns [n, num_heads * head_size], with the head size of the values.
    """
    key_cache, value_cache, k_scale, v_scale, group = kv_cache
    query = of_rows(query, rows)
    padded_size, value_size = key_cache.shape[2] * key_cache.shape[4], value.shape[-1]
    if min(query.shape[-1], value_size) < padded_size:  # zeros change no dot product, and come out as zeros
        query, key, value = (nn.functional.pad(x, (0, padded_size - x.shape[-1])) for x in (query, key, value))
    if not is_written:
        slots = metadata.slot_mappings[group]
        ops.reshape_and_cache(key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale)
    out, _ = ops.paged_attention(
        query,
        key_cache,
        value_cache,
        metadata.block_tables[group],
        metadata.seq_lens,
        query_start_loc=metadata.query_start_loc if rows is None else rows.query_start_loc,
        scale=scale,
        max_seq_len=metadata.max_seq_len,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if value_size < padded_size:
        out = out[..., :value_size].contiguous()
    return out.flatten(1)


def of_rows(hidden: Tensor, rows: LastRows | None) -> Tensor:
    return hidden if rows is None else hidden[rows.of_step]


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
    """Rotary position embedding from a table of cosines and sines."""

    cos_sin_cache: Tensor

    def __init__(self, config: Any, head_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_size = head_size
        self.register_buffer("cos_sin_cache", cos_sin_cache(config, head_size, dtype), persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> None:
        """Rotates query and key in place. positions: int64 [num_tokens]."""
        ops.rotary_embedding_neox(positions, query, key, self.head_size, self.cos_sin_cache)


Activation = Callable[[Tensor], Tensor]

# Activations by their names in a config. Plain ones: [..., d] to [..., d]. Gated ones: [..., 2d] to [..., d].
ACTIVATIONS: dict[str, Activation] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_new": ops.gelu_new,
    "gelu_pytorch_tanh": ops.gelu_new,
    "gelu_fast": ops.gelu_fast,
    "quick_gelu": ops.gelu_quick,
}
GATED_ACTIVATIONS: dict[str, Activation] = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_pytorch_tanh": ops.gelu_tanh_and_mul,
}


def choose_activation(activations: dict[str, Activation], config: Any, option: str) -> Activation:
    """The activation that an option of the config names. Raises ValueError if the table does not have it."""
    name = getattr(config, option)
    if name not in activations:
        raise ValueError(f"{option}: expected one of {', '.join(activations)}, got {name!r}")
    return activations[name]


def check_epsilon(config: Any, option: str) -> None:
    """Raises ValueError for an option of the config that a norm cannot add to a mean of squares."""
    epsilon = getattr(config, option)
    if not isinstance(epsilon, int | float) or not 0 <= epsilon <= sys.float_info.max:
        raise ValueError(f"{option}: expected a number >= 0, got {epsilon!r}")


# Activations of an MLP that stay in the CPU's caches. More than 32 MiB, which malloc of glibc gives back to the system
# at once, would be cleared page by page in every layer.
MAX_ACTIVATION_BYTES = 8 << 20
MIN_CHUNK_ROWS = 128  # so many rows share one pass over the weights


def chunk_by_rows(mlp: Callable[[Tensor], Tensor], hidden: Tensor, width: int) -> Tensor:
    """mlp(hidden), on the CPU some rows at a time.

    hidden: [num_tokens, hidden_size]. width: features of the widest activations that the MLP makes; those of all ranks
        together, as the ranks add up their outputs and have to take the same rows.
    """
    num_rows = MAX_ACTIVATION_BYTES // (width * hidden.element_size()) // MIN_CHUNK_ROWS * MIN_CHUNK_ROWS
    num_rows = max(num_rows, MIN_CHUNK_ROWS)
    if hidden.device.type != "cpu" or len(hidden) <= num_rows:
        return mlp(hidden)
    return torch.cat([mlp(rows) for rows in torch.split(hidden, num_rows)])


# ---- linear layers that checkpoints keep in another form ------------------------------------------------------------


class FusedLinear(SlicedLinear):
    """Several linear layers with the same input as one. `parts`: their names in the checkpoint, and outputs."""

    def __init__(self, inputs: int, parts: dict[str, Share], bias: bool) -> None:
        super().__init__(inputs, one_after_another(*parts.values()), bias)
        self.parts = parts

    def checkpoint_parts(self, name: str) -> dict[str, Share]:
        parent = name.rpartition(".")[0]
        return {f"{parent}.{part}": outputs for part, outputs in self.parts.items()}


class TransposedLinear(SlicedLinear):
    """A linear layer whose weight the checkpoint keeps as [in_features, out_features], unless it is quantized."""

    def checkpoint_shapes(self, name: str, kind: str) -> dict[str, list[Share]]:
        [(tensor, shares)] = super().checkpoint_shapes(name, kind).items()
        return {tensor: shares[::-1]}

    def in_own_order(self, kind: str, tensor: Tensor) -> Tensor:
        return tensor.t() if kind == "weight" else tensor


class InterleavedQKVLinear(SlicedLinear):
    """Query, key and value layers as one, whose output rows the checkpoint keeps as [num_heads, 3, head_size]."""

    def __init__(self, inputs: int, heads: Share, head_size: int) -> None:
        super().__init__(inputs, heads.times(3 * head_size))
        self.num_heads = heads.size

    def in_own_order(self, kind: str, tensor: Tensor) -> Tensor:
        return tensor.view(self.num_heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
