"""fp8 caches: reshape_and_cache stores the bytes of the reference, attention reads every byte for what it is.

The attention cases of the other files draw fp8 caches too; here are the number formats themselves.
"""

import math

import pytest
import reference
import torch
from attention_cases import (
    FP8_CACHES,
    FP8_IDS,
    OPS,
    Case,
    make_arguments,
    make_v1_arguments,
    make_v2_arguments,
    run_v1,
    run_v2,
)
from cache_layouts import make_cache_pair
from checks import (
    DTYPES,
    NOISE,
    ROUNDING,
    assert_close_to_reference,
    assert_rejected,
    assert_row_gap_untouched,
    assert_same_bits,
    filled_with_nan,
    random_bits,
    with_row_gap,
)
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_ext import ops

pytestmark = pytest.mark.code_for("avx512_vnni", "avx512_bf16", "amx")
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def all_bytes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def finite_values(dtype: torch.dtype) -> torch.Tensor:
    """All of them once, in order."""
    values = all_bytes(dtype).double()
    return values[values.isfinite()].unique()


def between_neighbours(dtype: torch.dtype) -> torch.Tensor:
    """In fp32: each value of the format, the middle of each two neighbours, and what lies next to both."""
    values = finite_values(dtype)
    exact = torch.cat([values, (values[1:] + values[:-1]) / 2, values[[0, -1]] * 17 / 16]).float()
    around = [torch.nextafter(exact, torch.full_like(exact, limit)) for limit in (math.inf, -math.inf)]
    beyond = torch.tensor([math.inf, -math.inf, 3e38, -3e38, 1e-30, -1e-30, 0.0, -0.0])
    return torch.cat([exact, *around, beyond])


# ---- the reference itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "mantissa_bits", "bias"), [(FLOAT8[0], 3, 7), (FLOAT8[1], 2, 15)])
def test_values_of_the_bytes(dtype, mantissa_bits, bias):
    for byte, value in enumerate(all_bytes(dtype).double().tolist()):
        exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        if math.isnan(value) or math.isinf(value):
            assert (byte & 0x7F) == 0x7F if dtype == torch.float8_e4m3fn else exponent == 31
            continue
        if exponent > 0:
            mantissa += 1 << mantissa_bits
        magnitude = mantissa * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        assert value == (-magnitude if byte & 0x80 else magnitude)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_reference_rounds_to_the_nearest_and_on_ties_to_the_even_byte(dtype):
    inputs = between_neighbours(dtype)
    stored = reference.quantise(inputs, dtype)
    for x, byte, value in zip(
        inputs.double().tolist(), stored.view(torch.uint8).tolist(), stored.double().tolist(), strict=True
    ):
        saturated = max(-torch.finfo(dtype).max, min(torch.finfo(dtype).max, x))
        distance = (finite_values(dtype) - saturated).abs()
        assert abs(value - saturated) == distance.min()
        if (distance == distance.min()).sum() == 2:
            assert byte % 2 == 0
        assert math.copysign(1, value) == math.copysign(1, x)


# ---- reshape_and_cache ---------------------------------------------------------------------------------------------


def make_reshape_arguments(
    device, key, value, slots, cache, scales=None, block_size=8, num_blocks=6, block_gap=0, layout="chunked"
) -> dict:
    """The caches hold NaN."""
    kv_cache_dtype, dtype = cache
    (_, num_kv_heads, head_size), (k_scale, v_scale) = key.shape, scales or (None, None)

    def make(*shape: int) -> torch.Tensor:
        return filled_with_nan(*shape, dtype=dtype).to(device)

    key_cache, value_cache = make_cache_pair(layout, num_blocks, num_kv_heads, head_size, block_size, make, block_gap)
    return {
        "key": key.to(device),
        "value": value.to(device),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64, device=device),
        "kv_cache_dtype": kv_cache_dtype,
        "k_scale": None if k_scale is None else torch.tensor(k_scale, device=device),
        "v_scale": None if v_scale is None else torch.tensor([v_scale], device=device),
    }


