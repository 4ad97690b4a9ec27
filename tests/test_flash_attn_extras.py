"""What pagedattn_ext.flash_attn takes beyond the ops, against brute force in fp64: heads of any width, ALiBi slopes by
sequence, attention in chunks, scales by head and fp8 queries, rows that are not used, a given output."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy
import pytest
import torch
from brute_force import Pages, attend, attend_all, rows, starts
from checks import assert_close_to_reference, assert_same_bits
from torch import Tensor

from pagedattn_ext import CPUGraph
from pagedattn_ext.flash_attn import _attend, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

HEADS, KV_HEADS = 4, 2
FP8 = torch.float8_e4m3fn
LENGTHS_Q, LENGTHS_K = [3, 1, 6, 0, 4], [7, 5, 2, 3, 9]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(49)
        yield


def batch(head_size: int = 16, head_size_v: int | None = None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    values = rows(LENGTHS_K, KV_HEADS, head_size_v or head_size)
    return rows(LENGTHS_Q, HEADS, head_size), rows(LENGTHS_K, KV_HEADS, head_size), values


def attend_batch(
    where: str, q: list[Tensor], k: list[Tensor], v: list[Tensor], options: dict[str, Any], page_size: int = 3
) -> Any:
    """(out, lse) of a ragged batch whose keys lie one after the other, in pages, or in rows of a cache."""
    tensors, options = map(torch.cat, (q, k, v)), {**options, "return_lse": True}
    if where == "ragged":
        return flash_attn_varlen_func(*tensors, starts(LENGTHS_Q), starts(LENGTHS_K), 6, 9, **options)
    if where == "rows":
        keys, values = (torch.zeros(len(k), max(LENGTHS_K), KV_HEADS, each[0].shape[-1]) for each in (k, v))
        for s, length in enumerate(LENGTHS_K):
            keys[s, :length], values[s, :length] = k[s], v[s]
        tables: dict[str, Any] = {}
    else:
        pages = [Pages(16, page_size, KV_HEADS, each[0].shape[-1]) for each in (k, v)]
        pages[1].write(table := pages[0].table(LENGTHS_K), v, v)
        pages[0].write(table, k, k)
        keys, values, tables = pages[0].key, pages[1].value, {"block_table": table}
    lengths = torch.tensor(LENGTHS_K, dtype=torch.int32)
    return flash_attn_with_kvcache(
        torch.cat(q), keys, values, cache_seqlens=lengths, cu_seqlens_q=starts(LENGTHS_Q), **tables, **options
    )


def assert_results(actual: Any, expected: tuple[Tensor, Tensor]) -> None:
    assert_close_to_reference(actual[0], expected[0])
    assert_close_to_reference(actual[1], expected[1].T)


WHERE = pytest.mark.parametrize("where", ["ragged", "pages", "rows"])


# ---- heads of any width ----------------------------------------------------------------------------------------------


@WHERE
@pytest.mark.parametrize(("head_size", "head_size_v"), [(59, 59), (7, 7), (1, 1), (24, 16), (16, 30)])
def test_head_sizes(where: str, head_size: int, head_size_v: int) -> None:
    """Sizes that are no multiple of 16 bytes, and values of another width than keys. The scale is that of the keys' own
    size, and the output has the values'."""
    q, k, v = batch(head_size, head_size_v)
    assert_results(attend_batch(where, q, k, v, {"causal": True}), attend_all(q, k, v, causal=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_size_of_100_in_16_bits(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 5, heads, 100).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = flash_attn_func(q, k, v, causal=True)
    expected, _ = attend_all(list(q), list(k), list(v), causal=True)
    in_torch = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert_close_to_reference(out, expected.view(out.shape), in_torch)
    assert out.is_contiguous()


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8])
@pytest.mark.parametrize("page_size", [3, None])
def test_append_of_any_head_size(page_size: int | None, cache_dtype: torch.dtype) -> None:
    """The new tokens are written to the caller's cache, whose other tokens keep their bits, NaN included."""
    before, new, size = [4, 0, 7], 2, 59
    total = [length + new for length in before]
    q, k, v = rows([new] * 3, HEADS, size), rows(total, KV_HEADS, size), rows(total, KV_HEADS, size)
    k, v = ([tensor.to(cache_dtype).float() for tensor in tensors] for tensors in (k, v))
    pages = Pages(12, page_size or 9, KV_HEADS, size, cache_dtype)
    table = pages.table(total) if page_size else torch.tensor([[4], [0], [7]])
    pages.write(table, [keys[:-new] for keys in k], [values[:-new] for values in v])
    unchanged = [cache.clone() for cache in (pages.key, pages.value)]
    for copies, tensors in zip(unchanged, (k, v), strict=True):
        for row, tensor in zip(table.tolist(), tensors, strict=True):
            for t in range(len(tensor) - new, len(tensor)):
                copies[row[t // pages.page_size], t % pages.page_size] = tensor[t]
    out = flash_attn_with_kvcache(
        torch.stack(q),
        pages.key,
        pages.value,
        torch.stack([keys[-new:] for keys in k]),
        torch.stack([values[-new:] for values in v]),
        cache_seqlens=torch.tensor(before, dtype=torch.int32),
        causal=True,
        **({"block_table": table} if page_size else {"cache_batch_idx": table[:, 0]}),
    )
    expected, _ = attend_all(q, k, v, causal=True)
    assert_close_to_reference(out, expected.view(out.shape))
    for cache, copy in zip((pages.key, pages.value), unchanged, strict=True):
        assert_same_bits(cache, copy)


@pytest.mark.parametrize("first", [0, 1, 8])
def test_slices_of_wider_heads(first: int) -> None:
    """q, k and v of 16 elements in heads of 40, from any element on."""
    wide = [torch.randn(2, n, heads, 40) for n, heads in ((3, HEADS), (5, KV_HEADS), (5, KV_HEADS))]
    q, k, v = (tensor[..., first : first + 16] for tensor in wide)
    expected = flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert_same_bits(flash_attn_func(q, k, v, causal=True), expected)
    cu_seqlens = starts([3, 3]), starts([5, 5])
    out = flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), *cu_seqlens, 3, 5, causal=True)
    assert_close_to_reference(out.view(expected.shape), expected)
    cache = torch.zeros(2, 2, 8, KV_HEADS, 40)[..., first : first + 16]
    assert_same_bits(
        flash_attn_with_kvcache(q, cache[0], cache[1], k, v, cache_seqlens=0, causal=True)[:, 2:], expected[:, 2:]
    )
    assert_same_bits(cache[0][:, :5], k)


