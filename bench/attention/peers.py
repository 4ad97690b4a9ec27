"""The peers of bench/attn.py. On a CPU: vLLM's and SGLang's attention, where their kernels are loaded. On a GPU: the
backends of torch's SDPA, and FlashInfer where it is installed."""

import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import sglang_kernels
import torch
import vllm_kernels
from harness import assert_same, time_interleaved, tolerance
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.inputs import BLOCK_SIZE, Attention, Model

T = TypeVar("T")
Decode = Callable[[Attention], Tensor]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
WORKSPACE_BYTES = 128 << 20  # as FlashInfer advises
MIN_GROUP_FOR_TENSOR_CORES = 4  # as FlashInfer advises


def attention_in_wheel(inputs: Sequence[Attention]) -> dict[str, Decode]:
    """vLLM's on pages of its own layout, and SGLang's on tokens in random order; empty where no kernels are loaded."""
    caches: dict[str, type[vllm_kernels.PagedKv | sglang_kernels.TokenKv]] = {}
    if vllm_kernels.are_loaded():
        caches["vLLM"] = vllm_kernels.PagedKv
    if sglang_kernels.has_attention(inputs[0].query.dtype, inputs[0].query.shape[-1]):
        caches["SGLang"] = sglang_kernels.TokenKv

    def peer(cache: type[vllm_kernels.PagedKv | sglang_kernels.TokenKv]) -> Decode:
        runs: dict[int, Callable[[], Tensor]] = {}
        for attention in inputs:
            kept = cache(attention.key, attention.value, attention.seq_lens)
            runs[id(attention)] = kept.attention(attention.query, attention.query_start_loc)
        return lambda attention: runs[id(attention)]()

    return {name: peer(cache) for name, cache in caches.items()}


def with_backend(backend: SDPBackend, function: Callable[[T], Tensor]) -> Callable[[T], Tensor]:
    def run(inputs: T) -> Tensor:
        with sdpa_kernel(backend):
            return function(inputs)

    return run


def flash(function: Callable[[T], Tensor]) -> Callable[[T], Tensor]:
    return with_backend(SDPBackend.FLASH_ATTENTION, function)


def fastest_sdpa(inputs: Sequence[Attention], dtype: torch.dtype) -> tuple[str, Decode]:
    """The backend that is fastest here; which of them has a kernel depends on the shape and on the GPU."""
    functions: dict[str, Decode] = {}
    for name, backend in BACKENDS.items():
        if name == "math" and functions:
            continue  # it writes its logits to memory
        function = with_backend(backend, Attention.sdpa)
        try:
            with warnings.catch_warnings(action="ignore"):  # the warnings say why a backend does not take the shape
                function(inputs[0])
        except RuntimeError:
            continue
        try:
            assert_same({"ours": Attention.decode, name: function}, inputs[0], tolerance(dtype))
        except AssertionError as error:
            print(f"SDPA, {name}: left out: {summary(error)}")
            continue
        functions[name] = function
    assert functions, "ours agrees with no backend of SDPA"
    seconds = time_interleaved(functions, inputs, num_rounds=5)
    name = min(functions, key=lambda name: median(seconds[name]))
    return name, functions[name]


def summary(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def flashinfer_decode(model: Model, inputs: Sequence[Attention], dtype: torch.dtype) -> dict[str, Decode]:
    """FlashInfer on pages of its own layout with the same block tables; empty where it is missing or fails."""
    try:
        runs = {id(attention): plan_flashinfer(model, attention) for attention in inputs}
        assert_same({"ours": Attention.decode, "FlashInfer": lambda a: runs[id(a)]()}, inputs[0], tolerance(dtype))
    except ImportError:
        return {}
    except Exception as error:  # any error: our own numbers do not depend on FlashInfer
        print(f"FlashInfer: left out: {summary(error)}")
        return {}
    return {"FlashInfer": lambda attention: runs[id(attention)]()}


def plan_flashinfer(model: Model, attention: Attention) -> Callable[[], Tensor]:
    import flashinfer

    device, block_tables = attention.query.device, attention.paged.block_tables
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        use_tensor_cores=model.num_heads >= MIN_GROUP_FOR_TENSOR_CORES * model.num_kv_heads,
    )
    indptr, indices, last_page_len = (t.to(device) for t in flashinfer_pages(attention))
    sizes = model.num_heads, model.num_kv_heads, model.head_size, BLOCK_SIZE
    wrapper.plan(indptr, indices, last_page_len, *sizes, q_data_type=attention.query.dtype)
    caches = tuple(to_pages(tensor, block_tables) for tensor in (attention.key, attention.value))
    return lambda: wrapper.run(attention.query, caches)


def flashinfer_pages(attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """On the CPU: where the pages of each sequence begin in the second, the pages, the tokens of each last page."""
    seq_lens, block_tables = attention.paged.seq_lens.cpu(), attention.paged.block_tables.cpu()
    num_pages = (seq_lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    indptr = torch.cat((torch.zeros(1, dtype=torch.int32), num_pages.cumsum(0).int()))
    indices = torch.cat([row[:n] for row, n in zip(block_tables, num_pages.tolist(), strict=True)])
    return indptr, indices, seq_lens - (num_pages - 1) * BLOCK_SIZE


def to_pages(tensor: Tensor, block_tables: Tensor) -> Tensor:
    """[num_seqs, num_kv_heads, num_tokens, head_size] to [num_pages, page_size, num_kv_heads, head_size]."""
    in_order = tensor.transpose(1, 2).unflatten(1, (-1, BLOCK_SIZE)).flatten(0, 1)
    pages = torch.empty_like(in_order, memory_format=torch.contiguous_format)
    pages[block_tables.flatten().long()] = in_order
    return pages
