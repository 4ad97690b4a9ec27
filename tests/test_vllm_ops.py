"""pagedattn_ext.vllm_ops: vLLM's names, order and forms of the ops, whose own tests are in tests/ops."""

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import reference
import torch
from brute_force import HEAD_SIZE, attend
from checks import assert_close_to_reference, assert_memory_is_checked, assert_same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedattn_ext import CPUGraph, ops, vllm_ops

NUM_SEQS, HEADS, KV_HEADS, BLOCK_SIZE, NUM_BLOCKS = 3, 6, 3, 8, 8
SCALE = HEAD_SIZE**-0.5


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(35)
        yield


def caches(layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [num_blocks, block_size, num_kv_heads, head_size], and both in this layout of the ops."""
    key, value = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    if layout == "NHD":
        return key, value, key.clone(), value.clone()
    chunked = key.unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4).contiguous()
    return key, value, chunked, value.permute(0, 2, 3, 1).contiguous()


class Decodes:
    """A batch of new tokens over such caches."""

    def __init__(self, layout: str) -> None:
        self.key, self.value, *self.caches = caches(layout)
        self.query = torch.randn(NUM_SEQS, HEADS, HEAD_SIZE)
        self.block_tables = torch.randperm(NUM_BLOCKS)[:6].view(NUM_SEQS, 2).int()
        self.seq_lens = torch.tensor([11, 1, 8], dtype=torch.int32)

    def expected(self, kv_heads: list[int], slopes: Tensor | None = None) -> Tensor:
        """By brute force, each head with the keys of its KV head."""
        out = torch.zeros(NUM_SEQS, HEADS, HEAD_SIZE, dtype=torch.float64)
        for s, (length, table) in enumerate(zip(self.seq_lens.tolist(), self.block_tables.long(), strict=True)):
            keys, values = (cache[table].flatten(0, 1)[:length] for cache in (self.key, self.value))
            for h, kv_head in enumerate(kv_heads):
                only = slice(kv_head, kv_head + 1)
                options: dict[str, Any] = {"slopes": None if slopes is None else slopes[h : h + 1]}
                out[s, h] = attend(self.query[s, None, h, None], keys[:, only], values[:, only], **options)[0][0, 0]
        return out


LAYOUTS = ["chunked", "NHD"]
REGULAR = [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_attention(layout: str) -> None:
    """v1 and v2 by position, as vLLM calls them."""
    batch = Decodes(layout)
    slopes = torch.rand(HEADS)
    arguments = batch.query, *batch.caches, KV_HEADS, SCALE, batch.block_tables, batch.seq_lens, BLOCK_SIZE, 11, slopes
    out = torch.empty_like(batch.query)
    vllm_ops.paged_attention_v1(out, *arguments, "auto", 1.0, torch.ones(1), tp_rank=0)
    assert_close_to_reference(out, batch.expected(REGULAR, slopes))
    exp_sum, max_logits = torch.empty(2, NUM_SEQS, HEADS, 1)
    out2 = torch.empty_like(out)
    vllm_ops.paged_attention_v2(
        out2, exp_sum, max_logits, torch.empty(NUM_SEQS, HEADS, 1, HEAD_SIZE), *arguments, "auto", 1.0, 1.0
    )
    assert_same_bits(out2, out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "head_mapping",
    [REGULAR, [[0, 0], [1, 1], [2, 2]], [2, 0, 1, 2, 0, 1], [1, 1, 1, 1, 0, 1], [2] * 6],
    ids=["regular", "2-D", "interleaved", "uneven", "one"],
)
def test_head_mapping(layout: str, head_mapping: Any) -> None:
    """The KV head of each head, in any map; the slopes are those of the heads."""
    batch, slopes = Decodes(layout), torch.rand(HEADS)
    out = torch.empty_like(batch.query)
    mapping = torch.tensor(head_mapping, dtype=torch.int32)
    vllm_ops.single_query_cached_kv_attention(
        out,
        batch.query,
        *batch.caches,
        head_mapping=mapping,
        scale=SCALE,
        block_tables=batch.block_tables,
        context_lens=batch.seq_lens,
        block_size=BLOCK_SIZE,
        max_context_len=batch.seq_lens.max(),
        alibi_slopes=slopes,
    )
    assert_close_to_reference(out, batch.expected(mapping.flatten().tolist(), slopes))


@pytest.mark.parametrize("head_mapping", [[0, 1], [0, 0, 1, 1, 2, 3], [0, 0, 1, 1, 2, -1]])
def test_wrong_head_mapping(head_mapping: list[int]) -> None:
    batch = Decodes("chunked")
    arguments = SCALE, batch.block_tables, batch.seq_lens, BLOCK_SIZE, 11
    with pytest.raises(ValueError, match=r"^single_query_.*: head_mapping: expected 6 elements from 0 to 2, got \[0,"):
        vllm_ops.single_query_cached_kv_attention(
            batch.query.clone(), batch.query, *batch.caches, torch.tensor(head_mapping), *arguments
        )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("output", lambda output: output.repeat(2, 1, 1, 1), "expected shape "),  # torch would repeat the result
        ("output", lambda output: output.long(), "expected dtype float32, got int64"),
        ("output", lambda output: output.to("meta"), "expected a tensor on cpu, got one on meta"),
        ("query", lambda query: query[0], "expected 3 dimensions, got 2"),
        ("value_cache", lambda cache: None, "expected a torch.Tensor, got NoneType"),
        ("head_mapping", lambda mapping: mapping.tolist(), "expected a torch.Tensor, got list"),
        ("context_lens", lambda lens: lens + 30, "expected .*, got 41"),
        ("max_context_len", lambda length: 3, "expected .*, got 3"),
        ("max_context_len", lambda length: 11.5, "expected an int, got float"),
        ("alibi_slopes", lambda slopes: slopes[:2], r"expected shape \[6\], got \[2\]"),
    ],
)
def test_errors_of_the_first_vllm(name: str, change: Any, message: str) -> None:
    batch = Decodes("chunked")
    arguments = {
        "output": torch.zeros_like(batch.query), "query": batch.query, "key_cache": batch.caches[0],
        "value_cache": batch.caches[1], "head_mapping": torch.tensor(REGULAR), "scale": SCALE,
        "block_tables": batch.block_tables, "context_lens": batch.seq_lens, "block_size": BLOCK_SIZE,
        "max_context_len": 16, "alibi_slopes": torch.rand(HEADS),
    }  # fmt: skip
    vllm_ops.single_query_cached_kv_attention(**arguments)
    with pytest.raises((ValueError, TypeError), match=f"^single_query_cached_kv_attention: {name}: {message}"):
        vllm_ops.single_query_cached_kv_attention(**arguments | {name: change(arguments[name])})


@pytest.mark.parametrize("wrong", [None, [1.0], torch.zeros(3, 6, 16).to_sparse(), torch.tensor(1)])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("cpu_attention_with_kv_cache", "query"),
        ("cpu_attention_with_kv_cache", "key_cache"),
        ("cpu_attention_with_kv_cache", "output"),
        ("cpu_attn_reshape_and_cache", "key"),
        ("cpu_attn_reshape_and_cache", "value_cache"),
        ("cpu_attn_reshape_and_cache", "slot_mapping"),
        ("merge_attn_states", "output"),
        ("merge_attn_states", "prefix_output"),
        ("merge_attn_states", "suffix_lse"),
        ("swap_blocks", "src"),
        ("convert_fp8", "input"),
    ],
)
def test_what_is_no_such_tensor(function: str, name: str, wrong: Any) -> None:
    query, lse, cache, lens = torch.zeros(3, 6, 16), torch.zeros(6, 3), torch.zeros(8, 3, 8, 16), torch.ones(3).int()
    arguments = {
        "cpu_attention_with_kv_cache": {
            "query": query, "key_cache": cache, "value_cache": cache, "output": query.clone(),
            "query_start_loc": torch.arange(4), "seq_lens": lens, "scale": 1.0, "causal": True, "alibi_slopes": None,
            "sliding_window": -1, "block_table": lens[:, None], "softcap": 0.0, "scheduler_metadata": None,
            "s_aux": None,
        },
        "cpu_attn_reshape_and_cache": {
            "key": query[:, :3], "value": query[:, :3], "key_cache": cache, "value_cache": cache.clone(),
            "slot_mapping": torch.arange(3), "isa": "",
        },
        "merge_attn_states": {
            "output": query.clone(), "prefix_output": query, "prefix_lse": lse, "suffix_output": query,
            "suffix_lse": lse,
        },
        "swap_blocks": {
            "src": cache, "dst": cache.clone(), "block_size_in_bytes": 1536, "block_mapping": torch.tensor([[0, 1]]),
        },
        "convert_fp8": {"output": query.byte(), "input": query},
    }[function]  # fmt: skip
    call = getattr(vllm_ops, function)
    call(**arguments)
    if function in ("swap_blocks", "convert_fp8") and isinstance(wrong, Tensor) and not wrong.is_sparse:
        return  # of any rank
    with pytest.raises((ValueError, TypeError), match=rf"^{function}: (output|{name}): expected "):
        call(**arguments | {name: wrong})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reshape_and_cache(layout: str) -> None:
    """And back, by gather_cached_kv; a slot of -1 is skipped."""
    key, value, *paged = caches(layout)
    new_key, new_value = torch.randn(2, 4, KV_HEADS, HEAD_SIZE)
    slots = torch.tensor([9, -1, 0, 63])
    name = "reshape_and_cache_flash" if layout == "NHD" else "reshape_and_cache"
    getattr(vllm_ops, name)(new_key, new_value, *paged, slots, "auto", 1.0, torch.tensor(1.0))
    gathered = torch.empty(2, NUM_BLOCKS * BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    vllm_ops.gather_cached_kv(*gathered, *paged, torch.arange(NUM_BLOCKS * BLOCK_SIZE))
    for tensor, new, old in zip(gathered, (new_key, new_value), (key, value), strict=True):
        expected = old.flatten(0, 1)
        expected[slots[slots >= 0]] = new[slots >= 0]
        assert_same_bits(tensor, expected)


def test_fp8_scales() -> None:
    """A float, as in older vLLM, divides what is stored, wherever new tensors are made."""
    cache = torch.zeros(2, NUM_BLOCKS, KV_HEADS, 1, BLOCK_SIZE, 16, dtype=torch.uint8)
    key_cache, value_cache = cache[0], cache[1].view(NUM_BLOCKS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
    (key, value), slots = torch.randn(2, 1, KV_HEADS, HEAD_SIZE), torch.tensor([0])
    with torch.device("meta"):
        vllm_ops.reshape_and_cache(key, value, key_cache, value_cache, slots, "fp8", 0.5, 0.25)
    assert_same_bits(key_cache[0, :, 0, 0].view(torch.float8_e4m3fn), (key[0] / 0.5).to(torch.float8_e4m3fn))
    assert_same_bits(value_cache[0, ..., 0].view(torch.float8_e4m3fn), (value[0] / 0.25).to(torch.float8_e4m3fn))


PAIRS = torch.tensor([[0, 3], [0, 5], [1, 2]])


@pytest.mark.parametrize(
    "mapping",
    [{0: [3, 5], 1: [2]}, {0: (3, 5), 1: 2}, PAIRS, PAIRS.tolist(), [*PAIRS.int().numpy()]],
    ids=["lists", "ints", "tensor", "pairs", "numpy"],
)
def test_block_mappings(mapping: Any) -> None:
    """Of a copy with two targets of one source, and of a swap."""
    before = torch.randn(2, NUM_BLOCKS, 3)
    after = before.clone()
    vllm_ops.copy_blocks([after[0]], [after[1]], mapping)
    expected = before.clone()
    expected[:, PAIRS[:, 1]] = before[:, PAIRS[:, 0]]
    assert_same_bits(after, expected)
    pool = torch.zeros(NUM_BLOCKS, 3)
    vllm_ops.swap_blocks(before[0], pool, mapping)
    assert_same_bits(pool[PAIRS[:, 1]], before[0, PAIRS[:, 0]])
    assert not pool[[0, 1, 4, 6, 7]].any()


def test_swaps_of_bytes() -> None:
    """The newest order: blocks of so many bytes, wherever they lie in a tensor; the first order goes by dimension 0."""
    src, dst = torch.randn(2, NUM_BLOCKS, 3), torch.zeros(NUM_BLOCKS, 2, 3)
    vllm_ops.swap_blocks(src, dst, 12, PAIRS + 8)
    expected = torch.zeros_like(dst).view(-1, 3)
    expected[PAIRS[:, 1] + 8] = src.view(-1, 3)[PAIRS[:, 0] + 8]
    assert_same_bits(dst.view(-1, 3), expected)
    first, newest = torch.zeros_like(src), torch.zeros_like(src)
    vllm_ops.swap_blocks(src, first, block_mapping=torch.tensor([[0, 1]]))
    vllm_ops.swap_blocks(src, newest, block_size_in_bytes=NUM_BLOCKS * 12, block_mapping=torch.tensor([[0, 1]]))
    assert_same_bits(first[1], src[0])
    assert_same_bits(newest, first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PAIRS, 12), "block_mapping: expected a tensor, a dict or a list of pairs, got 12"),
        ((12,), "block_mapping: expected a tensor, a dict or a list of pairs, got 12"),
        ((), "block_mapping: expected a tensor, a dict or a list of pairs, got none"),
        (("x",), "block_mapping: expected a tensor, a dict or a list of pairs, got 'x'"),
        *(
            ((wrong,), f"block_mapping: expected a tensor, a dict or a list of pairs, got {re.escape(repr(wrong))}$")
            for wrong in (
                {0: None},
                {0: True},
                {0: [1.5]},
                [0, 1, 2, 3],
                [(0, 1, 2, 3)],
                [(0.9, 1.7)],
                [(True, False)],
                [(0, True)],
                [(0, torch.tensor(1.5))],
                [[(0, 1), (2, 3)]],
                [()],
            )
        ),
        ((PAIRS, PAIRS), "block_size_in_bytes: expected an int, got Tensor"),
        ((7, PAIRS), "src: expected contiguous memory of whole blocks of block_size_in_bytes 7, got 96 bytes"),
        ((0, PAIRS), "src: expected contiguous memory of whole blocks of block_size_in_bytes 0, got 96 bytes"),
        ((-12, PAIRS), "src: expected contiguous memory of whole blocks of block_size_in_bytes -12, got 96 bytes"),
        ((12, PAIRS + 4), "block_mapping: expected"),
    ],
)
def test_refused_swaps(arguments: tuple[Any, ...], message: str) -> None:
    src, dst = torch.randn(NUM_BLOCKS, 3), torch.zeros(NUM_BLOCKS, 3)
    with pytest.raises((ValueError, TypeError), match=f"^swap_blocks: {message}"):
        vllm_ops.swap_blocks(src, dst, *arguments)
    assert not dst.any()


def test_empty_mapping() -> None:
    cache = torch.randn(NUM_BLOCKS, 3)
    before = cache.clone()
    vllm_ops.copy_blocks([cache], [cache.clone()], {})
    assert_same_bits(cache, before)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_convert_fp8(kv_dtype: str, as_bytes: bool) -> None:
    """There, saturating, and back."""
    fp8 = torch.float8_e5m2 if kv_dtype == "fp8_e5m2" else torch.float8_e4m3fn
    x = torch.cat([torch.randn(6), torch.tensor([1e6, -1e6, 0.0])]).view(3, 3)
    stored = torch.empty(3, 3, dtype=torch.uint8 if as_bytes else fp8)
    vllm_ops.convert_fp8(stored, x, 0.5, kv_dtype)
    largest = torch.finfo(fp8).max
    assert_same_bits(stored.view(fp8), (x / 0.5).clamp(-largest, largest).to(fp8))
    back = torch.empty(3, 3, dtype=torch.bfloat16)
    vllm_ops.convert_fp8(back, stored, 0.5, kv_dtype)
    assert_close_to_reference(back, stored.view(fp8).double() * 0.5)
    for other in (torch.int8, torch.bool, torch.int32):
        with pytest.raises(TypeError, match=f"^convert_fp8: input: expected fp8, uint8 .*, got {other}$"):
            vllm_ops.convert_fp8(back, stored.to(torch.float32).to(other), 0.5, kv_dtype)
        with pytest.raises(TypeError, match=f"^convert_fp8: output: expected a float dtype .*, got {other}$"):
            vllm_ops.convert_fp8(torch.empty(3, 3, dtype=other), stored, 0.5, kv_dtype)


def test_convert_fp8_of_blocks() -> None:
    """Of a key cache into one whose parts of a head are smaller, block by block, as vLLM's tests read it."""
    stored = torch.randint(0, 0x40, (3, 2, 4, 8, 16), dtype=torch.uint8)
    back = torch.empty(3, 2, 16, 8, 4)
    vllm_ops.convert_fp8(back, stored)
    assert torch.equal(back.flatten(1), stored.view(torch.float8_e4m3fn).float().flatten(1))
    expected = r"^convert_fp8: output: expected shape \[3, 2, 4, 8, 16\], as input, or contiguous blocks of as many"
    strided = torch.empty(3, 2, 8, 16, 4).transpose(2, 3)
    for output in (torch.empty(2, 3, 4, 8, 16), strided, torch.empty(3, 2, 8, 8, 4)):
        with pytest.raises(ValueError, match=expected):
            vllm_ops.convert_fp8(output, stored)


def test_merge_attn_states() -> None:
    """lse is [num_heads, num_tokens] in vLLM."""
    prefix, suffix = torch.randn(2, 4, HEADS, HEAD_SIZE)
    prefix_lse, suffix_lse = torch.randn(2, HEADS, 4)
    output, output_lse = torch.empty_like(prefix), torch.empty(HEADS, 4)
    vllm_ops.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, output_lse)
    lse = torch.logaddexp(prefix_lse.double(), suffix_lse.double())
    weights = [(part.double() - lse).exp().T[..., None] for part in (prefix_lse, suffix_lse)]
    assert_close_to_reference(output_lse, lse)
    assert_close_to_reference(output, weights[0] * prefix + weights[1] * suffix)
    without_lse = torch.empty_like(prefix)
    vllm_ops.merge_attn_states(without_lse, prefix, prefix_lse, suffix, suffix_lse)
    assert_same_bits(without_lse, output)