# ---- ALiBi and chunks ------------------------------------------------------------------------------------------------


@WHERE
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_slopes_by_sequence(where: str, causal: bool) -> None:
    q, k, v = batch()
    slopes = torch.rand(len(q), HEADS)
    each = [attend(*tensors, causal=causal, slopes=own) for *tensors, own in zip(q, k, v, slopes, strict=True)]
    expected = torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each])
    assert_results(attend_batch(where, q, k, v, {"causal": causal, "alibi_slopes": slopes}), expected)
    for same in (slopes[:1], slopes[:1].expand(len(q), -1)):
        options = {"causal": causal, "alibi_slopes": same}
        assert_results(attend_batch(where, q, k, v, options), attend_all(q, k, v, causal=causal, slopes=slopes[0]))


@WHERE
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 6, 100])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {}, {"window": (1, 2)}, {"window": (2, -1), "causal": True}], ids=str
)
def test_attention_chunk(where: str, chunk: int, options: dict[str, Any]) -> None:
    """Chunks smaller and larger than pages and sequences, more rows than keys, and a window beside."""
    q, k, v = batch()
    arguments = {"window_size" if name == "window" else name: value for name, value in options.items()}
    actual = attend_batch(where, q, k, v, arguments | {"attention_chunk": chunk}, page_size=4)
    assert_results(actual, attend_all(q, k, v, chunk=chunk, **options))


