"""What FlashInfer's functions refuse before an op sees it, and that a plan which is refused changes nothing."""

from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from brute_force import HEAD_SIZE, starts
from checks import assert_memory_is_checked, assert_same_bits, tensors_in
from flashinfer_batch import HEADS, KV_HEADS, PAGE_SIZE, WORKSPACE, Batch
from torch import Tensor

from pagedattn_ext import flashinfer
from pagedattn_ext.flashinfer._ragged import RaggedBatch


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            torch.zeros(16, 3, 2, 16),
            r"expected shape \[num_pages, 2, \.\.\.\] or a pair of tensors, got shape \[16, 3, ",
        ),
        ((torch.zeros(16, 3, 2, 16),) * 3, "expected a pair of tensors, got 3 elements$"),
        (None, "expected a tensor or a pair of tensors, got NoneType$"),
        ((None, None), "expected a torch.Tensor, got NoneType$"),
        ((torch.zeros(16, 3),) * 2, r"expected keys and values of 3 or 4 dimensions, got shape \[16, 3\]$"),
    ],
    ids=["one tensor", "three", "none", "pair of none", "without heads"],
)
def test_other_caches_than_pairs(cache: Any, message: str) -> None:
    batch, decode = Batch([4]), flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    decode.plan(**batch.plan)
    with pytest.raises((ValueError, TypeError), match=rf"^{type(decode).__name__}\.run: paged_kv_cache: {message}"):
        decode.run(torch.randn(1, HEADS, HEAD_SIZE), cache)
    rows, index = torch.randn(1, KV_HEADS, HEAD_SIZE), torch.zeros(1, dtype=torch.int32)
    with pytest.raises((ValueError, TypeError), match=rf"^append_paged_kv_cache: paged_kv_cache: {message}"):
        flashinfer.append_paged_kv_cache(rows, rows, index, index, cache, index, starts([1]), index + 1)


@pytest.mark.parametrize(
    ("v", "s", "message"),
    [
        ([5, 4, 16], [3, 5, 4], "v: expected 4 dimensions, got 3"),
        ([3, 5, 4, 16], [3, 5, 1], r"s: expected shape \[3, 5, 4\], got \[3, 5, 1\]$"),
        ([3, 5, 1, 16], [3, 5, 4], r"s: expected shape \[3, 5, 1\], got \[3, 5, 4\]$"),
    ],
)
def test_merges_of_states_of_other_shapes(v: list[int], s: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^merge_states: {message}"):
        flashinfer.merge_states(torch.zeros(v), torch.zeros(s))


# ---- plans that are refused ------------------------------------------------------------------------------------------


def paged_prefill(batch: Batch, *, is_graph: bool) -> tuple[Any, list[Tensor]]:
    """A wrapper with a plan of one row, and its buffers. Plans of a graph are of one kind."""
    lists = starts([1]), batch.indptr, batch.indices, batch.last_page_len
    names = "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"
    buffers = [torch.zeros_like(tensor) for tensor in lists] if is_graph else []
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE,
        "NHD",
        is_graph,
        **dict(zip(names, buffers, strict=False)),  # type: ignore[arg-type]
    )
    wrapper.plan(lists[0], **batch.prefill_plan, pos_encoding_mode="ROPE_LLAMA" if is_graph else "NONE")
    return wrapper, buffers


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"num_qo_heads": "a"}, "num_qo_heads: expected an int, got str"),
        ({"num_kv_heads": 2.0}, "num_kv_heads: expected an int, got float"),
        ({"head_dim_qk": None}, "head_dim_qk: expected an int, got NoneType"),
        ({"head_dim_vo": "a"}, "head_dim_vo: expected an int, got str"),
    ],
)
def test_sizes_that_are_no_ints(bad: dict[str, Any], message: str) -> None:
    batch, wrapper = Batch([4]), flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(TypeError, match=rf"KVCacheWrapper\.plan: {message}$"):
        wrapper.plan(qo_indptr=starts([1]), **batch.prefill_plan | bad)