@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_lse_is_an_empty_part(sign: int) -> None:
    """vLLM's convention, and flash-attn 2's."""
    prefix, suffix = torch.zeros(2, HEADS, HEAD_SIZE), torch.randn(2, HEADS, HEAD_SIZE)
    empty, suffix_lse = torch.full((HEADS, 2), sign * math.inf), torch.full((HEADS, 2), 1.5)
    output, output_lse = torch.empty_like(suffix), torch.empty_like(empty)
    vllm_ops.merge_attn_states(output, prefix, empty, suffix, suffix_lse, output_lse)
    assert_same_bits(output, suffix)
    assert_same_bits(output_lse, suffix_lse)
    vllm_ops.merge_attn_states(output, prefix, empty, suffix, empty, output_lse)
    assert not output.any()
    assert output_lse.isneginf().all()


@pytest.mark.parametrize("with_context", [0, 3, 4])
def test_tokens_without_context(with_context: int) -> None:
    """Those behind prefill_tokens_with_context: whatever stands in the prefix, they are the suffix, also where its lse
    says of a part to merge that it is empty."""
    prefix, suffix = torch.randn(2, 4, HEADS, HEAD_SIZE)
    prefix_lse, suffix_lse = torch.randn(2, HEADS, 4)
    suffix_lse[0], suffix_lse[1] = math.inf, -math.inf
    output, output_lse = torch.empty_like(prefix), torch.empty(HEADS, 4)
    expected, lse = torch.empty_like(prefix), torch.empty(HEADS, 4)
    before = prefix_lse.clone()
    vllm_ops.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, output_lse, with_context)
    assert_same_bits(prefix_lse, before)
    vllm_ops.merge_attn_states(expected, prefix, prefix_lse, suffix, suffix_lse, lse)
    assert_same_bits(output, torch.cat([expected[:with_context], suffix[with_context:]]))
    assert_same_bits(output_lse, torch.cat([lse[:, :with_context], suffix_lse[:, with_context:]], 1))


