"""pagedattn_ext.flash_attn against brute force in fp64: each item of what flash-attn's documentation promises, the
spellings of FlashAttention-3 and 4, signatures, refusals."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from brute_force import HEAD_SIZE, Pages, attend, attend_all, rows, starts
from checks import assert_close_to_reference, assert_same_bits
from torch import Tensor

from pagedattn_ext.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

HEADS, KV_HEADS = 4, 2


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(35)
        yield


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"window_size": (2, -1)},
    {"window_size": (-1, 2)},
    {"window_size": (0, 0)},
    {"window_size": (3, 3), "causal": True},  # causal makes the right window 0
    {"softmax_scale": 0.4, "softcap": 1.5, "causal": True},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": True, "window_size": (4, 0)},
    {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16), "causal": True},
    {"learnable_sink": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window_size": (None, None)},
]


def in_brute_force(options: dict[str, Any]) -> dict[str, Any]:
    names = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}
    names |= {"s_aux": "sinks", "learnable_sink": "sinks"}
    options = {names.get(name, name): value for name, value in options.items()}
    if options.get("window") == (None, None):
        options["window"] = (-1, -1)
    return options


def assert_results(actual: Any, expected: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> None:
    """(out, lse) as flash-attn has them, with lse [..., num_heads, rows], from brute force's rows."""
    out, lse = actual
    assert_close_to_reference(out, expected[0].view(*shape, HEADS, HEAD_SIZE))
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert_close_to_reference(lse, expected[1].view(*shape, HEADS).transpose(-2, -1))


# ---- what a row sees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(3, 7), (7, 3), (1, 6), (5, 5), (2, 0)], ids=str)
def test_dense(options: dict[str, Any], lengths: tuple[int, int]) -> None:
    """Among them more rows than keys, where the first rows of causal see nothing; and no keys at all."""
    seqlen_q, seqlen_k = lengths
    q, k, v = (rows([n] * 2, heads) for n, heads in ((seqlen_q, HEADS), (seqlen_k, KV_HEADS), (seqlen_k, KV_HEADS)))
    actual = flash_attn_func(torch.stack(q), torch.stack(k), torch.stack(v), **options, return_lse=True)
    assert_results(actual, attend_all(q, k, v, **in_brute_force(options)), (2, seqlen_q))


LENGTHS_Q, LENGTHS_K = [3, 1, 6, 0, 4], [7, 5, 2, 3, 0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("where", ["dense", "paged", "used"])
def test_varlen(options: dict[str, Any], where: str) -> None:
    q, k, v = rows(LENGTHS_Q, HEADS), rows(LENGTHS_K, KV_HEADS), rows(LENGTHS_K, KV_HEADS)
    expected = attend_all(q, k, v, **in_brute_force(options))
    options = options | {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K), "return_lse": True}
    if where == "dense":
        actual = flash_attn_varlen_func(
            torch.cat(q), torch.cat(k), torch.cat(v), starts(LENGTHS_Q), starts(LENGTHS_K), **options
        )
    elif where == "paged":
        pages = Pages(16, 3, KV_HEADS, HEAD_SIZE)
        table = pages.table(LENGTHS_K)
        pages.write(table, k, v)
        actual = flash_attn_varlen_func(
            torch.cat(q), pages.key, pages.value, starts(LENGTHS_Q), starts(LENGTHS_K), block_table=table, **options
        )
    else:  # two more keys behind each sequence, which are not used
        unused = torch.full((2, KV_HEADS, HEAD_SIZE), torch.nan)
        k, v = ([torch.cat([tensor, unused]) for tensor in tensors] for tensors in (k, v))
        room = [length + 2 for length in LENGTHS_K]
        used = torch.tensor(LENGTHS_K, dtype=torch.int32)
        actual = flash_attn_varlen_func(
            torch.cat(q), torch.cat(k), torch.cat(v), starts(LENGTHS_Q), starts(room), seqused_k=used, **options
        )
    assert_results(actual, expected, (sum(LENGTHS_Q),))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, None])
