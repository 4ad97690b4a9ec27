"""The functions of pagedattn_ext.flashinfer with names of trtllm, against the wrappers of the same package, which have
tests of their own."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from torch import Tensor

from pagedattn_ext import CPUGraph, flashinfer
from pagedattn_ext.flashinfer.decode import trtllm_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache_mla
from pagedattn_ext.flashinfer.prefill import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek

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
    starts_of_windows = torch.zeros(4, dtype=torch.int32)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"window_right": 1}, "window_right: expected -1, or 0 with causal, got 1"),
        ({"causal": False, "window_right": 0}, "window_right: expected -1, or 0 with causal, got 0"),
        ({"variable_window_token_starts": starts_of_windows}, "variable_window_token_starts: expected None, got a t"),
    )
    for options, message in wrong:
        with pytest.raises(ValueError, match=f"^trtllm_batch_context_with_kv_cache: {message}"):
            context(q, cache, 0.5, 2.0, **options)
    if causal:
        assert_same_bits(context(q, cache, 0.5, 2.0, sinks=sinks, window_right=0, **window), expected)


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


@pytest.mark.parametrize("width", [8, 16, 24])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged(causal: bool, width: int) -> None:
    """Values narrower than the keys, and wider."""
    q, k, v = torch.randn(4, HEADS, DIM), torch.randn(11, KV_HEADS, DIM), torch.randn(11, KV_HEADS, width)
    key_starts, sinks, lse = torch.tensor([0, 7, 11], dtype=torch.int32), torch.randn(HEADS), torch.empty(4, HEADS)
    batch = q, k, v, torch.empty(0), LENS, 3, 7, 0.5, 2.0, -1.0, 2, -1, STARTS, key_starts, None, causal, True
    out, out_lse = trtllm_ragged_attention_deepseek(*batch, lse=lse)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0))
    wrapper.plan(STARTS, key_starts, HEADS, KV_HEADS, DIM, width, causal=causal, sm_scale=0.5)
    expected, expected_lse = wrapper.run(q, k, v, return_lse=True)
    assert out_lse is lse
    assert_same_bits(out, 2 * expected)
    assert_same_bits(lse, expected_lse)
    with_sinks, _ = trtllm_ragged_attention_deepseek(*batch, sinks)
    shares = torch.sigmoid(expected_lse * math.log(2) - sinks)  # of the weights, without the sink's
    torch.testing.assert_close(with_sinks, out * shares[..., None])


RANK, ROPE = 12, 4


def latent(query: Tensor, cache: Tensor, **options: Any) -> Any:
    sizes = 8, RANK, ROPE, TABLES, LENS, 8
    return trtllm_batch_decode_with_kv_cache_mla(query, cache, torch.empty(0), *sizes, **options)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_latent(num_tokens: int) -> None:
    """Catches rows that see tokens after their own, and an lse of another base or shape."""
    q, cache = torch.randn(2, num_tokens, HEADS, RANK + ROPE), torch.randn(PAGES, PAGE_SIZE, RANK + ROPE)
    starts = torch.arange(3, dtype=torch.int32) * num_tokens
    rows, parts = q.flatten(0, 1).split([RANK, ROPE], -1), cache.split([RANK, ROPE], -1)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0))
    dtypes = torch.float32, torch.float32
    wrapper.plan(starts, INDPTR, INDICES, LENS, HEADS, RANK, ROPE, PAGE_SIZE, True, 0.5, *dtypes)
    expected, expected_lse = wrapper.run(*rows, *parts, return_lse=True)
    out, lse = latent(q, cache[:, None], bmm1_scale=0.5, return_lse=True)
    assert_same_bits(out, expected.view_as(out))
    assert_same_bits(lse, expected_lse)
    lse = torch.empty(2, num_tokens, HEADS)
    doubled = latent(q.flatten(0, 1), cache, bmm1_scale=0.5, bmm2_scale=2.0, cum_seq_lens_q=starts)
    assert_same_bits(doubled, 2 * expected)
    latent(q, cache, bmm1_scale=0.5, lse=lse)
    assert_same_bits(lse, expected_lse.view_as(lse))
    natural = wrapper.run(*rows, *parts, return_lse=True, return_lse_base_on_e=True)[1]
    assert_same_bits(latent(q, cache, bmm1_scale=0.5, return_lse=True, return_lse_base="basee")[1], natural)


LATENT = torch.zeros(2, 1, HEADS, RANK + ROPE), torch.zeros(PAGES, PAGE_SIZE, RANK + ROPE)
WRONG_LATENT: list[tuple[dict[str, Any], str]] = [
    ({"sparse_mla_top_k": 4}, "sparse_mla_top_k: expected 0, got 4"),
    ({"sinks": torch.zeros(HEADS)}, "sinks: expected None, got a tensor"),
    ({"cp_world": 2}, "cp_world: expected 1, got 2"),
    ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx: expected True, got False"),
    ({"return_lse_base": "e"}, "return_lse_base: expected None, 'base2' or 'basee', got 'e'"),
    ({"query": LATENT[0][..., 1:]}, r"query: expected heads of 16 \(kv_lora_rank \+ qk_rope_head_dim\), got 15"),
    ({"kv_cache": LATENT[1][..., 1:]}, r"kv_cache: expected shape \[6, 4, 16\], got \[6, 4, 15\]"),
    ({"block_tables": TABLES + 3}, "block_tables: expected .* got 8"),
    ({"cum_seq_lens_q": STARTS}, "query: expected 3 dimensions, got 4"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_LATENT, ids=lambda each: str(each)[:40])
def test_refused_latent(changes: dict[str, Any], message: str) -> None:
    arguments = {"query": LATENT[0], "kv_cache": LATENT[1]} | changes
    tables = arguments.pop("block_tables", TABLES)
    sizes = {"qk_nope_head_dim": 8, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "max_seq_len": 8}
    with pytest.raises(ValueError, match=f"^trtllm_batch_decode_with_kv_cache_mla: {message}"):
        trtllm_batch_decode_with_kv_cache_mla(
            **arguments, **sizes, workspace_buffer=torch.empty(0), block_tables=tables, seq_lens=LENS
        )


def test_refused_sizes_of_latents() -> None:
    tensors = *LATENT, torch.empty(0)
    with pytest.raises(TypeError, match=r"^trtllm_batch_decode_with_kv_cache_mla: kv_lora_rank: expected an int, got"):
        trtllm_batch_decode_with_kv_cache_mla(*tensors, 8, 12.0, ROPE, TABLES, LENS, 8)  # type: ignore[arg-type]


def test_refused_ragged() -> None:
    rows = torch.zeros(4, HEADS, DIM)
    arguments = rows, rows, rows, torch.empty(0), LENS, 3, 7, 0.5, 2.0, -1.0, 2, -1, STARTS, STARTS, None, True, False
    with pytest.raises(ValueError, match=r"^trtllm_ragged_attention_deepseek: sage_attn_sfs: expected no factors, got"):
        trtllm_ragged_attention_deepseek(*arguments, sage_attn_sfs=(rows, rows, None, None))
    with pytest.raises(ValueError, match=r"^trtllm_ragged_attention_deepseek: cum_seq_lens_kv: expected"):
        trtllm_ragged_attention_deepseek(*arguments[:13], STARTS + 1, *arguments[14:])


Q, CACHE = torch.zeros(2, HEADS, DIM), torch.zeros(PAGES, 2, KV_HEADS, PAGE_SIZE, DIM)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"out_dtype": torch.float8_e4m3fn}, "out_dtype: expected torch.float32, .*, got torch.float8_e4m3fn"),
    ({"out_dtype": "nvfp4"}, "out_dtype: expected torch.float32, .*, got 'nvfp4'"),
    ({"out": Q.to(torch.float8_e4m3fn)}, "out_dtype: expected torch.float32, .*, got torch.float8_e4m3fn"),
    ({"mask": torch.zeros(1)}, "mask: expected None, got a tensor"),
    ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx: expected True, got False"),
    ({"enable_block_sparse_attention": True}, "enable_block_sparse_attention: expected False, got True"),
    ({"sparse_top_k": 4}, "sparse_top_k: expected 0, got 4"),
    ({"cp_world": 2}, "cp_world: expected 1, got 2"),
    ({"cp_rank": 1}, "cp_rank: expected 0, got 1"),
    ({"causal_seqlens_kv_global": LENS}, "causal_seqlens_kv_global: expected None, got a tensor"),
    ({"q_len_per_req": 2}, r"query: expected 4 rows \(batch \* q_len_per_req\), got 2"),
    ({"q_len_per_req": 0}, "q_len_per_req: expected 1 or more, got 0"),
    ({"bmm1_scale": torch.ones(2)}, r"bmm1_scale: expected one number for all heads, got shape \[2\]"),
    ({"bmm2_scale": torch.ones(2)}, r"bmm2_scale: expected one number for all heads, got shape \[2\]"),
    ({"bmm1_scale": float("nan")}, "bmm1_scale: expected"),
    ({"kv_layout": "DHN"}, "kv_layout: expected 'NHD' or 'HND', got 'DHN'"),
    ({"out": torch.zeros(1)}, r"out: expected shape \[2, 4, 16\], got \[1\]"),
    ({"seq_lens": LENS + 2}, "seq_lens: expected 0 to 8"),
    ({"block_tables": TABLES + 3}, "block_tables: expected .* got 8"),
    (
        {"kv_cache": CACHE[:, 0, :1]},
        r"kv_cache: expected shape \[num_pages, 2, \.\.\.\] or a pair of tensors, got shape \[",
    ),
    ({"kv_cache": CACHE[..., :8]}, "query: expected shape .*8.*, got"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda each: str(each)[:40])
def test_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"query": Q, "kv_cache": CACHE, "workspace_buffer": torch.empty(0), "block_tables": TABLES}
    arguments |= {"seq_lens": LENS, "max_seq_len": 8} | changes
    with pytest.raises(ValueError, match=f"^trtllm_batch_decode_with_kv_cache: {message}"):
        trtllm_batch_decode_with_kv_cache(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bmm1_scale": [1.0]}, "bmm1_scale: expected a number, got list"),
        ({"bmm2_scale": "x"}, "bmm2_scale: expected a number, got str"),
        ({"out": [Q]}, "out: expected a torch.Tensor, got list"),
    ],
)
def test_wrong_types_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^trtllm_batch_decode_with_kv_cache: {message}$"):
        trtllm_batch_decode_with_kv_cache(Q, CACHE, torch.empty(0), TABLES, LENS, 8, **changes)