# ---- vLLM's attention on CPUs ----------------------------------------------------------------------------------------

STARTS, LENGTHS = [0, 3, 4, 6], [11, 1, 8]  # of the queries; of the keys


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 4},
        {"causal": False, "window": 3},
        {"softcap": 2.0, "slopes": torch.rand(HEADS), "sinks": torch.randn(HEADS)},
    ],
    ids=str,
)
def test_attention_on_cpus(options: dict[str, Any]) -> None:
    """From the write of keys and values, in vLLM's memory of a layer: head by head, keys, then values."""
    cache = torch.full((NUM_BLOCKS, KV_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE), math.nan)
    key_cache, value_cache = cache.chunk(2, dim=2)
    table = torch.randperm(NUM_BLOCKS)[:6].view(NUM_SEQS, 2).int()
    query, out = torch.randn(6, HEADS, HEAD_SIZE), torch.empty(6, HEADS, HEAD_SIZE)
    keys, values = torch.randn(2, sum(LENGTHS) + 1, KV_HEADS, HEAD_SIZE)  # and a row of padding
    slots = [block * BLOCK_SIZE + i for row in table.tolist() for block in row for i in range(BLOCK_SIZE)]
    slots = torch.tensor([slots[16 * s + t] for s, length in enumerate(LENGTHS) for t in range(length)])
    vllm_ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, "vec")
    starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in (STARTS, LENGTHS))
    causal, window = options.get("causal", True), options.get("window", -1)
    plan = vllm_ops.cpu_attn_get_scheduler_metadata(
        NUM_SEQS, HEADS, KV_HEADS, HEAD_SIZE, lengths, query.dtype, starts, causal, window, "vec", True
    )
    slopes, softcap, sinks = options.get("slopes"), options.get("softcap", 0.0), options.get("sinks")
    arguments = starts, lengths, SCALE, causal, slopes, window, table, softcap, plan, sinks
    vllm_ops.cpu_attention_with_kv_cache(query, key_cache, value_cache, out, *arguments)

    def expected(causal: bool) -> list[Tensor]:
        first, results = 0, []
        sides = (window - 1, window - 1) if window > 0 else (-1, -1)
        for begin, end, length in zip(STARTS, STARTS[1:], LENGTHS, strict=False):
            of_keys = slice(first, first := first + length)
            results.append(
                attend(
                    query[begin:end], keys[of_keys], values[of_keys], causal=causal, window=sides, slopes=slopes,
                    softcap=softcap, sinks=sinks,
                )[0]
            )  # fmt: skip
        return results

    assert_close_to_reference(out, torch.cat(expected(causal)))
    dynamic = torch.tensor([0, 1, 1], dtype=torch.int32)
    if slopes is None:
        vllm_ops.cpu_attention_with_kv_cache(query, key_cache, value_cache, out, *arguments, dynamic)
        assert_close_to_reference(out, torch.cat([expected(False)[0], *expected(True)[1:]]))
        return
    for more in ({"causal": False}, {"dynamic_causal": dynamic}):
        changed = (*arguments[:3], more.get("causal", True), *arguments[4:], more.get("dynamic_causal"))
        with pytest.raises(ValueError, match=r"^cpu_attention_with_kv_cache: alibi_slopes: expected None for rows"):
            vllm_ops.cpu_attention_with_kv_cache(query, key_cache, value_cache, out, *changed)


