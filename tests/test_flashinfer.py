"""pagedattn_ext.flashinfer against brute force in fp64; refusals."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import reference
import torch
from brute_force import HEAD_SIZE, attend, attend_all, rows, starts
from checks import assert_close_to_reference, assert_same_bits
from flashinfer_batch import HEADS, KV_HEADS, PAGE_SIZE, WORKSPACE, Batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedattn_ext import flashinfer

INDEX = torch.int32


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(35)
        yield


LAYOUTS = ["NHD tuple", "HND tuple", "NHD tensor", "HND tensor"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window_left": 2},
    {"logits_soft_cap": 1.5, "sm_scale": 0.4},
]


def in_brute_force(options: dict[str, Any]) -> dict[str, Any]:
    names = {"sm_scale": "scale", "logits_soft_cap": "softcap"}
    options = {names.get(name, name): value for name, value in options.items()}
    return options | {"window": (options.pop("window_left", -1), -1)}


def assert_results(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """(out, lse) with the lse in base 2."""
    assert_close_to_reference(actual[0], expected[0])
    assert actual[1].dtype == torch.float32
    assert_close_to_reference(actual[1], expected[1] / math.log(2))


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode(options: dict[str, Any], layout: str) -> None:
    """Lengths that end within a page, at its end, and behind it."""
    batch = Batch([7, 3, 1, 6], layout=layout)
    q = rows([1] * 4, HEADS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, batch.kv_layout)
    wrapper.plan(**batch.plan, **options)
    assert_results(
        wrapper.run(torch.cat(q), batch.cache, return_lse=True),
        attend_all(q, batch.key, batch.value, causal=True, **in_brute_force(options)),
    )


LENGTHS_Q, LENGTHS_K = [3, 1, 6, 0, 2], [7, 6, 2, 3, 0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, "ragged"])
def test_prefill(causal: bool, options: dict[str, Any], layout: str) -> None:
    """More rows than keys, no rows and no keys among the sequences."""
    q = rows(LENGTHS_Q, HEADS)
    batch = Batch(LENGTHS_K, layout="NHD tuple" if layout == "ragged" else layout)
    wrapper: Any
    arguments: tuple[Any, ...]
    if layout == "ragged":
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
        arguments = torch.cat(q), torch.cat(batch.key), torch.cat(batch.value)
        sizes = starts(LENGTHS_K), HEADS, KV_HEADS, HEAD_SIZE
        wrapper.plan(starts(LENGTHS_Q), *sizes, causal=causal, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, batch.kv_layout)
        arguments = torch.cat(q), batch.cache
        wrapper.plan(starts(LENGTHS_Q), **batch.prefill_plan, causal=causal, **options)
    expected = attend_all(q, batch.key, batch.value, causal=causal, **in_brute_force(options))
    assert_results(wrapper.run_return_lse(*arguments), expected)
    assert_results(wrapper.forward_return_lse(*arguments, causal=causal, **options), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single(options: dict[str, Any], layout: str) -> None:
    q, k, v = torch.randn(3, HEADS, HEAD_SIZE), *torch.randn(2, 5, KV_HEADS, HEAD_SIZE)
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    for causal in (True, False):
        actual = flashinfer.single_prefill_with_kv_cache_return_lse(
            q, *given, causal=causal, kv_layout=layout, **options
        )
        assert_results(actual, attend(q, k, v, causal=causal, **in_brute_force(options)))
    actual = flashinfer.single_decode_with_kv_cache(q[2], *given, kv_layout=layout, return_lse=True, **options)
    expected = attend(q[2:], k, v, causal=True, **in_brute_force(options))
    assert_results(actual, (expected[0][0], expected[1][0]))


def test_arguments_of_run() -> None:
    """Scales, sinks, a window in place of the plan's, and memory for the results."""
    batch = Batch([7, 4])
    q, sinks = rows([1] * 2, HEADS), torch.randn(HEADS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(**batch.plan, window_left=3)
    out, lse = torch.empty(2, HEADS, HEAD_SIZE), torch.empty(2, HEADS)
    scales: dict[str, float] = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 0.7}
    results = wrapper.run(
        torch.cat(q), batch.cache, **scales, out=out, lse=lse, return_lse=True, window_left=1, sinks=sinks
    )
    assert (results[0] is out, results[1] is lse) == (True, True)
    scale = HEAD_SIZE**-0.5 * 0.5 * 3.0
    expected = attend_all(q, batch.key, batch.value, causal=True, window=(1, -1), scale=scale, sinks=sinks)
    assert_results((out, lse), (expected[0] * 0.7, expected[1]))
    assert_close_to_reference(
        wrapper.run(torch.cat(q), batch.cache),
        attend_all(q, batch.key, batch.value, causal=True, window=(3, -1))[0],
    )