def test_kvcache(options: dict[str, Any], page_size: int | None) -> None:
    """Without k and v the lengths are those of all that is in the cache; page_size None is a cache without pages."""
    lengths = [7, 1, 0, 4]
    q, k, v = rows([2] * 4, HEADS), rows(lengths, KV_HEADS), rows(lengths, KV_HEADS)
    pages = Pages(24, page_size, KV_HEADS, HEAD_SIZE) if page_size else Pages(4, 9, KV_HEADS, HEAD_SIZE)
    table = pages.table(lengths) if page_size else torch.arange(4)[:, None]
    pages.write(table, k, v)
    tables = {"block_table": table} if page_size else {}
    actual = flash_attn_with_kvcache(
        torch.stack(q),
        pages.key,
        pages.value,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        **tables,
        **options,
        return_softmax_lse=True,
    )
    assert_results(actual, attend_all(q, k, v, **in_brute_force(options)), (4, 2))


def test_rows_without_keys_are_zeros() -> None:
    """Of 5 rows over 2 keys the first 3; NaN or a mean of the values would be in their place."""
    q, k, v = torch.randn(1, 5, HEADS, HEAD_SIZE), *torch.randn(2, 1, 2, KV_HEADS, HEAD_SIZE)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert not out[:, :3].any()
    assert (lse[..., :3] == -torch.inf).all()
    assert out[:, 3:].any(-1).all()
    assert lse[..., 3:].isfinite().all()


# ---- what a cache is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlens", [5, None])
def test_one_length_for_all(seqlens: int | None) -> None:
    """An int is each sequence's length, None the whole cache."""
    q, k, v = rows([1] * 3, HEADS), rows([6] * 3, KV_HEADS), rows([6] * 3, KV_HEADS)
    out = flash_attn_with_kvcache(torch.stack(q), torch.stack(k), torch.stack(v), cache_seqlens=seqlens, causal=True)
    expected, _ = attend_all(q, [keys[:seqlens] for keys in k], [values[:seqlens] for values in v])
    assert_close_to_reference(out, expected.view(3, 1, HEADS, HEAD_SIZE))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("spelling", ["block_table", "page_table"])
def test_append(dtype: torch.dtype, spelling: str) -> None:
    """New tokens are written behind cache_seqlens, into views of one tensor; nothing else in the cache changes."""
    before, new = [4, 0, 7], 3
    total = [length + new for length in before]
    q, k, v = rows([new] * 3, HEADS), rows(total, KV_HEADS), rows(total, KV_HEADS)
    pages = Pages(12, 4, KV_HEADS, HEAD_SIZE, interleaved=True)
    table = pages.table(total, dtype)
    pages.write(table, [keys[:-new] for keys in k], [values[:-new] for values in v])
    num_written = sum(before)
    assert int(pages.key[..., 0, 0].isfinite().sum()) == num_written
    actual = flash_attn_with_kvcache(
        torch.stack(q),
        pages.key,
        pages.value,
        torch.stack([keys[-new:] for keys in k]),
        torch.stack([values[-new:] for values in v]),
        cache_seqlens=torch.tensor(before, dtype=torch.int32),
        causal=True,
        return_softmax_lse=True,
        **{spelling: table},
    )
    assert_results(actual, attend_all(q, k, v, causal=True), (3, new))
    for row, keys, values in zip(table, k, v, strict=True):
        stored = pages.read(row, len(keys))
        assert_same_bits(stored[0], keys)
        assert_same_bits(stored[1], values)
    assert int(pages.key[..., 0, 0].isfinite().sum()) == num_written + 3 * new


