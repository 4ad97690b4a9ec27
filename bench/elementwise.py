"""Norm, activation and rotary embedding, beside what torch offers for them.

Usage: python bench/elementwise.py [--quick] [--threads N]
"""

from collections.abc import Callable

import torch
from harness import parse_args, print_hardware, print_table, time_interleaved

from pagedattn_ext import ops

HIDDEN_SIZE = 4096
INTERMEDIATE_SIZE = 11008
NUM_HEADS, HEAD_SIZE = 32, 128


def rotate_half_eager(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The form of the Hugging Face models: cos and sin are [num_tokens, 1, head_size]."""

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotated(query), rotated(key)


def cases(num_tokens: int, dtype: torch.dtype) -> list[tuple[str, Callable, Callable]]:
    """(name, ours, torch's); outputs are allocated by both."""
    hidden = torch.randn(num_tokens, HIDDEN_SIZE).to(dtype)
    weight = torch.randn(HIDDEN_SIZE).to(dtype)
    gate_up = torch.randn(num_tokens, 2 * INTERMEDIATE_SIZE).to(dtype)
    query, key = torch.randn(2, num_tokens, NUM_HEADS, HEAD_SIZE).to(dtype)
    positions = torch.arange(num_tokens)
    cos_sin = torch.rand(num_tokens, HEAD_SIZE).to(dtype)
    cos, sin = cos_sin.chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]

    def silu_and_mul_eager(_: int) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return [
        (
            "rms_norm vs F.rms_norm",
            lambda _: ops.rms_norm(hidden, weight),
            lambda _: torch.nn.functional.rms_norm(hidden, (HIDDEN_SIZE,), weight, 1e-6),
        ),
        ("silu_and_mul vs eager", lambda _: ops.silu_and_mul(gate_up), silu_and_mul_eager),
        (
            "rotary_embedding_neox vs eager",
            lambda _: ops.rotary_embedding_neox(positions, query, key, HEAD_SIZE, cos_sin),
            lambda _: rotate_half_eager(query, key, cos, sin),
        ),
    ]


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    print_hardware()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens in (32, 512):
            for name, ours, theirs in cases(num_tokens, dtype):
                seconds = time_interleaved({"ours": ours, "torch": theirs}, 5 if args.quick else 25)
                label = f"{name}, {num_tokens} tokens, {str(dtype).removeprefix('torch.')}"
                ratio = seconds["torch"] / seconds["ours"]
                rows.append([label, f"{seconds['ours'] * 1e3:.3f}", f"{seconds['torch'] * 1e3:.3f}", f"{ratio:.1f}x"])
    print_table(["op", "ms", "torch ms", "ratio"], rows)


if __name__ == "__main__":
    main()