def test_older_decode() -> None:
    """begin_forward and forward, where options are arguments of forward."""
    batch = Batch([7, 4])
    q = rows([1] * 2, HEADS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(*batch.plan.values(), "NONE", data_type=torch.float32)
    out = wrapper.forward(torch.cat(q), batch.cache, "NONE", sm_scale=0.4, window_left=1)
    wrapper.end_forward()
    expected, _ = attend_all(q, batch.key, batch.value, causal=True, scale=0.4, window=(1, -1))
    assert_close_to_reference(out, expected)


def test_fp8_cache() -> None:
    """What is stored is multiplied with k_scale and v_scale."""
    batch = Batch([7, 4], torch.float8_e4m3fn)
    q = rows([1] * 2, HEADS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(**batch.plan)
    stored_k, stored_v = (
        [tensor.to(torch.float8_e4m3fn).float() for tensor in tensors] for tensors in (batch.key, batch.value)
    )
    expected, _ = attend_all(q, [k * 0.5 for k in stored_k], [v * 0.25 for v in stored_v], causal=True)
    out = wrapper.run(torch.cat(q), batch.cache, k_scale=0.5, v_scale=0.25)
    assert_close_to_reference(out, expected)


def test_pages_of_one_token() -> None:
    """As SGLang has them, without the dimension of the page."""
    q, k, v = rows([1], HEADS), rows([6], KV_HEADS), rows([6], KV_HEADS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    tokens = torch.arange(6, dtype=torch.int32)
    wrapper.plan(starts([6]), tokens, torch.ones(1, dtype=torch.int32), HEADS, KV_HEADS, HEAD_SIZE, 1)
    assert_close_to_reference(wrapper.run(q[0], (k[0], v[0])), attend(q[0], k[0], v[0])[0])


def test_sequences_without_pages() -> None:
    """Callers that pad a batch write anything into last_page_len, and leave what they like behind the last page."""
    batch = Batch([7, 4])
    q = rows([1] * 4, HEADS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    pages = {
        "indptr": torch.cat([batch.indptr, batch.indptr[-1:].expand(2)]),
        "indices": torch.cat([batch.indices, torch.tensor([999, -1], dtype=torch.int32)]),
        "last_page_len": torch.cat([batch.last_page_len, torch.tensor([1, 3], dtype=torch.int32)]),
    }
    wrapper.plan(**batch.plan | pages)
    out, lse = wrapper.run(torch.cat(q), batch.cache, return_lse=True)
    expected, expected_lse = attend_all(q[:2], batch.key, batch.value, causal=True)
    assert_results((out[:2], lse[:2]), (expected, expected_lse))
    assert not out[2:].any()
    assert (lse[2:] == -math.inf).all()


def test_shared_workspace() -> None:
    """mini-sglang hands the prefill wrapper's int workspace to its decode wrapper."""
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, kv_layout="NHD", backend="fa2")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True, backend="fa2")
    decode._int_workspace_buffer = prefill._int_workspace_buffer
    batch = Batch([7, 4])
    q = rows([1] * 2, HEADS)
    decode.plan(**batch.plan)
    expected, _ = attend_all(q, batch.key, batch.value, causal=True)
    assert_close_to_reference(decode.run(torch.cat(q), batch.cache), expected)


# ---- plans -----------------------------------------------------------------------------------------------------------


class CountsMade(TorchDispatchMode):
    """Within it, `elements` counts those of new tensors, but for memory that is left as it is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **kwargs or {})
        if op is not torch.ops.aten.new_empty.default:
            given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)}
            made = [each for each in tree_leaves(results) if isinstance(each, Tensor)]
            self.elements += sum(each.numel() for each in made if each.untyped_storage().data_ptr() not in given)
        return results


def plan_of(form: str, counts: list[int], indptr: Tensor | None = None) -> Any:
    """A wrapper with a plan of this form, for sequences of so many full pages."""
    indptr, last = starts(counts) if indptr is None else indptr, torch.full((len(counts),), PAGE_SIZE)
    lists = indptr, torch.arange(sum(counts) + 1, dtype=INDEX).flip(0), last  # with a page that no sequence has
    sizes, row_starts = (HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE), starts([1] * len(counts))
    if form == "decode":
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(*lists, *sizes)
    elif form == "prefill":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        wrapper.plan(row_starts, *lists, *sizes)
    else:
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
        lens = torch.tensor(counts, dtype=INDEX) * PAGE_SIZE
        dtypes = torch.float32, torch.float32
        wrapper.plan(row_starts, *lists[:2], lens, HEADS, HEAD_SIZE, HEAD_SIZE, PAGE_SIZE, True, 1.0, *dtypes)
    return wrapper


@pytest.mark.parametrize("form", ["decode", "prefill", "mla"])
def test_a_plan_costs_no_more_than_its_pages(form: str) -> None:
    """Catches what is computed for each sequence as if it were the longest: 200 * 1,000 elements."""
    counts = [1000] + [2] * 199
    with CountsMade() as made:
        plan_of(form, counts)
    assert sum(counts) < made.elements < 20 * sum(counts)


@pytest.mark.parametrize("form", ["decode", "prefill", "mla"])
def test_offsets_of_a_plan_may_have_strides(form: str) -> None:
    indptr = torch.stack([starts([2, 0, 3]), torch.full((4,), 99, dtype=INDEX)], 1)[:, 0]
    wrapper = plan_of(form, [2, 0, 3], indptr)
    tables = (wrapper._plan.sequences if form == "mla" else wrapper._planned).block_tables
    assert tables.shape == (3, 3)
    assert [tables[0, :2].tolist(), tables[2].tolist()] == [[5, 4], [3, 2, 1]]


# ---- the cache, and merges -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_append(layout: str) -> None:
    """New tokens of all sequences but one, into pages; nothing else changes."""
    lengths, new = [7, 3, 4], [2, 0, 3]
    batch = Batch(lengths, layout=layout)
    key, value = torch.randn(2, sum(new), KV_HEADS, HEAD_SIZE)
    seq_lens = flashinfer.get_seq_lens(batch.indptr, batch.last_page_len, PAGE_SIZE)
    assert seq_lens.tolist() == lengths
    where = flashinfer.get_batch_indices_positions(starts(new), seq_lens, sum(new))
    assert [tensor.tolist() for tensor in where] == [[0, 0, 2, 2, 2], [5, 6, 1, 2, 3]]
    before = [tensor.clone() for tensor in (batch.cache if isinstance(batch.cache, tuple) else batch.cache.unbind(1))]
    flashinfer.append_paged_kv_cache(key, value, *where, batch.cache, *batch.pages, batch.kv_layout)
    after = batch.cache if isinstance(batch.cache, tuple) else batch.cache.unbind(1)
    for new_rows, old, cache in zip((key, value), before, after, strict=True):
        for row, sequence, position in zip(new_rows, *(tensor.tolist() for tensor in where), strict=True):
            page, offset = batch.indices[batch.indptr[sequence] + position // PAGE_SIZE], position % PAGE_SIZE
            (old[page, :, offset] if batch.kv_layout == "HND" else old[page, offset]).copy_(row)
        assert_same_bits(cache, old)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_append_of_fp8(dtype: torch.dtype) -> None:
    """FlashInfer's callers bring the cache's dtype themselves: all bits arrive as they are, infinities and NaN too."""
    key = torch.arange(256, dtype=torch.uint8).view(dtype).view(-1, 1, HEAD_SIZE)
    value = key.flip(0)
    tokens = torch.arange(len(key), dtype=torch.int32)
    cache = torch.zeros(len(key), 2, 1, 1, HEAD_SIZE).to(dtype)
    flashinfer.append_paged_kv_cache(
        key, value, torch.zeros_like(tokens), tokens, cache, tokens, starts([len(key)]), torch.ones(1, dtype=INDEX)
    )
    assert_same_bits(cache[:, 0, 0].view(torch.uint8), key.view(torch.uint8))
    assert_same_bits(cache[:, 1, 0].view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize(("width", "first", "name"), [(17, 0, "paged_kv_cache"), (16, 1, "append_key")])
def test_append_of_fp8_at_odd_places(width: int, first: int, name: str) -> None:
    """Two elements are moved as one, which does not begin at an odd place."""
    rows = torch.ones(2 * 16 + first).to(torch.float8_e4m3fn)[first:].view(2, 1, 16)
    cache, tokens = torch.zeros(1, 2, 4, 1, width).to(rows.dtype)[..., :16], torch.arange(2)
    with pytest.raises(
        ValueError, match=rf"^append_paged_kv_cache: {name}: expected rows of an even number .+ even offset"
    ):
        flashinfer.append_paged_kv_cache(rows, rows, tokens * 0, tokens, cache, tokens[:1], starts([1]), tokens[:1] + 2)
    assert not cache.view(torch.uint8).any()


def test_tokens_behind_the_batch_are_padding() -> None:
    """Their sequence is -1, in memory of the caller's too, and appends skip them."""
    indptr, lengths = starts([1, 2]), torch.tensor([5, 6], dtype=INDEX)
    buffers = torch.full((2, 5), 7, dtype=INDEX).unbind()
    for given in ((), buffers):
        where = flashinfer.get_batch_indices_positions(indptr, lengths, 5, *given)
        assert [tensor.tolist() for tensor in where] == [[0, 1, 1, -1, -1], [4, 4, 5, 0, 0]]
        assert [tensor.dtype for tensor in where] == [INDEX, INDEX]
    assert (where[0] is buffers[0], where[1] is buffers[1]) == (True, True)
    batch = Batch([6, 6])
    kept = [cache.clone() for cache in batch.cache]
    key, value = torch.randn(2, 5, KV_HEADS, HEAD_SIZE)
    flashinfer.append_paged_kv_cache(key, value, *where, batch.cache, *batch.pages)
    for cache, old, rows_of_new in zip(batch.cache, kept, (key, value), strict=True):
        for page, offset, row in ((1, 1, 0), (3, 1, 1), (3, 2, 2)):
            old[batch.indices[page], offset] = rows_of_new[row]
        assert_same_bits(cache, old)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"positions": [3, 9]},
            "positions: expected 0 or more, and room for the new tokens, got .* 9 to 9 in .* for 6 ",
        ),
        (
            {"positions": [-1, 4]},
            "positions: expected 0 or more, and room for the new tokens, got .* -1 to -1 in .* 9 ",
        ),
        ({"positions": [3, 2**31 - 1]}, "positions: expected 0 or more, and room"),
        ({"batch_indices": [0, 2]}, "batch_indices: expected sequences below 2, got 2 at token 1$"),
        ({"batch_indices": [0]}, r"batch_indices: expected shape \[2\], got \[1\]$"),
        ({"kv_indptr": [0, 3, 6]}, r"kv_indptr: expected at most 5 \(the size of kv_indices\) last, got 6$"),
        ({"kv_indptr": [0, 4, 3]}, "kv_indptr: expected offsets that do not decrease, got 4 and then 3 at sequence 1$"),
        ({"kv_indptr": [1, 3, 5]}, "kv_indptr: expected 0 first, got 1$"),
        ({"kv_indices": [0, 1, 2, 3, 16]}, "kv_indices: expected blocks of 0 to 15, got 16 at sequence 1, entry 1$"),
        ({"kv_indices": [0, -1, 2, 4, 3]}, "kv_indices: expected blocks of 0 to 15, got -1 at sequence 0, entry 1$"),
        ({"kv_last_page_len": [4, 1]}, "kv_last_page_len: expected 1 to 3 .*, got 4 at sequence 0$"),
        ({"kv_last_page_len": [1]}, r"kv_last_page_len: expected shape \[2\], got \[1\]$"),
        (
            {"append_key": torch.zeros(3, KV_HEADS, HEAD_SIZE)},
            r"append_key: expected shape \[2, 2, 16\], got \[3, 2, 16",
        ),
        ({"append_value": torch.zeros(2, 1, HEAD_SIZE)}, r"append_value: expected shape \[2, 2, 16\], got \[2, 1, 16"),
    ],
    ids=str,
)
def test_append_outside_of_its_pages(changes: dict[str, Any], message: str) -> None:
    """A sequence's tokens reach no page of another, and nothing is written before the error."""
    batch = Batch([7, 4])
    arguments = {"batch_indices": [0, 1], "positions": [3, 4], "kv_indptr": [0, 3, 5], "kv_last_page_len": [1, 1]}
    arguments |= {"kv_indices": batch.indices.tolist()} | changes
    tensors = {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=INDEX)
        for name, value in arguments.items()
    }
    rows_of_new = dict.fromkeys(("append_key", "append_value"), torch.zeros(2, KV_HEADS, HEAD_SIZE))
    kept = [cache.clone() for cache in batch.cache]
    with pytest.raises(ValueError, match=f"^append_paged_kv_cache: {message}"):
        flashinfer.append_paged_kv_cache(paged_kv_cache=batch.cache, **rows_of_new | tensors)
    for cache, old in zip(batch.cache, kept, strict=True):
        assert_same_bits(cache, old)