def test_fp8_attention_on_cpus() -> None:
    """Scales are floats, there and back."""
    key_cache, value_cache = torch.zeros(2, 1, KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype=torch.uint8)
    key, value, query = torch.randn(3, 2, KV_HEADS, HEAD_SIZE)
    scales = 0.5, 0.25, "fp8_e4m3"
    vllm_ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([0, 1]), "vec", *scales)
    stored = [(t / scale).to(torch.float8_e4m3fn).float() * scale for t, scale in ((key, 0.5), (value, 0.25))]
    starts, length, table = (torch.tensor(each, dtype=torch.int32) for each in ([0, 2], [2], [[0]]))
    out = torch.empty_like(query)
    arguments = starts, length, SCALE, True, None, -1, table, 0.0, None, None, None, *scales
    vllm_ops.cpu_attention_with_kv_cache(query, key_cache, value_cache, out, *arguments)
    assert_close_to_reference(out, attend(query, *stored, causal=True)[0])


def wide(tensor: Tensor) -> Tensor:
    """The same in slices of wider heads."""
    return torch.nn.functional.pad(tensor, (0, 5))[..., : tensor.shape[-1]]


def test_slices_of_wider_heads() -> None:
    """What is read and what is written may be such slices."""
    batch = Decodes("NHD")
    arguments = *batch.caches, KV_HEADS, SCALE, batch.block_tables, batch.seq_lens, BLOCK_SIZE, 11, None
    expected, out = torch.empty_like(batch.query), wide(torch.empty_like(batch.query))
    vllm_ops.paged_attention_v1(expected, batch.query, *arguments)
    vllm_ops.paged_attention_v1(out, wide(batch.query), *arguments)
    assert_same_bits(out.contiguous(), expected)
    starts, cache = torch.arange(NUM_SEQS + 1, dtype=torch.int32), [each.transpose(1, 2) for each in batch.caches]
    arguments = starts, batch.seq_lens, SCALE, True, None, -1, batch.block_tables, 0.0, None, None
    out.zero_()
    vllm_ops.cpu_attention_with_kv_cache(wide(batch.query), *cache, out, *arguments)
    assert_close_to_reference(out, expected.double())
    key, value, slots = *torch.randn(2, 2, KV_HEADS, HEAD_SIZE), torch.tensor([9, 20])
    vllm_ops.reshape_and_cache(wide(key), wide(value), *batch.caches, slots)
    found = wide(torch.zeros_like(key)), wide(torch.zeros_like(value))
    vllm_ops.gather_cached_kv(*found, *batch.caches, slots)
    assert_same_bits(found[0].contiguous(), key)
    assert_same_bits(found[1].contiguous(), value)


