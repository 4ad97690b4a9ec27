"""pagedattn_ext.flashinfer's rotary embedding and norms beside the formulas in fp64."""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reference
import torch
from checks import CountsConverted, assert_close_to_reference, assert_memory_is_checked, assert_same_bits
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


def test_rows_behind_the_last_sequence_stay() -> None:
    q, k = qk()
    before = q.clone()
    flashinfer.apply_rope_inplace(q, k, torch.tensor([0, 3]), torch.tensor([9]))
    assert_same_bits(q[3:].contiguous(), before[3:])
    assert not torch.equal(q[:3], before[:3])


def test_default_scales() -> None:
    """All of a head, in halves: theta 1e4 without a scale; Llama 3.1's own numbers."""
    q, k = qk()
    plain = {"rotary_dim": None, "interleave": False, "rope_scale": 1, "rope_theta": 1e4}
    llama31 = plain | {"rope_scale": 8, "rope_theta": 5e5, "low": 1, "high": 4, "old_context_len": 8192}
    for function, arguments in ((flashinfer.apply_rope, plain), (flashinfer.apply_llama31_rope, llama31)):
        for result, wanted in zip(function(q, k, INDPTR, OFFSETS), expected(q, k, arguments), strict=True):
            assert_close_to_reference(result, wanted)


def test_rope_of_positions_within_and_beyond_what_is_kept() -> None:
    """Cosines are kept for positions of before. A graph computes its own, of the same bits."""
    q, k = qk()
    for largest in (5, 1023, 1024, 3000, 2000, 2**16 + 3, 7, -1, 3000):
        positions = torch.full((len(q),), largest, dtype=torch.int32)
        graph = CPUGraph()
        with torch.inference_mode(), graph.capture():
            captured = flashinfer.apply_rope_pos_ids(q, k, positions)
        graph.replay()
        for result, wanted in zip(flashinfer.apply_rope_pos_ids(q, k, positions), captured, strict=True):
            assert_same_bits(result, wanted)


def test_scales_in_tensors_that_change() -> None:
    """What is kept for numbers would be that of the numbers before."""
    q, k = qk()
    scale, theta = torch.tensor([2.0]), torch.tensor([100.0])

    def results(rope_scale: Any, rope_theta: Any) -> tuple[Tensor, ...]:
        options = {"rope_scale": rope_scale, "rope_theta": rope_theta}
        rotated = flashinfer.apply_rope_pos_ids(q, k, POSITIONS, **options)
        one = flashinfer.single_prefill_with_kv_cache(
            q.repeat(1, 2, 1), k, k, pos_encoding_mode="ROPE_LLAMA", **options
        )
        return *rotated, one

    for numbers in ((2.0, 100.0), (3.0, 500.0)):
        scale.fill_(numbers[0])
        theta.fill_(numbers[1])
        for result, wanted in zip(results(scale, theta), results(*numbers), strict=True):
            torch.testing.assert_close(result, wanted)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_rope_of_a_cache_in_another_dtype(dtype: torch.dtype) -> None:
    """Of a long cache only the rows at the positions are converted. Positions are checked as ever, at replays, too."""
    (q, k), positions = (tensor.bfloat16() for tensor in qk()), POSITIONS.clone()
    cache = torch.randn(1003, 8).to(dtype)

    def rotate(positions: Tensor) -> tuple[Tensor, Tensor]:
        return flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, HEAD_SIZE, cache)

    def quantize(positions: Tensor) -> tuple[Tensor, ...]:
        return flashinfer.rope_quantize_fp8(q[..., :8], k[..., :8], None, None, cache, positions)[:2]

    right = flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, HEAD_SIZE, cache.float())
    in_fp8 = flashinfer.rope_quantize_fp8(q[..., :8], k[..., :8], None, None, cache.float(), positions)[:2]
    for name, step, wanted in (("positions", rotate, right), ("pos_ids", quantize, in_fp8)):
        with CountsConverted(dtype) as counts:
            step(positions)
        assert counts.rows == {len(positions)}
        with pytest.raises(ValueError, match=rf"{name}: expected 0 to 1002 \(the rows of cos_sin_cache\), got 1003"):
            step(positions + 1)
        with pytest.raises(ValueError, match=f"{name}: expected 0 to 1002 .*, got -1 at token 0"):
            step(positions - 8)
        graph = CPUGraph()
        with torch.inference_mode(), graph.capture():
            captured = step(positions)
        positions += 1
        with pytest.raises(ValueError, match="positions: expected 0 to 1002"):
            graph.replay()
        positions -= 1
        graph.replay()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(positions)
        for results in zip(step(positions), captured, compiled, wanted, strict=True):
            for result in results[:3]:
                assert_same_bits(result, results[3])


