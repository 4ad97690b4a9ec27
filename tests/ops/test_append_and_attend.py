"""A step that appends and attends, against the ops that it takes the place of: the same bits in results and caches."""

from typing import Any

import pytest
import torch
from checks import DTYPES, assert_rejected, assert_same_bits
from op_table import OPS
from torch import Tensor

from pagedattn_ext import ops

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS, NUM_POSITIONS = 4, 2, 32, 4, 12, 24
CACHED = [5, 0, 11]
TABLES = [[3, 1, 9, 0], [7, 0, 0, 0], [2, 8, 5, 10]]
# Query rows and new tokens of each sequence.
COUNTS = {"decode": ([1, 1, 1], [1, 1, 1]), "equal": ([2, 2, 2], [3, 3, 3]), "ragged": ([1, 2, 3], [4, 0, 2])}


def starts_of(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts) + 1)]


def make_step(kind: str, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The rows behind a ragged batch's new tokens are padding, which has no sequence."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    num_rows, num_new = map(sum, COUNTS[kind])
    num_new += 2 if kind == "ragged" else 0
    query, new = normal(num_rows, HEADS, HEAD_SIZE), [normal(num_new, KV_HEADS, HEAD_SIZE) for _ in "kv"]
    step = {"query": query, "key": new[0], "value": new[1], "scale": 0.2}
    step |= {name: normal(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE).to(cache_dtype) for name in CACHES}
    step["block_tables"] = torch.tensor(TABLES, dtype=torch.int32, device=device)
    step["cached_lens"] = torch.tensor(CACHED, dtype=torch.int32, device=device)
    if kind != "decode":
        step["query_start_loc"] = torch.tensor(starts_of(COUNTS[kind][0]), dtype=torch.int32, device=device)
    if kind == "ragged":
        step["key_start_loc"] = torch.tensor(starts_of(COUNTS[kind][1]), dtype=torch.int32, device=device)
    return step


CACHES = ("key_cache", "value_cache")
SCALES = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.25])}