def test_attention_chunk_captured_and_compiled() -> None:
    """The chunks are those of the lengths that a replay finds, and so are those of a compiled function."""
    q, caches = torch.randn(2, 1, HEADS, 16), torch.randn(2, 8, 4, KV_HEADS, 16)
    tables, lengths = torch.arange(8).view(2, 4), torch.tensor([5, 7])

    def step(lengths: torch.Tensor) -> torch.Tensor:
        return flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lengths, block_table=tables, causal=True, attention_chunk=6
        )

    graph = CPUGraph()
    with graph.capture():
        captured = step(lengths)
    lengths.copy_(torch.tensor([13, 6]))
    graph.replay()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(lengths)
    first = torch.stack([attend(q[0], *(c[:4].flatten(0, 1)[:13] for c in caches), causal=True, chunk=6)[0]])
    assert_close_to_reference(captured[:1], first)
    for result in captured, compiled:
        assert_same_bits(result, step(lengths))


def test_attention_chunk_of_equal_sequences_with_slopes_of_each() -> None:
    q, k, v = (rows([n] * 2, heads) for n, heads in ((5, HEADS), (9, KV_HEADS), (9, KV_HEADS)))
    slopes = torch.rand(2, HEADS)
    tensors = map(torch.stack, (q, k, v))
    out = flash_attn_func(*tensors, attention_chunk=4, alibi_slopes=slopes, window_size=(-1, 1))
    each = [attend(*t, chunk=4, window=(-1, 1), slopes=own)[0] for *t, own in zip(q, k, v, slopes, strict=True)]
    assert_close_to_reference(out, torch.stack(each))