def test_rope_captured_and_compiled() -> None:
    """A replay rotates by the positions that it finds, and checks them, and so does a compiled function."""
    (q, k), offsets = qk(), OFFSETS.clone()

    def rotate(offsets: Tensor) -> tuple[Tensor, Tensor]:
        return flashinfer.apply_llama31_rope(q, k, INDPTR, offsets)

    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        captured = rotate(offsets)
    offsets -= 1001
    with pytest.raises(ValueError, match="first_positions: expected 0 "):
        graph.replay()
    offsets += 1006
    graph.replay()
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")(offsets)
    for results in zip(captured, compiled, rotate(OFFSETS + 5), strict=True):
        assert_same_bits(results[0], results[2])
        assert_same_bits(results[1], results[2])


IDS = {"pos_ids": POSITIONS}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("apply_rope", {"indptr": torch.tensor([0, 3, 2, 5])}, "indptr: expected offsets that do not decrease, got 3 "),
        ("apply_rope", {"indptr": torch.tensor([0, 2, 4, 6])}, "indptr: expected at most 5 .* last, got 6"),
        ("apply_rope", {"indptr": torch.tensor([1, 2, 4, 5])}, "indptr: expected 0 first, got 1"),
        ("apply_rope", {"indptr": torch.tensor(0)}, "indptr: expected"),
        ("apply_rope", {"offsets": OFFSETS[:2]}, r"indptr: expected .*3.*, got .*4"),
        ("apply_rope", {"offsets": -OFFSETS}, "offsets: expected 0 .*, got -7"),
        ("apply_rope", {"offsets": OFFSETS.float()}, "offsets: expected dtype int32 or int64, got float32"),
        ("apply_llama31_rope", {"q": torch.randn(5, 48)}, r"q: expected 3 dimensions, got 2 \(shape \[5, 48\]\)"),
        ("apply_rope_pos_ids", {"pos_ids": POSITIONS[:4]}, "pos_ids: expected 5 elements, got 4"),
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
        ("apply_rope_pos_ids", {"rope_scale": 0, **IDS}, "rope_scale: expected a positive number, got 0"),
        ("apply_rope_pos_ids", {"rope_theta": math.inf, **IDS}, "rope_theta: expected a positive number, got inf"),
        ("apply_llama31_rope", {"high_freq_factor": 1}, "high_freq_factor: expected more than low_freq_factor 1, .* 1"),
        ("apply_llama31_rope", {"old_context_len": 0}, "old_context_len: expected a positive number, got 0"),
        ("apply_rope", {"k": torch.ones(5, 2, 16, requires_grad=True)}, "k: requires grad, but the ops have no backw"),
    ],
)
def test_refused_rope(name: str, changes: dict[str, Any], message: str) -> None:
    q, k = qk()
    where = {} if "pos_ids" in changes else {"indptr": INDPTR, "offsets": OFFSETS}
    arguments = {"q": q, "k": k} | where | changes
    before = arguments["q"].clone()
    with pytest.raises((ValueError, TypeError, RuntimeError), match=f"^{name}: {message}"):
        getattr(flashinfer, name)(**arguments)
    assert_same_bits(arguments["q"], before)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND", "MLA"])