@pytest.mark.parametrize(
    ("indptr", "lengths", "nnz", "message"),
    [
        ([0, 1, 3], [5, 1], 3, "seq_lens: expected 0 tokens or more before those of sequence 1, got -1$"),
        ([0, 1, 3], [5], 3, "seq_lens: expected 2 elements, got 1$"),
        ([0, 3, 1], [5, 6], 3, "append_indptr: expected offsets that do not decrease, got 3 and then 1 at sequence 1$"),
        ([1, 2, 3], [5, 6], 3, "append_indptr: expected 0 first, got 1$"),
        ([0, 1, 3], [5, 6], 2, r"append_indptr: expected at most 2 \(nnz\) last, got 3$"),
        ([0, 1, 3], [5, 6], -1, "nnz: expected a number that is not negative, got -1$"),
    ],
)
def test_positions_that_do_not_fit_together(indptr: list[int], lengths: list[int], nnz: int, message: str) -> None:
    tensors = torch.tensor(indptr, dtype=INDEX), torch.tensor(lengths, dtype=INDEX)
    with pytest.raises(ValueError, match=f"^get_batch_indices_positions: {message}"):
        flashinfer.get_batch_indices_positions(*tensors, nnz)


def test_merges() -> None:
    """Attention over two and three sets of tokens is that over all of them, where one set is empty, too."""
    q, k, v = torch.randn(3, HEADS, HEAD_SIZE), *torch.randn(2, 9, KV_HEADS, HEAD_SIZE)
    parts = [
        flashinfer.single_prefill_with_kv_cache(q, k[s], v[s], return_lse=True)
        for s in (slice(0, 4), slice(4, 5), slice(5, 9))
    ]
    empty = torch.zeros_like(q), torch.full((3, HEADS), -math.inf)
    two = attend(q, k[:5], v[:5])
    assert_results(flashinfer.merge_state(*parts[0], *parts[1]), two)
    assert_results(flashinfer.merge_state(*parts[0], *empty), attend(q, k[:4], v[:4]))
    states = [torch.stack(tensors, 1) for tensors in zip(*parts, empty, strict=True)]
    assert_results(flashinfer.merge_states(*states), attend(q, k, v))
    none = flashinfer.merge_states(*(torch.stack([tensor] * 2, 1) for tensor in empty))
    assert_same_bits(none[0], empty[0])
    assert_same_bits(none[1], empty[1])

    state = [tensor.clone() for tensor in parts[0]]
    flashinfer.merge_state_in_place(*state, *parts[1])
    assert_results((state[0], state[1]), two)
    state = [tensor.clone() for tensor in parts[0]]
    flashinfer.merge_state_in_place(*state, *parts[1], mask=torch.tensor([True, False, True]))
    assert_same_bits(state[0][1], parts[0][0][1])
    assert_same_bits(state[1][1], parts[0][1][1])
    assert_results((state[0][::2], state[1][::2]), (two[0][::2], two[1][::2]))


