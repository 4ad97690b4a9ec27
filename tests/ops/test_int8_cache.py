"""int8 caches: what reshape_and_cache stores, and attention over it. They are for the CPU and the chunked layout."""

import math
import platform

import pytest
import reference
import torch
from attention_cases import OPS
from checks import DTYPES, NOISE, ROUNDING, assert_rejected, assert_row_gap_untouched, assert_same_bits, with_row_gap
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_ext import allocate_kv_cache, ops

pytestmark = pytest.mark.code_for("avx512_vnni")
CPU = pytest.mark.devices("cpu")
# Queries and weights are rounded to so many steps.
MAX_CODE_16 = 32639 if platform.machine() in {"aarch64", "arm64"} else 32767
NO_BLOCK = 2**31 - 1


def make_caches(num_blocks: int, num_kv_heads: int, head_size: int, block_size: int, gap: int = 0):
    """Any codes, and scales that are NaN. `gap` elements follow a block of keys, twice as many a block of values."""
    generator = torch.Generator().manual_seed(num_blocks)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)

    key_cache = codes(num_blocks, num_kv_heads, head_size // 16, block_size, 16)
    value_cache = codes(num_blocks, num_kv_heads, head_size + 8, block_size)
    value_cache[:, :, head_size:] = torch.tensor([0, 0, -64, 127], dtype=torch.int8).repeat(2 * block_size).view(8, -1)
    return with_row_gap(key_cache, gap), with_row_gap(value_cache, 2 * gap)


def scales_in(value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys and of values, [num_blocks, num_kv_heads, block_size]."""
    keys, values = value_cache[:, :, -8:].flatten(2).contiguous().view(torch.float32).chunk(2, dim=2)
    return keys, values


def read(key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes of keys and values [num_tokens, num_kv_heads, head_size], and the scales [num_tokens, num_kv_heads, 1]."""
    key, value = reference.gather(key_cache, value_cache[:, :, :-8], slots)
    block, offset = reference.block_and_offset(slots, key_cache)
    scales = (of_cache[block, :, offset][..., None] for of_cache in scales_in(value_cache))
    return key.double(), value.double(), *(scale.double() for scale in scales)


# ---- reshape_and_cache ---------------------------------------------------------------------------------------------


@CPU
@given(st.data())
def test_reshape_and_cache(device, data):
    """Every code and scale is that of the formula, in its place; all other slots stay as they are."""
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    block_size, num_blocks = draw(st.sampled_from([1, 2, 8, 16, 64, 256])), draw(st.integers(1, 5))
    slots = (
        draw(st.permutations(range(block_size * num_blocks))) if draw(st.booleans()) else range(block_size * num_blocks)
    )
    slots = torch.tensor(list(slots)[: draw(st.integers(0, block_size * num_blocks))], dtype=torch.int64)
    shape = (2, len(slots), draw(st.integers(1, 3)), 16 * draw(st.integers(1, 8) | st.just(32)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    magnitude = draw(st.sampled_from([1e-6, 1.0, 1e4]))
    key, value = (torch.randn(*shape, generator=generator) * magnitude).to(dtype)
    key_cache, value_cache = make_caches(num_blocks, *shape[2:], block_size, draw(st.sampled_from([0, 3, 512])))
    skipped = torch.rand(len(slots), generator=generator) < 0.2
    before = key_cache.clone(), value_cache.clone()
    OPS.reshape_and_cache(
        with_row_gap(key, 8), with_row_gap(value, 24), key_cache, value_cache, slots.masked_fill(skipped, -1), "int8"
    )
    assert_row_gap_untouched(key_cache)
    assert_row_gap_untouched(value_cache)
    *codes, key_scales, value_scales = read(key_cache, value_cache, slots[~skipped])
    for rows, stored, scales in zip((key, value), codes, (key_scales, value_scales), strict=True):
        expected = reference.quantise_to_int8(rows[~skipped])
        assert torch.equal(stored.long(), expected[0])
        assert torch.equal(scales.float(), expected[1])
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
    untouched[slots[~skipped]] = False
    untouched = untouched.nonzero()[:, 0]
    for now, then in zip(read(key_cache, value_cache, untouched), read(*before, untouched), strict=True):
        assert torch.equal(now.nan_to_num(nan=-1), then.nan_to_num(nan=-1))


@CPU
def test_zeros_and_what_is_not_finite(device):
    """A vector of zeros has a scale of 0. A vector with a NaN or an infinity is NaN as a whole."""
    key = torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(0))
    key[0] = 0
    key[1, 0, 3], key[2, 0, 15] = math.nan, -math.inf
    key_cache, value_cache = make_caches(1, 1, 16, 8)
    OPS.reshape_and_cache(key, key, key_cache, value_cache, torch.arange(4), "int8")
    codes, _, *scales = read(key_cache, value_cache, torch.arange(4))
    for of_tokens in scales:
        assert of_tokens[0] == 0 and of_tokens[1:3].isnan().all() and of_tokens[3] > 0
    assert not codes[:3].any() and codes[3].abs().max() == 127


# ---- attention -----------------------------------------------------------------------------------------------------


def make_arguments(
    lens, dtype=torch.float32, num_kv_heads=2, group_size=2, head_size=64, block_size=16, gap=0, seed=0, **options
) -> dict:
    """Of paged_attention: normal keys and values, stored by the op, in blocks scattered over caches that hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [math.ceil(seq_len / block_size) for _, seq_len in lens]
    ids = torch.randperm(sum(num_blocks) + 3, generator=generator, dtype=torch.int32)
    block_tables = torch.full((len(lens), max(num_blocks, default=0) + 1), NO_BLOCK, dtype=torch.int32)
    for table, n, of_seq in zip(block_tables, num_blocks, ids[:-3].split(num_blocks), strict=True):
        table[:n] = of_seq
    key_cache, value_cache = make_caches(len(ids), num_kv_heads, head_size, block_size, gap)
    slots = [reference.slots_of(table, n, block_size) for table, (_, n) in zip(block_tables, lens, strict=True)]
    slots = torch.cat([torch.empty(0, dtype=torch.int64), *slots])
    key, value = torch.randn(2, len(slots), num_kv_heads, head_size, generator=generator)
    value *= 8.0 ** torch.randint(
        -1, 2, (len(slots), num_kv_heads, 1), generator=generator
    )  # scales far from each other
    key, value = key.to(dtype), value.to(dtype)
    OPS.reshape_and_cache(key, value, key_cache, value_cache, slots, "int8")
    rows = [n for n, _ in lens]
    query = torch.randn(sum(rows), num_kv_heads * group_size, head_size, generator=generator).to(dtype)
    return {
        "query": with_row_gap(query, gap),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": block_tables,
        "seq_lens": torch.tensor([n for _, n in lens], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *rows]).cumsum(0).int(),
        "scale": head_size**-0.5,
        "kv_cache_dtype": "int8",
        **options,
    }


def assert_attention(out: torch.Tensor, lse: torch.Tensor, arguments: dict) -> None:
    """Against attention over codes times scales in fp64.

    An element of a query is rounded by half a step, max|query| / 32767, so a logit by up to half a step times the sum
    of the key's magnitudes; twice the largest of these errors bounds the relative error of a probability. A weight, the
    probability times the value's scale, is rounded by up to half a step, max(weight) / 32767. Beyond that there is the
    noise of fp32, and the rounding of the result.
    """
    options = {
        name: arguments[name]
        for name in ("alibi_slopes", "sliding_window", "softcap", "sinks", "causal", "right_window", "attention_chunk")
        if name in arguments
    }
    group_size = arguments["query"].shape[1] // arguments["key_cache"].shape[1]
    block_size = arguments["key_cache"].shape[3]
    for seq, seq_len in enumerate(arguments["seq_lens"].tolist()):
        rows = slice(*arguments["query_start_loc"][seq : seq + 2].tolist())
        query = arguments["query"][rows].double()
        if not len(query):
            continue
        slots = reference.slots_of(arguments["block_tables"][seq], seq_len, block_size)
        key, value, key_scales, value_scales = read(arguments["key_cache"], arguments["value_cache"], slots)
        key, value = key * key_scales, value * value_scales
        scale = arguments["scale"]
        expected, expected_lse = reference.attention(query, key, value, scale=scale, **options)
        identity = torch.eye(seq_len, dtype=torch.float64)[:, None].expand(-1, key.shape[1], -1)
        probs, _ = reference.attention(query, key, identity, scale=scale, **options)  # [rows, heads, seq_len]

        steps = query.abs().amax(-1, keepdim=True) / MAX_CODE_16  # [rows, heads, 1]
        key_sums = key.abs().sum(-1).T.repeat_interleave(group_size, 0)  # [heads, seq_len]
        of_logits = (scale * steps / 2 * key_sums).amax(-1) if seq_len else torch.zeros(query.shape[:2])
        of_logits = of_logits + NOISE * (1 + expected_lse.where(expected_lse.isfinite(), 0).abs())
        of_heads = value_scales[..., 0].T.repeat_interleave(group_size, 0)  # [heads, seq_len]
        weight_steps = (probs * of_heads).amax(-1, keepdim=True) / MAX_CODE_16 if seq_len else 0
        codes = (value / value_scales).abs().sum(0).repeat_interleave(group_size, 0)  # [heads, head_size]
        magnitudes = torch.einsum("qht,thd->qhd", probs, value.abs().repeat_interleave(group_size, 1))
        allowed = 2 * of_logits[..., None] * magnitudes + weight_steps / 2 * codes
        allowed = allowed + ROUNDING[out.dtype] * expected.abs() + 1e-9
        error = (out[rows].double() - expected).abs()
        assert (error <= allowed).all(), (
            f"{error.max()} where {allowed.flatten()[(error - allowed).argmax()]} is allowed"
        )
        lse_error = (lse[rows].double() - expected_lse).abs()
        assert ((lse[rows] == expected_lse) | (lse_error <= of_logits)).all(), lse_error.max()


def run(arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return OPS.paged_attention(**arguments)


@CPU
def test_tiny_queries(device):
    """32767 divided by the largest of them is infinite. They count as zeros, and overflow nothing (make sanitize)."""
    arguments = make_arguments([(1, 20)])
    tiny, zero = (run(arguments | {"query": arguments["query"] * factor}) for factor in (1e-36, 0))
    assert all(torch.equal(*results) for results in zip(tiny, zero, strict=True))


@CPU
@given(st.data())
def test_attention(device, data):
    """Any shapes and options; prompts, chunks and single rows. The slots that no row sees hold NaN."""
    draw = data.draw
    causal = draw(st.booleans())
    group_size, num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9])), draw(st.integers(1, 3))
    arguments = make_arguments(
        draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70) | st.integers(0, 700)), max_size=3)),
        dtype=draw(st.sampled_from(DTYPES)),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_size=draw(st.sampled_from([64, 80, 128, 512]) | st.integers(1, 16).map(lambda n: 16 * n)),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128, 256])),
        gap=draw(st.sampled_from([0, 3, 64])),
        seed=draw(st.integers(0, 99)),
        alibi_slopes=draw(st.none() | st.just(torch.rand(num_kv_heads * group_size) / 2 - 0.25)),
        sinks=draw(st.none() | st.just(torch.randn(num_kv_heads * group_size))),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        sliding_window=draw(st.none() | st.integers(1, 40) | st.integers(1, 600)),
        causal=causal,
        right_window=None if causal else draw(st.none() | st.integers(0, 40)),
        attention_chunk=draw(st.just(0) | st.integers(1, 600)),
    )
    assert_attention(*run(arguments), arguments)


@CPU
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 23])  # from 16 on the kernel takes them all together
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_each_row_has_a_scale_of_its_own(device, block_size, num_rows):
    """The rows that a kernel takes at once, as heads of a decode row and as rows of a chunk. Heads of which the last
    strips are few end within what is summed at once. A row's weights have another scale in each tile: tiles of one,
    of some and of all visible tokens."""
    for head_size in range(16, 144, 16):
        for group_size, lens in ((num_rows, [(1, 300)]), (1, [(num_rows, 129 + num_rows)])):
            arguments = make_arguments(
                lens, num_kv_heads=1, group_size=group_size, head_size=head_size, block_size=block_size
            )
            assert_attention(*run(arguments), arguments)


@CPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_a_row_has_the_same_bits_in_any_batch(device, dtype, group_size):
    """As a row of a prompt, of a chunk, and alone; beside other sequences and not."""
    arguments = make_arguments([(1, 300), (40, 40), (5, 640)], dtype, group_size=group_size)
    out, lse = run(arguments)
    starts = arguments["query_start_loc"].tolist()
    for seq, seq_len in enumerate(arguments["seq_lens"].tolist()):
        num_rows = starts[seq + 1] - starts[seq]
        for row in {0, num_rows // 2, num_rows - 1}:
            at = starts[seq] + row
            alone = arguments | {
                "query": arguments["query"][at : at + 1],
                "block_tables": arguments["block_tables"][seq : seq + 1],
                "seq_lens": torch.tensor([seq_len - num_rows + row + 1], dtype=torch.int32),
                "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
            }
            out_alone, lse_alone = run(alone)
            assert_same_bits(out_alone[0], out[at])
            assert_same_bits(lse_alone[0], lse[at])


@CPU
def test_all_decode_ops_and_wrappers_are_the_same(device):
    arguments = make_arguments([(1, 40), (1, 600), (1, 0)], torch.bfloat16)
    expected, _ = run(arguments)
    assert not expected[2].any()
    del arguments["query_start_loc"]
    assert_same_bits(ops.paged_attention(**arguments)[0], expected)
    assert_same_bits(ops.paged_attention(**arguments | {"kv_cache_dtype": "auto"})[0], expected)
    assert_same_bits(ops.paged_attention_v1(**arguments), expected)
    assert_same_bits(ops.paged_attention_v2(**arguments), expected)
    assert_same_bits(ops.paged_attention_v1(**arguments | {"k_scale": torch.tensor(2.0)}), expected)  # not fp8: ignored


@CPU
@pytest.mark.parametrize("of_value", [False, True])
@pytest.mark.parametrize("group_size", [1, 4, 20])
def test_one_nan_stays_with_its_head(device, group_size, of_value):
    """All else is the same bit for bit."""
    arguments = make_arguments([(1, 300)], group_size=group_size)
    expected = run(arguments)
    block, slot = arguments["block_tables"][0, 9], 5
    row = 64 + 4 * of_value + slot // 4  # of 16 bytes each, with 4 scales
    cache = arguments["value_cache"].clone()
    cache[block, 1, row, 4 * (slot % 4) : 4 * (slot % 4) + 4] = torch.tensor([0, 0, -64, 127], dtype=torch.int8)
    out, lse = run(arguments | {"value_cache": cache})
    hit = slice(group_size, 2 * group_size)  # the heads of KV head 1
    assert out[:, hit].isnan().all() and (of_value or lse[:, hit].isnan().all())
    assert_same_bits(out[:, :group_size], expected[0][:, :group_size])
    assert_same_bits(lse[:, :group_size], expected[1][:, :group_size])


@CPU
@pytest.mark.parametrize("group_size", [1, 20])
def test_large_queries_and_keys(device, group_size):
    """The largest sums of integers: 512 products of the largest codes do not overflow."""
    arguments = make_arguments([(1, 128)], head_size=512, group_size=group_size)
    key = torch.full((128, 2, 512), 3e4)
    slots = reference.slots_of(arguments["block_tables"][0], 128, 16)
    OPS.reshape_and_cache(key, -key, arguments["key_cache"], arguments["value_cache"], slots, "int8")
    arguments |= {"query": torch.full((1, 2 * group_size, 512), -5.0), "scale": 1.0}
    out, lse = run(arguments)
    torch.testing.assert_close(out, torch.full_like(out, -3e4))
    torch.testing.assert_close(lse, torch.full_like(lse, -5.0 * 3e4 * 512 + math.log(128)))


@CPU
def test_allocate():
    [(key_cache, value_cache)] = allocate_kv_cache(3, 2, 32, 8, torch.int8)
    assert key_cache.shape == (3, 2, 2, 8, 16) and value_cache.shape == (3, 2, 40, 8)
    assert key_cache.dtype == value_cache.dtype == torch.int8
    with pytest.raises(ValueError, match="allocate_kv_cache: layout: expected chunked for int8, got nhd"):
        allocate_kv_cache(3, 2, 32, 8, torch.int8, layout="nhd")
    with pytest.raises(ValueError, match="allocate_kv_cache: device: expected cpu for int8, got cuda"):
        allocate_kv_cache(3, 2, 32, 8, torch.int8, "cuda")


# ---- errors --------------------------------------------------------------------------------------------------------

NHD = dict.fromkeys(("key_cache", "value_cache"), torch.zeros(7, 16, 2, 64, dtype=torch.int8))
OF_1 = {
    "key_cache": torch.zeros(300, 2, 4, 1, 16, dtype=torch.int8),
    "value_cache": torch.zeros(300, 2, 72, 1, dtype=torch.int8),
}
ERRORS = {
    "nhd": ("key_cache", ValueError, lambda a: NHD),
    "uint8": (
        "key_cache",
        TypeError,
        lambda a: {name: a[name].view(torch.uint8) for name in ("key_cache", "value_cache")},
    ),
    "no scales": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"][:, :, :64].contiguous()}),
    "fp8": ("key_cache", TypeError, lambda a: {"kv_cache_dtype": "fp8"}),
}


@CPU
@pytest.mark.parametrize("what", [*ERRORS, "a block of one token"])
def test_attention_rejects(device, what):
    argument, error, change = ERRORS.get(what, ("key_cache", ValueError, lambda a: OF_1))
    arguments = make_arguments([(1, 20)])
    assert_rejected("paged_attention", arguments | change(arguments), argument, error)


@CPU
@pytest.mark.parametrize("what", ERRORS)
def test_reshape_and_cache_rejects(device, what):
    argument, error, change = ERRORS[what]
    key_cache, value_cache = make_caches(6, 2, 64, 16)
    arguments = {"key": torch.ones(2, 2, 64), "value": torch.ones(2, 2, 64), "slot_mapping": torch.arange(2)}
    arguments |= {"key_cache": key_cache, "value_cache": value_cache, "kv_cache_dtype": "int8"}
    assert_rejected("reshape_and_cache", arguments | change(arguments), argument, error)


@CPU
def test_gather_rejects(device):
    key_cache, value_cache = make_caches(6, 2, 64, 16)
    arguments = {"key": torch.ones(2, 2, 64), "value": torch.ones(2, 2, 64), "slot_mapping": torch.arange(2)}
    assert_rejected(
        "gather_cached_kv", arguments | {"key_cache": key_cache, "value_cache": value_cache}, "key_cache", TypeError
    )


@pytest.mark.devices("simt", "cuda")
def test_refused_on_a_gpu(device):
    key_cache, value_cache = (cache.to(device) for cache in make_caches(6, 2, 64, 16))
    key = torch.ones(2, 2, 64, device=device)
    with pytest.raises(RuntimeError, match=r"key_cache: expected another dtype on a GPU .*, got int8"):
        OPS.reshape_and_cache(key, key, key_cache, value_cache, torch.arange(2, device=device), "int8")