def test_sizes_of_decode_that_are_no_ints() -> None:
    batch, wrapper = Batch([4]), flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    for name in ("head_dim", "q_len_per_req"):
        with pytest.raises(TypeError, match=rf"KVCacheWrapper\.plan: {name}: expected an int, got str$"):
            wrapper.plan(**batch.plan | {name: "2"})


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("bad", [{"rope_scale": "8"}, {"window_left": 1.5}, {}], ids=str)
def test_a_refused_plan_changes_nothing(bad: dict[str, Any], is_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an argument is refused, or memory runs out when all arguments have been taken."""
    batch, q = Batch([5]), torch.randn(1, HEADS, HEAD_SIZE)
    wrapper, buffers = paged_prefill(batch, is_graph=is_graph)
    expected, kept = wrapper.run(q, batch.cache), [buffer.clone() for buffer in buffers]
    if not bad:
        monkeypatch.setattr(RaggedBatch, "in_pages", Mock(side_effect=MemoryError))
    other = batch.prefill_plan | {"paged_kv_indices": batch.indices.flip(0)}
    with pytest.raises((TypeError, MemoryError)):
        wrapper.plan(starts([1]), **other, pos_encoding_mode="ROPE_LLAMA", **bad)
    assert_same_bits(wrapper.run(q, batch.cache), expected)
    for buffer, old in zip(buffers, kept, strict=True):
        assert_same_bits(buffer, old)


@pytest.mark.parametrize("is_graph", [False, True])
def test_a_failed_forward_leaves_the_plan(is_graph: bool) -> None:
    batch, q = Batch([5]), torch.randn(1, HEADS, HEAD_SIZE)
    wrapper, _ = paged_prefill(batch, is_graph=is_graph)
    expected = wrapper.run(q, batch.cache)
    options = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 2.0, "window_left": 0}
    with pytest.raises(TypeError, match=r"\.run: k_scale: expected a number, got str$"):
        wrapper.forward(q, batch.cache, **options, k_scale="x")
    assert_same_bits(wrapper.run(q, batch.cache), expected)
    replaced = wrapper.forward(q, batch.cache, **options)
    assert not torch.equal(replaced, expected)
    assert_same_bits(wrapper.run(q, batch.cache), replaced)


@pytest.mark.parametrize("is_graph", [False, True])
def test_refused_levels_change_nothing(is_graph: bool) -> None:
    """The last level is refused when those before it have been taken."""
    batch, q = Batch([PAGE_SIZE, 2]), torch.randn(1, HEADS, HEAD_SIZE)
    levels = [[starts([1])] * 2, [starts([1])] * 2, [*batch.indices.split(1)], [*batch.last_page_len.split(1)]]
    buffers = [[torch.zeros_like(tensor) for tensor in tensors] for tensors in levels]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "NHD", is_graph, *buffers)
    sizes = HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE
    wrapper.plan(*levels, *sizes)
    expected, kept = wrapper.run(q, batch.cache), [buffer.clone() for buffer in chain(*buffers)]
    other = [*levels[:2], levels[2][::-1], [levels[3][0], levels[3][1] + 9]]
    message = r"^MultiLevelCascadeAttentionWrapper\.plan: paged_kv_last_page_len\[1\]: expected 1 to 3 .*, got 11"
    with pytest.raises(ValueError, match=message):
        wrapper.plan(*other, *sizes)
    assert_same_bits(wrapper.run(q, batch.cache), expected)
    for buffer, old in zip(chain(*buffers), kept, strict=True):
        assert_same_bits(buffer, old)


def test_a_graph_with_pages_of_another_size() -> None:
    """Memory of the first plan would be too small for the keys of a later one."""
    batch, q = Batch([5]), torch.randn(1, HEADS, HEAD_SIZE)
    wrapper, _ = paged_prefill(batch, is_graph=True)
    cache = [torch.randn(16, 8, KV_HEADS, HEAD_SIZE) for _ in range(2)]
    plan = batch.prefill_plan | {"page_size": 8, "paged_kv_last_page_len": batch.last_page_len + 5}
    plain = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    for each in (wrapper, plain):
        each.plan(starts([1]), **plan, pos_encoding_mode="ROPE_LLAMA")
    assert_same_bits(wrapper.run(q, cache), plain.run(q, cache))


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool])
@pytest.mark.parametrize("kind", ["mask", "ROPE_LLAMA", "ragged", "one"])
def test_bytes_are_no_keys(kind: str, dtype: torch.dtype) -> None:
    """Where `run` copies keys and values in fp8, bytes are not numbers to copy."""
    batch, q = Batch([4]), torch.randn(2, HEADS, HEAD_SIZE)
    keys, values = (cache.to(dtype) for cache in batch.cache)
    name, call = "paged_kv_cache", lambda: wrapper.run(q, (keys, values))
    if kind == "ragged":
        wrapper: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
        wrapper.plan(starts([2]), starts([4]), HEADS, KV_HEADS, HEAD_SIZE)
        name, call = "k", lambda: wrapper.run(q, keys.flatten(0, 1)[:4], values.flatten(0, 1)[:4])
    elif kind == "one":
        name, call = "k", lambda: flashinfer.single_prefill_with_kv_cache(q, keys.flatten(0, 1), values.flatten(0, 1))
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        options: dict[str, Any] = {"custom_mask": torch.ones(8)} if kind == "mask" else {"pos_encoding_mode": kind}
        wrapper.plan(starts([2]), **batch.prefill_plan, **options)
    with pytest.raises(TypeError, match=f": {name}: expected dtype float32 or fp8, got {str(dtype)[6:]}$"):
        call()


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_with_sinks(causal: bool) -> None:
    """The bias of the ops differs by a constant, which counts beside a sink."""
    batch, wrapper = Batch([4]), flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(starts([2]), **batch.prefill_plan, causal=causal, pos_encoding_mode="ALIBI")
    with pytest.raises(ValueError, match=r"\.run: sinks: expected None with 'ALIBI', got a tensor$"):
        wrapper.run(torch.randn(2, HEADS, HEAD_SIZE), batch.cache, sinks=torch.zeros(HEADS))


Q, K = torch.zeros(2, HEADS, HEAD_SIZE), torch.zeros(5, KV_HEADS, HEAD_SIZE)
ROWS, PROBS = torch.zeros(2, HEADS), torch.full((2, 5), 0.2)
INDEX, ENDS = torch.zeros(2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
ROTATED = {"pos_encoding_mode": "ROPE_LLAMA"}
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (flashinfer.segment_packbits, (PROBS.flatten(), ROWS[0]), {}, "indptr: expected dtype int32 or int64, got float32"),
    (flashinfer.segment_packbits, (PROBS.flatten(), INDEX[0]), {}, "indptr: expected 1 dimensions, got 0"),
    (flashinfer.segment_packbits, ([1, 0], INDEX), {}, "x: expected a torch.Tensor, got list"),
    (flashinfer.packbits, ([1, 0],), {}, "x: expected a torch.Tensor, got list"),
    (flashinfer.single_prefill_with_kv_cache, (Q.double(), *[K.double()] * 2), ROTATED, "q: expected dtype float32, "),
    (flashinfer.single_prefill_with_kv_cache, (Q, K.double(), K), ROTATED, "k: expected dtype float32 or fp8, got flo"),
    (flashinfer.single_prefill_with_kv_cache, (Q, None, K), {}, "k: expected a torch.Tensor, got NoneType"),
    (flashinfer.single_prefill_with_kv_cache, (Q, K, K), {"custom_mask": [1]}, "custom_mask: expected a torch.Tensor"),
    (flashinfer.single_prefill_with_kv_cache, (Q, K, K), ROTATED | {"rope_theta": -7.0}, "rope_theta: expected a p"),
    (flashinfer.single_prefill_with_kv_cache, (Q, K, K), ROTATED | {"rope_scale": float("nan")}, "rope_scale: exp"),
    (flashinfer.single_prefill_with_kv_cache, (Q, K, K), {"causal": None}, "causal: expected a bool, got NoneType"),
    (
        flashinfer.single_prefill_with_kv_cache,
        (Q, K, K),
        {"window_left": 1.5, "custom_mask": torch.ones(10)},
        "window_left: expected an int, got float",
    ),
    (flashinfer.single_decode_with_kv_cache, ({}, K, K), {}, "q: expected a torch.Tensor, got dict"),
    (flashinfer.single_decode_with_kv_cache, (Q, K, K), {}, "q: expected 2 dimensions, got 3"),
    (
        flashinfer.single_decode_with_kv_cache,
        (Q[0, :0], K, K),
        {"pos_encoding_mode": "ALIBI"},
        "q: expected a number of heads that is a multiple of the 2 KV heads, got 0",
    ),
    (
        flashinfer.single_decode_with_kv_cache,
        (Q[0, :, :0], *[K[..., :0]] * 2),
        {},
        "k: expected a head size of 4 to 512, ",
    ),
    (flashinfer.apply_rope_with_cos_sin_cache, (INDEX, None, K, 16, ROWS), {}, "query: expected a torch.Tensor"),
    (flashinfer.apply_rope_with_cos_sin_cache, (INDEX, Q[0, 0, 0], K, 16, ROWS), {}, "query: expected 2 or 3 dimens"),
    (flashinfer.apply_rope, (Q[0, 0, 0], K, ENDS, INDEX), {}, "q: expected 3 dimensions, got 0"),
    (flashinfer.single_prefill_with_kv_cache, (Q, K, K), {"o_dtype": "x"}, "o_dtype: expected a dtype of torch, or it"),
    (flashinfer.single_prefill_with_kv_cache, (Q, K, K), {"o_dtype": 5}, "o_dtype: expected a dtype of torch, or its"),
    (flashinfer.single_prefill_with_kv_cache, (Q, K, K), {"sm_scale": 2**70}, "sm_scale: expected an int of 64 bits"),
    (flashinfer.merge_state, (Q, None, Q, ROWS), {}, "s_a: expected a torch.Tensor, got NoneType"),
    (flashinfer.merge_state_in_place, (Q, ROWS, Q, ROWS, [True]), {}, "mask: expected a torch.Tensor, got list"),
    (
        flashinfer.append_paged_kv_cache,
        (None, K[:1], INDEX[:1], INDEX[:1], (K[:, None], K[:, None]), INDEX[:1], ENDS, ENDS[1:]),
        {},
        "append_key: expected a torch.Tensor, got NoneType",
    ),
    (flashinfer.get_batch_indices_positions, (ENDS, ENDS[1:], 1, [0]), {}, "batch_indices: expected a torch.Tensor"),
    (flashinfer.sampling_from_probs, ([[0.5, 0.5]],), {}, "probs: expected a torch.Tensor, got list"),
    (flashinfer.sampling_from_logits, (None,), {"check_nan": True}, "logits: expected a torch.Tensor, got NoneType"),
    (flashinfer.softmax, (PROBS.tolist(), 0.5), {}, "logits: expected a torch.Tensor, got list"),
    (flashinfer.top_k_renorm_probs, (PROBS.tolist(), INDEX), {}, "probs: expected a torch.Tensor, got list"),
    (flashinfer.top_p_renorm_probs, (PROBS.tolist(), 0.5), {}, "probs: expected a torch.Tensor, got list"),
    (flashinfer.chain_speculative_sampling, (None, INDEX, PROBS), {}, "draft_probs: expected a torch.Tensor"),
    (flashinfer.rmsnorm_quant, ([1], PROBS, PROBS[0], 1.0), {}, "out: expected a torch.Tensor, got list"),
]


@pytest.mark.parametrize(
    ("function", "args", "options", "message"), CALLS, ids=[f"{c[0].__name__} {c[3][:20]}" for c in CALLS]
)
def test_errors_name_the_argument(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{function.__name__}: {message}"):
        function(*args, **options)


OF_RUN: list[tuple[dict[str, Any], str]] = [
    ({"q": None}, "q: expected a torch.Tensor, got NoneType"),
    ({"out": [1]}, "out: expected a torch.Tensor, got list"),
    ({"out": torch.zeros(1, HEADS, HEAD_SIZE, dtype=torch.int64)}, "out: expected a float dtype, got int64"),
    ({"kv_cache": torch.zeros(16, 2, 4, KV_HEADS, HEAD_SIZE)}, r"kv_cache: keys: expected shape \[\*, 3, 2, 16\]"),
    ({"kv_cache": 5}, "kv_cache: expected a tensor or a pair of tensors, got int"),
]
OF_PLAN: list[tuple[dict[str, Any], str]] = [
    ({"kv_len_arr": None}, "kv_len_arr: expected a torch.Tensor, got NoneType"),
    ({"kv_len_arr": INDEX}, "kv_len_arr: expected 1 elements, got 2"),
    ({"page_size": None}, "page_size: expected an int, got NoneType"),
    ({"page_size": 0}, "page_size: expected 1 or more, got 0"),
    ({"causal": None}, "causal: expected a bool, got NoneType"),
]


@pytest.mark.parametrize(("change", "message"), [*OF_RUN, *OF_PLAN], ids=[case[1][:30] for case in [*OF_RUN, *OF_PLAN]])
def test_arguments_of_batch_attention(change: dict[str, Any], message: str) -> None:
    batch, wrapper = Batch([4]), flashinfer.BatchAttention(device="cpu")
    of_plan = {"kv_len_arr": torch.tensor([4], dtype=torch.int32), "page_size": PAGE_SIZE}
    of_run = {"q": torch.randn(1, HEADS, HEAD_SIZE), "kv_cache": batch.cache}
    lists = starts([1]), batch.indptr, batch.indices
    sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": HEAD_SIZE, "head_dim_vo": HEAD_SIZE}
    is_of_plan = (change, message) in OF_PLAN
    with pytest.raises(
        (TypeError, ValueError), match=rf"^BatchAttention\.{'plan' if is_of_plan else 'run'}: {message}"
    ):
        wrapper.plan(*lists, **of_plan | sizes | (change if is_of_plan else {}))
        wrapper.run(**of_run | ({} if is_of_plan else change))


def test_options_of_one_run() -> None:
    """The message names `run`, not the plan."""
    batch, wrapper = Batch([4]), flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(**batch.plan)
    with pytest.raises(TypeError, match=r"\.run: window_left: expected an int, got float$"):
        wrapper.run(Q[:1], batch.cache, window_left=1.5)


@pytest.mark.parametrize(("argument", "shape"), [("out", (1, HEADS, HEAD_SIZE)), ("lse", (1, HEADS))])
def test_memory_for_attention_is_checked(argument: str, shape: tuple[int, ...]) -> None:
    """It may have another float dtype."""
    batch, wrapper = Batch([4]), flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(**batch.plan)
    q = torch.randn(1, HEADS, HEAD_SIZE)
    assert_memory_is_checked(
        rf"BatchDecodeWithPagedKVCacheWrapper\.run: {argument}",
        torch.zeros(shape, dtype=torch.float16),
        lambda memory: wrapper.run(q, batch.cache, **{argument: memory}),
    )


STATES = {"v_other": torch.ones(3, HEADS, HEAD_SIZE), "s_other": torch.ones(3, HEADS)}
LENS = torch.tensor([5], dtype=torch.int32)
MEMORY: dict[str, tuple[Tensor, Any]] = {
    "merge_state_in_place: s": (
        torch.zeros(3, HEADS),
        lambda memory: flashinfer.merge_state_in_place(torch.zeros(3, HEADS, HEAD_SIZE), memory, **STATES),
    ),
    "get_batch_indices_positions: batch_indices": (
        torch.zeros(3, dtype=torch.int32),
        lambda memory: flashinfer.get_batch_indices_positions(starts([3]), LENS, 3, memory),
    ),
    "get_batch_indices_positions: positions": (
        torch.zeros(3, dtype=torch.int32),
        lambda memory: flashinfer.get_batch_indices_positions(starts([3]), LENS, 3, None, memory),
    ),
}


@pytest.mark.parametrize("argument", MEMORY)
def test_memory_for_results_is_checked(argument: str) -> None:
    assert_memory_is_checked(argument, *MEMORY[argument])


FP8 = torch.zeros(3, HEADS, HEAD_SIZE).to(torch.float8_e4m3fn)
THREE, TWO_PAGES = torch.arange(3, dtype=torch.int32), torch.zeros(2, 2, 3, KV_HEADS, 2 * HEAD_SIZE).to(FP8.dtype)
ROPE = {
    "q_rope": torch.ones(3, HEADS, HEAD_SIZE),
    "k_rope": torch.ones(3, KV_HEADS, HEAD_SIZE),
    "q_nope": torch.ones(3, HEADS, HEAD_SIZE),
    "k_nope": torch.ones(3, KV_HEADS, HEAD_SIZE),
    "cos_sin_cache": torch.ones(9, HEAD_SIZE),
    "pos_ids": THREE,
}
APPENDED = {
    "v": torch.ones(3, KV_HEADS, 2 * HEAD_SIZE),
    "paged_kv_cache": [*TWO_PAGES],
    "kv_indices": THREE[:1],
    "kv_indptr": THREE[:2],
    "batch_indices": THREE * 0,
    "positions": THREE,
    "page_size": 3,
}
SCORES = {"input": torch.rand(2, 5), "k": 2, "lengths": torch.tensor([5, 3], dtype=torch.int32)}
NORM = {"out": FP8, "input": ROPE["q_rope"], "weight": torch.ones(HEAD_SIZE), "scale": torch.ones(1)}
RULE = {
    **dict.fromkeys("qkv", torch.ones(3, HEADS, HEAD_SIZE)),
    **dict.fromkeys(("g", "beta"), torch.full((3, HEADS), 0.5)),
    "cu_seqlens": torch.tensor([0, 3]),
    "output_final_state": True,
    "output": torch.zeros(3, HEADS, HEAD_SIZE),
    "output_state": torch.zeros(1, HEADS, HEAD_SIZE, HEAD_SIZE),
}
DIFFERENTIATED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *((flashinfer.merge_states, {"v": torch.ones(3, 4, 2, 8), "s": torch.ones(3, 4, 2)}, name) for name in "vs"),
    (flashinfer.top_k, {"input": SCORES["input"], "k": 2}, "input"),
    (flashinfer.top_k_ragged_transform, {**SCORES, "offsets": INDEX}, "input"),
    (flashinfer.top_k_page_table_transform, {**SCORES, "src_page_table": INDEX.expand(5, 2).T}, "input"),
    *(
        (flashinfer.concat_ops.concat_mla_k, {"k": Q[..., :10], "k_nope": Q[..., :8], "k_rope": Q[:, :1, :2]}, name)
        for name in ("k", "k_nope", "k_rope")
    ),
    *((flashinfer.rope_quantize_fp8, ROPE, name) for name in ("q_nope", "k_nope")),
    *((flashinfer.rope_quantize_fp8_append_paged_kv_cache, ROPE | APPENDED, name) for name in ("q_nope", "v")),
    *((flashinfer.rmsnorm_quant, NORM, name) for name in ("out", "scale")),
    *(
        (flashinfer.fused_add_rmsnorm_quant, {**NORM, "residual": ROPE["q_nope"]}, name)
        for name in ("out", "residual", "scale")
    ),
    *((flashinfer.chunk_gated_delta_rule, RULE, name) for name in ("output", "output_state")),
]


COMPLEX: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *((flashinfer.merge_state, {"v_a": Q, "s_a": ROWS, "v_b": Q, "s_b": ROWS}, name) for name in ("s_a", "s_b")),
    (flashinfer.merge_state_in_place, {"v": Q, "s": ROWS, "v_other": Q, "s_other": ROWS}, "s_other"),
    (flashinfer.merge_states, {"v": torch.ones(3, 4, 2, 8), "s": torch.ones(3, 4, 2)}, "s"),
    *(
        (
            function,
            {"positions": INDEX, "query": Q.clone(), "key": Q.clone(), "head_size": HEAD_SIZE, "cos_sin_cache": ROWS},
            "cos_sin_cache",
        )
        for function in (flashinfer.apply_rope_with_cos_sin_cache, flashinfer.apply_rope_with_cos_sin_cache_inplace)
    ),
    *((flashinfer.rope_quantize_fp8, ROPE, name) for name in ("q_rope", "k_nope", "cos_sin_cache")),
    (flashinfer.rope_quantize_fp8_append_paged_kv_cache, ROPE | APPENDED, "v"),
]


@pytest.mark.parametrize(
    ("function", "arguments", "name"), COMPLEX, ids=[f"{case[0].__name__} {case[2]}" for case in COMPLEX]
)
def test_complex_numbers_are_refused(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    """Torch would take their real parts, and warn."""
    function(**deepcopy(arguments))
    with pytest.raises(TypeError, match=f"^{function.__name__}: {name}: expected a real dtype, got complex64$"):
        function(**arguments | {name: arguments[name].cfloat()})


@pytest.mark.parametrize(
    ("function", "arguments", "name"), DIFFERENTIATED, ids=[f"{case[0].__name__} {case[2]}" for case in DIFFERENTIATED]
)
def test_backward_is_refused(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    """Where torch computes, too, and before anything is written."""
    arguments = deepcopy(arguments)
    tensors = [tensor for tensor in tensors_in(arguments) if tensor is not arguments[name]]
    before = [tensor.clone() for tensor in tensors]
    arguments[name] = arguments[name].detach().requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{function.__name__}: {name}: requires grad"):
        function(**arguments)
    for tensor, old in zip(tensors, before, strict=True):
        assert_same_bits(tensor, old)
        assert not tensor.requires_grad
    with torch.no_grad():
        function(**arguments)