INF = math.inf


@pytest.mark.parametrize(
    ("lses", "shares", "merged"),
    [
        ([-1e7, -1e7], [0.5, 0.5], -1e7 + 1),
        ([1e7, 1e7 - 1], [2 / 3, 1 / 3], 1e7 + math.log2(1.5)),
        ([INF, 1.5], [0, 1], 1.5),
        ([-INF, 1.5], [0, 1], 1.5),
        ([INF, -INF], [0, 0], -INF),
        ([INF, INF], [0, 0], -INF),
        ([math.nan, 1.5], [math.nan, math.nan], math.nan),
    ],
)
def test_merges_of_large_and_infinite_lses(lses: list[float], shares: list[float], merged: float) -> None:
    """The numbers that a change of base rounds, and empty sets of either sign. NaN is not hidden."""
    v, s = torch.randn(1, 2, HEADS, HEAD_SIZE), torch.tensor(lses)[None, :, None].expand(1, 2, HEADS).contiguous()
    expected = (v.double() * torch.tensor(shares, dtype=torch.float64)[:, None, None]).sum(1)
    v[s.isinf()] = math.nan  # of an empty set
    for out, lse in (flashinfer.merge_states(v, s), flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])):
        torch.testing.assert_close(out, expected.float(), equal_nan=True)
        torch.testing.assert_close(lse, torch.full((1, HEADS), merged), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"s": torch.zeros(2, HEADS)}, r"s: expected shape \[3, 4\], got \[2, 4\]$"),
        ({"v_other": torch.zeros(1, HEADS, HEAD_SIZE)}, r"v_other: expected shape \[3, 4, 16\], got \[1, 4, 16\]$"),
        ({"s_other": torch.zeros(1, HEADS)}, r"s_other: expected shape \[3, 4\], got \[1, 4\]$"),
        ({"mask": torch.tensor([True])}, r"mask: expected shape \[3\], got \[1\]$"),
        ({"v": torch.zeros(1).expand(3, HEADS, HEAD_SIZE)}, "v: expected memory for each element"),
    ],
)
def test_merges_of_other_shapes(changes: dict[str, Tensor], message: str) -> None:
    """Torch would repeat what is smaller."""
    states = {name: torch.zeros(3, HEADS, HEAD_SIZE) for name in ("v", "v_other")}
    states |= {name: torch.zeros(3, HEADS) for name in ("s", "s_other")}
    with pytest.raises(ValueError, match=f"^merge_state_in_place: {message}"):
        flashinfer.merge_state_in_place(**states | changes)


