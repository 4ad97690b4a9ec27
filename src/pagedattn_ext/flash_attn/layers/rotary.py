"""Rotary position embedding of queries and keys, alone or packed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_ext._adapters import call_as, expect_defaults, refuse_expanded
from pagedattn_ext.flash_attn.ops.triton.rotary import apply_rotary
from pagedattn_ext.ops._call import check_rank


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """`apply_rotary`, in another order of arguments."""
    return call_as(
        apply_rotary_emb, {}, apply_rotary, x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace
    )


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`apply_rotary_emb` in plain torch, with gradients.

    Args:
        x: [batch, seqlen, num_heads, head_size].
        cos, sin: [seqlen, rotary_dim / 2], or [batch, seqlen, rotary_dim / 2].
    """
    rotary_dim = 2 * cos.shape[-1]
    pairs = x[..., :rotary_dim].reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
    dim = -1 if interleaved else -2
    first, second = pairs.unbind(dim)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim).flatten(-2)
    return torch.cat([rotated, x[..., rotary_dim:]], -1)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """`apply_rotary` of the queries and keys in qkv, in place.

    Args:
        qkv: [batch, seqlen, 3, num_heads, head_size], or with num_heads_q [batch, seqlen, num_heads_q + 2 *
            num_kv_heads, head_size].
        cos, sin: [max_position, rotary_dim / 2].
        cos_k, sin_k: the same for the keys; default those of the queries.

    Returns:
        qkv.
    """
    function = apply_rotary_emb_qkv_
    if (cos_k is None) != (sin_k is None):
        missing = "cos_k" if cos_k is None else "sin_k"
        raise ValueError(f"{function.__name__}: {missing}: expected a tensor, as the other of the pair is, got None")
    q, k = _queries_and_keys(qkv, num_heads_q)
    refuse_expanded(function, qkv=qkv)
    rotated_q = _rotated(function, {"x": "qkv"}, q, cos, sin, seqlen_offsets, interleaved)
    if cos_k is None or sin_k is None:
        rotated_k = _rotated(function, {"x": "qkv"}, k, cos, sin, seqlen_offsets, interleaved)
    else:
        names = {"x": "qkv", "cos": "cos_k", "sin": "sin_k"}
        rotated_k = _rotated(function, names, k, cos_k, sin_k, seqlen_offsets, interleaved)
    q.copy_(rotated_q)
    k.copy_(rotated_k)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """`apply_rotary` of the keys in kv [batch, seqlen, 2, num_kv_heads, head_size], in place; returns kv."""
    function = apply_rotary_emb_kv_
    check_rank(function.__name__, "kv", kv, 5)
    if kv.shape[2] != 2:
        raise ValueError(f"{function.__name__}: kv: expected 2 in dimension 2, got shape {list(kv.shape)}")
    refuse_expanded(function, kv=kv)
    kv[:, :, 0] = _rotated(function, {"x": "kv"}, kv[:, :, 0], cos, sin, seqlen_offsets, interleaved)
    return kv


class RotaryEmbedding(nn.Module):
    """cos and sin of positions, computed when they are first needed, and the embedding by them, in place.

    The angle of position p and pair i of `dim` / 2 is p * base ** (-2 * i / dim).
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        expect_defaults(type(self), scale_base=scale_base)
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", self.base**-exponents, persistent=False)
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            qkv: as in `apply_rotary_emb_qkv_`; with kv [batch, seqlen, num_heads, head_size], the queries alone.
            kv: [batch, seqlen, 2, num_kv_heads, head_size].
            seqlen_offset: the position of each sequence's first row, an int or int32 [batch].
            max_seqlen: a bound of all positions; default that of seqlen_offset, which on a GPU waits for the tensor.

        Returns:
            qkv, or (qkv, kv).
        """
        if max_seqlen is None:
            first = int(seqlen_offset.max()) if isinstance(seqlen_offset, Tensor) else seqlen_offset
            max_seqlen = qkv.shape[1] + first
        cos, sin = self._cos_sin_of(max_seqlen, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, interleaved=self.interleaved, seqlen_offsets=seqlen_offset, num_heads_q=num_heads_q
            )
        refuse_expanded(type(self).forward, qkv=qkv)
        rotated = apply_rotary_emb(qkv, cos, sin, self.interleaved, seqlen_offsets=seqlen_offset)
        apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)
        return qkv.copy_(rotated), kv

    def _cos_sin_of(self, num_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._cos_sin is not None:
            cos, sin = self._cos_sin
            if cos.shape[0] >= num_positions and cos.dtype == like.dtype and cos.device == like.device:
                return cos, sin
        positions = torch.arange(num_positions, device=like.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq.to(like.device, torch.float32))
        self._cos_sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
        return self._cos_sin


def _queries_and_keys(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    """Views of the queries and of the keys."""
    function = apply_rotary_emb_qkv_.__name__
    if num_heads_q is None:
        check_rank(function, "qkv", qkv, 5)
        if qkv.shape[2] == 3:
            return qkv[:, :, 0], qkv[:, :, 1]
        raise ValueError(f"{function}: qkv: expected 3 in dimension 2, got shape {list(qkv.shape)}")
    check_rank(function, "qkv", qkv, 4)
    num_kv_heads = (qkv.shape[2] - num_heads_q) // 2
    if num_kv_heads < 1 or num_heads_q < 1 or num_heads_q + 2 * num_kv_heads != qkv.shape[2]:
        raise ValueError(
            f"{function}: num_heads_q: expected as many heads of keys as of values behind the queries' in "
            f"{qkv.shape[2]} heads, got {num_heads_q}"
        )
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_kv_heads]


def _rotated(
    function: Callable[..., Any],
    names: dict[str, str],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    interleaved: bool,
) -> Tensor:
    return call_as(function, names, apply_rotary, x, cos, sin, seqlen_offsets, interleaved=interleaved)
