"""Decode attention over a paged cache, beside torch's SDPA on contiguous keys and values.

Usage: python bench/attn.py [--quick] [--threads N]

Physical blocks are in random order and larger than the caches of the CPU. GB/s counts the bytes of keys and values;
"of probe" is their share of what torch.sum reads in the same run.
"""

from dataclasses import dataclass

import torch
from harness import PROBE_BYTES, make_read_probe, parse_args, print_hardware, print_table, time_interleaved

from pagedattn_ext import ops

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_seqs: int
    context: int

    def kv_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.num_seqs * self.context * self.num_kv_heads * self.head_size * dtype.itemsize


SHAPES = [
    Shape("MHA 32x128, 8 x 2048", 32, 32, 128, 8, 2048),
    Shape("GQA 32/8x128, 8 x 2048", 32, 8, 128, 8, 2048),
    Shape("GPT-2 12x64, 8 x 1024", 12, 12, 64, 8, 1024),
]


class Decode:
    """One decode step of a shape, in our layout and in torch's."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        x = 16 // dtype.itemsize
        blocks_per_seq = shape.context // BLOCK_SIZE
        num_blocks = shape.num_seqs * blocks_per_seq
        heads = (shape.num_kv_heads, shape.head_size)
        self.key_cache = torch.randn(num_blocks, heads[0], heads[1] // x, BLOCK_SIZE, x).to(dtype)
        self.value_cache = torch.randn(num_blocks, *heads, BLOCK_SIZE).to(dtype)
        self.block_tables = torch.randperm(num_blocks, dtype=torch.int32).view(shape.num_seqs, blocks_per_seq)
        self.seq_lens = torch.full((shape.num_seqs,), shape.context, dtype=torch.int32)
        self.query = torch.randn(shape.num_seqs, shape.num_heads, shape.head_size).to(dtype)
        self.key = torch.randn(shape.num_seqs, heads[0], shape.context, heads[1]).to(dtype)
        self.value = torch.randn(shape.num_seqs, heads[0], shape.context, heads[1]).to(dtype)

    def paged(self, _: int) -> torch.Tensor:
        return ops.paged_attention_v1(self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens)

    def sdpa(self, _: int) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            self.query[:, :, None], self.key, self.value, enable_gqa=True
        )


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    print_hardware()
    probe = make_read_probe()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            decode = Decode(shape, dtype)
            functions = {"paged": decode.paged, "sdpa": decode.sdpa, "probe": probe}
            seconds = time_interleaved(functions, 3 if args.quick else 9)
            bandwidth = shape.kv_bytes(dtype) / seconds["paged"]
            rows.append(
                [
                    f"{shape.name}, {str(dtype).removeprefix('torch.')}",
                    f"{seconds['paged'] * 1e3:.2f}",
                    f"{bandwidth / 1e9:.1f}",
                    f"{bandwidth / (PROBE_BYTES / seconds['probe']):.0%}",
                    f"{seconds['sdpa'] / seconds['paged']:.1f}x",
                ]
            )
    print_table(["decode", "ms", "GB/s", "of probe", "vs SDPA"], rows)


if __name__ == "__main__":
    main()