def test_merge_of_no_states() -> None:
    out, lse = flashinfer.merge_states(torch.empty(3, 0, HEADS, HEAD_SIZE), torch.empty(3, 0, HEADS))
    assert (out.shape, out.any().item(), (lse == -INF).all().item()) == ((3, HEADS, HEAD_SIZE), False, True)


# ---- the rest of a layer ---------------------------------------------------------------------------------------------


def test_norms() -> None:
    x, residual, weight = torch.randn(3, 24), torch.randn(3, 24), torch.randn(24)
    expected = reference.rms_norm(x, weight, 1e-6)
    assert_close_to_reference(flashinfer.rmsnorm(x, weight), expected)
    out = torch.empty_like(x)
    assert flashinfer.rmsnorm(x, weight, eps=1e-6, out=out) is out
    assert_close_to_reference(out, expected)
    total = x.double() + residual.double()
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    flashinfer.fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert_close_to_reference(x, expected)
    assert_close_to_reference(residual, total)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_activations(name: str) -> None:
    x = torch.randn(3, 48)
    function, formula = getattr(flashinfer, name), getattr(reference, name)
    assert_close_to_reference(function(x), formula(x))
    out = torch.empty(3, 24)
    assert function(x, out) is out
    assert_close_to_reference(out, formula(x))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("positions_dtype", "dtype"), [(torch.int32, torch.bfloat16), (torch.int64, torch.float32)])
