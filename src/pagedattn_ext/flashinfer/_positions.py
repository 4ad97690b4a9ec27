"""What pos_encoding_mode means: rotations of queries and keys, and slopes of ALiBi."""

import math

import torch
from torch import Tensor

POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


def rotate(x: Tensor, positions: Tensor, rope_scale: float | None, rope_theta: float | None) -> Tensor:
    """x [num_tokens, num_heads, head_dim] with each half of a head turned against the other; a copy, of x's dtype.

    Elements i and i + head_dim / 2 of a token turn by position / rope_scale * rope_theta ** (-2 i / head_dim).
    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, in the layout of LLaMA.

    positions: int [num_tokens]. Defaults: rope_scale 1, rope_theta 10000.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) / -half
    frequencies = (10000.0 if rope_theta is None else rope_theta) ** exponents / (rope_scale or 1.0)
    angles = positions[:, None, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """fp32 [num_heads]: powers of 2 ** (-8 / n) for n heads, n a power of 2; heads beyond n take every second power of
    the square root. Source: Press et al., "Train Short, Test Long", ICLR 2022."""
    n = 2 ** int(math.log2(num_heads))
    exponents = [-8 * i / n for i in range(1, n + 1)] + [-4 * i / n for i in range(1, 2 * (num_heads - n), 2)]
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float32, device=device)
