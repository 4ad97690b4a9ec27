"""pagedattn_ext.flashinfer's rotary embedding beside the formula in fp64."""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reference
import torch
from checks import assert_close_to_reference, assert_same_bits
from torch import Tensor

from pagedattn_ext import CPUGraph, flashinfer

HEADS, KV_HEADS, HEAD_SIZE = 3, 2, 16
INDPTR, OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([7, 3, 1000], dtype=torch.int32)
POSITIONS = torch.tensor([7, 8, 1000, 1001, 1002])
ARGUMENTS: dict[bool, dict[str, Any]] = {
    False: {"rotary_dim": 12, "interleave": True, "rope_scale": 3.0, "rope_theta": 500.0},
    True: {
        "rotary_dim": None,
        "interleave": False,
        "rope_scale": 4.0,
        "rope_theta": 300.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.5,
        "old_context_len": 60,
    },
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(49)
        yield


def qk(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Slices of wider heads, in one tensor."""
    heads = torch.randn(5, HEADS + KV_HEADS, HEAD_SIZE + 3).to(dtype)[..., 2 : 2 + HEAD_SIZE]
    return heads[:, :HEADS], heads[:, HEADS:]


def frequencies(rotary_dim: int, scale: float, theta: float, passage: tuple[float, ...]) -> Tensor:
    """As transformers computes them for Llama 3.1, pair by pair."""
    result = []
    for pair in range(rotary_dim // 2):
        frequency = theta ** (-2 * pair / rotary_dim)
        scaled = frequency / scale
        if passage:
            low, high, context = passage
            wavelength = 2 * math.pi / frequency
            smooth = (context / wavelength - low) / (high - low)
            if wavelength < context / high:
                scaled = frequency
            elif wavelength <= context / low:
                scaled = (1 - smooth) * frequency / scale + smooth * frequency
        result.append(scaled)
    return torch.tensor(result, dtype=torch.float64)


def expected(q: Tensor, k: Tensor, arguments: dict[str, Any]) -> list[Tensor]:
    dim, interleave, scale, theta, *passage = arguments.values()
    angles = torch.arange(1003)[:, None] * frequencies(dim or HEAD_SIZE, scale, theta, tuple(passage))
    cache = torch.cat([angles.cos(), angles.sin()], 1)
    rotated = reference.rotary_embedding(POSITIONS, q.flatten(1), k.flatten(1), HEAD_SIZE, cache, not interleave)
    return [each.unflatten(1, (-1, HEAD_SIZE)) for each in rotated]


def functions(llama31: bool, pos_ids: bool) -> tuple[Callable[..., Any], Callable[..., None]]:
    name = f"apply_{'llama31_' * llama31}rope{'_pos_ids' * pos_ids}"
    return getattr(flashinfer, name), getattr(flashinfer, f"{name}_inplace")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pos_ids", [True, False])
@pytest.mark.parametrize("llama31", [True, False])
def test_rope(llama31: bool, pos_ids: bool, dtype: torch.dtype) -> None:
    """By position, in place and not, of heads that are slices; the rest of a head stays."""
    (q, k), arguments = qk(dtype), ARGUMENTS[llama31]
    where = (POSITIONS.int(),) if pos_ids else (INDPTR, OFFSETS)
    right = expected(q, k, arguments)
    out_of_place, in_place = functions(llama31, pos_ids)
    before = q.clone(), k.clone()
    results = out_of_place(q, k, *where, *arguments.values())
    for result, tensor, old, wanted in zip(results, (q, k), before, right, strict=True):
        assert_close_to_reference(result, wanted)
        assert_same_bits(tensor, old)
    assert in_place(q, k, *where, *arguments.values()) is None
    assert_same_bits(q.contiguous(), results[0])
    assert_same_bits(k.contiguous(), results[1])


def test_default_scales() -> None:
    """All of a head, in halves: theta 1e4 without a scale; Llama 3.1's own numbers."""
    q, k = qk()
    plain = {"rotary_dim": None, "interleave": False, "rope_scale": 1, "rope_theta": 1e4}
    llama31 = plain | {"rope_scale": 8, "rope_theta": 5e5, "low": 1, "high": 4, "old_context_len": 8192}
    for function, arguments in ((flashinfer.apply_rope, plain), (flashinfer.apply_llama31_rope, llama31)):
        for result, wanted in zip(function(q, k, INDPTR, OFFSETS), expected(q, k, arguments), strict=True):
            assert_close_to_reference(result, wanted)


@pytest.mark.parametrize("flat", [True, False])
def test_rope_of_a_cache(flat: bool) -> None:
    """Not in place: query and key stay, and the results have their shapes."""
    q, k = (tensor.flatten(1) if flat else tensor for tensor in qk())
    cache, before = torch.randn(1003, 8), (q.clone(), k.clone())
    results = flashinfer.apply_rope_with_cos_sin_cache(POSITIONS.int(), q, k, HEAD_SIZE, cache, False)
    right = reference.rotary_embedding(POSITIONS, q.flatten(1), k.flatten(1), HEAD_SIZE, cache, False)
    for result, wanted, tensor, old in zip(results, right, (q, k), before, strict=True):
        assert_close_to_reference(result, wanted.view(old.shape))
        assert_same_bits(tensor, old)


def test_rope_captured_and_compiled() -> None:
    """A replay rotates by the positions that it finds, and so does a compiled function."""
    (q, k), positions = qk(), POSITIONS.clone()

    def rotate(positions: Tensor) -> tuple[Tensor, Tensor]:
        return flashinfer.apply_rope_pos_ids(q, k, positions)

    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        captured = rotate(positions)
    positions += 5
    graph.replay()
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")(positions)
    for results in zip(captured, compiled, rotate(POSITIONS + 5), strict=True):
        assert_same_bits(results[0], results[2])
        assert_same_bits(results[1], results[2])


IDS = {"pos_ids": POSITIONS}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "apply_rope",
            {"indptr": torch.tensor([0, 3, 2, 5])},
            r"indptr: expected rows from 0 to 5 in asc.*, got \[0, 3",
        ),
        (
            "apply_rope",
            {"indptr": torch.tensor([0, 2, 4, 6])},
            r"indptr: expected rows from 0 to 5 .*, got \[0, 2, 4, 6\]",
        ),
        (
            "apply_rope",
            {"indptr": torch.tensor([1, 2, 4, 5])},
            r"indptr: expected rows from 0 to 5 .*, got \[1, 2, 4, 5\]",
        ),
        ("apply_rope", {"indptr": torch.tensor(0)}, r"indptr: expected 1 dimensions, got 0 \(shape \[\]\)"),
        ("apply_rope", {"offsets": OFFSETS[:2]}, r"offsets: expected shape \[3\], one less than indptr, got \[2\]"),
        ("apply_rope", {"offsets": -OFFSETS}, r"offsets: expected positions of 0 and more, got -1000"),
        ("apply_rope", {"offsets": OFFSETS.float()}, "offsets: expected dtype int32 or int64, got float32"),
        ("apply_llama31_rope", {"q": torch.randn(5, 48)}, r"q: expected 3 dimensions, got 2 \(shape \[5, 48\]\)"),
        ("apply_rope_pos_ids", {"pos_ids": POSITIONS[:4]}, r"pos_ids: expected shape \[5\], got \[4\]"),
        (
            "apply_rope_pos_ids",
            {"k": torch.randn(4, 2, 16), **IDS},
            r"k: expected shape \[5, \*, 16\], got \[4, 2, 16\]",
        ),
        ("apply_rope_pos_ids", {"k": torch.randn(5, 2, 16).half(), **IDS}, "k: expected dtype float32, got float16"),
        ("apply_rope_pos_ids_inplace", {"rotary_dim": 7, **IDS}, "rotary_dim: expected an even number up to 16, got 7"),
        (
            "apply_rope_pos_ids_inplace",
            {"rotary_dim": 18, **IDS},
            "rotary_dim: expected an even number up to 16, got 18",
        ),
        ("apply_rope_pos_ids_inplace", {"rope_scale": True, **IDS}, "rope_scale: expected a number, got True"),
        ("apply_rope_pos_ids", {"interleave": 1, **IDS}, "interleave: expected a bool, got int"),
    ],
)
def test_refused_rope(name: str, changes: dict[str, Any], message: str) -> None:
    q, k = qk()
    where = {} if "pos_ids" in changes else {"indptr": INDPTR, "offsets": OFFSETS}
    arguments = {"q": q, "k": k} | where | changes
    before = arguments["q"].clone()
    with pytest.raises((ValueError, TypeError), match=f"^{name}: {message}"):
        getattr(flashinfer, name)(**arguments)
    assert_same_bits(arguments["q"], before)


ROPE = {"rotary_dim": None, "interleave": False, "rope_scale": 1, "rope_theta": 1e4}
LLAMA31 = ROPE | {"rope_scale": 8, "rope_theta": 5e5, "low_freq_factor": 1, "high_freq_factor": 4}
LLAMA31 |= {"old_context_len": 8192}
SIGNATURES = {
    f"apply_{'llama31_' * llama31}rope{'_pos_ids' * pos_ids}{'_inplace' * in_place}": [
        *dict.fromkeys(
            ["q", "k", *(["pos_ids"] if pos_ids else ["indptr", "offsets"])], inspect.Parameter.empty
        ).items(),
        *(LLAMA31 if llama31 else ROPE).items(),
    ]
    for llama31 in (True, False)
    for pos_ids in (True, False)
    for in_place in (True, False)
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """FlashInfer 0.7's, in order."""
    parameters = inspect.signature(getattr(flashinfer, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]