def test_rope(is_neox: bool, positions_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Cosines and sines are fp32, as FlashInfer demands, and are not rounded."""
    q, k = torch.randn(3, HEADS * HEAD_SIZE, dtype=dtype), torch.randn(3, KV_HEADS * HEAD_SIZE, dtype=dtype)
    positions, cache = torch.tensor([5, 0, 2], dtype=positions_dtype), torch.randn(8, 8)
    expected = reference.rotary_embedding(positions.long(), q, k, HEAD_SIZE, cache, is_neox)
    flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, HEAD_SIZE, cache, is_neox)
    assert_close_to_reference(q, expected[0])
    assert_close_to_reference(k, expected[1])


# ---- refusals --------------------------------------------------------------------------------------------------------

TENSOR, BYTE = torch.ones(1), torch.ones(1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("pos_encoding_mode", "ROPE", "expected one of NONE, ROPE_LLAMA, ALIBI, got 'ROPE'"),
        ("custom_mask", TENSOR, r"expected 4 elements \(for the rows times the keys of each sequence\), got 1"),
        ("packed_custom_mask", BYTE.expand(2), r"expected 1 elements \(for .*\), got 2"),
        ("prefix_len_ptr", TENSOR, "expected None, got a tensor"),
        ("token_pos_in_items_ptr", TENSOR, "expected None, got a tensor"),
        ("token_pos_in_items_len", 3, "expected 0, got 3"),
        ("max_item_len_ptr", TENSOR, "expected None, got a tensor"),
    ],
)
@pytest.mark.parametrize("ragged", [True, False])
def test_refused_plans(argument: str, value: object, message: str, ragged: bool) -> None:
    batch, wrapper = Batch([4]), flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    plan: Callable[..., None]
    if ragged:
        plan = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE).plan
        arguments = {"kv_indptr": starts([4]), "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16}
    else:
        plan, arguments = wrapper.plan, batch.prefill_plan
    with pytest.raises(ValueError, match=rf"KVCacheWrapper\.plan: {argument}: {message}$"):
        plan(qo_indptr=starts([1]), **arguments, **{argument: value})


def test_refused() -> None:
    name = "BatchDecodeWithPagedKVCacheWrapper"
    with pytest.raises(
        ValueError, match=rf"^{name}\.__init__: jit_args: expected those of attention with sinks, or No"
    ):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, jit_args=[*[None] * 7, ["bias"], [], ["x"]])
    with pytest.raises(ValueError, match=f"^{name}: kv_layout: expected 'NHD' or 'HND', got 'nhd'$"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "nhd")
    batch, wrapper = Batch([4]), flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    q, k = torch.randn(1, HEADS, HEAD_SIZE), torch.randn(2, KV_HEADS, HEAD_SIZE)
    with pytest.raises(RuntimeError, match=rf"^{name}\.run: expected a plan, got none"):
        wrapper.run(q, batch.cache)
    with pytest.raises(ValueError, match=rf"^{name}\.plan: q_len_per_req: expected 1 or more, got 0$"):
        wrapper.plan(**batch.plan, q_len_per_req=0)
    wrapper.plan(**batch.plan)
    with pytest.raises(ValueError, match=rf"^{name}\.run: q: expected shape \[\*, 4, 16\], as planned, got \[1, 2, 16"):
        wrapper.run(q[:, :2], batch.cache)
    wrapper.plan(**batch.plan | {"page_size": 4})
    with pytest.raises(
        ValueError, match=rf"^{name}\.run: paged_kv_cache: keys: expected shape \[\*, 4, 2, 16\], as planned, got \[16,"
    ):
        wrapper.run(q, batch.cache)
    with pytest.raises(ValueError, match=r"^single_prefill_with_kv_cache: custom_mask: expected 2 elements .*, got 1$"):
        flashinfer.single_prefill_with_kv_cache(q, k, k, custom_mask=TENSOR)
    with pytest.raises(ValueError, match=r"^single_prefill_with_kv_cache: v: expected shape \[\*, 2, 16\]"):
        flashinfer.single_prefill_with_kv_cache(q, k, k[:, :1])
    for given in ([1.0], [TENSOR, 1.0]):
        with pytest.raises(ValueError, match=rf"^{name}\.run: args: expected no more positional arguments, got "):
            wrapper.run(q, batch.cache, *given)
    wrapper.plan(**batch.plan)
    for argument in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(
            ValueError, match=rf"^{name}\.run: {argument}: expected one number for all heads, got shape"
        ):
            wrapper.run(q, batch.cache, **{argument: torch.ones(4)})  # type: ignore[arg-type]
    for argument in ("skip_softmax_threshold_scale_factor", "kv_cache_sf"):
        with pytest.raises(ValueError, match=rf"^{name}\.run: {argument}: expected None, got a tensor$"):
            wrapper.run(q, batch.cache, **{argument: TENSOR})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^append_paged_kv_cache: kv_layout: expected 'NHD' or 'HND', got 'x'$"):
        flashinfer.append_paged_kv_cache(*[q] * 8, kv_layout="x")


NOT_FITTING: list[tuple[str, Tensor, str]] = [
    ("last_page_len", torch.tensor([4, 1], dtype=INDEX), r"expected 1 to 3 \(page_size\), got 4 at sequence 0$"),
    ("last_page_len", torch.tensor([1, 0], dtype=INDEX), r"expected 1 to 3 \(page_size\), got 0 at sequence 1$"),
    ("last_page_len", torch.tensor([1, -5], dtype=INDEX), r"expected 1 to 3 \(page_size\), got -5 at sequence 1$"),
    ("last_page_len", torch.tensor([1], dtype=INDEX), "expected 2 elements, got 1$"),
    ("last_page_len", torch.ones(2), "expected dtype int32 or int64, got float32$"),
    ("indptr", torch.tensor([1, 3, 5], dtype=INDEX), "expected 0 first, got 1$"),
    ("indptr", torch.tensor([0, 5, 3], dtype=INDEX), "expected offsets that do not decrease, got 5 and then 3 at "),
    ("indptr", torch.tensor([0, -2, 5], dtype=INDEX), "expected offsets that do not decrease, got 0 and then -2 at "),
    ("indptr", torch.tensor([0, 3, 6], dtype=INDEX), "expected at most 5 last, got 6$"),
    ("indptr", torch.tensor([], dtype=INDEX), "expected at least 1 element, got 0$"),
    ("indptr", torch.tensor([[0, 3, 5]], dtype=INDEX), "expected 1 dimensions, got 2"),
    ("indptr", torch.tensor([0.0, 3.0, 5.0]), "expected dtype int32 or int64, got float32$"),
    ("indices", torch.zeros(5), "expected dtype int32 or int64, got float32$"),
    ("indices", torch.zeros(4, dtype=INDEX), "expected at most 4 last, got 5$"),  # of indptr
    ("page_size", torch.tensor(0), "expected 1 or more, got 0$"),
]


@pytest.mark.parametrize(("argument", "value", "message"), NOT_FITTING)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_lists_that_do_not_fit_together(argument: str, value: Any, message: str, phase: str) -> None:
    """Or a sequence reads the pages of another. A plan that is refused leaves the plan before as it was."""
    batch = Batch([7, 4])
    q = torch.randn(2, HEADS, HEAD_SIZE)
    plan: Callable[..., None]
    named = "indptr" if argument == "indices" and len(value) == 4 else argument
    if phase == "decode":
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
        plan, lists, prefix = wrapper.plan, batch.plan, ""
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        plan, lists, prefix = partial(wrapper.plan, starts([1, 1])), batch.prefill_plan, "paged_kv_"
    plan(**lists)
    expected = wrapper.run(q, batch.cache)
    prefix = "" if argument == "page_size" else prefix
    with pytest.raises((ValueError, TypeError), match=rf"KVCacheWrapper\.plan: {prefix}{named}: {message}"):
        plan(**lists | {prefix + argument: value})
    assert_same_bits(wrapper.run(q, batch.cache), expected)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("qo_indptr", [1, 2, 3], "expected 0 first, got 1$"),
        ("qo_indptr", [0, 2, 1], "expected offsets that do not decrease, got 2 and then 1 at sequence 1$"),
        ("qo_indptr", [0, 3], "expected 3 elements, got 2$"),
        ("kv_indptr", [2, 4, 9], "expected 0 first, got 2$"),
        ("kv_indptr", [0, 10, 9], "expected offsets that do not decrease, got 10 and then 9 at sequence 1$"),
        ("kv_indptr", [0, 4, 5, 9], "expected 3 elements, got 4$"),
    ],
)
def test_offsets_that_do_not_fit_together(argument: str, value: list[int], message: str) -> None:
    """Of a ragged batch; and of the rows of a batch in pages."""
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    good = {"qo_indptr": starts([1, 2]), "kv_indptr": starts([4, 5])}
    bad = {argument: torch.tensor(value, dtype=INDEX)}
    named = "kv_indptr" if len(value) == 2 else argument  # which is compared with the first
    with pytest.raises(ValueError, match=rf"RaggedKVCacheWrapper\.plan: {named}: "):
        ragged.plan(**good | bad, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=HEAD_SIZE)
    if argument == "qo_indptr":
        paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        with pytest.raises(ValueError, match=rf"PagedKVCacheWrapper\.plan: qo_indptr: {message}"):
            paged.plan(bad["qo_indptr"], **Batch([7, 4]).prefill_plan)


def test_run_checks_what_it_is_given() -> None:
    """Rows, pages, keys and memory for results that do not meet the plan, by FlashInfer's names."""
    batch, q = Batch([7, 4]), torch.randn(3, HEADS, HEAD_SIZE)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    decode.plan(**batch.plan)
    name = r"^BatchDecodeWithPagedKVCacheWrapper\.run: "
    with pytest.raises(ValueError, match=name + "q: expected one row for each of the 2 sequences"):
        decode.run(q, batch.cache)
    with pytest.raises(ValueError, match=name + r"out: expected shape \[2, 4, 16\], got \[5, 2, 4, 16\]$"):
        decode.run(q[:2], batch.cache, out=torch.empty(5, 2, HEADS, HEAD_SIZE))
    with pytest.raises(ValueError, match=name + r"lse: expected shape \[2, 4\], got \[2, 2, 4\]$"):
        decode.run(q[:2], batch.cache, lse=torch.empty(2, 2, HEADS), return_lse=True)
    decode.plan(**batch.plan | {"indices": batch.indices + 16})
    with pytest.raises(ValueError, match=name + r"indices: expected blocks of 0 to 15, got \d+ at sequence 0"):
        decode.run(q[:2], batch.cache)

    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    prefill.plan(starts([1, 1]), **batch.prefill_plan)
    name = r"^BatchPrefillWithPagedKVCacheWrapper\.run: "
    with pytest.raises(ValueError, match=name + "qo_indptr: expected the number of query rows, 3, last, got 2$"):
        prefill.run(q, batch.cache)

    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(starts([1, 2]), starts([4, 5]), HEADS, KV_HEADS, HEAD_SIZE)
    key = torch.randn(8, KV_HEADS, HEAD_SIZE)
    name = r"^BatchPrefillWithRaggedKVCacheWrapper\.run: "
    with pytest.raises(ValueError, match=name + "kv_indptr: expected the number of keys, 8, last, got 9$"):
        ragged.run(q, key, key)


@pytest.mark.parametrize("name", ["fused_rmsnorm_silu", "concat_mla_k", "trtllm_batch_decode_with_kv_cache"])
def test_left_out(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^pagedattn_ext.flashinfer: {name} is left out; it has Batch"):
        getattr(flashinfer, name)
    assert not hasattr(flashinfer, "other")
