"""allocate_kv_cache: the right shapes in huge pages; and caches of more than 2^31 elements, of which only a few blocks
are ever touched.
"""

import copy
import mmap
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import reference
import torch
from attention_cases import FP8_CACHES, FP8_IDS
from checks import DTYPES, assert_close_to_reference, assert_same_bits, random_bits

import pagedattn_ext
from pagedattn_ext import ops
from pagedattn_ext.huge_pages import empty_huge_pages

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8])
def test_shapes(device, dtype):
    caches = pagedattn_ext.allocate_kv_cache(5, 2, 48, 32, dtype, device, num_layers=3)
    assert len(caches) == 3
    x = 16 // dtype.itemsize
    for key_cache, value_cache in caches:
        assert key_cache.shape == (5, 2, 48 // x, 32, x) and value_cache.shape == (5, 2, 48, 32)
        for cache in (key_cache, value_cache):
            assert cache.dtype == dtype and cache.device.type == device.type and cache.is_contiguous()
    addresses = [cache.data_ptr() for pair in caches for cache in pair]
    assert len(set(addresses)) == 6
    for cache in pagedattn_ext.allocate_kv_cache(5, 2, 48, 3, dtype, device, layout="nhd")[0]:
        assert cache.shape == (5, 3, 2, 48) and cache.dtype == dtype and cache.device.type == device.type
        assert cache.is_contiguous()


def test_defaults():
    ((key_cache, value_cache),) = pagedattn_ext.allocate_kv_cache(5, 2, 64)
    assert key_cache.shape == (5, 2, 16, 16, 4) and value_cache.shape == (5, 2, 64, 16)
    assert key_cache.dtype == torch.float32 and key_cache.device.type == "cpu" and not key_cache.is_pinned()


def test_padded_head_size():
    assert [pagedattn_ext.padded_head_size(size, torch.float16) for size in (0, 1, 8, 9)] == [0, 8, 8, 16]
    with pytest.raises(ValueError, match=r"^padded_head_size: head_size: expected at least 0, got -3"):
        pagedattn_ext.padded_head_size(-3, torch.float16)
    with pytest.raises(TypeError, match=r"^padded_head_size: dtype: expected a torch\.dtype, got str"):
        pagedattn_ext.padded_head_size(3, "float16")  # type: ignore[arg-type]


def test_no_blocks_or_layers():
    assert pagedattn_ext.allocate_kv_cache(0, 2, 64)[0][1].shape == (0, 2, 64, 16)
    assert pagedattn_ext.allocate_kv_cache(5, 2, 64, num_layers=0) == []


@pytest.mark.parametrize(("layout", "block_size"), [("chunked", 16), ("nhd", 300)])
def test_the_ops_take_it(device, layout, block_size):
    ((key_cache, value_cache),) = pagedattn_ext.allocate_kv_cache(4, 2, 64, block_size, device=device, layout=layout)
    key, value = torch.randn(2, 9, 2, 64, generator=torch.Generator().manual_seed(0)).to(device)
    slots = torch.arange(20, 29, device=device)
    ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
    for result, expected in zip(ops.gather_cached_kv(key_cache, value_cache, slots), (key, value), strict=True):
        assert_same_bits(result, expected)


@pytest.mark.parametrize("num_blocks", [4, 1 << 14])
def test_begins_at_a_page_whatever_the_default_device(num_blocks):
    """Large ones at a huge page."""
    with torch.device("meta"):
        pairs = pagedattn_ext.allocate_kv_cache(num_blocks, 2, 64, num_layers=2, device="cpu")
    for cache in (cache for pair in pairs for cache in pair):
        assert cache.device.type == "cpu"
        assert cache.data_ptr() % (4096 if cache.nbytes < 32 << 20 else 2 << 20) == 0


def test_small_tensors_share_huge_pages_and_do_not_overlap():
    """Of several threads, and written to in and out of inference mode."""

    def allocate(i: int) -> list[torch.Tensor]:
        with torch.inference_mode(i % 2 == 0):
            return [empty_huge_pages((1000, 1 + size % 3), torch.float32).fill_(i) for size in range(1000)]

    with ThreadPoolExecutor(8) as pool:
        tensors = [tensor for some in pool.map(allocate, range(8)) for tensor in some]
    for tensor in tensors:
        assert tensor.min() == tensor.max() < 8
        tensor.fill_(8)
    begins = sorted(tensor.data_ptr() for tensor in tensors)
    size_at = {tensor.data_ptr(): -(-tensor.nbytes // 4096) * 4096 for tensor in tensors}
    num_gaps = sum(begin + size_at[begin] != following for begin, following in pairwise(begins))
    assert num_gaps <= sum(size_at.values()) // (32 << 20) + 2


@pytest.mark.parametrize("shape", [(3, 1000), (2, 0)])
def test_a_small_tensor_alone_is_shared_saved_and_copied(shape):
    """Torch does so with whole storages: no tensor beside it moves, or is saved with it."""
    before, tensor, behind = (empty_huge_pages(shape, torch.float32).fill_(i) for i in range(3))
    places = before.data_ptr(), behind.data_ptr()
    assert len(pickle.dumps(tensor)) < tensor.nbytes + 1000
    assert copy.deepcopy(tensor).untyped_storage().nbytes() == tensor.nbytes
    tensor.share_memory_()
    assert not before.is_shared() and not behind.is_shared() and (before.data_ptr(), behind.data_ptr()) == places
    later = empty_huge_pages(shape, torch.float32)
    assert not later.is_shared()
    assert [each.sum() for each in (before, tensor, behind, later)] == [i * tensor.numel() for i in (0, 1, 2, 0)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="pages are counted on Linux")
def test_pages_of_a_large_tensor_go_with_it():
    """Though the tensors beside it keep their mapping, and what they hold."""

    def resident_mib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE >> 20

    kept, views = [], []
    before = resident_mib()
    for i in range(20):  # two large ones in a mapping, each between small ones
        large = empty_huge_pages((14 << 20,), torch.uint8).fill_(i + 1)
        kept += [empty_huge_pages((1000,), torch.uint8).fill_(i + 1)]
        if i == 0:
            views += [large[5:]]  # of a tensor that goes
        del large
    most = 20 * 4 + 20  # of each large one the two ends, outside of whole huge pages; and what else the process takes
    assert resident_mib() - before < most + 14
    for i, tensor in enumerate(kept):
        assert tensor.min() == tensor.max() == i + 1
    assert views[0].min() == views[0].max() == 1
    views.clear()
    assert resident_mib() - before < most


def test_what_does_not_fit_in_memory():
    for num_bytes in (1 << 50, 1 << 64):  # more than there is, and more than addresses reach
        with pytest.raises(MemoryError, match=f"^{num_bytes} bytes of memory on the CPU: "):
            empty_huge_pages((num_bytes,), torch.uint8)


def test_huge_pages_are_advised():
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    for cache in pagedattn_ext.allocate_kv_cache(2048, 8, 128)[0]:
        middle, inside = cache.data_ptr() + cache.nbytes // 2, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
            elif inside and line.startswith("VmFlags:"):
                assert "hg" in line.split()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs CUDA")
def test_pinned():
    for cache in pagedattn_ext.allocate_kv_cache(4, 2, 64, pin_memory=True)[0]:
        assert cache.is_pinned()


VALID = {"num_blocks": 5, "num_kv_heads": 2, "head_size": 64, "block_size": 16, "dtype": torch.float32, "num_layers": 1}
ERRORS = [
    ("num_blocks", -1, ValueError),
    ("num_blocks", 2.0, TypeError),
    ("num_kv_heads", 0, ValueError),
    ("num_kv_heads", "2", TypeError),
    ("head_size", 0, ValueError),
    ("head_size", 66, ValueError),
    ("head_size", 516, ValueError),
    ("head_size", None, TypeError),
    ("block_size", 0, ValueError),
    ("block_size", 24, ValueError),
    ("block_size", 512, ValueError),
    ("block_size", 16.0, TypeError),
    ("dtype", torch.float64, TypeError),
    ("dtype", torch.int32, TypeError),
    ("dtype", "float32", TypeError),
    ("layout", "hnd", ValueError),
    ("layout", None, ValueError),
    ("num_layers", -1, ValueError),
    ("num_layers", 1.0, TypeError),
]


def test_rejects_the_name_of_a_dtype():
    with pytest.raises(TypeError, match=r"^allocate_kv_cache: dtype: expected a torch\.dtype, got str"):
        pagedattn_ext.allocate_kv_cache(5, 2, 64, dtype="bfloat16")


def test_rejects_a_block_without_tokens():
    with pytest.raises(ValueError, match=r"^allocate_kv_cache: block_size: expected at least 1, got 0"):
        pagedattn_ext.allocate_kv_cache(5, 2, 64, 0, layout="nhd")


@pytest.mark.parametrize(("argument", "wrong", "error"), ERRORS)
def test_rejects(argument, wrong, error):
    with pytest.raises(error, match=rf"^allocate_kv_cache: {argument}: expected .+, got .+"):
        pagedattn_ext.allocate_kv_cache(**VALID | {argument: wrong})


@pytest.mark.parametrize(("name", "error"), [("gpu", ValueError), (None, TypeError), ("cuda:999999999999", ValueError)])
def test_rejects_what_is_no_device(name, error):
    with pytest.raises(error, match=r"^allocate_kv_cache: device: expected .+, got .+"):
        pagedattn_ext.allocate_kv_cache(5, 2, 64, device=name)


# ---- more than 2^31 elements ---------------------------------------------------------------------------------------

FAR_BLOCKS = [0, 2**16, 2**17 - 1, 2**17, 2**17 + 2]  # of 2^14 elements: up to and past element 2^31


def make_far_caches(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 2^31 elements and a bit more: on the CPU mapped, and committed page by page where it is written."""
    try:
        ((key_cache, value_cache),) = pagedattn_ext.allocate_kv_cache(FAR_BLOCKS[-1] + 1, 8, 128, 16, dtype, device)
    except RuntimeError as error:
        pytest.skip(f"this machine has not the memory: {error}")
    assert key_cache.numel() > 2**31
    return key_cache, value_cache


def near(cache: torch.Tensor) -> torch.Tensor:
    return cache[FAR_BLOCKS]


@pytest.mark.parametrize("cache", [None, *FP8_CACHES[1:3]], ids=["bf16", *FP8_IDS[1:3]])
def test_reshape_attention_and_gather_far_into_a_cache(device, cache):
    """As on a cache that holds nothing but these blocks."""
    kv_cache_dtype, dtype = cache or ("auto", torch.bfloat16)
    key_cache, value_cache = make_far_caches(dtype, device)
    num_tokens = 16 * len(FAR_BLOCKS)
    key, value = torch.randn(2, num_tokens, 8, 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    query = torch.randn(1, 16, 128, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    block_table = torch.tensor([FAR_BLOCKS], dtype=torch.int32, device=device)
    slots = reference.slots_of(block_table[0], num_tokens, 16)
    options = {"kv_cache_dtype": kv_cache_dtype}
    ops.reshape_and_cache(key, value, key_cache, value_cache, slots, **options)

    near_caches = near(key_cache), near(value_cache)
    zeros = (torch.zeros_like(near_cache) for near_cache in near_caches)
    near_slots = torch.arange(num_tokens, device=device)
    expected_caches = reference.reshape_and_cache(key, value, *zeros, near_slots, **options)
    for near_cache, expected in zip(near_caches, expected_caches, strict=True):
        assert_same_bits(near_cache, expected)

    seq_lens = torch.tensor([num_tokens], dtype=torch.int32, device=device)
    out, _ = ops.paged_attention(query, key_cache, value_cache, block_table, seq_lens, **options)
    near_table = torch.arange(len(FAR_BLOCKS), dtype=torch.int32, device=device)[None]
    arguments = {"scale": 128**-0.5, **options}
    expected, eager = (
        reference.paged_attention(query, *near_caches, near_table, seq_lens, dtype=compute, **arguments)[0]
        for compute in (torch.float64, torch.bfloat16)
    )
    assert_close_to_reference(out, expected, eager)
    assert_same_bits(ops.paged_attention_v2(query, key_cache, value_cache, block_table, seq_lens, **options), out)
    if cache is None:
        for result, wanted in zip(ops.gather_cached_kv(key_cache, value_cache, slots), (key, value), strict=True):
            assert_same_bits(result, wanted)


def test_copy_and_swap_far_into_a_cache(device):
    key_cache, value_cache = make_far_caches(torch.bfloat16, device)
    generator, (first, middle, *_, last) = torch.Generator().manual_seed(0), FAR_BLOCKS
    for cache in (key_cache, value_cache):
        cache[first] = random_bits(*cache.shape[1:], dtype=cache.dtype, generator=generator)
    ops.copy_blocks([key_cache], [value_cache], torch.tensor([[first, last]]))
    ops.copy_blocks([key_cache], [value_cache], torch.tensor([[last, middle]]))
    for cache in (key_cache, value_cache):
        assert_same_bits(cache[last], cache[first])
        assert_same_bits(cache[middle], cache[first])
    host = torch.zeros(2, *value_cache.shape[1:], dtype=value_cache.dtype)
    ops.swap_blocks(value_cache, host, torch.tensor([[last, 1]]))
    assert_same_bits(host[1], value_cache[first].cpu())
    value_cache[last] = 0
    ops.swap_blocks(host, value_cache, torch.tensor([[1, last]]))
    assert_same_bits(value_cache[last], value_cache[first])