def test_append_without_pages() -> None:
    """With cache_batch_idx: sequence 0 is row 2 of the cache, sequence 1 row 0."""
    before, new = [2, 5], 2
    q, k, v = rows([new] * 2, HEADS), rows([4, 7], KV_HEADS), rows([4, 7], KV_HEADS)
    pages = Pages(3, 8, KV_HEADS, HEAD_SIZE)
    table = torch.tensor([[2], [0]])
    pages.write(table, [keys[:-new] for keys in k], [values[:-new] for values in v])
    actual = flash_attn_with_kvcache(
        torch.stack(q),
        pages.key,
        pages.value,
        torch.stack([keys[-new:] for keys in k]),
        torch.stack([values[-new:] for values in v]),
        cache_seqlens=torch.tensor(before, dtype=torch.int32),
        cache_batch_idx=torch.tensor([2, 0], dtype=torch.int32),
        causal=True,
        return_lse=True,
    )
    assert_results(actual, attend_all(q, k, v, causal=True), (2, new))
    assert pages.key[1].isnan().all()


def test_append_with_left_padding() -> None:
    """Tokens before cache_leftpad are skipped; a window counts from the row, as ever."""
    padding, before, new = [3, 0], [6, 4], 1
    q, k, v = rows([new] * 2, HEADS), rows([4, 5], KV_HEADS), rows([4, 5], KV_HEADS)
    pages = Pages(2, 8, KV_HEADS, HEAD_SIZE)
    for sequence, first in enumerate(padding):
        end = first + len(k[sequence]) - new
        pages.key[sequence, first:end], pages.value[sequence, first:end] = k[sequence][:-new], v[sequence][:-new]
    actual = flash_attn_with_kvcache(
        torch.stack(q),
        pages.key,
        pages.value,
        torch.stack([keys[-new:] for keys in k]),
        torch.stack([values[-new:] for values in v]),
        cache_seqlens=torch.tensor(before, dtype=torch.int32),
        cache_leftpad=torch.tensor(padding, dtype=torch.int32),
        causal=True,
        window_size=(2, 0),
        return_lse=True,
    )
    assert_results(actual, attend_all(q, k, v, causal=True, window=(2, 0)), (2, new))


def test_ragged_rows_over_a_cache() -> None:
    """FlashAttention-3's form of a mixed batch: cu_seqlens_q, here with new tokens by cu_seqlens_k_new."""
    before, new = [4, 0, 7], [1, 5, 2]
    total = [a + b for a, b in zip(before, new, strict=True)]
    q, k, v = rows(new, HEADS), rows(total, KV_HEADS), rows(total, KV_HEADS)
    pages = Pages(24, 1, KV_HEADS, HEAD_SIZE)
    table = pages.table(total)
    pages.write(table, *([tensor[:n] for tensor, n in zip(tensors, before, strict=True)] for tensors in (k, v)))
    new_k, new_v = (torch.cat([t[n:] for t, n in zip(tensors, before, strict=True)]) for tensors in (k, v))
    actual = flash_attn_with_kvcache(
        q=torch.cat(q),
        k_cache=pages.key,
        v_cache=pages.value,
        k=new_k,
        v=new_v,
        page_table=table,
        cache_seqlens=torch.tensor(before, dtype=torch.int32),
        cu_seqlens_q=starts(new),
        cu_seqlens_k_new=starts(new),
        max_seqlen_q=5,
        causal=True,
        num_splits=1,
        pack_gqa=False,
        return_softmax_lse=True,
    )
    assert_results(actual, attend_all(q, k, v, causal=True), (sum(new),))
    again = flash_attn_with_kvcache(  # the same batch with its tokens in the cache, as mini-sglang calls it
        q=torch.cat(q),
        k_cache=pages.key,
        v_cache=pages.value,
        page_table=table,
        cache_seqlens=torch.tensor(total, dtype=torch.int32),
        cu_seqlens_q=starts(new),
        cu_seqlens_k_new=starts(total),
        max_seqlen_q=5,
        softmax_scale=HEAD_SIZE**-0.5,
        window_size=(-1, -1),
        causal=True,
    )
    assert_same_bits(again, actual[0])