# ---- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rope_of_the_rest_of_a_head(is_neox: bool, flat: bool) -> None:
    """rope_dim_offset leaves the first elements; inverse takes the rotation back."""
    positions, cache = torch.tensor([5, 0, 2]), torch.randn(8, 8)
    angles = torch.rand(8, 4)
    cache = torch.cat([angles.cos(), angles.sin()], 1)
    heads = [torch.randn(3, n, HEAD_SIZE) for n in (HEADS, KV_HEADS)]
    parts = [each[..., 6:].flatten(1) for each in heads]
    expected = reference.rotary_embedding(positions, *parts, HEAD_SIZE - 6, cache, is_neox)
    rotated = [each.flatten(1) if flat else each.clone() for each in heads]
    vllm_ops.rotary_embedding(positions, *rotated, HEAD_SIZE, cache, is_neox, 6)
    for result, before, rest in zip(rotated, heads, expected, strict=True):
        result = result.view(before.shape)
        assert_same_bits(result[..., :6], before[..., :6])
        assert_close_to_reference(result[..., 6:], rest.view(*before.shape[:2], -1))
    vllm_ops.rotary_embedding(positions, *rotated, HEAD_SIZE, cache, is_neox, rope_dim_offset=6, inverse=True)
    for result, before in zip(rotated, heads, strict=True):
        assert (result.view(before.shape) - before).abs().max() < 1e-5
    vllm_ops.rotary_embedding(positions[:0], *(each[:0] for each in rotated), HEAD_SIZE, cache, is_neox, 6)


def test_norms_without_weight() -> None:
    x, residual, out = torch.randn(3, 24), torch.randn(3, 24), torch.empty(3, 24)
    vllm_ops.rms_norm(out, x, None, 1e-5)
    assert_close_to_reference(out, reference.rms_norm(x, torch.ones(24), 1e-5))
    expected = reference.fused_add_rms_norm(x, residual, torch.ones(24), 1e-5)[0]
    vllm_ops.fused_add_rms_norm(x, residual, None, 1e-5)
    assert_close_to_reference(x, expected)


def test_norms_and_rope() -> None:
    x, residual, weight, out = torch.randn(3, 24), torch.randn(3, 24), torch.randn(24), torch.empty(3, 24)
    vllm_ops.rms_norm(out, x, weight, 1e-5)
    assert_close_to_reference(out, reference.rms_norm(x, weight, 1e-5))
    expected = reference.fused_add_rms_norm(x, residual, weight, 1e-5)
    vllm_ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert_close_to_reference(x, expected[0])
    for function, extra in ((vllm_ops.rotary_embedding, (True,)), (vllm_ops.rotary_embedding_neox, ())):
        positions, cache = torch.tensor([5, 0, 2]), torch.randn(8, 8)
        q, k = torch.randn(3, HEADS * HEAD_SIZE), torch.randn(3, KV_HEADS * HEAD_SIZE)
        rotated = reference.rotary_embedding(positions, q, k, HEAD_SIZE, cache, True)
        function(positions, q, k, HEAD_SIZE, cache, *extra)
        assert_close_to_reference(q, rotated[0])
        assert_close_to_reference(k, rotated[1])


@pytest.mark.parametrize(
    "name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_new", "gelu_fast", "gelu_quick"]
)
def test_activations(name: str) -> None:
    x = torch.randn(3, 16)
    expected = getattr(reference, name)(x)
    out = torch.empty(expected.shape)
    assert getattr(vllm_ops, name)(out, x) is None
    assert_close_to_reference(out, expected)


# vLLM's _custom_ops and, of the last ones, the first vLLM; "?" has a default there or here.
DECODE = (
    "num_kv_heads scale block_tables seq_lens block_size max_seq_len alibi_slopes kv_cache_dtype? k_scale? v_scale?"
)
SPARSE = "tp_rank? blocksparse_local_blocks? blocksparse_vert_stride? blocksparse_block_size?"
SPARSE += " blocksparse_head_sliding_step?"
CACHE = "key value key_cache value_cache slot_mapping"
SIGNATURES = {
    "paged_attention_v1": f"out query key_cache value_cache {DECODE} {SPARSE}",
    "paged_attention_v2": f"out exp_sum max_logits tmp_out query key_cache value_cache {DECODE} {SPARSE}",
    "merge_attn_states": "output prefix_output prefix_lse suffix_output suffix_lse output_lse?"
    " prefill_tokens_with_context? output_scale?",
    "reshape_and_cache": f"{CACHE} kv_cache_dtype? k_scale? v_scale? interleaved_v?",
    "reshape_and_cache_flash": f"{CACHE} kv_cache_dtype? k_scale? v_scale?",
    "concat_and_cache_mla": "kv_c k_pe kv_cache slot_mapping kv_cache_dtype? scale? skip_scale?",
    "copy_blocks": "key_caches value_caches block_mapping",
    "swap_blocks": "src dst block_size_in_bytes? block_mapping?",
    "convert_fp8": "output input scale? kv_dtype?",
    "rms_norm": "out input weight epsilon",
    "fused_add_rms_norm": "input residual weight epsilon",
    "rotary_embedding": "positions query key head_size cos_sin_cache is_neox rope_dim_offset? inverse?",
    "cpu_attn_get_scheduler_metadata": "num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal"
    " sliding_window_size isa enable_kv_split dynamic_causal? kv_cache_dtype?",
    "cpu_attn_reshape_and_cache": f"{CACHE} isa k_scale? v_scale? kv_cache_dtype?",
    "cpu_attention_with_kv_cache": "query key_cache value_cache output query_start_loc seq_lens scale causal"
    " alibi_slopes sliding_window block_table softcap scheduler_metadata s_aux dynamic_causal? k_scale? v_scale?"
    " kv_cache_dtype?",
    "single_query_cached_kv_attention": "output query key_cache value_cache head_mapping scale block_tables"
    " context_lens block_size max_context_len alibi_slopes?",
    "gather_cached_kv": CACHE,
    "rotary_embedding_neox": "positions query key head_size cos_sin_cache",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(vllm_ops, name)).parameters.values()
    assert " ".join(p.name + "?" * (p.default is not p.empty) for p in parameters) == SIGNATURES[name]


