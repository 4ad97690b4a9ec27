"""What pos_encoding_mode means: rotations of queries and keys, and slopes of ALiBi."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, check_scales, kept, sequences_of_rows

POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


@dataclass(frozen=True)
class Rotation:
    """Where the rows and the keys of a ragged batch stand, each in its sequence: int64 [num_rows], [num_keys]."""

    rows: Tensor
    keys: Tensor
    cos_sin: Tensor  # [num_positions, head_dim], see `cosines_and_sines`

    @classmethod
    def of(
        cls,
        head_dim: int,
        rope_scale: float | None,
        rope_theta: float | None,
        query_starts: Tensor,
        key_starts: Tensor,
        sizes: tuple[int, int],
    ) -> "Rotation":
        """query_starts, key_starts: [batch + 1], where the rows and the keys of each sequence begin; sizes: where the
        last end."""
        num_rows, num_keys = query_starts.diff(), key_starts.diff()
        first = num_keys - num_rows  # the last row stands at the last key
        # A sequence of more rows than keys begins with its first row: only distances count.
        of_row, row = sequences_of_rows(query_starts, sizes[0])
        of_key, key = sequences_of_rows(key_starts, sizes[1])
        rows, keys = row + first.clamp(min=0)[of_row], key + (-first).clamp(min=0)[of_key]
        longest = max(sizes) if len(num_rows) <= 1 else int(torch.maximum(num_rows, num_keys).max())
        if not torch.compiler.is_compiling():  # of one size for many batches, so that it is kept
            longest = 2 ** max(longest - 1, 0).bit_length()
        rope_scale = 1.0 if rope_scale is None else rope_scale
        rope_theta = 1e4 if rope_theta is None else rope_theta
        return cls(rows, keys, cosines_and_sines(longest, head_dim, rope_scale, rope_theta, rows.device))

    def to(self, device: torch.device) -> "Rotation":
        return Rotation(self.rows.to(device), self.keys.to(device), self.cos_sin.to(device))

    def rotate(self, function: Callable[..., Any], name: str, x: Tensor, positions: Tensor) -> Tensor:
        """A copy of x [num_tokens, num_heads, head_dim], which the function calls by this name."""
        x = x.clone(memory_format=torch.contiguous_format)
        call_as(function, {"query": name}, ops.rotary_embedding, positions, x, None, x.shape[-1], self.cos_sin)
        return x


def check_positive(function: Callable[..., Any], **numbers: float) -> None:
    check_scales(function, **numbers)
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{function.__qualname__}: {name}: expected a positive number, got {number}")


@kept
def cosines_and_sines(
    num_positions: int, head_dim: int, rope_scale: float, rope_theta: float, device: torch.device
) -> Tensor:
    """fp32 [num_positions, head_dim], for `ops.rotary_embedding`: angle i is position / rope_scale * rope_theta **
    (-2 i / head_dim). Kept from plan to plan. Source: Su et al., "RoFormer", 2021, with the halves of LLaMA."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / -head_dim
    angles = torch.arange(num_positions, device=device)[:, None] * (rope_theta**exponents / rope_scale)
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """fp32 [num_heads]: powers of 2 ** (-8 / n) for n heads, n a power of 2; heads beyond n take every second power of
    the square root. Source: Press et al., "Train Short, Test Long", ICLR 2022."""
    n = 2 ** (max(num_heads, 1).bit_length() - 1)
    exponents = [-8 * i / n for i in range(1, n + 1)] + [-4 * i / n for i in range(1, 2 * (num_heads - n), 2)]
    return torch.tensor([2.0**exponent for exponent in exponents[:num_heads]], dtype=torch.float32, device=device)