def test_fp8_cache() -> None:
    """Scales of one element, expanded to [batch, num_kv_heads] as vLLM's; new tokens are divided by them."""
    k_descale, v_descale = (torch.tensor(scale).expand(2, KV_HEADS) for scale in (0.5, 0.25))
    q, k, v = rows([2] * 2, HEADS), rows([6] * 2, KV_HEADS), rows([6] * 2, KV_HEADS)
    pages = Pages(2, 8, KV_HEADS, HEAD_SIZE, torch.float8_e4m3fn)
    out = flash_attn_with_kvcache(
        torch.stack(q),
        pages.key,
        pages.value,
        torch.stack(k),
        torch.stack(v),
        cache_seqlens=0,
        causal=True,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    stored_k = [(keys / 0.5).to(torch.float8_e4m3fn).float() * 0.5 for keys in k]
    stored_v = [(values / 0.25).to(torch.float8_e4m3fn).float() * 0.25 for values in v]
    expected, _ = attend_all(q, stored_k, stored_v, causal=True)
    assert_close_to_reference(out, expected.view(2, 2, HEADS, HEAD_SIZE))


def test_fp8_without_cache() -> None:
    """Ragged keys, which the op for them does not take in fp8."""
    q, *kv = (rows([2, 3], heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k, v = ([tensor.to(torch.float8_e4m3fn) for tensor in tensors] for tensors in kv)
    out = flash_attn_varlen_func(
        *map(torch.cat, (q, k, v)), starts([2, 3]), starts([2, 3]), 3, 3, k_descale=torch.tensor(0.5), causal=True
    )
    expected, _ = attend_all(q, [keys.float() * 0.5 for keys in k], [values.float() for values in v], causal=True)
    assert_close_to_reference(out, expected)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (4, 4)}, {}], ids=str)