def rotary(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Of half a head."""
    angles = torch.arange(NUM_POSITIONS)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005])
    return {"rotary_cos": angles.cos().to(dtype).to(device), "rotary_sin": angles.sin().to(dtype).to(device)}


def positions_of(counts: list[int], first: list[int], step: int = 1) -> list[int]:
    return [first[seq] + step * i for seq, count in enumerate(counts) for i in range(count)]


def one_by_one(kind: str, step: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The ops in turn, with slots and positions of Python."""
    rows, new = COUNTS[kind]
    device = step["query"].device
    cached = step["cached_lens"].tolist()
    places = [(seq, position) for seq, n in enumerate(new) for position in range(cached[seq], cached[seq] + n)]
    slots = [TABLES[seq][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for seq, p in places]
    num_new = step["key"].shape[:-2].numel()
    slots += [-1] * (num_new - len(slots))
    query, key, value = (step[name].flatten(0, -3).clone() for name in ("query", "key", "value"))
    if "rotary_cos" in step:
        first = step.get("rotary_lens", step["cached_lens"]).tolist()
        is_in_order = step.get("causal", True) or "sliding_window" in step or "attention_chunk" in step
        padding = [0] * (num_new - len(places))
        for tokens, positions in (
            (query, positions_of(rows, first, 1 if is_in_order else 0)),
            (key, positions_of(new, first) + padding),
        ):
            cos, sin = step["rotary_cos"], step["rotary_sin"]
            placed = torch.tensor(positions, device=device)
            OPS.rotary_embedding(placed, tokens, None, HEAD_SIZE, cos, step["rotary_is_neox"], sin_cache=sin)
    scales = {name: step[name] for name in SCALES if name in step}
    OPS.reshape_and_cache(
        key, value, step["key_cache"], step["value_cache"], torch.tensor(slots, device=device), **scales
    )
    seq_lens = torch.tensor([a + b for a, b in zip(cached, new, strict=True)], device=device)
    names = ("causal", "sliding_window", "attention_chunk", "query_start_loc", "scale")
    options = {name: step[name] for name in names if name in step}
    return OPS.paged_attention(
        query, step["key_cache"], step["value_cache"], step["block_tables"], seq_lens, **options, **scales
    )


def assert_as_one_by_one(kind: str, step: dict[str, Any]) -> None:
    mine = {name: value.clone() if isinstance(value, Tensor) else value for name, value in step.items()}
    out, lse = OPS.append_and_attend(**step)
    expected, expected_lse = one_by_one(kind, mine)
    assert out.shape == step["query"].shape
    assert lse.shape == step["query"].shape[:-1]
    assert_same_bits(out.flatten(0, -3), expected)
    assert_same_bits(lse.flatten(0, -2), expected_lse)
    for name in ("query", "key", "value", *CACHES):
        assert_same_bits(step[name], mine[name])


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_and_attend(device, dtype, kind):
    assert_as_one_by_one(kind, make_step(kind, dtype, dtype, device))


@pytest.mark.parametrize("kind", COUNTS)
def test_fp8_cache(device, kind):
    scales = {name: scale.to(device) for name, scale in SCALES.items()}
    assert_as_one_by_one(kind, make_step(kind, torch.float16, torch.float8_e4m3fn, device) | scales)


ORDERS = [{}, {"causal": False}, {"causal": False, "sliding_window": 4}, {"causal": False, "attention_chunk": 4}]


@pytest.mark.parametrize("options", ORDERS, ids=str)
@pytest.mark.parametrize("kind", COUNTS)
def test_rotation(device, kind, options):
    """Without an order all rows of a sequence stand at its first new token. Lengths of another kind say where."""
    step = make_step(kind, torch.bfloat16, torch.bfloat16, device) | options | {"rotary_is_neox": kind != "equal"}
    if kind == "ragged":
        step["rotary_lens"] = torch.tensor([17, 0, 3], device=device)
    dtype = torch.float32 if kind == "decode" else torch.bfloat16
    assert_as_one_by_one(kind, step | rotary(dtype, device))


@pytest.mark.parametrize("kind", ["decode", "equal"])
def test_sequences_of_equal_lengths(device, kind):
    """In tensors of four dimensions, and as slices of wider ones."""
    step = make_step(kind, torch.float32, torch.float32, device)
    rows, new = (counts[0] for counts in COUNTS[kind])
    step |= rotary(torch.float32, device) | {"rotary_is_neox": True}
    for name, count in (("query", rows), ("key", new), ("value", new)):
        step[name] = step[name].view(3, count, -1, HEAD_SIZE)
    assert_as_one_by_one(kind, step)
    for name in ("query", "key", "value"):
        step[name] = torch.nn.functional.pad(step[name], (0, 0, 0, 2))[:, :, :-2]
    step["cached_lens"] = step["cached_lens"].long()
    assert_as_one_by_one(kind, step)
    expected, _ = ops.append_and_attend(**step)
    assert_same_bits(ops.append_and_attend(**step | {"query_start_loc": None})[0], expected)


def test_no_tokens(device):
    step = make_step("decode", torch.float32, torch.float32, device)
    none = {name: step[name][:0] for name in ("query", "key", "value", "block_tables", "cached_lens")}
    out, lse = OPS.append_and_attend(**step | none)
    assert out.shape == (0, HEADS, HEAD_SIZE)
    assert lse.shape == (0, HEADS)
    for options in ({}, rotary(torch.float32, device)):  # of no sequence, with several rows each
        equal = make_step("equal", torch.float32, torch.float32, device) | none | options
        for name in ("query", "key", "value"):
            equal[name] = equal[name][:, None].expand(-1, 3, -1, -1)
        equal["query_start_loc"] = equal["query_start_loc"][:1]
        assert OPS.append_and_attend(**equal)[0].shape == (0, 3, HEADS, HEAD_SIZE)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


ROTARY = rotary(torch.float32, torch.device("cpu"))
# What is wrong: the argument, the wrapper's error, and the change.
WRONG: list[tuple[str, type[Exception], dict[str, Any]]] = [
    ("cached_lens", ValueError, {"cached_lens": ints(5, -1, 11)}),
    ("cached_lens", ValueError, {"cached_lens": ints(5, 0, 16)}),
    ("cached_lens", ValueError, {"cached_lens": torch.tensor([5, 0, 2**63 - 1])}),
    ("cached_lens", TypeError, {"cached_lens": torch.ones(3)}),
    ("key", ValueError, {"cached_lens": ints(5, 0)}),
    ("block_tables", ValueError, {"block_tables": ints([3, 12, 0, 0], *TABLES[1:])}),
    ("block_tables", ValueError, {"block_tables": ints([99, 1, 0, 0], *TABLES[1:])}),  # which only attention reads
    ("block_tables", ValueError, {"block_tables": ints(*TABLES[1:])}),
    ("key_start_loc", ValueError, {"key_start_loc": ints(0, 1, 2, 4)}),
    ("key_start_loc", ValueError, {"key_start_loc": ints(0, 2, 1, 3)}),
    ("key_start_loc", ValueError, {"key_start_loc": ints(0, 1, 3)}),
    ("query_start_loc", ValueError, {"query_start_loc": ints(0, 1, 1, 2)}),
    ("query", ValueError, {"query": torch.ones(2, HEADS, HEAD_SIZE)}),
    ("query", ValueError, {"query": torch.ones(3, HEADS * HEAD_SIZE)}),
    ("query", ValueError, {"query": torch.ones(3, 3, HEAD_SIZE)}),
    ("query", ValueError, {"query": torch.ones(3, HEADS, 16)}),
    ("query", ValueError, {"query": torch.ones(2, 2, HEADS, HEAD_SIZE)}),
    ("query", TypeError, {"query": torch.ones(3, HEADS, HEAD_SIZE).half()}),
    ("key", ValueError, {"key": torch.ones(3, 1, HEAD_SIZE)}),
    ("key", ValueError, {"key": torch.ones(1, 3, KV_HEADS, HEAD_SIZE)}),
    ("key", ValueError, {"key": torch.ones(3)}),
    ("key", TypeError, {"key": torch.ones(3, KV_HEADS, HEAD_SIZE).half()}),
    ("value", ValueError, {"value": torch.ones(2, KV_HEADS, HEAD_SIZE)}),
    ("value", TypeError, {"value": torch.ones(3, KV_HEADS, HEAD_SIZE).half()}),
    ("value", ValueError, {"value": torch.ones(2, 1, KV_HEADS, HEAD_SIZE)}),  # a token less than key
    (
        "value",
        ValueError,
        {"key": torch.ones(3, 2, KV_HEADS, HEAD_SIZE), "value": torch.ones(2, 3, KV_HEADS, HEAD_SIZE)},
    ),
    ("value_cache", ValueError, {"value_cache": torch.ones(11, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)}),
    ("scale", ValueError, {"scale": float("nan")}),
    ("sinks", ValueError, {"sinks": torch.ones(3)}),
    ("right_window", ValueError, {"right_window": 2}),
    ("rotary_sin", TypeError, {"rotary_cos": ROTARY["rotary_cos"]}),
    ("rotary_sin", ValueError, {"rotary_sin": ROTARY["rotary_sin"]}),
    ("rotary_lens", ValueError, {"rotary_lens": ints(0, 0, 0)}),
    ("rotary_lens", ValueError, ROTARY | {"rotary_lens": ints(0, 0)}),
    ("rotary_lens", ValueError, ROTARY | {"rotary_lens": ints(0, NUM_POSITIONS, 0)}),
    ("rotary_lens", ValueError, ROTARY | {"rotary_lens": ints(0, -1, 0)}),
    ("cached_lens", ValueError, {name: table[:11] for name, table in ROTARY.items()}),
    ("rotary_cos", ValueError, {name: torch.ones(NUM_POSITIONS, 17) for name in ROTARY}),
    ("rotary_cos", TypeError, {name: table.half() for name, table in ROTARY.items()}),
    ("rotary_sin", ValueError, ROTARY | {"rotary_sin": ROTARY["rotary_sin"][:8]}),
]


@pytest.mark.parametrize(("argument", "error", "change"), WRONG, ids=lambda value: value if type(value) is str else "")
def test_rejected(device, argument, error, change):
    """Before anything is written."""
    assert_rejected(
        "append_and_attend", make_step("decode", torch.float32, torch.float32, device) | change, argument, error
    )