def test_rope_into_fp8_pages(layout: str, fp8: torch.dtype) -> None:
    """Queries and keys, rotated in their first part, and values, each times its scale; padding is skipped."""
    is_mla, page_size = layout == "MLA", 4
    rope_dim, rest = (16, 64) if is_mla else (32, 64)
    q, k = torch.randn(5, HEADS, rope_dim + rest).half(), torch.randn(5, KV_HEADS, rope_dim + rest).half()
    v, cache = torch.randn(5, KV_HEADS, rope_dim + rest).half(), torch.randn(9, rope_dim)
    if is_mla:
        k = k[:, 0]
    pos_ids, scales = torch.tensor([8, 0, 3, 1, 2], dtype=torch.int32), (2.0, 4.0)
    shapes = [(6, page_size, KV_HEADS, rope_dim + rest)] * 2
    if is_mla:
        shapes = [(6, page_size, rest), (6, page_size, rope_dim)]
    pages = [torch.zeros(shape).to(fp8) for shape in shapes]
    if layout == "HND":
        pages = [page.transpose(1, 2).contiguous() for page in pages]
    kv_indices, kv_indptr = torch.tensor([5, 0, 2], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    batch, positions = torch.tensor([0, 0, 1, 0, -1]), torch.tensor([0, 6, 3, 2, 0])
    q_rope, q_nope = flashinfer.rope_quantize_fp8_append_paged_kv_cache(
        q[..., :rope_dim], k[..., :rope_dim], q[..., rope_dim:], k[..., rope_dim:], None if is_mla else v, cache,
        pos_ids, tuple(pages), kv_indices, kv_indptr, batch, positions, False, None, *scales, page_size,
        "NHD" if is_mla else layout,
    )  # fmt: skip
    largest = torch.finfo(fp8).max

    def quantized(heads: Tensor, scale: float, *, rotates: bool) -> Tensor:
        rows = heads.flatten(1).double()
        if rotates:
            rows = reference.rotary_embedding(pos_ids.long(), rows, None, rope_dim + rest, cache, False)[0]
        return (rows * scale).clamp(-largest, largest).view(heads.shape)

    def assert_rounded(actual: Tensor, expected: Tensor) -> None:
        step = 2.0 ** (-2 if fp8 is torch.float8_e5m2 else -3)  # of a number's own size; the rest is subnormal
        assert ((actual.double() - expected).abs() <= expected.abs() * step / 2 * 1.001 + 2.0**-10).all()

    assert_rounded(torch.cat([q_rope.half(), q_nope.half()], -1), quantized(q, 2.0, rotates=True))
    key, value = quantized(k, 4.0, rotates=True), quantized(v, 4.0, rotates=False)
    expected = [key[..., rope_dim:], key[..., :rope_dim]] if is_mla else [key, value]
    for result, rows in zip(pages, expected, strict=True):
        heads = (result.transpose(1, 2) if layout == "HND" else result).double()
        right = torch.zeros_like(heads)
        for token, (page, place) in enumerate([(5, 0), (0, 2), (2, 3), (5, 2)]):
            right[page, place] = rows[token]
        assert_rounded(heads, right)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantize_dtype": torch.half}, "quantize_dtype: expected torch.float8_e4m3fn or .*, got torch.float16"),
        ({"quantize_dtype": "float8_e5m2"}, "quantize_dtype: expected torch.float8_e4m3fn or .*, got 'float8_e5m2'"),
        ({"quant_scale_q": True}, "quant_scale_q: expected a number, got True"),
        ({"pos_ids": POSITIONS}, r"pos_ids: expected 0 to 8 \(the rows of cos_sin_cache\), got 1000 at token 2"),
        ({"q_rope_out": torch.empty(5, 1, 16).to(torch.float8_e5m2)}, r"q_rope_out: expected shape \[5, 3, 16\]"),
        ({"k_rope": torch.randn(4, 2, 16)}, r"k_rope: expected shape \[5, \*, 16\], got \[4, 2, 16\]"),
        ({"k_rope": torch.randn(5)}, r"k_rope: expected 2 or 3 dimensions, got shape \[5\]"),
        ({"q_nope": torch.randn(5, 2, 16)}, r"q_nope: expected shape \[5, 3, \*\], got \[5, 2, 16\]"),
        ({"k_nope": torch.randn(5, 3, 16)}, r"k_nope: expected shape \[5, 2, \*\], got \[5, 3, 16\]"),
        ({"quant_scale_kv": "x"}, "quant_scale_kv: expected a number, got str"),
    ],
)
def test_refused_rope_into_fp8(changes: dict[str, Any], message: str) -> None:
    q, k = qk()
    arguments = {"q_rope": q, "k_rope": k, "q_nope": None, "k_nope": None, "cos_sin_cache": torch.randn(9, 16)}
    arguments |= {"pos_ids": POSITIONS % 9}
    with pytest.raises((ValueError, TypeError), match=f"^rope_quantize_fp8: {message}"):
        flashinfer.rope_quantize_fp8(**arguments | changes)


def fp8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