def test_rotary(interleaved: bool, options: dict[str, Any]) -> None:
    """Keys by their positions; rows by theirs too, or all by cache_seqlens where neither causal nor a window orders
    them. The caller's q and k stay as they are, and so do elements behind rot_dim."""
    before, new, rot_dim = [3, 0], 2, 8
    angles = torch.outer(torch.arange(16), torch.tensor([1.0, 0.5, 0.2, 0.1]))
    q, k, v = rows([new] * 2, HEADS), rows([new] * 2, KV_HEADS), rows([5, 2], KV_HEADS)
    cached = rows(before, KV_HEADS)

    def rotated(tensor: Tensor, positions: list[int]) -> Tensor:
        tensor = tensor.double()
        first = tensor[..., 0:rot_dim:2] if interleaved else tensor[..., : rot_dim // 2]
        second = tensor[..., 1:rot_dim:2] if interleaved else tensor[..., rot_dim // 2 : rot_dim]
        cos, sin = (f(angles[positions].double())[:, None] for f in (torch.cos, torch.sin))
        pair = [first * cos - second * sin, second * cos + first * sin]
        head = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat([head, tensor[..., rot_dim:]], -1)

    pages = Pages(8, 2, KV_HEADS, HEAD_SIZE)
    table = pages.table([5, 2])
    pages.write(table, cached, [values[:-new] for values in v])
    given = torch.stack(q), torch.stack(k)
    kept = [tensor.clone() for tensor in given]
    out = flash_attn_with_kvcache(
        given[0],
        pages.key,
        pages.value,
        given[1],
        torch.stack([values[-new:] for values in v]),
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        cache_seqlens=torch.tensor(before, dtype=torch.int32),
        block_table=table,
        rotary_interleaved=interleaved,
        **options,
    )
    positions = [[length, length + 1] for length in before]
    keys = [torch.cat([old, rotated(k[s], positions[s])]) for s, old in enumerate(cached)]
    if not options:
        positions = [[length, length] for length in before]
    queries = [rotated(q[s], positions[s]) for s in range(2)]
    expected, _ = attend_all(queries, keys, v, **in_brute_force(options))
    assert_close_to_reference(out, expected.view(2, new, HEADS, HEAD_SIZE))
    for tensor, copy in zip(given, kept, strict=True):
        assert_same_bits(tensor, copy)


@pytest.mark.parametrize("batch", [1, 2])
def test_views(batch: int) -> None:
    """q, k and v of [batch, heads, seqlen, head_size] turned around, as transformers has them, and heads whose last
    dimension is not contiguous."""
    q, k, v = torch.randn(batch, HEADS, 3, HEAD_SIZE), *torch.randn(2, batch, KV_HEADS, 5, HEAD_SIZE)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    expected = flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert_same_bits(flash_attn_func(q, k, v, causal=True), expected)
    strided = [tensor.transpose(1, 3).contiguous().transpose(1, 3) for tensor in (q, k, v)]
    assert_same_bits(flash_attn_func(*strided, causal=True), expected)


# ---- signatures ------------------------------------------------------------------------------------------------------

# flash-attn 2.8, in order. Without a default there, and with one here for FlashAttention-4's callers: "None here".
NONE_HERE = "None here"
SIGNATURES: dict[Callable[..., Any], dict[str, Any]] = {
    flash_attn_func: {
        "q": inspect.Parameter.empty,
        "k": inspect.Parameter.empty,
        "v": inspect.Parameter.empty,
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
    },
    flash_attn_varlen_func: {
        "q": inspect.Parameter.empty,
        "k": inspect.Parameter.empty,
        "v": inspect.Parameter.empty,
        "cu_seqlens_q": inspect.Parameter.empty,
        "cu_seqlens_k": NONE_HERE,
        "max_seqlen_q": NONE_HERE,
        "max_seqlen_k": NONE_HERE,
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
        "block_table": None,
    },
    flash_attn_with_kvcache: {
        "q": inspect.Parameter.empty,
        "k_cache": inspect.Parameter.empty,
        "v_cache": inspect.Parameter.empty,
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}
NEWER = {"qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "pack_gqa", "sm_margin"}
NEWER |= {"learnable_sink", "s_aux", "return_lse", "out"}
ALSO = {
    flash_attn_func: {"num_splits"},
    flash_attn_varlen_func: {"num_splits", "page_table", "seqused_q", "seqused_k", "scheduler_metadata"}
    | {"sinks", "ver", "fa_version", "return_softmax_lse"},
    flash_attn_with_kvcache: {"page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens"}
    | {"scheduler_metadata", "sinks", "ver", "fa_version"},
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_signature(function: Callable[..., Any]) -> None:
    """Names, order and defaults, which callers inspect."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    expected = {name: None if value is NONE_HERE else value for name, value in SIGNATURES[function].items()}
    assert list(positional.items()) == list(expected.items())
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == NEWER | ALSO[function]
    assert len(parameters) == len(positional) + len(NEWER | ALSO[function])


def test_hints_change_nothing() -> None:
    q, k, v = torch.randn(1, 3, HEADS, HEAD_SIZE), *torch.randn(2, 1, 5, KV_HEADS, HEAD_SIZE)
    plain = flash_attn_func(q, k, v, causal=True)
    hints: dict[str, Any] = {"num_splits": 4, "pack_gqa": True, "sm_margin": 2}
    assert_same_bits(flash_attn_func(q, k, v, causal=True, deterministic=True, **hints), plain)
    metadata = torch.zeros(2, dtype=torch.int32)
    hints |= {"scheduler_metadata": metadata, "ver": 4}
    assert_same_bits(flash_attn_with_kvcache(q, k, v, causal=True, **hints), plain)


def test_spellings_of_sgl_kernel() -> None:
    q, k, v = torch.randn(3, HEADS, HEAD_SIZE), *torch.randn(2, 5, KV_HEADS, HEAD_SIZE)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    expected, _ = attend(q, k, v, sinks=sinks)
    out = flash_attn_varlen_func(q, k, v, starts([3]), starts([5]), 3, 5, sinks=sinks, ver=3)
    assert_close_to_reference(out, expected)
    out = flash_attn_with_kvcache(q[None], k[None], v[None], sinks=sinks, ver=3)
    assert_close_to_reference(out[0], expected)


def test_return_attn_probs_is_a_triple() -> None:
    """As ring attention and others unpack it."""
    q, k, v = torch.randn(1, 3, HEADS, HEAD_SIZE), *torch.randn(2, 1, 5, KV_HEADS, HEAD_SIZE)
    out, lse, probs = flash_attn_func(q, k, v, return_attn_probs=True)
    assert_results((out, lse), attend(q[0], k[0], v[0]), (1, 3))
    assert probs.numel() == 0


# ---- refusals --------------------------------------------------------------------------------------------------------

TENSOR = torch.ones(1)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.1}, "dropout_p: expected 0.0, got 0.1"),
    ({"qv": TENSOR}, "qv: expected None, got a tensor"),
    ({"attention_chunk": -8}, r"attention_chunk: expected 0 \(no chunks\) or a number of tokens, got -8"),
    ({"s_aux": TENSOR}, r"s_aux: expected shape \[4\], got \[1\]"),
    ({"s_aux": TENSOR, "learnable_sink": TENSOR}, "s_aux: expected None beside learnable_sink"),
    ({"alibi_slopes": torch.ones(2, HEADS)}, r"alibi_slopes: expected shape \[1, 4\], got \[2, 4\]"),
    ({"k_descale": torch.ones(2, 2)}, r"k_descale: expected one element, or shape \[1, 2\] .*, got shape \[2, 2\]"),
    ({"v_descale": torch.ones(2)}, r"v_descale: expected one element, or shape \[1, 2\] .*, got shape \[2\]"),
    ({"q": torch.ones(3, HEADS, HEAD_SIZE)}, "q: expected 4 dimensions, got 3"),
    ({"q": torch.ones(1, 3, HEADS, 12)}, r"q: expected shape \[\*, \*, \*, 16\], got \[1, 3, 4, 12\]"),
    ({"k": torch.ones(1, 5, KV_HEADS, 13)}, "q: expected heads of 13 elements, as the keys have, got 16"),
    ({"k": torch.ones(1, 5, 3, HEAD_SIZE)}, "v: expected shape"),
    ({"softmax_scale": torch.inf}, "softmax_scale: expected a finite number"),
    ({"window_size": (1, 2, 3)}, "window_size: expected"),
    ({"q": torch.ones(2, 3, HEADS, HEAD_SIZE)}, "k: expected 2 sequences, as q has, got 1"),
    ({"out": torch.ones(1, 3, 1, HEAD_SIZE).expand(1, 3, HEADS, HEAD_SIZE)}, "out: expected memory for each element"),
    ({"window_size": 5}, r"window_size: expected \(left, right\), got 5"),
    ({"softcap": -1.0}, "softcap: expected 0 or a positive normal number"),
    ({"window_size": (2, 2**40), "out": torch.ones(1, 1, HEADS, HEAD_SIZE)}, r"out: expected shape \[1, 3, 4, 16\]"),
    ({"out": torch.ones(1, 3, HEADS, HEAD_SIZE, device="meta")}, "out: expected a tensor on cpu, got one on meta"),
    ({"out": torch.ones(1, 3, HEADS, HEAD_SIZE).half()}, "out: expected dtype float32, got float16"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(arguments: dict[str, Any], message: str) -> None:
    tensors: dict[str, Any] = {"q": torch.randn(1, 3, HEADS, HEAD_SIZE)}
    tensors |= dict(zip("kv", torch.randn(2, 1, 5, KV_HEADS, HEAD_SIZE), strict=True))
    with pytest.raises((ValueError, TypeError), match=f"^flash_attn_func: {message}"):
        flash_attn_func(**tensors | arguments)


PAGED = {"block_table": torch.zeros(1, 1, dtype=torch.int32)}
REFUSED_OF_CACHES: list[tuple[dict[str, Any], str]] = [
    ({"qv": TENSOR}, "qv: expected None, got a tensor"),
    ({**PAGED, "page_table": PAGED["block_table"]}, "page_table: expected None beside block_table"),
    (
        {**PAGED, "cache_batch_idx": torch.tensor([1])},
        r"cache_batch_idx: expected rows of block_table, 0 to 0, got \[1\]",
    ),
    ({**PAGED, "cache_batch_idx": torch.tensor([0, 0])}, "cache_batch_idx: expected 1 elements, got 2"),
    ({"rotary_cos": TENSOR}, "rotary_cos: expected None without both k and v, got a tensor"),
    ({"k": torch.ones(1, 1, KV_HEADS, HEAD_SIZE)}, "k: expected None without both k and v, got a tensor"),
    (
        {**dict(zip("kv", torch.ones(2, 1, 2, KV_HEADS, HEAD_SIZE), strict=True)), "cache_seqlens": 4},
        "cache_seqlens: expected 0 or more, and room for the new tokens, got 2 new tokens from 4 on in caches for 5",
    ),
    (
        {**dict(zip("kv", torch.ones(2, 1, 2, KV_HEADS, HEAD_SIZE), strict=True)), "cache_seqlens": -1},
        "cache_seqlens: expected 0 or more, and room for the new tokens, got 2 new tokens from -1 on in caches for 5",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_OF_CACHES, ids=[message for _, message in REFUSED_OF_CACHES])
def test_refused_of_caches(arguments: dict[str, Any], message: str) -> None:
    """And nothing is written before."""
    key_cache, value_cache = torch.zeros(2, 1, 5, KV_HEADS, HEAD_SIZE)
    with pytest.raises(ValueError, match=f"^flash_attn_with_kvcache: {message}"):
        flash_attn_with_kvcache(torch.randn(1, 2, HEADS, HEAD_SIZE), key_cache, value_cache, **arguments)
    assert not key_cache.any()


def test_refused_varlen() -> None:
    q, k, v = torch.randn(3, HEADS, HEAD_SIZE), *torch.randn(2, 5, KV_HEADS, HEAD_SIZE)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: cu_seqlens_k: expected a tensor without a block"):
        flash_attn_varlen_func(q, k, v, starts([3]), seqused_k=starts([5])[1:])
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: cu_seqlens_k: expected a tensor without seqused_k"):
        flash_attn_varlen_func(q, k[None], v[None], starts([3]), **PAGED)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: seqused_q: expected for each .* \[3\], got \[4\]"):
        flash_attn_varlen_func(q, k, v, starts([3]), starts([5]), seqused_q=torch.tensor([4]))
    with pytest.raises(TypeError, match=r"^flash_attn_varlen_func: seqused_q: expected dtype int32 or int64"):
        flash_attn_varlen_func(q, k, v, starts([3]), starts([5]), seqused_q=TENSOR)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "alibi_slopes", "s_aux"])
def test_what_is_no_tensor_is_refused(name: str) -> None:
    tensors = dict(zip("qkv", torch.randn(3, 1, 3, HEADS, HEAD_SIZE), strict=True))
    with pytest.raises(TypeError, match=f"^flash_attn_func: {name}: expected a torch.Tensor, got float"):
        flash_attn_func(**tensors | {name: 0.5})


@pytest.mark.parametrize("name", ["q", "k", "v", "alibi_slopes", "s_aux"])
def test_backward_is_refused(name: str) -> None:
    tensors = dict(zip("qkv", torch.randn(3, 1, 3, HEADS, HEAD_SIZE), strict=True))
    tensors |= {"alibi_slopes": torch.ones(HEADS), "s_aux": torch.ones(HEADS)}
    tensors[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"^flash_attn_func: {name}: requires grad, but the ops have no backward"):
        flash_attn_func(**tensors)
    with torch.no_grad():
        flash_attn_func(**tensors)