def test_refused() -> None:
    batch = Decodes("chunked")
    arguments = KV_HEADS, SCALE, batch.block_tables, batch.seq_lens, BLOCK_SIZE, 11, None
    out = torch.full_like(batch.query, math.nan)
    with pytest.raises(ValueError, match=r"^paged_attention_v1: blocksparse_vert_stride: expected 0, got 8$"):
        vllm_ops.paged_attention_v1(out, batch.query, *batch.caches, *arguments, blocksparse_vert_stride=8)
    with pytest.raises(ValueError, match=r"^paged_attention_v1: k_scale: expected a scale for the whole cache"):
        vllm_ops.paged_attention_v1(out, batch.query, *batch.caches, *arguments, "auto", torch.ones(3))
    with pytest.raises(ValueError, match=r"^paged_attention_v1: block_size: expected"):
        vllm_ops.paged_attention_v1(out, batch.query, *batch.caches, *arguments[:4], 16, *arguments[5:])
    assert out.isnan().all()
    with pytest.raises(ValueError, match=r"^convert_fp8: kv_dtype: expected one of auto, .*, got 'int8'$"):
        vllm_ops.convert_fp8(out.byte(), out, 1.0, "int8")
    with pytest.raises(TypeError, match=r"^convert_fp8: output: expected fp8 or uint8 of torch.float32 input, got tor"):
        vllm_ops.convert_fp8(out, out)
    with pytest.raises(TypeError, match=r"^paged_attention_v1: scale: expected a number, got True$"):
        vllm_ops.paged_attention_v1(out, batch.query, *batch.caches, KV_HEADS, True, *arguments[2:])
    with pytest.raises(TypeError, match=r"^paged_attention_v1: v_scale: expected a number, got False$"):
        vllm_ops.paged_attention_v1(out, batch.query, *batch.caches, *arguments, "auto", 1.0, False)
    for scale in (1e39, 10**400):
        with pytest.raises(
            ValueError, match=r"^paged_attention_v1: v_scale: expected a finite number of float32, got 1"
        ):
            vllm_ops.paged_attention_v1(out, batch.query, *batch.caches, *arguments, "fp8", 1.0, scale)
    with pytest.raises(TypeError, match=r"^convert_fp8: scale: expected a number, got True$"):
        vllm_ops.convert_fp8(out.byte(), out, True)
    with pytest.raises(
        ValueError, match=r"^convert_fp8: output: expected shape \[3, 6, 16\], as input, .*, got \[1, 3, 6"
    ):
        vllm_ops.convert_fp8(out[None].byte(), out)
    lse = torch.zeros(HEADS, NUM_SEQS)
    with pytest.raises(ValueError, match=r"^merge_attn_states: suffix_lse: expected shape \[6, 3\], got \[3, 6\]$"):
        vllm_ops.merge_attn_states(out, batch.query, lse, batch.query, lse.T)
    with pytest.raises(ValueError, match=r"^merge_attn_states: output: expected shape \[3, 6, 16\], got \[1, 3,"):
        vllm_ops.merge_attn_states(out[None], batch.query, lse, batch.query, lse)
    with pytest.raises(
        ValueError, match=r"^merge_attn_states: prefill_tokens_with_context: expected 0 to 3, .*, got 4"
    ):
        vllm_ops.merge_attn_states(out, batch.query, lse, batch.query, lse, None, 4)
    cache = torch.randn(8, 8)
    for changes, message in (
        ({"rope_dim_offset": 9}, "rope_dim_offset: expected 0 to 8, what head_size 16 leaves of the 8 el.*, got 9"),
        ({"rope_dim_offset": -1}, "rope_dim_offset: expected 0 to 8, what head_size 16 leaves of the 8 el.*, got -1"),
        ({"inverse": True}, r"positions: expected 0 to 7 \(the rows of cos_sin_cache\), got 1 to 8"),
        ({"inverse": True, "positions": torch.ones(3)}, "positions: expected dtype int32 or int64, got float32$"),
        ({"inverse": True, "positions": [1, 1, 1]}, "positions: expected a torch.Tensor, got list$"),
        ({"rope_dim_offset": 2, "positions": [1, 1, 1]}, "positions: expected a torch.Tensor, got list$"),
    ):
        query = batch.query.flatten(1)
        rotary = {"positions": torch.tensor([1, 8, 2]), "query": query, "key": None, "head_size": 16}
        with pytest.raises((ValueError, TypeError), match=f"^rotary_embedding: {message}"):
            vllm_ops.rotary_embedding(**rotary | changes, cos_sin_cache=cache, is_neox=True)
    with pytest.raises(ValueError, match=r"^reshape_and_cache: interleaved_v: expected False, got True$"):
        vllm_ops.reshape_and_cache(batch.query, batch.query, *batch.caches, batch.seq_lens, interleaved_v=True)
    with pytest.raises(ValueError, match=r"^merge_attn_states: output_scale: expected None, got a tensor$"):
        vllm_ops.merge_attn_states(out, out, out, out, out, output_scale=torch.ones(1))


def test_concat_and_cache_mla() -> None:
    """vLLM's order, with a scale that has no effect; fp8 is refused by name."""
    cache, slots = torch.zeros(2, 4, 6), torch.tensor([5, -1])
    vllm_ops.concat_and_cache_mla(torch.ones(2, 4), torch.full((2, 2), 3.0), cache, slots, "auto", torch.tensor(2.0))
    assert cache[1, 1].tolist() == [1, 1, 1, 1, 3, 3]
    assert cache.count_nonzero() == 6
    before = cache.clone()
    vllm_ops.concat_and_cache_mla(
        torch.ones(2, 4), torch.full((2, 2), 3.0), cache, slots, "auto", torch.tensor(2.0), skip_scale=True
    )
    assert torch.equal(cache, before)
    with pytest.raises(ValueError, match=r"^concat_and_cache_mla: kv_cache_dtype: expected 'auto', got 'fp8'"):
        vllm_ops.concat_and_cache_mla(torch.ones(2, 4), torch.ones(2, 2), cache, slots, "fp8", None)


TABLE = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32)  # of caches of 3 blocks of 4 tokens