OF_HEADS = {"k_rope": torch.ones(3, 2, 16), "k_nope": torch.ones(3, 2, 32), "v": torch.ones(3, 2, 48)}
LATENT = {"k_rope": torch.ones(3, 16), "k_nope": torch.ones(3, 32), "v": None}


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        (OF_HEADS, {"k_rope": torch.ones(3, 2, 8)}, "paged_kv_cache: expected shape .* 2, 40.*, got .* 2, 48"),
        (OF_HEADS, {"k_rope": torch.ones(2, 2, 16)}, r"k_nope: expected shape \[2, 2, \*\], got \[3, 2, 32\]"),
        (OF_HEADS, {"k_nope": torch.ones(3, 1, 32)}, r"k_nope: expected shape \[3, 2, \*\], got \[3, 1, 32\]"),
        (OF_HEADS, {"k_nope": torch.ones(3, 2, 24)}, "paged_kv_cache: expected shape .* 2, 40.*, got .* 2, 48"),
        (OF_HEADS, {"q_nope": torch.ones(3, 3, 32)}, r"q_nope: expected shape \[3, 4, \*\], got \[3, 3, 32\]"),
        (OF_HEADS, {"v": torch.ones(3, 2, 32)}, r"v: expected shape \[3, 2, 48\], got \[3, 2, 32\]"),
        (OF_HEADS, {"v": torch.ones(2, 2, 48)}, r"v: expected shape \[3, 2, 48\], got \[2, 2, 48\]"),
        (OF_HEADS, {"quant_scale_q": "x"}, "quant_scale_q: expected a number, got str"),
        (OF_HEADS, {"q_nope_out": fp8(1, 1, 32).expand(3, 4, 32)}, "q_nope_out: expected memory for each element"),
        (
            OF_HEADS,
            {"k_nope": None, "v": OF_HEADS["k_rope"][..., :8], "k_rope": OF_HEADS["k_rope"][..., :8]}
            | {"q_rope": torch.ones(3, 4, 8), "cos_sin_cache": torch.ones(9, 8), "q_rope_out": fp8(3, 4, 8)}
            | {"paged_kv_cache": (fp8(2, 4, 2, 8), fp8(2, 4, 2, 8))},
            "paged_kv_cache: expected heads of a multiple of 16 elements of torch.float8_e4m3fn, got 8",
        ),
        (LATENT, {"k_rope": torch.ones(3, 8)}, "paged_kv_cache: expected shape .* 4, 8.* of .*, got .* 4, 16.* of"),
        (LATENT, {"k_nope": torch.ones(2, 32)}, r"k_nope: expected shape \[3, \*\], got \[2, 32\]"),
        (
            LATENT,
            {"paged_kv_cache": (fp8(2, 4, 32), fp8(2, 4, 32))},
            "paged_kv_cache: expected shape .* 4, 16.* of .*, got .* 4, 32.* of",
        ),
        (
            LATENT,
            {"paged_kv_cache": (fp8(2, 4, 32), fp8(2, 4, 32)[..., ::2])},
            "paged_kv_cache: expected rows of an even number of elements, side by side, .+, got shape .* strides",
        ),
        (LATENT, {"paged_kv_cache": fp8(3, 4, 32)}, r"paged_kv_cache: expected shape \[num_pages, 2, ...\] or a pair"),
        (LATENT, {"paged_kv_cache": (fp8(2, 4, 32), fp8(2, 4, 16).to("meta"))}, "paged_kv_cache: .* cpu, got .* meta"),
        (LATENT, {"positions": torch.arange(2)}, "positions: expected 3 elements, got 2"),
        (LATENT, {"positions": torch.arange(3) + 2}, "positions: expected 0 or more, and room"),
        (LATENT, {"v": OF_HEADS["v"]}, "v: expected None for keys without heads, got a tensor"),
    ],
)
def test_refused_rope_into_fp8_pages(keys: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """Neither pages nor memory for queries are written before the error."""
    pages = (fp8(2, 4, 2, 48), fp8(2, 4, 2, 48)) if keys is OF_HEADS else (fp8(2, 4, 32), fp8(2, 4, 16))
    arguments: dict[str, Any] = {"q_rope": torch.ones(3, 4, 16), "q_nope": torch.ones(3, 4, 32)}
    arguments |= {"cos_sin_cache": torch.ones(9, 16), "pos_ids": torch.arange(3), "paged_kv_cache": pages}
    arguments |= {"kv_indices": torch.tensor([1]), "kv_indptr": torch.tensor([0, 1]), "page_size": 4}
    arguments |= {"batch_indices": torch.zeros(3).long(), "positions": torch.arange(3)}
    arguments |= {"q_rope_out": fp8(3, 4, 16), "q_nope_out": fp8(3, 4, 32)} | keys | changes
    with pytest.raises((ValueError, TypeError), match=f"^rope_quantize_fp8_append_paged_kv_cache: {message}"):
        flashinfer.rope_quantize_fp8_append_paged_kv_cache(**arguments)
    for memory in (*arguments["paged_kv_cache"], arguments["q_rope_out"], arguments["q_nope_out"]):
        assert memory.is_meta or not memory.float().any()


# ---- norms -----------------------------------------------------------------------------------------------------------


def test_norms_of_heads() -> None:
    """Gemma's, and layer norm with fp32 weights; of heads of a fused qkv."""
    (q, k), weight, bias = qk(torch.bfloat16), torch.randn(HEAD_SIZE), torch.randn(HEAD_SIZE)
    gemma = weight.bfloat16()
    assert_close_to_reference(flashinfer.rmsnorm(q, gemma), reference.rms_norm(q, gemma, 1e-6))
    expected = reference.rms_norm(q, 1 + gemma.double(), 1e-5)
    out = torch.empty_like(q)
    assert flashinfer.gemma_rmsnorm(q, gemma, 1e-5, out) is out
    assert_close_to_reference(out, expected)
    assert_close_to_reference(flashinfer.layernorm(q, weight, bias), reference.layer_norm(q, weight, bias, 1e-6))
    residual = torch.randn(5, KV_HEADS, HEAD_SIZE).bfloat16()
    expected, total = reference.fused_add_rms_norm(k, residual, 1 + gemma.double(), 1e-6)
    flashinfer.gemma_fused_add_rmsnorm(k, residual, gemma)
    assert_close_to_reference(k, expected)
    assert_close_to_reference(residual, total)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scale", [0.02, torch.tensor([1e-4])], ids=["float", "tensor"])
def test_norms_into_fp8(scale: float | Tensor, fp8: torch.dtype) -> None:
    """Divided by the scale, and saturating."""
    x, residual = torch.randn(2, 3, HEAD_SIZE).bfloat16()
    weight, bias, largest = torch.randn(HEAD_SIZE), torch.randn(HEAD_SIZE), torch.finfo(fp8).max

    def assert_quantized(out: Tensor, normed: Tensor) -> None:
        expected = (normed.float() / scale).clamp(-largest, largest)
        assert ((out.float() - expected).abs() <= expected.abs() / 2 ** (2 if fp8 is torch.float8_e5m2 else 3)).all()

    out = torch.empty(3, HEAD_SIZE, dtype=fp8)
    flashinfer.norm.rmsnorm_quant(out, x, weight.bfloat16(), scale)
    assert_quantized(out, reference.rms_norm(x, weight.bfloat16(), 1e-6))
    flashinfer.norm.layernorm_quant(out, x, weight, bias, scale)
    assert_quantized(out, reference.layer_norm(x, weight, bias, 1e-6))
    expected, total = reference.fused_add_rms_norm(x, residual, weight.bfloat16(), 1e-6)
    before = x.clone()
    flashinfer.norm.fused_add_rmsnorm_quant(out, x, residual, weight.bfloat16(), scale)
    assert_quantized(out, expected)
    assert_close_to_reference(residual, total)
    assert_same_bits(x, before)


X, WEIGHT = torch.randn(3, 8), torch.randn(8)
FP8 = torch.empty(3, 8, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rmsnorm", (X, WEIGHT[:4]), r"weight: expected shape \[8\], got \[4\]"),
        ("gemma_rmsnorm", (X, WEIGHT, -1.0), "eps: expected a number that is not negative, got -1"),
        ("gemma_rmsnorm", (X, WEIGHT, 1e-6, X[:1]), r"out: expected shape \[3, 8\], got \[1, 8\]"),
        ("layernorm", (X, WEIGHT.half(), WEIGHT), "gemma: expected dtype float32, got float16"),
        ("layernorm", (X, WEIGHT, WEIGHT[:4]), r"beta: expected shape \[8\], got \[4\]"),
        ("rmsnorm_quant", (FP8, X, WEIGHT, True), "scale: expected a number, got True"),
        ("rmsnorm_quant", (FP8, X, WEIGHT, WEIGHT), r"scale: expected one element, got shape \[8\]"),
        ("fused_add_rmsnorm_quant", (FP8, X, X, WEIGHT, "x"), "scale: expected a number, got str"),
        ("fused_add_rmsnorm_quant", (FP8, X, X, WEIGHT, None), "scale: expected a number, got NoneType"),
        *(
            (name, (FP8, *rows, weight, 1.0), f"weight: expected a torch.Tensor, got {type(weight).__name__}")
            for name, rows in (("rmsnorm_quant", (X,)), ("fused_add_rmsnorm_quant", (X, X)))
            for weight in (None, [1.0] * 8, WEIGHT.numpy())
        ),
        ("rmsnorm_quant", (FP8, X, WEIGHT.cfloat(), 1.0), "weight: expected a real dtype, got complex64"),
        ("rmsnorm_quant", (FP8, X.cfloat(), WEIGHT, 1.0), "input: expected a real dtype, got complex64"),
        ("fused_add_rmsnorm_quant", (FP8, X, X, WEIGHT, torch.tensor(1j)), "scale: expected a real dtype, got complex"),
        ("rmsnorm_quant", (FP8[:1], X, WEIGHT, 1.0), r"out: expected shape \[3, 8\], got \[1, 8\]"),
        ("fused_add_rmsnorm_quant", (X, X, X, WEIGHT, 1.0), "out: expected dtype float8_e4m3fn or float8_e5m2, got"),
        ("fused_add_rmsnorm_quant", (FP8, X, X[:1], WEIGHT, 1.0), r"residual: expected shape \[3, 8\], got \[1, 8\]"),
    ],
)
def test_refused_norms(name: str, arguments: tuple[Any, ...], message: str) -> None:
    before = X.clone()
    with pytest.raises((ValueError, TypeError), match=f"^{name}: {message}"):
        getattr(flashinfer, name)(*arguments)
    assert_same_bits(X, before)


