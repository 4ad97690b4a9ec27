"""Work that fills a GPU: blocks of decode take a second work, threads several rows or vectors. On a GPU of 132
multiprocessors in sizes of a model; on the simt device, which is given 16 of them, just past the limit: the limit grows
with the number of multiprocessors, and the kernels are the same.
"""

import math
from dataclasses import dataclass

import pytest
import reference
import torch
from attention_cases import OPS, assert_attention
from checks import assert_close_to_reference, assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.devices("simt", "cuda")


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has its own."""
    monkeypatch.setenv("PAGEDATTN_SIMT_MULTIPROCESSORS", "16")


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


@pytest.mark.devices("simt")
def test_number_of_multiprocessors_is_checked(device, monkeypatch):
    monkeypatch.setenv("PAGEDATTN_SIMT_MULTIPROCESSORS", "many")
    with pytest.raises(RuntimeError, match=r"^PAGEDATTN_SIMT_MULTIPROCESSORS: expected 1 or more, got many"):
        OPS.rms_norm(torch.empty(2, 8), torch.ones(2, 8), torch.ones(8), 1e-6)


# ---- attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Decode rows of `num_seqs` sequences, of up to `max_seq_len` tokens each; `long_seq_len` is that of one more."""

    num_seqs: int
    num_kv_heads: int
    max_seq_len: int
    head_size: int
    min_seq_len: int = 0
    long_seq_len: int = 0
    group_size: int = 2
    num_blocks: int = 40  # which the sequences share

    @property
    def seq_lens(self) -> list[int]:
        num_lengths = self.max_seq_len - self.min_seq_len + 1
        lens = [self.min_seq_len + 37 * seq % num_lengths for seq in range(self.num_seqs)]
        return [*lens, self.long_seq_len] if self.long_seq_len else lens


# Works are KV heads x sequences x partitions of 512 tokens, here more than the blocks that share them: 16 for each
# multiprocessor, and one.
BATCHES = {
    "simt": {
        "many works": Batch(135, 2, max_seq_len=40, head_size=64),
        "a long sequence": Batch(4, 2, max_seq_len=40, head_size=64, long_seq_len=16_200),
    },
    "cuda": {
        "many works": Batch(96, 32, min_seq_len=1025, max_seq_len=1536, head_size=128, num_blocks=400),
        "a long sequence": Batch(255, 8, max_seq_len=2000, head_size=128, long_seq_len=100_000, group_size=4),
    },
}

DTYPES_OF_QUERY_AND_CACHE = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float8_e4m3fn),
]


def make_decode_arguments(batch: Batch, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device) -> dict:
    """Blocks are drawn for each place of the tables, so that caches stay small."""
    x, block_size = 16 // cache_dtype.itemsize, 16
    num_seqs = len(batch.seq_lens)
    shape = (batch.num_blocks, batch.num_kv_heads, batch.head_size, block_size)
    key_cache, value_cache = (normal(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    tables = torch.randint(
        batch.num_blocks,
        (num_seqs, math.ceil(max(batch.seq_lens) / block_size)),
        dtype=torch.int32,
        generator=torch.Generator().manual_seed(3),
    )
    return {
        "query": normal(num_seqs, batch.num_kv_heads * batch.group_size, batch.head_size, dtype=dtype, device=device),
        "key_cache": key_cache.unflatten(2, (-1, x)).mT.contiguous().to(cache_dtype),
        "value_cache": value_cache.to(cache_dtype),
        "block_tables": tables.to(device),
        "seq_lens": torch.tensor(batch.seq_lens, dtype=torch.int32, device=device),
        "scale": batch.head_size**-0.5,
    }


@pytest.mark.parametrize("dtypes", DTYPES_OF_QUERY_AND_CACHE, ids=str)
@pytest.mark.parametrize("kind", ["many works", "a long sequence"])
def test_blocks_take_several_decode_works(device, kind, dtypes):
    batch = BATCHES["cuda" if device.type == "cuda" else "simt"][kind]
    arguments = make_decode_arguments(batch, *dtypes, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


# ---- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.bfloat16, 1024), (torch.float16, 4096), (torch.float32, 4096), (torch.bfloat16, 4099)],
    ids=str,
)
def test_norms_of_many_rows(device, dtype, width):
    """Several vectors a thread: within a warp, in several of them, and more than the registers hold."""
    num_rows = 8192 if device.type == "cuda" else 133
    input, residual = (normal(num_rows, width, dtype=dtype, device=device, seed=seed) for seed in range(2))
    weight, out = normal(width, dtype=dtype, device=device, seed=2), torch.full_like(input, math.nan)
    OPS.rms_norm(out, input, weight, 1e-6)
    assert_close_to_reference(out, reference.rms_norm(input, weight, 1e-6))
    expected, _ = reference.fused_add_rms_norm(input, residual, weight, 1e-6)
    expected_residual = (input.float() + residual.float()).to(dtype)
    OPS.fused_add_rms_norm(input, residual, weight, 1e-6)
    assert_close_to_reference(input, expected)
    assert_same_bits(residual, expected_residual)


def rows_and_width(device: torch.device, dtype: torch.dtype, aligned: bool) -> tuple[int, int]:
    """Of a tensor for which threads take 4 rows each, the last of them fewer. Where rows are not `aligned`, accesses
    are an element each: narrow rows are enough."""
    if device.type == "cuda":
        return 8190, 11008 if aligned else 11007
    return 514, 256 * (16 // dtype.itemsize if aligned else 1) - (not aligned)


@pytest.mark.parametrize(
    ("dtype", "aligned"), [(torch.bfloat16, True), (torch.float32, True), (torch.float16, False)], ids=str
)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_new"])
def test_activations_of_many_rows(device, name, dtype, aligned):
    num_rows, width = rows_and_width(device, dtype, aligned)
    input = normal(num_rows, width * (2 if name == "silu_and_mul" else 1), dtype=dtype, device=device)
    out = torch.full((num_rows, width), math.nan, dtype=dtype, device=device)
    getattr(OPS, name)(out, input)
    assert_close_to_reference(out, getattr(reference, name)(input))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_of_many_rows(device, dtype):
    shape = (8190, 32, 128) if device.type == "cuda" else (133, 64, 16 * 16 // dtype.itemsize)
    inputs = {}
    for i, part in enumerate(("prefix", "suffix")):
        inputs[f"{part}_output"] = normal(*shape, dtype=dtype, device=device, seed=2 * i)
        inputs[f"{part}_lse"] = normal(*shape[:2], dtype=torch.float32, device=device, seed=2 * i + 1)
    output, output_lse = (torch.full_like(inputs[f"prefix_{name}"], math.nan) for name in ("output", "lse"))
    OPS.merge_attn_states(output=output, output_lse=output_lse, **inputs)
    expected_output, expected_lse = reference.merge_attn_states(**inputs)
    assert_close_to_reference(output, expected_output)
    assert_close_to_reference(output_lse, expected_lse)