def assert_reshape_and_cache(arguments: dict) -> None:
    expected = reference.reshape_and_cache(**arguments)
    OPS.reshape_and_cache(**arguments)
    for i, cache in enumerate(("key_cache", "value_cache")):
        assert_same_bits(arguments[cache], expected[i])


@given(st.data())
def test_reshape_and_cache(device, data):
    """Any slots and scales; elements of any bits, or of the magnitudes where rounding is dense."""
    draw = data.draw
    dtype, cache = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(FP8_CACHES))
    layout = draw(st.sampled_from(["chunked", "nhd", "hnd"]))
    block_sizes = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 256]) if layout == "chunked" else st.integers(1, 300)
    block_size, num_blocks = draw(block_sizes), draw(st.integers(1, 6))
    all_slots = range(block_size * num_blocks)
    slots = draw(st.permutations(all_slots)) if draw(st.booleans()) else list(all_slots)
    begin, end = sorted((draw(st.integers(0, len(slots))), draw(st.integers(0, len(slots)))))
    slots = slots[begin:end]
    for token in draw(st.lists(st.integers(0, len(slots) - 1), max_size=5)) if slots else []:
        slots[token] = draw(st.sampled_from([-1, -7, -(2**40)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shape = (2, len(slots), draw(st.integers(1, 3)), 16 * draw(st.integers(1, 16) | st.just(32)))
    magnitude = draw(st.none() | st.sampled_from([1e-6, 1.0, 1e3]))
    if magnitude is None:
        key, value = random_bits(*shape, dtype=dtype, generator=generator)
    else:
        key, value = (torch.randn(*shape, generator=generator) * magnitude).to(dtype)
    gaps = draw(st.sampled_from([(0, 0), (1, 8), (24, 33)]))
    arguments = make_reshape_arguments(
        device,
        with_row_gap(key.to(device), gaps[0]),
        with_row_gap(value.to(device), gaps[1]),
        slots,
        cache,
        scales=draw(st.none() | st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))),
        block_size=block_size,
        num_blocks=num_blocks,
        block_gap=draw(st.sampled_from([0, 3, 512])),
        layout=layout,
    )
    assert_reshape_and_cache(arguments)
    assert_row_gap_untouched(arguments["key_cache"])
    assert_row_gap_untouched(arguments["value_cache"])


@pytest.mark.parametrize("cache", FP8_CACHES, ids=FP8_IDS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("order", [1, -1])
def test_every_16_bit_element(device, dtype, cache, order):
    """In any order, so that neighbours differ in sign; in a run of slots, and in no run."""
    elements = torch.randperm(2**16, generator=torch.Generator().manual_seed(0)).to(torch.int16)
    elements = elements.view(dtype).view(256, 1, 256)
    slots, caches = list(range(256))[::order], {"block_size": 256, "num_blocks": 1}
    for scales in (None, (0.37, 3.0)):
        assert_reshape_and_cache(make_reshape_arguments(device, elements, elements, slots, cache, scales, **caches))


@pytest.mark.parametrize("cache", FP8_CACHES, ids=FP8_IDS)
def test_fp32_elements_between_neighbours(device, cache):
    elements = between_neighbours(reference.element_dtype(torch.empty(0, dtype=cache[1]), cache[0]))
    key = torch.cat([elements, torch.zeros(-len(elements) % 16)]).view(-1, 1, 16)
    slots = list(range(len(key)))
    assert_reshape_and_cache(make_reshape_arguments(device, key, -key, slots, cache, block_size=256, num_blocks=1))


@pytest.mark.parametrize("cache", FP8_CACHES, ids=FP8_IDS)
def test_infinities_saturate_and_nan_stays(device, cache):
    dtype = reference.element_dtype(torch.empty(0, dtype=cache[1]), cache[0])
    key = torch.tensor([math.inf, -math.inf, math.nan, 0.0] * 4).view(1, 1, 16)
    arguments = make_reshape_arguments(device, key, key, [0], cache)
    OPS.reshape_and_cache(**arguments)
    largest = torch.finfo(dtype).max
    for stored in (arguments["key_cache"][0, 0, 0, 0], arguments["value_cache"][0, 0, :, 0]):
        assert stored.contiguous().view(dtype).double()[:2].tolist() == [largest, -largest]
        assert stored.contiguous().view(dtype).double()[2].isnan()


@pytest.mark.parametrize("cache", FP8_CACHES, ids=FP8_IDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_nan_keeps_its_sign(device, dtype, cache, scale):
    """Also where arithmetic, the division by the scale, does not keep it."""
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    key = torch.tensor([torch.iinfo(integer).max, -1] * 8, dtype=integer).view(dtype).view(1, 1, 16)
    arguments = make_reshape_arguments(device, key, key.flip(-1), [0], cache, scales=(scale, scale))
    OPS.reshape_and_cache(**arguments)
    assert arguments["key_cache"].view(torch.uint8)[0, 0, 0, 0].tolist() == [0x7F, 0xFF] * 8
    assert arguments["value_cache"].view(torch.uint8)[0, 0, :, 0].tolist() == [0xFF, 0x7F] * 8


def test_many_tokens(device, several_threads):
    """Large enough to run in parallel, from a fused qkv."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(1000, 24, 128, generator=generator).bfloat16()
    key, value, slots = qkv[:, 8:16], qkv[:, 16:], list(range(100, 1100))
    arguments = make_reshape_arguments(device, key, value, slots, ("fp8", torch.uint8), (0.1, 0.2), 16, num_blocks=80)
    assert_reshape_and_cache(arguments)


@pytest.mark.parametrize("cache", FP8_CACHES, ids=FP8_IDS)
def test_wrapper(device, cache):
    key, value = torch.randn(2, 3, 2, 16, generator=torch.Generator().manual_seed(0))
    arguments = make_reshape_arguments(device, key, value, [9, -1, 2], cache, scales=(0.5, 0.3))
    expected = reference.reshape_and_cache(**arguments)
    ops.reshape_and_cache(**arguments)
    assert_same_bits(arguments["key_cache"], expected[0])
    assert_same_bits(arguments["value_cache"], expected[1])


# ---- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_attention_reads_every_byte(device, out_dtype, dtype):
    """One token a sequence: its value comes out, and its key's product with (1, 0, ...) is lse."""
    stored = all_bytes(dtype)[all_bytes(dtype).double().isfinite()]
    num_seqs = len(stored)
    key_cache = torch.zeros(num_seqs, 1, 1, 8, 16, dtype=torch.uint8)
    value_cache = torch.zeros(num_seqs, 1, 16, 8, dtype=torch.uint8)
    key_cache[:, 0, 0, 0, 0] = value_cache[:, 0, 3, 0] = stored.view(torch.uint8)
    query = torch.zeros(num_seqs, 1, 16, dtype=out_dtype)
    query[:, :, 0] = 1
    k_scale, v_scale = torch.tensor(0.37), torch.tensor(0.0625)
    out, lse = OPS.paged_attention(
        query.to(device),
        key_cache.view(dtype).to(device),
        value_cache.view(dtype).to(device),
        torch.arange(num_seqs, dtype=torch.int32, device=device)[:, None],
        torch.ones(num_seqs, dtype=torch.int32, device=device),
        scale=1.0,
        k_scale=k_scale.to(device),
        v_scale=v_scale.to(device),
    )
    assert_close_to_reference(lse[:, 0].cpu(), reference.dequantise(stored, dtype, k_scale))
    assert_close_to_reference(out[:, 0, 3].cpu(), reference.dequantise(stored, dtype, v_scale))


@pytest.mark.parametrize("group_size", [1, 4, 20])
@pytest.mark.parametrize("nan", [0x7F, 0xFF], ids=hex)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_one_nan_stays_where_it_is(device, dtype, nan, group_size):
    """A key: out and lse of its heads. A value: its element of their out. All else is the same bit for bit."""
    case = Case(((1, 300),), torch.bfloat16, cache=("auto", dtype), group_size=group_size)
    arguments = make_arguments(case, device)
    expected_out, expected_lse = OPS.paged_attention(**arguments)
    block, slot = arguments["block_tables"][0, 9].long(), 5
    heads = slice(group_size, 2 * group_size)  # of KV head 1
    for name, place in (("key_cache", (block, 1, 2, slot, 13)), ("value_cache", (block, 1, 37, slot))):
        cache = arguments[name].clone()
        cache.view(torch.uint8)[place] = nan
        out, lse = OPS.paged_attention(**arguments | {name: cache})
        hit = torch.zeros_like(out, dtype=torch.bool)
        hit[:, heads, 37 if name == "value_cache" else slice(None)] = True
        assert out[hit].isnan().all()
        assert_same_bits(out[~hit], expected_out[~hit])
        if name == "key_cache":
            assert lse[:, heads].isnan().all()
            lse[:, heads] = expected_lse[:, heads]
        assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("cache", FP8_CACHES, ids=FP8_IDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_probabilities_are_rounded_no_further_than_to_the_dtype_of_the_query(device, dtype, cache, block_size):
    case = Case(((1, 300), (5, 77), (1, 1)), dtype, cache=cache, block_size=block_size)
    arguments = make_arguments(case, device)
    out, _ = OPS.paged_attention(**arguments)
    expected, _ = reference.paged_attention(**arguments)
    values = arguments["value_cache"]
    magnitudes = (values.view(torch.uint8) & 0x7F).view(values.dtype)
    sums_of_magnitudes, _ = reference.paged_attention(**arguments | {"value_cache": magnitudes})
    allowed = torch.finfo(dtype).eps / 2 * sums_of_magnitudes
    allowed += ROUNDING[dtype] * expected.abs() + NOISE * expected.abs().max()
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_names_and_tensor_dtypes_of_one_format_are_the_same(device, dtype):
    case = Case(((1, 40), (1, 600)), torch.bfloat16, cache=("auto", dtype))
    arguments = make_v1_arguments(case, device)
    expected = run_v1(dict(arguments)).clone()
    one = torch.ones((), device=device)
    for name, same in reference.FP8_OF_NAME.items():
        if same != dtype:
            continue
        for change in ({}, {"k_scale": one}, {"v_scale": one[None]}):
            assert_same_bits(run_v1(arguments | {"kv_cache_dtype": name} | change), expected)
        caches = {cache: arguments[cache].view(torch.uint8) for cache in ("key_cache", "value_cache")}
        assert_same_bits(run_v1(arguments | {"kv_cache_dtype": name} | caches), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", FP8_CACHES, ids=FP8_IDS)
def test_stored_and_read_back(device, dtype, cache):
    """reshape_and_cache, then attention on what it wrote; against the reference on the same bytes."""
    arguments = make_arguments(Case(((1, 33), (12, 70)), dtype, cache, scales=(0.05, 0.02)), device)
    slots = [reference.slots_of(t, n, 16) for t, n in zip(arguments["block_tables"], (33, 70), strict=True)]
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 103, 2, 64, generator=generator).to(dtype).to(device)
    options = {name: arguments[name] for name in ("kv_cache_dtype", "k_scale", "v_scale")}
    OPS.reshape_and_cache(key, value, arguments["key_cache"], arguments["value_cache"], torch.cat(slots), **options)
    out, lse = OPS.paged_attention(**arguments)
    expected, eager = (reference.paged_attention(**arguments, dtype=d) for d in (torch.float64, dtype))
    assert_close_to_reference(out, expected[0], eager[0])
    assert_close_to_reference(lse, expected[1], reference.paged_attention(**arguments, dtype=torch.float32)[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [(0.5, 3.0), (0.0, -1.0), (math.nan, math.inf)], ids=str)
def test_scales_of_a_cache_that_is_not_fp8_are_ignored(device, dtype, scales):
    """Frameworks pass a layer's scales whatever its cache is: the same bits as without."""
    k_scale, v_scale = (torch.tensor(scale, device=device) for scale in scales)
    with_scales = {"k_scale": k_scale, "v_scale": v_scale}
    key, value = torch.randn(2, 3, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    stored = []
    for change in ({}, with_scales):
        caches = torch.zeros(6, 2, 64 * dtype.itemsize // 16, 8, 16 // dtype.itemsize, dtype=dtype, device=device)
        stored.append((caches, torch.zeros(6, 2, 64, 8, dtype=dtype, device=device)))
        slots = torch.tensor([9, -1, 2], device=device)
        OPS.reshape_and_cache(key, value, *stored[-1], slots, **change)
    for cache, same in zip(*stored, strict=True):
        assert_same_bits(cache, same)

    arguments = make_arguments(Case(((1, 33), (12, 70)), dtype), device)
    for result, same in zip(
        OPS.paged_attention(**arguments), OPS.paged_attention(**arguments | with_scales), strict=True
    ):
        assert_same_bits(result, same)
    arguments = make_v1_arguments(Case(((1, 33), (1, 70)), dtype), device)
    expected = run_v1(arguments).clone()
    assert_same_bits(run_v1(arguments | with_scales), expected)
    v2 = make_v2_arguments(Case(((1, 33), (1, 70)), dtype), device)
    assert_same_bits(run_v2(v2 | with_scales), expected)


# ---- errors --------------------------------------------------------------------------------------------------------
# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)

ERRORS = {
    "key of fp8": ("key", TypeError, lambda a: {"key": a["key"].to(torch.float8_e4m3fn)}),
    "value of another dtype": ("value", TypeError, lambda a: {"value": a["value"].half()}),
    "uint8 but auto": ("key_cache", TypeError, lambda a: {"kv_cache_dtype": "auto"}),
    "fp32 cache but fp8": (
        "(key_cache|kv_cache_dtype)",
        TypeError,
        lambda a: {"key_cache": torch.ones(6, 2, 4, 8, 4), "value_cache": torch.ones(6, 2, 16, 8)},
    ),
    "e5m2 but fp8": (
        "(key_cache|kv_cache_dtype)",
        TypeError,
        lambda a: {name: a[name].view(torch.float8_e5m2) for name in ("key_cache", "value_cache")},
    ),
    "value_cache float8, key_cache uint8": (
        "value_cache",
        TypeError,
        lambda a: {"value_cache": a["value_cache"].view(torch.float8_e4m3fn)},
    ),
    "x of 8": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"].reshape(6, 2, 2, 8, 8)}),
    "kv_cache_dtype unknown": ("kv_cache_dtype", ValueError, lambda a: {"kv_cache_dtype": "int4"}),
    "uint8 but int8": ("key_cache", TypeError, lambda a: {"kv_cache_dtype": "int8"}),
    "k_scale dtype": ("k_scale", TypeError, lambda a: {"k_scale": torch.ones((), dtype=torch.float64)}),
    "v_scale shape": ("v_scale", ValueError, lambda a: {"v_scale": torch.ones(2)}),
    "k_scale 0": ("k_scale", ValueError, lambda a: {"k_scale": torch.zeros(())}),
    "v_scale negative": ("v_scale", ValueError, lambda a: {"v_scale": torch.tensor(-1.0)}),
    "slot past the cache": ("slot_mapping", ValueError, lambda a: {"slot_mapping": torch.tensor([0, 48])}),
}


@pytest.mark.parametrize("what", ERRORS)
def test_reshape_and_cache_rejects(device, what):
    argument, error, change = ERRORS[what]
    key, value = torch.ones(2, 2, 2, 16)
    arguments = make_reshape_arguments(device, key, value, [0, 1], ("fp8", torch.uint8))
    assert_rejected("reshape_and_cache", arguments | change(arguments), argument, error)
