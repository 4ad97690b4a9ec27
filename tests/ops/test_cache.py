"""reshape_and_cache, gather_cached_kv, copy_blocks and swap_blocks: every element moved bit for bit, every other one
left alone. fp8 caches, into which reshape_and_cache rounds, have test_fp8_cache.py.
"""

from collections.abc import Callable

import pytest
import reference
import torch
from cache_layouts import LAYOUTS, NHD_LAYOUTS, make_cache_pair
from checks import (
    DTYPES,
    assert_raises_and_writes_nothing,
    assert_rejected,
    assert_row_gap_untouched,
    assert_same_bits,
    random_bits,
    with_row_gap,
)
from hypothesis import given
from hypothesis import strategies as st
from op_table import OPS

from pagedattn_ext import ops

pytestmark = pytest.mark.code_for()  # for nothing beyond avx512
BLOCK_DTYPES = [
    *DTYPES,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
]  # of blocks that are only moved


def make_caches(
    num_blocks, num_kv_heads, head_size, block_size, dtype, generator, device, layout="chunked", block_gap=0
):
    """A key and a value cache of any bits. `block_gap` is that of make_cache_pair."""

    def make(*shape: int) -> torch.Tensor:
        return random_bits(*shape, dtype=dtype, generator=generator).to(device)

    return make_cache_pair(layout, num_blocks, num_kv_heads, head_size, block_size, make, block_gap)


def make_reshape_arguments(
    device,
    dtype,
    slots,
    num_kv_heads=2,
    head_size=16,
    block_size=8,
    num_blocks=6,
    gaps=(0, 0),
    block_gap=0,
    seed=0,
    layout="chunked",
    slot_dtype=torch.int64,
) -> dict:
    """`gaps` follow the rows of key and of value. `block_gap` is that of make_cache_pair."""
    generator = torch.Generator().manual_seed(seed)
    key, value = random_bits(2, len(slots), num_kv_heads, head_size, dtype=dtype, generator=generator).unbind()
    sizes = num_blocks, num_kv_heads, head_size, block_size
    key_cache, value_cache = make_caches(*sizes, dtype, generator, device, layout, block_gap)
    return {
        "key": with_row_gap(key.to(device), gaps[0]),
        "value": with_row_gap(value.to(device), gaps[1]),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.tensor(slots, dtype=slot_dtype, device=device),
    }


@st.composite
def reshape_arguments(
    draw: st.DrawFn, device: torch.device, slots_of: Callable[[int], st.SearchStrategy[list[int]]]
) -> dict:
    """Those of `make_reshape_arguments`, all drawn. `slots_of(num_slots)` draws the slots, of so many in the caches."""
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    block_sizes = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 256]) if layout == "chunked" else st.integers(1, 300)
    block_size, num_blocks = draw(block_sizes), draw(st.integers(1, 6))
    slots = draw(slots_of(block_size * num_blocks))
    slot_dtypes = [torch.int64, torch.int32] if min(slots, default=0) >= -(2**31) else [torch.int64]
    return make_reshape_arguments(
        device,
        dtype,
        slots,
        num_kv_heads=draw(st.integers(1, 4)),
        head_size=16 // dtype.itemsize * draw(st.integers(1, 8) | st.integers(1, 512 * dtype.itemsize // 16)),
        block_size=block_size,
        num_blocks=num_blocks,
        gaps=draw(st.sampled_from([(0, 0), (1, 8), (24, 33)])),
        block_gap=draw(st.sampled_from([0, 3, 512])),
        seed=draw(st.integers(0, 99)),
        layout=layout,
        slot_dtype=draw(st.sampled_from(slot_dtypes)),
    )


def assert_block_gaps_untouched(*caches: torch.Tensor) -> None:
    if caches[0].untyped_storage().data_ptr() == caches[1].untyped_storage().data_ptr():
        assert_row_gap_untouched(*caches)  # the two lie in each other's gaps
        return
    for cache in caches:
        assert_row_gap_untouched(cache)


def assert_reshape_and_cache(arguments: dict, op: str = "reshape_and_cache") -> None:
    expected = reference.reshape_and_cache(**arguments)
    getattr(OPS, op)(**arguments)
    for i, cache in enumerate(("key_cache", "value_cache")):
        assert_same_bits(arguments[cache], expected[i])
    assert_block_gaps_untouched(arguments["key_cache"], arguments["value_cache"])


# ---- reshape_and_cache ---------------------------------------------------------------------------------------------