# ---- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query_dtype", [torch.float32, FP8])
@pytest.mark.parametrize("where", ["equal", "ragged", "append"])
def test_scales_by_head(where: str, query_dtype: torch.dtype) -> None:
    """[batch, num_kv_heads] of fp8 queries, keys and values; new tokens are divided by them. Output of fp8 queries is
    bf16."""
    n, shape = 5, (2, KV_HEADS)
    q_scale, k_scale, v_scale = 0.5 + torch.rand(3, *shape)
    q, k, v = (rows([n] * 2, heads, 32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q = [tensor.to(query_dtype) for tensor in q]
    scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    if where == "append":
        caches = torch.zeros(2, 2, 8, KV_HEADS, 32).to(FP8)
        arguments = {**scales, "cache_seqlens": 0, "causal": True}
        out = flash_attn_with_kvcache(torch.stack(q), *caches, torch.stack(k), torch.stack(v), **arguments)
        k, v = (
            [(t / s[:, None]).to(FP8) for t, s in zip(ts, each, strict=True)]
            for ts, each in ((k, k_scale), (v, v_scale))
        )
        assert_same_bits(caches[0][:, :n].float(), torch.stack(k).float())
    else:
        k, v = ([tensor.to(FP8) for tensor in tensors] for tensors in (k, v))
        if where == "equal":
            out = flash_attn_func(*map(torch.stack, (q, k, v)), causal=True, **scales)
        else:
            cu_seqlens = starts([n, n])
            out = flash_attn_varlen_func(
                *map(torch.cat, (q, k, v)), cu_seqlens, cu_seqlens, n, n, causal=True, **scales
            )
    if query_dtype == FP8:
        q = [
            (t.float().unflatten(1, (KV_HEADS, -1)) * s[:, None, None]).flatten(1, 2)
            for t, s in zip(q, q_scale, strict=True)
        ]
    k, v = (
        [t.float() * s[:, None] for t, s in zip(ts, each, strict=True)] for ts, each in ((k, k_scale), (v, v_scale))
    )
    expected, _ = attend_all(q, k, v, causal=True)
    assert out.dtype == (torch.bfloat16 if query_dtype == FP8 else torch.float32)
    assert_close_to_reference(out, expected.view(out.shape), expected.view(out.shape).to(out.dtype))


def test_scales_of_what_is_not_fp8_have_no_effect() -> None:
    """Frameworks pass the scales of a layer whatever its cache is."""
    q, k, v = (torch.randn(2, 3, heads, 16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    scales = {f"{name}_descale": torch.rand(2, KV_HEADS) for name in "qk"}
    assert_same_bits(flash_attn_func(q, k, v, **scales), flash_attn_func(q, k, v))


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_scales_of_other_heads_are_refused(name: str) -> None:
    q, k, v = (torch.randn(2, 3, heads, 16).to(FP8) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with pytest.raises(ValueError, match=rf"^flash_attn_func: {name}: expected one element, or shape \[2, 2\]"):
        flash_attn_func(q, k, v, **{name: torch.rand(2, 3)})


def test_fp8_queries_over_other_keys_are_refused() -> None:
    q, k, v = (torch.randn(2, 3, heads, 16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with pytest.raises(TypeError, match=r"^flash_attn_func: q: expected torch.float32, the dtype of the keys, got"):
        flash_attn_func(q.to(FP8), k, v)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "rotary_cos"])
def test_dtypes_beside_scales_by_head(name: str, dtype: torch.dtype) -> None:
    """Tensors that are scaled in fp32 are checked before, and before the cache is written."""
    caches = torch.zeros(2, 2, 8, KV_HEADS, 16).to(FP8)
    q, k, v = (torch.randn(2, 1, heads, 16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cos, sin = torch.randn(2, 8, 4)
    tensors = {"q": q, "k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin}
    tensors[name] = tensors[name].to(dtype)
    got = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"_kvcache: {name}: expected dtype float32, float16 or bfloat16, got {got}$"):
        flash_attn_with_kvcache(
            k_cache=caches[0], v_cache=caches[1], cache_seqlens=2, k_descale=torch.rand(2, KV_HEADS), **tensors
        )
    assert not caches.float().any()


@pytest.mark.parametrize(
    "scale",
    [[1.0, 2.0], "1", numpy.ones((2, KV_HEADS)), torch.rand(2, KV_HEADS).cfloat()],
    ids=["list", "str", "numpy", "complex"],
)
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_what_is_no_scale_is_named(name: str, scale: Any) -> None:
    """Also beside fp8 queries, where scales are multiplied with tensors here and not in an op."""
    q, k, v = (torch.randn(2, 3, heads, 16).to(FP8) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with pytest.raises(TypeError, match=f"^flash_attn_func: {name}: expected a (number|real dtype), got"):
        flash_attn_func(q, k, v, **{name: scale})


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *product(("softmax_scale", "softcap"), (True, False)),
        ("attention_chunk", True),
        *product(("k_descale", "v_descale"), (True, torch.tensor(True), torch.ones(2, 2).bool())),
    ],
    ids=str,
)
def test_a_bool_is_no_scale(name: str, scale: Any) -> None:
    """As FlashAttention-3's callers pass `causal` where flash-attn 2 has softmax_scale."""
    q, k, v = torch.randn(3, 2, 3, 2, 16)
    with pytest.raises(TypeError, match=f"^flash_attn_func: {name}: expected (a number|numbers), got"):
        flash_attn_func(q, k, v, **{name: scale})


# ---- rows, output ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (2, 1)}, {"attention_chunk": 3}], ids=str)
def test_seqused_q(options: dict[str, Any]) -> None:
    """The rows that are used are the last tokens of their sequence; the others give zeros and an lse of -inf."""
    q, k, v = batch()
    used = [2, 1, 6, 0, 0]
    out, lse = flash_attn_varlen_func(
        *map(torch.cat, (q, k, v)),
        starts(LENGTHS_Q),
        starts(LENGTHS_K),
        6,
        9,
        seqused_q=torch.tensor(used, dtype=torch.int32),
        return_lse=True,
        **options,
    )
    names = {"window_size": "window", "attention_chunk": "chunk"}
    options = {names.get(name, name): value for name, value in options.items()}
    for s, (begin, count) in enumerate(zip(starts(LENGTHS_Q).tolist(), used, strict=False)):
        expected = attend(q[s][:count], k[s], v[s], **options)
        assert_results((out[begin : begin + count], lse[:, begin : begin + count]), expected)
        unused = slice(begin + count, begin + LENGTHS_Q[s])
        assert not out[unused].any()
        assert lse[:, unused].isneginf().all()


def test_out() -> None:
    """Of all functions, into a slice of a wider tensor."""
    q, k, v = torch.randn(2, 3, HEADS, 16), *torch.randn(2, 2, 5, KV_HEADS, 16)
    expected = flash_attn_func(q, k, v)
    ragged = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    for function, arguments in (
        (flash_attn_func, (q, k, v)),
        (flash_attn_varlen_func, (*ragged, starts([3, 3]), starts([5, 5]), 3, 5)),
        (flash_attn_with_kvcache, (q, k, v)),
    ):
        out = torch.full((*arguments[0].shape[:-1], 20), torch.nan)[..., 2:18]
        result, _ = function(*arguments, out=out, return_lse=True)
        assert result is out
        assert_close_to_reference(out.reshape(expected.shape), expected)


@pytest.mark.parametrize("shape", [(1, 3, HEADS, 16), (2, 3, 1, 16), (2, 3, HEADS, 1), (2, 2, 3, HEADS, 16)], ids=str)
def test_out_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """Also of one that the result broadcasts to, and before a cache is written."""
    q, k, v = torch.randn(2, 3, HEADS, 16), *torch.randn(2, 2, 3, KV_HEADS, 16)
    caches = torch.zeros(2, 2, 8, KV_HEADS, 16)
    with pytest.raises(ValueError, match=r"^flash_attn_with_kvcache: out: expected shape \[2, 3, 4, 16\]"):
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0, out=torch.empty(shape))
    assert not caches.any()


@pytest.mark.parametrize(
    "extra", [{"attention_chunk": 4}, {"seqused_q": torch.tensor([1])}], ids=["chunk", "seqused_q"]
)
def test_what_a_batch_says_of_itself_is_checked(extra: dict[str, Any]) -> None:
    """Where something is computed with it before an op sees it."""
    q, k, v = torch.randn(2, HEADS, 16), *torch.randn(2, 2, 4, KV_HEADS, 16)
    table, used = torch.tensor([[0, 1]]), torch.tensor([8])
    flash_attn_varlen_func(q, k, v, starts([2]), block_table=table, seqused_k=used, **extra)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: seqused_k: expected (1 lengths of )?0 to 8"):
        flash_attn_varlen_func(q, k, v, starts([2]), block_table=table, seqused_k=used + 1, **extra)
    with pytest.raises(
        ValueError, match=r"^flash_attn_varlen_func: cu_seqlens_q: expected (2 offsets|the number of query rows)"
    ):
        flash_attn_varlen_func(q, k, v, starts([3]), block_table=table, seqused_k=used, **extra)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: block_table: expected blocks of 0 to 1"):
        flash_attn_varlen_func(q, k, v, starts([2]), block_table=table + 1, seqused_k=used, **extra)


def test_append_behind_padding_to_sequences_apart() -> None:
    """To a cache whose sequences do not lie side by side, with positions that count the padding."""
    q, k, v = torch.randn(3, 1, HEADS, 16), *torch.randn(2, 3, 1, KV_HEADS, 16)
    cos, sin = torch.rand(2, 12, 8)
    step = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "causal": True}
    step |= {"cache_seqlens": torch.tensor([4, 3, 7]), "cache_leftpad": torch.tensor([2, 0, 7])}
    dense = torch.randn(2, 3, 9, KV_HEADS, 16)
    apart = torch.cat([dense, dense.new_full((2, 3, 2, KV_HEADS, 16), torch.nan)], 2)[:, :, :9]
    unpadded = dense.clone()
    flash_attn_with_kvcache(q, *unpadded, **step | {"cache_leftpad": None})
    expected = flash_attn_with_kvcache(q, *dense, **step)
    step["cache_seqlens"] = step["cache_seqlens"].repeat_interleave(2)[::2]  # with steps of two between them
    assert_same_bits(flash_attn_with_kvcache(q, *apart, **step), expected)
    assert_same_bits(apart.contiguous(), dense)
    assert_same_bits(dense, unpadded)


@pytest.mark.parametrize("shape", [(1, KV_HEADS, 9, 16), (9, KV_HEADS, 1, 16)], ids=["sequence", "pages of a token"])
def test_append_behind_padding_where_heads_come_first(shape: tuple[int, ...]) -> None:
    """With one page, or pages of one token, one of the two strides means nothing. It must not look like that of a cache
    that was copied, and is to be copied back."""
    q, k, v = torch.randn(1, 1, HEADS, 16), *torch.randn(2, 1, 1, KV_HEADS, 16)
    step: dict[str, Any] = {"k": k, "v": v, "cache_seqlens": torch.tensor([5]), "cache_leftpad": torch.tensor([2])}
    step["block_table"] = None if shape[0] == 1 else torch.arange(9)[None]
    caches = torch.randn(2, *shape).transpose(2, 3)
    tokens_first = caches.contiguous()
    expected = flash_attn_with_kvcache(q, *tokens_first, **step)
    assert_close_to_reference(flash_attn_with_kvcache(q, *caches, **step), expected)
    assert_same_bits(caches, tokens_first)


def test_rotation_with_scales_by_head() -> None:
    """Of an fp8 cache, where queries and new keys become fp32 and the cosines are of their 16 bits."""
    q, k, v = torch.randn(2, 1, HEADS, 16).half(), *torch.randn(2, 2, 1, KV_HEADS, 16).half()
    cos, sin = torch.rand(2, 12, 8).half()
    caches = torch.randn(2, 2, 9, KV_HEADS, 16).to(torch.float8_e4m3fn)
    step = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": 4, "causal": True}
    one = flash_attn_with_kvcache(q, *caches.clone(), **step, k_descale=torch.tensor(0.5), v_descale=torch.tensor(0.5))
    by_head = torch.full((2, KV_HEADS), 0.5)
    by_head[1, 1] = 0.5 + 2**-20  # another number, and the same result
    each = flash_attn_with_kvcache(q, *caches.clone(), **step, k_descale=by_head, v_descale=by_head)
    torch.testing.assert_close(each, one, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("page_size", [1, 3, 9])
@pytest.mark.parametrize("with_new", [False, True])
def test_padding_and_rows_of_a_block_table(with_new: bool, page_size: int) -> None:
    """As of a cache without pages, whose sequences are chosen and padded likewise."""
    q, new = torch.randn(2, 1, HEADS, 16), torch.randn(2, 2, 1, KV_HEADS, 16)
    dense = torch.randn(2, 4, 9, KV_HEADS, 16)
    num_pages = 9 // page_size
    table = torch.randperm(4 * num_pages).view(4, num_pages)
    paged = torch.full((2, 4 * num_pages + 1, page_size, KV_HEADS, 16), torch.nan)
    paged[:, table] = dense.view(2, 4, num_pages, page_size, KV_HEADS, 16)
    step: dict[str, Any] = {"cache_seqlens": torch.tensor([4, 7]), "cache_leftpad": torch.tensor([2, 0])}
    step |= {"cache_batch_idx": torch.tensor([3, 1]), "causal": True}
    step |= dict(zip("kv", new, strict=True)) if with_new else {}
    table[0] = -1  # of a sequence that is not in the batch
    expected = flash_attn_with_kvcache(q, *dense, **step)
    assert_close_to_reference(flash_attn_with_kvcache(q, *paged, block_table=table, **step), expected)
    assert_same_bits(paged[:, table[1:]].view(2, 3, 9, KV_HEADS, 16), dense[:, 1:])


def test_padding_of_a_sequence_without_tokens() -> None:
    """Whatever its row of a block table of one column has."""
    q, caches = torch.randn(3, 1, HEADS, 16), torch.randn(2, 5, 4, KV_HEADS, 16)
    step: dict[str, Any] = {"cache_seqlens": torch.tensor([3, 4, 0]), "cache_leftpad": torch.tensor([1, 0, 0])}
    for column in [[2], [0], [-1]], [[2], [0], [9]]:
        table = torch.tensor(column)
        expected = flash_attn_with_kvcache(q, *caches, block_table=torch.nn.functional.pad(table, (0, 1)), **step)
        assert_same_bits(flash_attn_with_kvcache(q, *caches, block_table=table, **step), expected)
    assert not expected[2].any()


@pytest.mark.parametrize(("head_size", "padding"), [(16, [2, 1]), (13, None), (13, [2, 1])])
def test_copied_pages_are_those_of_the_batch(
    head_size: int, padding: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another thread writes to its own page meanwhile, stays."""
    copied: list[list[int]] = []
    converted_rows, call = _attend.converted_rows, _attend.call

    def recorded(tensor: Tensor, rows: Tensor, convert: Any) -> Tensor:
        copied.append(rows.tolist())
        return converted_rows(tensor, rows, convert)

    def call_while_another_writes(*args: Any, **kwargs: Any) -> Any:
        cache[4] = 7
        return call(*args, **kwargs)

    q, new = torch.randn(2, 2, HEADS, head_size), torch.randn(2, 2, 2, KV_HEADS, head_size)
    cache = torch.randn(9, 2, 3, KV_HEADS, head_size)  # keys and values by turns
    expected = cache.transpose(0, 1).contiguous()
    # Behind the pages of a sequence its row may have anything.
    step: dict[str, Any] = {"block_table": torch.tensor([[5, 2, 4, -1], [8, 0, 99, 4]]), "causal": True}
    step |= {"cache_seqlens": torch.tensor([4, 1])}
    step |= {} if padding is None else {"cache_leftpad": torch.tensor(padding)}
    right = flash_attn_with_kvcache(q, *expected, *new, **step)
    monkeypatch.setattr(_attend, "converted_rows", recorded)
    monkeypatch.setattr(_attend, "call", call_while_another_writes)
    assert_same_bits(flash_attn_with_kvcache(q, *cache.unbind(1), *new, **step), right)
    expected[:, 4] = 7
    assert_same_bits(cache.transpose(0, 1).contiguous(), expected)
    assert copied[0] == [5, 2, 8]


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize("counts", [[0, 2, 1], [0, 0, 0]])
@pytest.mark.parametrize("is_captured", [False, True])
def test_rows_behind_the_new_tokens_are_not_written(dtype: torch.dtype, counts: list[int], is_captured: bool) -> None:
    """Nor is any page that is not copied."""
    q, new = torch.randn(3, HEADS, 13), torch.randn(2, 5, KV_HEADS, 13)
    cache = torch.randn(2, 9, 3, KV_HEADS, 13).to(dtype)
    expected = cache.clone()
    step: dict[str, Any] = {"cache_seqlens": torch.tensor([4, 1, 2]), "cu_seqlens_k_new": starts(counts)}
    step |= {"block_table": torch.tensor([[5, 2], [8, 0], [3, 1]]), "cu_seqlens_q": starts([1, 1, 1])}
    graph = CPUGraph()
    with graph.capture() if is_captured else nullcontext(), torch.inference_mode():
        flash_attn_with_kvcache(q, *cache, *new, **step)
    if is_captured:
        assert_same_bits(cache, expected)
        graph.replay()
    if any(counts):
        for page, offset, row in ((8, 1, 0), (8, 2, 1), (3, 2, 2)):
            expected[:, page, offset] = new[:, row].to(dtype)
    assert_same_bits(cache, expected)


def test_scales_of_an_empty_batch() -> None:
    """One element expanded to [0, num_kv_heads] has no element."""
    cache, table = torch.zeros(2, 4, 3, KV_HEADS, 16).to(FP8), torch.zeros(0, 2, dtype=torch.int32)
    scales = dict.fromkeys(("k_descale", "v_descale"), torch.ones(1).expand(0, KV_HEADS))
    q, lengths = torch.zeros(0, HEADS, 16), torch.zeros(0, dtype=torch.int32)
    ragged = {"max_seqlen_q": 1, "max_seqlen_k": 3, "block_table": table, "seqused_k": lengths}
    assert flash_attn_varlen_func(q, *cache, starts([]), **ragged, **scales).shape == (0, HEADS, 16)
    assert flash_attn_func(q[:, None], *cache[:, :0], **scales).shape == (0, 1, HEADS, 16)
    step = {"cache_seqlens": lengths, "block_table": table, **scales}
    new = torch.zeros(2, 0, 3, KV_HEADS, 16)
    assert flash_attn_with_kvcache(q[:, None], *cache, *new, **step).shape == (0, 1, HEADS, 16)
    scales["k_descale"] = scales["k_descale"][:, :1]
    with pytest.raises(ValueError, match=r"^flash_attn_func: k_descale: expected one element, or shape \[0, 2\]"):
        flash_attn_func(q[:, None], *cache[:, :0], **scales)


SCALES = pytest.mark.parametrize("scales", ["none", "one", "by head"])


def scales_of(scales: str) -> dict[str, Any]:
    shape = {"none": None, "one": (1,), "by head": (2, KV_HEADS)}[scales]
    return {} if shape is None else {name: 0.5 + torch.rand(shape) for name in ("k_descale", "v_descale")}


@SCALES
@pytest.mark.parametrize("query_dtype", [FP8, torch.bfloat16, torch.float32], ids=str)
def test_new_tokens_in_fp8(query_dtype: torch.dtype, scales: str) -> None:
    """Their bits go into the cache: they are its numbers, whatever the scales are. As if they had been there."""
    q, new = torch.randn(2, 1, HEADS, 16).to(query_dtype), torch.randn(2, 2, 1, KV_HEADS, 16).to(FP8)
    caches = torch.randn(2, 2, 9, KV_HEADS, 16).to(FP8)
    step = scales_of(scales)
    filled = caches.clone()
    filled[:, :, 4] = new[:, :, 0]
    expected = flash_attn_with_kvcache(q, *filled, cache_seqlens=5, **step)
    out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=4, **step)
    assert out.dtype == expected.dtype
    assert_close_to_reference(out, expected)
    assert_same_bits(caches.view(torch.uint8), filled.view(torch.uint8))


@SCALES
def test_new_tokens_beside_fp8_queries(scales: str) -> None:
    """fp32 ones are divided by the scales of the cache, one or by head, and rounded."""
    q, new = torch.randn(2, 1, HEADS, 16).to(FP8), torch.randn(2, 2, 1, KV_HEADS, 16)
    caches, step = torch.randn(2, 2, 9, KV_HEADS, 16).to(FP8), scales_of(scales)
    filled = caches.clone()
    for cache, tokens, scale in zip(filled, new, step.values() or [torch.ones(1)] * 2, strict=True):
        cache[:, 4] = (tokens[:, 0] / scale[..., None]).to(FP8)
    expected = flash_attn_with_kvcache(q, *filled, cache_seqlens=5, **step)
    assert_same_bits(flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=4, **step), expected)
    assert_same_bits(caches.view(torch.uint8), filled.view(torch.uint8))


@SCALES
def test_one_new_token_in_fp8_is_refused(scales: str) -> None:
    q, caches, step = torch.randn(2, 1, HEADS, 16), torch.zeros(2, 2, 9, KV_HEADS, 16).to(FP8), scales_of(scales)
    k, v = torch.randn(2, 2, 1, KV_HEADS, 16)
    for tokens, name in ((k.to(FP8), v), "k"), ((k, v.to(FP8)), "v"):
        with pytest.raises(TypeError, match=rf"^flash_attn_with_kvcache: {name}: expected .+, got (torch\.)?float8"):
            flash_attn_with_kvcache(q, *caches, *tokens, cache_seqlens=4, **step)
    assert not caches.float().any()


@pytest.mark.parametrize("padding", [None, torch.zeros(1, dtype=torch.int32)], ids=["wide", "padding"])
def test_new_tokens_do_not_go_to_expanded_caches(padding: Tensor | None) -> None:
    """Where an op appends to copies of them, because no op takes heads of 10 numbers, or padding before the tokens."""
    cache = torch.zeros(1, 8, 1, 10).expand(2, 8, KV_HEADS, 10)
    q, (k, v) = torch.randn(1, 1, HEADS, 10), torch.randn(2, 1, 1, KV_HEADS, 10)
    with pytest.raises(ValueError, match=r"^flash_attn_with_kvcache: k_cache: expected memory for each element"):
        flash_attn_with_kvcache(q, cache, cache, k, v, cache_seqlens=0, cache_leftpad=padding)
    assert not cache.any()


def test_an_output_that_requires_grad_is_refused() -> None:
    """Torch would refuse it, too, but only when new tokens are in the cache."""
    caches = torch.zeros(2, 2, 5, KV_HEADS, 16)
    q, k, v = (torch.randn(2, 1, heads, 16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = torch.zeros_like(q, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^flash_attn_with_kvcache: out: requires grad, but there is no backward"):
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=2, out=out)
    assert not caches.any()
    with torch.no_grad():
        assert flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=2, out=out) is out