# ---- signatures ------------------------------------------------------------------------------------------------------

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
NO_DEFAULT = inspect.Parameter.empty
SCALED = {"scale": NO_DEFAULT, "eps": 1e-6}
PDL = {"enable_pdl": None}
NORM = dict.fromkeys(["input", "weight"], NO_DEFAULT)
ADD = dict.fromkeys(["input", "residual", "weight"], NO_DEFAULT)
LAYER = dict.fromkeys(["input", "gemma", "beta"], NO_DEFAULT)
OUT = {"out": NO_DEFAULT}
SIGNATURES |= {
    name: list(signature.items())
    for name, signature in {
        "gemma_rmsnorm": NORM | {"eps": 1e-6, "out": None} | PDL,
        "gemma_fused_add_rmsnorm": ADD | {"eps": 1e-6} | PDL,
        "layernorm": LAYER | {"eps": 1e-6},
        "rmsnorm_quant": OUT | NORM | SCALED | PDL,
        "fused_add_rmsnorm_quant": OUT | ADD | SCALED | PDL,
        "layernorm_quant": OUT | LAYER | SCALED | PDL,
        "apply_rope_with_cos_sin_cache": dict.fromkeys(
            ["positions", "query", "key", "head_size", "cos_sin_cache"], NO_DEFAULT
        )
        | {"is_neox": True},
    }.items()
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """FlashInfer 0.7.4's, in order."""
    parameters = inspect.signature(getattr(flashinfer, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]


def rope_quantize(**memory: Any) -> None:
    q, k = torch.ones(3, 4, 16), torch.ones(3, 2, 16)
    flashinfer.rope_quantize_fp8(q, k, q, k, torch.ones(9, 16), torch.arange(3), quantize_dtype=fp8(0).dtype, **memory)


MEMORY: dict[str, tuple[Tensor, Any]] = {
    "rope_quantize_fp8: q_rope_out": (fp8(3, 4, 16), lambda memory: rope_quantize(q_rope_out=memory)),
    "rope_quantize_fp8: k_nope_out": (fp8(3, 2, 16), lambda memory: rope_quantize(k_nope_out=memory)),
    "rmsnorm_quant: out": (FP8, lambda memory: flashinfer.rmsnorm_quant(memory, X, WEIGHT, 1.0)),
    "layernorm_quant: out": (FP8, lambda memory: flashinfer.norm.layernorm_quant(memory, X, WEIGHT, WEIGHT, 1.0)),
    "fused_add_rmsnorm_quant: residual": (
        torch.zeros(3, 8),
        lambda memory: flashinfer.fused_add_rmsnorm_quant(FP8.clone(), X, memory, WEIGHT, 1.0),
    ),
}


@pytest.mark.parametrize("argument", MEMORY)
def test_memory_for_results_is_checked(argument: str) -> None:
    assert_memory_is_checked(argument, *MEMORY[argument])