@pytest.mark.parametrize("seq_starts", [None, [3, 2]])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_latents_are_gathered(kv_cache_dtype: str, seq_starts: list[int] | None) -> None:
    """Token by token from where it lies. What lies behind the tokens of all sequences stays."""
    fp8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(kv_cache_dtype, torch.float32)
    numbers = torch.randn(3, 4, 6).to(fp8)
    cache = numbers.view(torch.uint8) if kv_cache_dtype != "auto" else numbers
    starts, first = torch.tensor([0, 5, 7], dtype=torch.int32), seq_starts or [0, 0]
    places = [(s, first[s] + i) for s, length in enumerate((5, 2)) for i in range(length)]
    expected = torch.stack([numbers.float()[TABLE[s, p // 4], p % 4] for s, p in places])
    offsets = None if seq_starts is None else torch.tensor(seq_starts, dtype=torch.int32)
    dst = torch.full((8, 6), 9.0)
    scale = torch.tensor(0.5)
    vllm_ops.gather_and_maybe_dequant_cache(
        cache, dst, TABLE, starts, torch.tensor([0] * 5 + [1] * 2), 7, kv_cache_dtype, scale, offsets
    )
    assert torch.equal(dst[:7], expected if kv_cache_dtype == "auto" else expected * 0.5)
    assert torch.equal(dst[7], torch.full((6,), 9.0))
    copied = torch.zeros(7, 6, dtype=cache.dtype)
    vllm_ops.cp_gather_cache(cache, copied, TABLE, starts, 2, offsets)
    assert torch.equal(copied.view(fp8).float(), expected)


def test_gathering_of_latents_is_checked() -> None:
    cache, dst, starts = torch.zeros(3, 4, 6), torch.zeros(8, 6), torch.tensor([0, 5, 7], dtype=torch.int32)
    for arguments, message in (
        ((cache, dst[:, :5], TABLE, starts, 2), r"dst: expected shape \[8, 6\], got \[8, 5\]"),
        ((cache, dst, TABLE, starts, 3), "cu_seq_lens: expected 4 elements, got 3"),
        ((cache, dst, TABLE + 1, starts, 2), "block_table: expected .* got 3"),
        ((cache, dst, TABLE, starts, 2, torch.tensor([9, 0])), "seq_starts: expected .* got new tokens from 9 to 13"),
    ):
        with pytest.raises(ValueError, match=f"^cp_gather_cache: {message}"):
            vllm_ops.cp_gather_cache(*arguments)
    fp8, uint8 = torch.float8_e4m3fn, torch.uint8
    for arguments, message in (
        ((cache.to(fp8), dst, TABLE, starts, 2), "dst: expected dtype float8_e4m3fn, got float32"),
        ((cache, dst, TABLE, None, 2), "cu_seq_lens: expected a torch.Tensor, got NoneType"),
        (([1], dst, TABLE, starts, 2), "src_cache: expected a torch.Tensor, got list"),
        ((cache, dst, TABLE, starts, "2"), "batch_size: expected an int, got str"),
    ):
        with pytest.raises(TypeError, match=f"^cp_gather_cache: {message}"):
            vllm_ops.cp_gather_cache(*arguments)
    for arguments, kv_cache_dtype, message in (
        ((cache, dst, TABLE, starts), "int4", "kv_cache_dtype: expected one of auto, fp8"),
        ((cache.to(uint8), dst, TABLE, starts), "auto", "src_cache: expected float32, .+, got torch.uint8"),
        ((cache, dst, TABLE, starts), "fp8", "src_cache: expected uint8 or torch.float8_e4m3fn .+, got torch.float32"),
        (
            (cache.to(fp8), dst, TABLE, starts),
            "fp8_e5m2",
            "src_cache: expected uint8 or torch.float8_e5m2 .+, got .+e4m3fn",
        ),
        ((cache, dst, TABLE, None), "auto", "cu_seq_lens: expected a torch.Tensor, got NoneType"),
        (([1], dst, TABLE, starts), "fp8", "src_cache: expected a torch.Tensor, got list"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^gather_and_maybe_dequant_cache: {message}"):
            vllm_ops.gather_and_maybe_dequant_cache(*arguments, None, 7, kv_cache_dtype, None)
    with pytest.raises(TypeError, match=r"^gather_.*: scale: expected a real dtype, got complex64"):
        vllm_ops.gather_and_maybe_dequant_cache(
            cache.to(fp8), dst, TABLE, starts, None, 7, "fp8", torch.ones(1).cfloat()
        )
    assert not dst.any()


def test_rows_behind_the_gathered_latents_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, dst, starts = torch.randn(3, 4, 6), torch.full((999, 6), 9.0), torch.tensor([0, 5, 7], dtype=torch.int32)
    num_rows, batch_positions = [], ops.batch_positions

    def recorded(*args: Any) -> tuple[Tensor, Tensor]:
        num_rows.append(args[2])
        return batch_positions(*args)

    monkeypatch.setattr(ops, "batch_positions", recorded)
    vllm_ops.cp_gather_cache(cache, dst, TABLE, starts, 2)
    vllm_ops.gather_and_maybe_dequant_cache(cache, dst, TABLE, starts, None, 7, "auto", None)
    assert num_rows == [7, 7]
    assert torch.equal(dst[7:], torch.full((992, 6), 9.0))
    with pytest.raises(
        ValueError, match=r"^cp_gather_cache: cu_seq_lens: expected at most 7 \(num_tokens\) last, got 8"
    ):
        vllm_ops.cp_gather_cache(cache, dst[:7], TABLE, starts + torch.tensor([0, 0, 1]), 2)
    with pytest.raises(ValueError, match=r"^cp_gather_cache: cu_seq_lens: expected shape \[1\], got \[0\]"):
        vllm_ops.cp_gather_cache(cache, dst, TABLE[:0], starts[:0], -1)


def test_latents_are_gathered_on_the_device_of_the_cache() -> None:
    """Also where the scale is a number, which becomes a tensor."""
    with FakeTensorMode():
        cache, dst = torch.empty(3, 4, 6, dtype=torch.uint8, device="meta"), torch.empty(8, 6, device="meta")
        table, starts = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2, 3), 3))
        vllm_ops.gather_and_maybe_dequant_cache(cache, dst, table, starts, None, 7, "fp8", 0.5)


def test_latents_are_gathered_in_a_graph() -> None:
    """How many tokens there are may change from a step to the next. A cache without blocks has none."""
    cache, starts = torch.randn(3, 4, 6), torch.tensor([0, 5, 7], dtype=torch.int32)
    captured = [torch.full((8, 6), 9.0) for _ in range(2)]
    graph = CPUGraph()
    with graph.capture():
        vllm_ops.cp_gather_cache(cache, captured[0], TABLE, starts, 2)
        vllm_ops.gather_and_maybe_dequant_cache(cache, captured[1], TABLE, starts, None, 7, "auto", None)
    starts.copy_(torch.tensor([0, 2, 3]))
    graph.replay()
    for dst in captured:
        assert torch.equal(dst[:3], cache[[2, 2, 1], [0, 1, 0]])
    starts, dst = torch.zeros(3, dtype=torch.int32), torch.full((8, 6), 9.0)
    vllm_ops.cp_gather_cache(cache[:0], dst, TABLE, starts, 2)
    vllm_ops.gather_and_maybe_dequant_cache(cache[:0], dst, TABLE, starts, None, 0, "auto", None)
    assert torch.equal(dst, torch.full((8, 6), 9.0))


def test_mla_decode_kvcache_cpu() -> None:
    query, cache, lengths = torch.randn(2, 5, 6), torch.randn(3, 4, 6), torch.tensor([9, 2], dtype=torch.int32)
    out = torch.empty(2, 5, 4)
    vllm_ops.mla_decode_kvcache_cpu(out, query, cache, 0.3, TABLE, lengths)
    for s, length in enumerate(lengths.tolist()):
        tokens = cache[TABLE[s].long()].flatten(0, 1)[:length]
        expected = torch.softmax(0.3 * query[s] @ tokens.T, -1) @ tokens[:, :4]
        torch.testing.assert_close(out[s], expected)
    with pytest.raises(ValueError, match=r"^mla_decode_kvcache_cpu: out: expected shape \[2, 5, 4\], got \[2, 4, 4\]"):
        vllm_ops.mla_decode_kvcache_cpu(torch.empty(2, 4, 4), query, cache, 0.3, TABLE, lengths)
    with pytest.raises(ValueError, match=r"^mla_decode_kvcache_cpu: out: expected heads of 1 to 6, got 7"):
        vllm_ops.mla_decode_kvcache_cpu(torch.empty(2, 5, 7), query, cache, 0.3, TABLE, lengths)
    with pytest.raises(TypeError, match=r"^mla_decode_kvcache_cpu: kv_cache: expected dtype float32, got float16"):
        vllm_ops.mla_decode_kvcache_cpu(out, query, cache.half(), 0.3, TABLE, lengths)


ROWS, LSE, LENS = torch.ones(NUM_SEQS, HEADS, HEAD_SIZE), torch.ones(HEADS, NUM_SEQS), torch.ones(NUM_SEQS).int()
PAGES = [torch.ones(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)] * 2
OF_PAGES = KV_HEADS, SCALE, torch.zeros(NUM_SEQS, 1).int(), LENS, BLOCK_SIZE, BLOCK_SIZE, None
ONE_TOKEN, SCRATCH = torch.ones(1).long(), [*[torch.empty(NUM_SEQS, HEADS, 1)] * 2, ROWS[:, :, None].clone()]
OF_LATENTS = torch.zeros(2, 1).int(), torch.tensor([0, 2, 3])  # block tables, and where two sequences begin
MEMORY: dict[str, tuple[Tensor, Any]] = {
    "paged_attention_v1: out": (ROWS * 0, lambda memory: vllm_ops.paged_attention_v1(memory, ROWS, *PAGES, *OF_PAGES)),
    "paged_attention_v2: out": (
        ROWS * 0,
        lambda memory: vllm_ops.paged_attention_v2(memory, *SCRATCH, ROWS, *PAGES, *OF_PAGES),
    ),
    "merge_attn_states: output": (
        ROWS * 0,
        lambda memory: vllm_ops.merge_attn_states(memory, ROWS, LSE, ROWS, LSE),
    ),
    "merge_attn_states: output_lse": (
        LSE * 0,
        lambda memory: vllm_ops.merge_attn_states(ROWS.clone(), ROWS, LSE, ROWS, LSE, memory),
    ),
    "gather_cached_kv: key": (
        ROWS[:1, :KV_HEADS] * 0,
        lambda memory: vllm_ops.gather_cached_kv(memory, ROWS[:1, :KV_HEADS].clone(), *PAGES, ONE_TOKEN),
    ),
    "gather_cached_kv: value": (
        ROWS[:1, :KV_HEADS] * 0,
        lambda memory: vllm_ops.gather_cached_kv(ROWS[:1, :KV_HEADS].clone(), memory, *PAGES, ONE_TOKEN),
    ),
    "convert_fp8: output": (ROWS.byte() * 0, lambda memory: vllm_ops.convert_fp8(memory, ROWS)),
    "cpu_attention_with_kv_cache: output": (
        ROWS * 0,
        lambda memory: vllm_ops.cpu_attention_with_kv_cache(
            ROWS, *(cache.transpose(1, 2) for cache in PAGES), memory, torch.arange(NUM_SEQS + 1), LENS, SCALE, True,
            None, -1, OF_PAGES[2], 0.0, None, None,
        ),
    ),
    "mla_decode_kvcache_cpu: out": (
        torch.zeros(2, 5, 4),
        lambda memory: vllm_ops.mla_decode_kvcache_cpu(
            memory, torch.ones(2, 5, 6), torch.ones(3, 4, 6), 0.3, OF_LATENTS[0], LENS[:2]
        ),
    ),
    "cp_gather_cache: dst": (
        torch.zeros(3, 6),
        lambda memory: vllm_ops.cp_gather_cache(torch.ones(3, 4, 6), memory, *OF_LATENTS, 2),
    ),
    "gather_and_maybe_dequant_cache: dst": (
        torch.zeros(3, 6, dtype=torch.bfloat16),
        lambda memory: vllm_ops.gather_and_maybe_dequant_cache(
            torch.ones(3, 4, 6), memory, *OF_LATENTS, None, 3, "auto", None
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("argument", MEMORY)
def test_memory_for_results_is_checked(argument: str) -> None:
    assert_memory_is_checked(argument, *MEMORY[argument])


OF_FLOATS = [argument for argument, (memory, _) in MEMORY.items() if memory.is_floating_point()]


@pytest.mark.parametrize("argument", OF_FLOATS)
def test_memory_that_requires_grad_is_refused(argument: str) -> None:
    fit, call = MEMORY[argument]
    memory = fit.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{argument}: requires grad"):
        call(memory)
    assert not memory.any()


FP8 = torch.zeros(3, 4, 6).to(torch.float8_e4m3fn)
DIFFERENTIATED: dict[str, tuple[Tensor, Any]] = {
    "swap_blocks: src": (ROWS, lambda src: vllm_ops.swap_blocks(src, ROWS.clone(), 4, PAIRS)),
    "swap_blocks: dst": (ROWS, lambda dst: vllm_ops.swap_blocks(ROWS, dst, 4, PAIRS)),
    "convert_fp8: input": (ROWS, lambda numbers: vllm_ops.convert_fp8(ROWS.byte(), numbers)),
    "convert_fp8: scale": (ONE_TOKEN, lambda scale: vllm_ops.convert_fp8(ROWS.byte(), ROWS, scale)),
    "cp_gather_cache: src_cache": (
        torch.ones(3, 4, 6),
        lambda cache: vllm_ops.cp_gather_cache(cache, torch.zeros(3, 6), *OF_LATENTS, 2),
    ),
    "gather_and_maybe_dequant_cache: scale": (
        ONE_TOKEN,
        lambda scale: vllm_ops.gather_and_maybe_dequant_cache(
            FP8, torch.zeros(3, 6), *OF_LATENTS, None, 3, "fp8", scale
        ),
    ),
}


@pytest.mark.parametrize("argument", DIFFERENTIATED)
def test_backward_is_refused(argument: str) -> None:
    """Where torch computes, or where an op sees bytes of the tensor: the result would require grad, or not tell."""
    tensor, call = DIFFERENTIATED[argument]
    tensor = tensor.float().clone().requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{argument}: requires grad"):
        call(tensor)
    with torch.no_grad():
        call(tensor)