@st.composite
def slots_to_write(draw: st.DrawFn, num_slots: int) -> list[int]:
    """Runs of slots, lone slots and padding in any order, no slot twice."""
    slots = draw(st.permutations(range(num_slots))) if draw(st.booleans()) else list(range(num_slots))
    begin, end = sorted((draw(st.integers(0, num_slots)), draw(st.integers(0, num_slots))))
    slots = slots[begin:end]
    for token in draw(st.lists(st.integers(0, len(slots) - 1), max_size=5)) if slots else []:
        slots[token] = draw(st.sampled_from([-1, -7, -(2**31), -(2**40)]))
    return slots


@given(st.data())
def test_reshape_and_cache(device, data):
    assert_reshape_and_cache(data.draw(reshape_arguments(device, slots_to_write)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout(device, dtype):
    """The layout, written out; this also checks the reference."""
    x = 16 // dtype.itemsize
    arguments = make_reshape_arguments(device, dtype, [19, 3], head_size=24)
    OPS.reshape_and_cache(**arguments)
    for token, slot in enumerate([19, 3]):
        block, offset = divmod(slot, 8)
        for head in range(2):
            for d in range(24):
                key = arguments["key_cache"][block, head, d // x, offset, d % x]
                value = arguments["value_cache"][block, head, d, offset]
                assert_same_bits(key, arguments["key"][token, head, d])
                assert_same_bits(value, arguments["value"][token, head, d])
    expected = reference.reshape_and_cache(**arguments)
    assert_same_bits(arguments["key_cache"], expected[0])
    assert_same_bits(arguments["value_cache"], expected[1])


@pytest.mark.parametrize("slots", [[], [-1, -1], [0], [47], [7, 8], [5, -1, 6, 7, -1, 8, 9]], ids=str)
def test_reshape_and_cache_edges(device, slots):
    """No token, only padding, the first and last slot, a block boundary, padding inside a run."""
    assert_reshape_and_cache(make_reshape_arguments(device, torch.bfloat16, slots))


@pytest.mark.parametrize("layout", ["chunked", "interleaved"])
def test_reshape_and_cache_many_tokens(device, several_threads, layout):
    """Large enough to run in parallel, from a fused qkv."""
    slots, gaps = list(range(100, 1100)), (3072, 3072)
    assert_reshape_and_cache(
        make_reshape_arguments(device, torch.bfloat16, slots, 8, 128, 16, num_blocks=80, gaps=gaps, layout=layout)
    )


@pytest.mark.parametrize("layout", NHD_LAYOUTS)
def test_reshape_and_cache_flash(device, layout):
    """The same for 4-D caches alone, and with tokens at the end that have no slot."""
    arguments = make_reshape_arguments(device, torch.bfloat16, [17, -1, 0], block_size=3, layout=layout)
    assert_reshape_and_cache(arguments, "reshape_and_cache_flash")
    padded = make_reshape_arguments(device, torch.bfloat16, [4, 9, 0], block_size=3, layout=layout, seed=1)
    padded["slot_mapping"] = padded["slot_mapping"][:2]
    without_padding = padded | {name: padded[name][:2] for name in ("key", "value")}
    expected = reference.reshape_and_cache(**without_padding)
    ops.reshape_and_cache_flash(*padded.values())
    assert_same_bits(padded["key_cache"], expected[0])
    assert_same_bits(padded["value_cache"], expected[1])


def test_reshape_and_cache_of_every_fourth_head(device):
    """Heads that are one have a stride that nothing reads, here that of four heads."""
    kv = torch.randn(5, 4, 64, device=device)
    key, value = kv[:, ::4], kv[:, 1::4]
    key_cache, value_cache = torch.zeros(2, 2, 16, 1, 64, device=device)
    OPS.reshape_and_cache_flash(key, value, key_cache, value_cache, torch.arange(5, device=device), "auto", None, None)
    assert_same_bits(key_cache[0, :5], key.contiguous())
    assert_same_bits(value_cache[0, :5], value.contiguous())


def test_wrapper_of_reshape_and_cache(device):
    arguments = make_reshape_arguments(device, torch.float32, [9, -1, 2])
    expected = reference.reshape_and_cache(**arguments)
    ops.reshape_and_cache(**arguments)
    assert_same_bits(arguments["key_cache"], expected[0])
    assert_same_bits(arguments["value_cache"], expected[1])


# ---- gather_cached_kv ----------------------------------------------------------------------------------------------


@st.composite
def slots_to_gather(draw: st.DrawFn, num_slots: int) -> list[int]:
    """Any slots, some of them twice, and padding."""
    begin, end = sorted((draw(st.integers(0, num_slots - 1)), draw(st.integers(0, num_slots - 1))))
    slot = st.integers(0, num_slots - 1) | st.sampled_from([-1, -(2**40)])
    return [*range(begin, end), *draw(st.lists(slot, max_size=40))]


@given(st.data())
def test_gather_cached_kv(device, data):
    arguments = data.draw(reshape_arguments(device, slots_to_gather))
    expected = reference.gather_cached_kv(**arguments)
    caches_before = arguments["key_cache"].clone(), arguments["value_cache"].clone()
    OPS.gather_cached_kv(**arguments)
    for i, rows in enumerate(("key", "value")):
        assert_same_bits(arguments[rows], expected[i])
        assert_row_gap_untouched(arguments[rows])
        assert_same_bits(arguments[f"{rows}_cache"], caches_before[i])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_after_reshape_is_the_input(device, several_threads, dtype):
    """Large enough to run in parallel, in any order of slots."""
    slots = torch.randperm(80 * 16, generator=torch.Generator().manual_seed(0))[:1000].tolist()
    arguments = make_reshape_arguments(device, dtype, slots, 4, 64, 16, num_blocks=80, gaps=(8, 1))
    OPS.reshape_and_cache(**arguments)
    key, value = ops.gather_cached_kv(*(arguments[name] for name in ("key_cache", "value_cache", "slot_mapping")))
    assert_same_bits(key, arguments["key"])
    assert_same_bits(value, arguments["value"])


@pytest.mark.parametrize("layout", ["chunked", "hnd"])
@pytest.mark.parametrize("slots", [[], [-1, -1], [0], [47], [7, 8], [5, -1, 5]], ids=str)
def test_wrapper_of_gather_gives_zeros_for_padding(device, slots, layout):
    arguments = make_reshape_arguments(device, torch.bfloat16, slots, layout=layout)
    arguments["key"][:], arguments["value"][:] = 0, 0
    expected = reference.gather_cached_kv(**arguments)
    result = ops.gather_cached_kv(*(arguments[name] for name in ("key_cache", "value_cache", "slot_mapping")))
    for rows, wanted in zip(result, expected, strict=True):
        assert_same_bits(rows, wanted)


# ---- copy_blocks, swap_blocks --------------------------------------------------------------------------------------


@st.composite
def mappings(draw: st.DrawFn, num_src: int, num_dst: int, distinct: bool) -> list[tuple[int, int]]:
    """Pairs with a destination at most once each; `distinct` keeps sources and destinations apart."""
    dst = draw(st.lists(st.integers(0, num_dst - 1), unique=True, max_size=num_dst - 1 if distinct else num_dst))
    allowed = [block for block in range(num_src) if not (distinct and block in dst)]
    return [(draw(st.sampled_from(allowed)), block) for block in dst]


def mapping_tensor(pairs: list[tuple[int, int]], device) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)


@given(st.data())
def test_copy_blocks(device, data):
    draw, layout = data.draw, data.draw(st.sampled_from(LAYOUTS))
    dtype, generator = draw(st.sampled_from(BLOCK_DTYPES)), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    num_blocks, num_kv_heads = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    head_size, block_size = 16 // dtype.itemsize * draw(st.integers(1, 9)), draw(st.sampled_from([1, 8, 16, 32, 64]))
    key_caches, value_caches = [], []
    for _ in range(draw(st.integers(0, 3))):
        sizes, block_gap = (num_blocks, num_kv_heads, head_size, block_size), draw(st.sampled_from([0, 3, 512]))
        key_cache, value_cache = make_caches(*sizes, dtype, generator, device, layout, block_gap)
        key_caches.append(key_cache)
        value_caches.append(value_cache)
    mapping = mapping_tensor(draw(mappings(num_blocks, num_blocks, distinct=True)), device)
    expected = reference.copy_blocks(key_caches, value_caches, mapping)
    OPS.copy_blocks(key_caches, value_caches, mapping)
    for cache, copy in zip(key_caches + value_caches, expected[0] + expected[1], strict=True):
        assert_same_bits(cache, copy)
    for pair in zip(key_caches, value_caches, strict=True):
        assert_block_gaps_untouched(*pair)


def test_copy_blocks_of_many_layers(device):
    """More caches than a kernel's parameters hold."""
    generator = torch.Generator().manual_seed(0)
    caches = [make_caches(3, 1, 8, 8, torch.float16, generator, device) for _ in range(110)]
    key_caches, value_caches = (list(layers) for layers in zip(*caches, strict=True))
    mapping = mapping_tensor([(0, 2), (0, 1)], device)
    expected = reference.copy_blocks(key_caches, value_caches, mapping)
    OPS.copy_blocks(key_caches, value_caches, mapping)
    for cache, copy in zip(key_caches + value_caches, expected[0] + expected[1], strict=True):
        assert_same_bits(cache, copy)


def test_copy_blocks_of_caches_in_one_tensor(device):
    """Keys and values of two layers block by block, so each cache lies in the gaps of the others."""
    pool = random_bits(4, 2, 2, 24, dtype=torch.float16, generator=torch.Generator().manual_seed(0)).to(device)
    expected = pool.clone()
    expected[[3, 1]] = pool[[0, 2]]
    mapping = mapping_tensor([(0, 3), (2, 1)], device)
    OPS.copy_blocks([pool[:, 0, 0], pool[:, 1, 0]], [pool[:, 0, 1], pool[:, 1, 1]], mapping)
    assert_same_bits(pool, expected)


def test_copy_blocks_of_views_of_one_tensor(device):
    """Two layers, keys and values, token by token in one tensor: pieces of a head, in the gaps of each other."""
    generator = torch.Generator().manual_seed(0)
    pool = random_bits(4, 2, 3, 2, 2, 24, dtype=torch.float16, generator=generator).to(device)
    expected = pool.clone()
    expected[[3, 1]] = pool[[0, 2]]
    mapping = mapping_tensor([(0, 3), (2, 1)], device)
    keys, values = pool.unbind(3)
    OPS.copy_blocks([keys[:, 0], keys[:, 1]], [values[:, 0], values[:, 1]], mapping)
    assert_same_bits(pool, expected)


@pytest.mark.parametrize("layouts", [("nhd", "hnd"), ("interleaved", "nhd"), ("hnd", "interleaved")], ids=str)
def test_swap_blocks_between_layouts(device, layouts):
    """A block is copied index by index, whatever the strides."""
    generator = torch.Generator().manual_seed(0)
    (src, _), (dst, other) = (make_caches(5, 3, 16, 6, torch.float16, generator, device, name, 8) for name in layouts)
    mapping = mapping_tensor([(0, 4), (3, 1), (3, 2)], device)
    expected, same = reference.swap_blocks(src, dst, mapping), other.clone()
    OPS.swap_blocks(src, dst, mapping)
    assert_same_bits(dst, expected)
    assert_same_bits(other, same)
    assert_block_gaps_untouched(dst, other)


@given(st.data())
def test_swap_blocks(device, data):
    draw = data.draw
    dtype, generator = draw(st.sampled_from(BLOCK_DTYPES)), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    block_shape = draw(st.sampled_from([(2, 2, 8, 16 // dtype.itemsize), (3, 24, 32), (1, 5, 7)]))
    num_src, num_dst = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    src_gap, dst_gap = draw(st.sampled_from([0, 5])), draw(st.sampled_from([0, 7, 512]))
    src = with_row_gap(random_bits(num_src, *block_shape, dtype=dtype, generator=generator).to(device), src_gap)
    dst = with_row_gap(random_bits(num_dst, *block_shape, dtype=dtype, generator=generator).to(device), dst_gap)
    mapping = mapping_tensor(draw(mappings(num_src, num_dst, distinct=False)), device)
    expected, src_before = reference.swap_blocks(src, dst, mapping), src.clone()
    OPS.swap_blocks(src, dst, mapping)
    assert_same_bits(dst, expected)
    assert_same_bits(src, src_before)
    assert_row_gap_untouched(dst)


def test_large_blocks(device, several_threads):
    """Large enough for several threads and for stores past the cache."""
    generator = torch.Generator().manual_seed(0)
    caches = make_caches(48, 8, 128, 32, torch.float32, generator, device)
    pairs = [(block, block + 24) for block in range(24)]
    expected = reference.copy_blocks([caches[0]], [caches[1]], mapping_tensor(pairs, device))
    host = torch.zeros_like(caches[0])
    OPS.swap_blocks(caches[0], host, mapping_tensor(pairs, device))
    assert_same_bits(host[24:], caches[0][:24])
    OPS.copy_blocks([caches[0]], [caches[1]], mapping_tensor(pairs, device))
    assert_same_bits(caches[0], expected[0][0])
    assert_same_bits(caches[1], expected[1][0])


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("block_bytes", "gap"), [(128, 0), (320, 0), (320, 8)])
def test_many_small_blocks(device, block_bytes, gap):
    """Enough for stores past the cache, which take 256 bytes at a time, where all blocks begin with a cache line."""
    num_blocks = (4 << 20) // block_bytes + 1
    pool = torch.arange(num_blocks * block_bytes // 8, device=device).view(torch.uint8).view(num_blocks, block_bytes)
    blocks = torch.arange(num_blocks, device=device)
    swapped = with_row_gap(torch.zeros_like(pool), gap)
    OPS.swap_blocks(pool, swapped, torch.stack([blocks, blocks.flip(0)], dim=1))
    assert_same_bits(swapped, pool.flip(0))


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_swap_there_and_back_is_the_identity(device, dtype):
    """Out to a host pool, the device blocks overwritten, and back to other blocks."""
    generator = torch.Generator().manual_seed(0)
    (cache, _), (host, _) = (make_caches(12, 2, 16, 8, dtype, generator, device) for _ in range(2))
    before = cache.clone()
    out, back = [(3, 7), (4, 0), (9, 11)], [(7, 1), (0, 2), (11, 9)]
    OPS.swap_blocks(cache, host, mapping_tensor(out, device))
    cache[[3, 4, 9]] = random_bits(3, *cache.shape[1:], dtype=dtype, generator=generator).to(device)
    OPS.swap_blocks(host, cache, mapping_tensor(back, device))
    assert_same_bits(cache[[1, 2, 9]], before[[3, 4, 9]])


@pytest.mark.devices("simt")
@pytest.mark.parametrize("gaps", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_swap_blocks_with_memory_that_is_not_pinned(device, monkeypatch, gaps):
    """One copy for each run of blocks that follow each other on both sides. test_cuda.py does it with a GPU."""
    monkeypatch.setenv("PAGEDATTN_SIMT_PAGEABLE", "1")
    generator = torch.Generator().manual_seed(0)
    src, dst = (
        with_row_gap(random_bits(12, 2, 24, dtype=torch.float16, generator=generator).to(device), gap) for gap in gaps
    )
    mapping = mapping_tensor([(0, 4), (1, 5), (2, 6), (7, 0), (9, 2), (10, 3), (11, 1), (3, 8), (5, 9)], device)
    expected = reference.swap_blocks(src, dst, mapping)
    OPS.swap_blocks(src, dst, mapping)
    assert_same_bits(dst, expected)
    assert_row_gap_untouched(dst)
    in_pieces = torch.zeros(12, 24, 2, dtype=torch.float16, device=device).transpose(1, 2)
    OPS.swap_blocks(src[:, :, :1], in_pieces[:, :, :1], mapping)
    assert_same_bits(in_pieces[:, :, :1], reference.swap_blocks(src, torch.zeros_like(in_pieces), mapping)[:, :, :1])


def test_wrappers_of_copy_and_swap(device):
    generator = torch.Generator().manual_seed(0)
    (key, value), (host, _) = (make_caches(4, 2, 16, 8, torch.float16, generator, device) for _ in range(2))
    mapping = mapping_tensor([(0, 3), (0, 1)], device)
    expected_host = reference.swap_blocks(key, host, mapping)
    expected = reference.copy_blocks([key], [value], mapping)
    ops.swap_blocks(key, host, mapping)
    ops.copy_blocks([key], [value], mapping)
    for actual, wanted in [(host, expected_host), (key, expected[0][0]), (value, expected[1][0])]:
        assert_same_bits(actual, wanted)


# ---- errors --------------------------------------------------------------------------------------------------------
# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)

RESHAPE_ERRORS = {
    "key rank": ("key", ValueError, lambda a: {"key": a["key"].flatten(1)}),
    "key dtype": ("(key|key_cache)", TypeError, lambda a: {"key": a["key"].half()}),
    "key float64": ("key", TypeError, lambda a: {"key": a["key"].double()}),
    "key not dense in a row": ("key", ValueError, lambda a: {"key": a["key"].mT.contiguous().mT}),
    "key heads": ("(key|key_cache)", ValueError, lambda a: {"key": a["key"][:, :1]}),
    "value shape": ("value", ValueError, lambda a: {"value": a["value"][:2]}),
    "value dtype": ("value", TypeError, lambda a: {"value": a["value"].half()}),
    "value not dense in a row": ("value", ValueError, lambda a: {"value": a["value"].mT.contiguous().mT}),
    "key_cache rank": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"].flatten(2)}),
    "layouts differ": ("value_cache", ValueError, lambda a: {"key_cache": a["key_cache"].flatten(3)}),
    "key_cache dtype": (
        "(key|key_cache|value_cache)",
        TypeError,
        lambda a: {"key_cache": a["key_cache"].half().reshape(6, 2, 2, 8, 8)},
    ),
    "key_cache float64": ("key_cache", TypeError, lambda a: {"key_cache": a["key_cache"].double()}),
    "key_cache x": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"].reshape(6, 2, 2, 8, 8)}),
    "key_cache not contiguous": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"].mT.contiguous().mT}),
    "value_cache dtype": ("value_cache", TypeError, lambda a: {"value_cache": a["value_cache"].half()}),
    "value_cache blocks": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"][:5]}),
    "value_cache layout": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"].mT.contiguous()}),
    "value_cache not contiguous": (
        "value_cache",
        ValueError,
        lambda a: {"value_cache": a["value_cache"].mT.contiguous().mT},
    ),
    "block size": (
        "(key_cache|value_cache)",
        ValueError,
        lambda a: {"key_cache": torch.ones(6, 2, 4, 12, 4), "value_cache": torch.ones(6, 2, 16, 12)},
    ),
    "head size": (
        "(key|key_cache)",
        ValueError,
        lambda a: {
            "key": torch.ones(4, 2, 516),
            "value": torch.ones(4, 2, 516),
            "key_cache": torch.ones(6, 2, 129, 8, 4),
            "value_cache": torch.ones(6, 2, 516, 8),
        },
    ),
    "blocks overlap": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"][:1].expand_as(a["key_cache"])}),
    "slot_mapping dtype": ("slot_mapping", TypeError, lambda a: {"slot_mapping": a["slot_mapping"].short()}),
    "slot_mapping shape": ("(slot_mapping|key)", ValueError, lambda a: {"slot_mapping": a["slot_mapping"][:3]}),
    "slot_mapping rank": ("slot_mapping", ValueError, lambda a: {"slot_mapping": a["slot_mapping"][None]}),
    "slot past the cache": ("slot_mapping", ValueError, lambda a: {"slot_mapping": torch.tensor([0, 1, 2, 48])}),
    "slot of 2^40": ("slot_mapping", ValueError, lambda a: {"slot_mapping": torch.tensor([0, 1, 2, 2**40])}),
    "one memory for both caches": (
        "value_cache",
        ValueError,
        lambda a: {"value_cache": a["key_cache"].view(a["value_cache"].shape)},
    ),
}


NHD_ERRORS = {
    **{what: RESHAPE_ERRORS[what] for what in ("key rank", "key heads", "value shape", "slot past the cache")},
    "last dimension not contiguous": (
        "key_cache",
        ValueError,
        lambda a: {"key_cache": a["key_cache"].mT.contiguous().mT},
    ),
    "value_cache shape": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"][:, :7]}),
    "block size 0": (
        "key_cache",
        ValueError,
        lambda a: {name: a[name][:, :0] for name in ("key_cache", "value_cache")},
    ),
    "head size": (
        "(key|key_cache)",
        ValueError,
        lambda a: {name: a[name][..., :6] for name in ("key", "value", "key_cache", "value_cache")},
    ),
    "blocks overlap": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"][:1].expand_as(a["key_cache"])}),
    "heads overlap": (
        "value_cache",
        ValueError,
        lambda a: {"value_cache": a["value_cache"][:, :, :1].expand_as(a["value_cache"])},
    ),
    "tokens overlap": (
        "value_cache",
        ValueError,
        lambda a: {"value_cache": a["value_cache"].as_strided((6, 8, 2, 16), (256, 16, 64, 1))},
    ),
    "one memory for both caches": ("value_cache", ValueError, lambda a: {"value_cache": a["key_cache"]}),
}


@pytest.mark.parametrize("op", ["reshape_and_cache", "reshape_and_cache_flash"])
@pytest.mark.parametrize("what", NHD_ERRORS)
def test_reshape_and_cache_into_nhd_rejects(device, op, what):
    argument, error, change = NHD_ERRORS[what]
    arguments = make_reshape_arguments(device, torch.float32, [0, 1, 2, 3], layout="nhd")
    assert_rejected(op, arguments | change(arguments), argument, error)


def test_reshape_and_cache_flash_rejects_5_dimensions(device):
    arguments = make_reshape_arguments(device, torch.float32, [0, 1, 2, 3])
    assert_rejected("reshape_and_cache_flash", arguments, "key_cache", ValueError)


@pytest.mark.parametrize("what", RESHAPE_ERRORS)
def test_reshape_and_cache_rejects(device, what):
    argument, error, change = RESHAPE_ERRORS[what]
    arguments = make_reshape_arguments(device, torch.float32, [0, 1, 2, 3])
    assert_rejected("reshape_and_cache", arguments | change(arguments), argument, error)


def test_bad_slot_names_its_token(device):
    arguments = make_reshape_arguments(device, torch.float32, [0, 1, 2, 48, 3])
    match = "slot_mapping: expected .*, got 48 at token 3"
    assert_raises_and_writes_nothing(OPS.reshape_and_cache, arguments, RuntimeError, match)


# gather_cached_kv only reads the caches, which may overlap themselves and each other; and
# what reshape_and_cache's wrapper has as arguments and gather_cached_kv's returns is a matter for the raw op alone.
CACHE_MEMORY_ERRORS = {"blocks overlap", "one memory for both caches"}
ROWS_ERRORS = {"key dtype", "key float64", "key heads", "slot_mapping shape"}
GATHER_ERRORS = {
    **{what: error for what, error in RESHAPE_ERRORS.items() if what not in {*CACHE_MEMORY_ERRORS, *ROWS_ERRORS}},
    **{what: ("key", *RESHAPE_ERRORS[what][1:]) for what in ROWS_ERRORS},
    "one memory for both results": ("value", ValueError, lambda a: {"value": a["key"]}),
    "key_cache float8": (
        "key_cache",
        TypeError,
        lambda a: (
            {"key_cache": torch.ones(6, 2, 1, 8, 16).to(torch.float8_e4m3fn)}
            | {"value_cache": torch.ones(6, 2, 16, 8).to(torch.float8_e4m3fn)}
        ),
    ),
}


@pytest.mark.parametrize("what", GATHER_ERRORS)
def test_gather_cached_kv_rejects(device, what):
    argument, error, change = GATHER_ERRORS[what]
    arguments = make_reshape_arguments(device, torch.float32, [0, 1, 2, 3])
    assert_rejected("gather_cached_kv", arguments | change(arguments), argument, error)


MAPPING_ERRORS = {
    "dtype": (TypeError, lambda m: m.int()),
    "rank": (ValueError, lambda m: m.flatten()),
    "columns": (ValueError, lambda m: torch.ones(2, 3, dtype=torch.int64)),
    "src too large": (ValueError, lambda m: torch.tensor([[0, 1], [6, 2]])),
    "dst too large": (ValueError, lambda m: torch.tensor([[0, 1], [2, 6]])),
    "src negative": (ValueError, lambda m: torch.tensor([[0, 1], [-1, 2]])),
    "dst negative": (ValueError, lambda m: torch.tensor([[0, 1], [2, -1]])),
}


@pytest.mark.parametrize("what", MAPPING_ERRORS)
def test_copy_and_swap_reject_mapping(device, what):
    error, change = MAPPING_ERRORS[what]
    caches = make_caches(6, 2, 16, 8, torch.float32, torch.Generator().manual_seed(0), device)
    mapping = change(mapping_tensor([(0, 1), (2, 3)], device))
    copy = {"key_caches": [caches[0]], "value_caches": [caches[1]], "block_mapping": mapping}
    swap = {"src": caches[0], "dst": caches[0].clone(), "block_mapping": mapping}
    assert_rejected("copy_blocks", copy, "block_mapping", error)
    assert_rejected("swap_blocks", swap, "block_mapping", error)


@pytest.mark.devices("cpu")  # on CUDA the pairs, which lie there, are not looked at
def test_a_cache_without_blocks(device):
    """Errors speak of no blocks, and not of blocks 0 to -1."""
    empty, cache = (make_caches(n, 2, 16, 8, torch.float32, torch.Generator(), device)[0] for n in (0, 6))
    pair = mapping_tensor([(0, 1)], device)
    for src, dst, message in (
        (empty, cache, "expected no pairs, as there are no source blocks, got 1"),
        (cache, empty, "expected no pairs, as there are no target blocks, got 1"),
    ):
        with pytest.raises(RuntimeError, match=f"^swap_blocks: block_mapping: {message}"):
            OPS.swap_blocks(src, dst, pair)
        OPS.swap_blocks(src, dst, pair[:0])
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="block_tables: expected no blocks, as the cache has none, got 0 at sequence"):
        ops.compute_slot_mapping(zero, zero[None], block_size=8, num_blocks=0)


@pytest.mark.parametrize("pairs", [[(1, 0), (2, 1)], [(2, 1), (1, 0)], [(0, 1), (2, 3), (1, 4)], [(1, 1)]], ids=str)
def test_copy_blocks_rejects_a_block_that_is_source_and_target(device, pairs):
    caches = make_caches(6, 2, 16, 8, torch.float32, torch.Generator().manual_seed(0), device)
    copy = {"key_caches": [caches[0]], "value_caches": [caches[1]], "block_mapping": mapping_tensor(pairs, device)}
    assert_rejected("copy_blocks", copy, "block_mapping", ValueError)


@pytest.mark.parametrize("pairs", [[(0, 1), (2, 1)], [(0, 1), (2, 3), (0, 1)]], ids=str)
def test_copy_and_swap_reject_a_target_twice(device, pairs):
    caches = make_caches(6, 2, 16, 8, torch.float32, torch.Generator().manual_seed(0), device)
    mapping = mapping_tensor(pairs, device)
    copy = {"key_caches": [caches[0]], "value_caches": [caches[1]], "block_mapping": mapping}
    swap = {"src": caches[0], "dst": caches[0].clone(), "block_mapping": mapping}
    assert_rejected("copy_blocks", copy, "block_mapping", ValueError)
    assert_rejected("swap_blocks", swap, "block_mapping", ValueError)


COPY_ERRORS = {
    "one list longer": ("(key_caches|value_caches)", ValueError, lambda k, v: ([k, k], [v])),
    "blocks differ": ("(key_caches|value_caches)", ValueError, lambda k, v: ([k], [v[:5]])),
    "not contiguous": ("key_caches", ValueError, lambda k, v: ([k.mT.contiguous().mT], [v])),
    "value not contiguous": ("value_caches", ValueError, lambda k, v: ([k], [v.mT.contiguous().mT])),
    "heads overlap": ("value_caches", ValueError, lambda k, v: ([k], [v[:, :1].expand_as(v)])),
    "halves overlap": (
        "value_caches",
        ValueError,
        lambda k, v: ([k.view(6, 32, 8)[:, :, :4]], [k.view(6, 32, 8)[:, :, 3:7]]),
    ),
    "one cache for keys and values": ("value_caches", ValueError, lambda k, v: ([k], [k])),
    "one cache for two layers": ("(key_caches|value_caches)", ValueError, lambda k, v: ([k, k], [v, v.clone()])),
    "overlapping views": ("value_caches", ValueError, lambda k, v: ([k[:5]], [k[1:]])),
    "overlapping blocks": ("value_caches", ValueError, lambda k, v: ([k.flatten(1)[:, :100]], [k.flatten(1)[:, 99:]])),
    "blocks into the next": (
        "value_caches",
        ValueError,
        lambda k, v: ([k[:5].flatten(1)[:, :100]], [k.as_strided((5, 100), (256, 1), 200)]),
    ),
    "strides that differ": ("value_caches", ValueError, lambda k, v: ([k[:3]], [k[::2]])),
}


@pytest.mark.parametrize("what", COPY_ERRORS)
def test_copy_blocks_rejects(device, what):
    argument, error, change = COPY_ERRORS[what]
    caches = make_caches(6, 2, 16, 8, torch.float32, torch.Generator().manual_seed(0), device)
    key_caches, value_caches = change(*caches)
    mapping = mapping_tensor([(0, 1)], device)
    arguments = {"key_caches": key_caches, "value_caches": value_caches, "block_mapping": mapping}
    assert_rejected("copy_blocks", arguments, argument, error)


SWAP_ERRORS = {
    "dtype differs": ("dst", TypeError, lambda cache: {"dst": cache.half()}),
    "block shape differs": ("dst", ValueError, lambda cache: {"dst": cache[:, :1].contiguous()}),
    "src not contiguous": ("src", ValueError, lambda cache: {"src": cache.mT.contiguous().mT}),
    "pools overlap": ("dst", ValueError, lambda cache: {"src": cache[:5], "dst": cache[1:]}),
    "blocks of dst overlap": ("dst", ValueError, lambda cache: {"dst": cache[:1].expand_as(cache)}),
    "blocks of dst overlap in part": (
        "dst",
        ValueError,
        lambda cache: {"dst": torch.zeros(cache.numel()).as_strided(cache.shape, (255, *cache.stride()[1:]))},
    ),
    "dst not contiguous": ("dst", ValueError, lambda cache: {"dst": cache.mT.contiguous().mT}),
    "heads of dst overlap": ("dst", ValueError, lambda cache: {"dst": cache[:, :1].expand_as(cache)}),
    "blocks without dimensions": ("src", ValueError, lambda cache: {"src": torch.zeros(6), "dst": torch.zeros(6)}),
}


@pytest.mark.parametrize("what", SWAP_ERRORS)
def test_swap_blocks_rejects(device, what):
    argument, error, change = SWAP_ERRORS[what]
    cache, _ = make_caches(6, 2, 16, 8, torch.float32, torch.Generator().manual_seed(0), device)
    arguments = {"src": cache, "dst": cache.clone(), "block_mapping": mapping_tensor([(0, 1)], device)}
    assert_rejected("swap_blocks", arguments | change(cache), argument, error)
