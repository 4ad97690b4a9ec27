"""trtllm_batch_decode_with_kv_cache and trtllm_batch_context_with_kv_cache, against FlashInfer's wrappers of the same
package, which have tests of their own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from torch import Tensor

from pagedattn_ext import CPUGraph, flashinfer
from pagedattn_ext.flashinfer.decode import trtllm_batch_decode_with_kv_cache
from pagedattn_ext.flashinfer.prefill import trtllm_batch_context_with_kv_cache

PAGES, PAGE_SIZE, HEADS, KV_HEADS, DIM = 6, 4, 4, 2, 16
TABLES, LENS = torch.tensor([[5, 1], [0, 3]], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)
STARTS = torch.tensor([0, 3, 4], dtype=torch.int32)
INDPTR, LAST = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
INDICES = torch.tensor([5, 1, 0], dtype=torch.int32)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(54)
        yield


def pages(dtype: torch.dtype = torch.float32) -> Tensor:
    """HND, keys and values in one tensor."""
    return torch.randn(PAGES, 2, KV_HEADS, PAGE_SIZE, DIM).to(dtype)


def wrapped(q: Tensor, cache: Tensor, causal: bool = True, window_left: int = -1, **options: Any) -> Any:
    """By the wrapper for prompts, with a scale of 0.5."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), "HND")
    starts = torch.tensor([0, len(q) // 2, len(q)]) if len(q) != 4 else STARTS
    sizes = HEADS, KV_HEADS, DIM, PAGE_SIZE
    wrapper.plan(starts, INDPTR, INDICES, LAST, *sizes, causal=causal, window_left=window_left, sm_scale=0.5)
    return wrapper.run(q, cache, **options)


def context(q: Tensor, cache: Any, *scales: Any, **options: Any) -> Any:
    return trtllm_batch_context_with_kv_cache(
        q, cache, torch.empty(0), TABLES, LENS, 3, 7, *scales, 2, STARTS, torch.tensor([0, 7, 11]), **options
    )


def decode(q: Tensor, cache: Any, *scales: Any, **options: Any) -> Any:
    return trtllm_batch_decode_with_kv_cache(q, cache, torch.empty(0), TABLES, LENS, 7, *scales, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_context(causal: bool, dtype: torch.dtype) -> None:
    """Catches a scale of the values that is lost, an lse of another base, and a window that counts the row's token."""
    q, cache, sinks = torch.randn(4, HEADS, DIM).to(dtype), pages(dtype), torch.randn(HEADS)
    window = {"window_left": 1} if causal else {}
    out, lse = torch.empty_like(q), torch.empty(4, HEADS)
    result = context(q, cache, 0.5, 2.0, causal=causal, sinks=sinks, out=out, lse=lse, **window)
    expected, expected_lse = wrapped(q, cache, causal, **window, v_scale=2.0, sinks=sinks, return_lse=True)
    assert result is out
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)


def test_decode() -> None:
    q, cache = torch.randn(2, HEADS, DIM), pages()
    expected, expected_lse = wrapped(q, cache, return_lse=True)
    out, lse = decode(q, cache.unbind(1), torch.tensor([0.5]), torch.tensor(1.0), return_lse=True)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)
    of_log2 = decode(q, cache, 7.0, bmm1_scale_log2=torch.tensor([0.5 * 1.4426950408889634]))
    torch.testing.assert_close(of_log2, expected)
    nhd = decode(q, cache.transpose(2, 3).contiguous(), 0.5, kv_layout="NHD", out_dtype=torch.bfloat16)
    assert_same_bits(nhd, expected.bfloat16())
    values_of_keys = decode(q, cache[:, :1], 0.5)
    assert_same_bits(values_of_keys, wrapped(q, cache[:, :1].expand(-1, 2, -1, -1, -1)))


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pages(fp8: torch.dtype) -> None:
    """The scales of the cache are in the two scales."""
    q, cache = torch.randn(2, HEADS, DIM).bfloat16(), pages().to(fp8)
    expected = wrapped(q, cache, k_scale=0.25, v_scale=3.0)
    assert_same_bits(decode(q, cache, 0.5 * 0.25, 3.0), expected)


def test_drafts() -> None:
    """Several rows a sequence, as many or not."""
    q, cache = torch.randn(6, HEADS, DIM), pages()
    assert_same_bits(decode(q, cache, 0.5, q_len_per_req=3), wrapped(q, cache))
    q = q[:4]
    assert_same_bits(decode(q, cache, 0.5, cum_seq_lens_q=STARTS, max_q_len=3), wrapped(q, cache))


def test_captured() -> None:
    q, cache, lens = torch.randn(2, HEADS, DIM), pages(), LENS.clone()
    graph = CPUGraph()
    with graph.capture():
        out = trtllm_batch_decode_with_kv_cache(q, cache, torch.empty(0), TABLES, lens, 8, 0.5)
    lens.fill_(2)
    graph.replay()
    assert_same_bits(out, trtllm_batch_decode_with_kv_cache(q, cache, torch.empty(0), TABLES, lens, 8, 0.5))


Q, CACHE = torch.zeros(2, HEADS, DIM), torch.zeros(PAGES, 2, KV_HEADS, PAGE_SIZE, DIM)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"out_dtype": torch.float8_e4m3fn}, "out_dtype: expected torch.float32, .*, got torch.float8_e4m3fn"),
    ({"out_dtype": "nvfp4"}, "out_dtype: expected torch.float32, .*, got nvfp4"),
    ({"out": Q.to(torch.float8_e4m3fn)}, "out_dtype: expected torch.float32, .*, got torch.float8_e4m3fn"),
    ({"mask": torch.zeros(1)}, "mask: expected None, got a tensor"),
    ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx: expected True, got False"),
    ({"enable_block_sparse_attention": True}, "enable_block_sparse_attention: expected False, got True"),
    ({"q_len_per_req": 2}, r"query: expected 4 rows \(batch \* q_len_per_req\), got 2"),
    ({"q_len_per_req": 0}, "q_len_per_req: expected 1 or more, got 0"),
    ({"bmm1_scale": torch.ones(2)}, r"bmm1_scale: expected one number for all heads, got shape \[2\]"),
    ({"bmm2_scale": torch.ones(2)}, r"bmm2_scale: expected one number for all heads, got shape \[2\]"),
    ({"bmm1_scale": float("nan")}, "bmm1_scale: expected"),
    ({"kv_layout": "DHN"}, "kv_layout: expected 'NHD' or 'HND', got 'DHN'"),
    ({"out": torch.zeros(1)}, r"out: expected shape \[2, 4, 16\], got \[1\]"),
    ({"seq_lens": LENS + 2}, "seq_lens: expected 0 to 8"),
    ({"block_tables": TABLES + 3}, "block_tables: expected .* got 8"),
    ({"kv_cache": CACHE[..., :8]}, "query: expected shape .*8.*, got"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda each: str(each)[:40])
def test_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"query": Q, "kv_cache": CACHE, "workspace_buffer": torch.empty(0), "block_tables": TABLES}
    arguments |= {"seq_lens": LENS, "max_seq_len": 8} | changes
    with pytest.raises(ValueError, match=f"^trtllm_batch_decode_with_kv_cache: {message}"):
        trtllm_batch_decode_with_kv_cache(**arguments)
