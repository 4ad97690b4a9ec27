"""bert_padding, layers.rotary and ops of pagedattn_ext.flash_attn, against plain torch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from brute_force import starts
from checks import CountsConverted, assert_close_to_reference, assert_memory_is_checked, assert_same_bits
from torch import Tensor
from torch.nn import functional

from pagedattn_ext.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from pagedattn_ext.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from pagedattn_ext.flash_attn.ops import rms_norm
from pagedattn_ext.flash_attn.ops.activations import fast_gelu_impl, swiglu
from pagedattn_ext.flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn
from pagedattn_ext.flash_attn.ops.triton.rotary import apply_rotary


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(49)
        yield


# ---- bert_padding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unpad_and_pad(dtype: torch.dtype) -> None:
    hidden = torch.randn(3, 4, 2, 5)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).to(dtype)
    tokens, indices, cu_seqlens, longest, used = unpad_input(hidden, mask)
    assert_same_bits(tokens, hidden[mask.bool()])
    assert (indices.tolist(), cu_seqlens.tolist(), longest) == ([0, 1, 9, 10, 11], [0, 2, 2, 5], 3)
    assert used.tolist() == [2, 0, 3] and used.dtype == cu_seqlens.dtype == torch.int32
    assert_same_bits(pad_input(tokens, indices, 3, 4), torch.where(mask.bool()[..., None, None], hidden, 0))
    assert_same_bits(index_first_axis(hidden.flatten(0, 1), indices), tokens)
    assert_same_bits(index_first_axis_residual(hidden.flatten(0, 1), indices)[0], tokens)


def test_unpad_with_room_that_is_not_used() -> None:
    mask, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 1]])
    tokens, _, cu_seqlens, longest, used = unpad_input(torch.arange(6.0).view(2, 3, 1), mask, unused)
    assert tokens.flatten().tolist() == [0, 1, 3, 4, 5]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 2, 5], 3, [1, 2])


def test_unpad_rows_of_several_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    hidden = torch.arange(18.0).view(3, 6, 1)
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(hidden, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert tokens.flatten().tolist() == indices.tolist()
    assert (cu_seqlens.tolist(), longest) == ([0, 2, 5, 8, 10, 16], 6)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^unpad_input: attention_mask: expected shape \[2, 3\], got \[2, 4\]"):
        unpad_input(torch.randn(2, 3, 1), torch.ones(2, 4))


# ---- rotary ----------------------------------------------------------------------------------------------------------

ROTARY_DIM = 8
ANGLES = torch.outer(torch.arange(20), torch.tensor([1.0, 0.5, 0.2, 0.1]))
COS, SIN = ANGLES.cos(), ANGLES.sin()


def rotated(x: Tensor, positions: Tensor, interleaved: bool = False, sign: int = 1) -> Tensor:
    """x [..., heads, head_size] at positions [...], in fp64."""
    first = x[..., 0:ROTARY_DIM:2] if interleaved else x[..., : ROTARY_DIM // 2]
    second = x[..., 1:ROTARY_DIM:2] if interleaved else x[..., ROTARY_DIM // 2 : ROTARY_DIM]
    cos, sin = (f(ANGLES.double()[positions])[..., None, :] for f in (torch.cos, torch.sin))
    sin = sign * sin
    pair = [first.double() * cos - second.double() * sin, second.double() * cos + first.double() * sin]
    head = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([head, x[..., ROTARY_DIM:].double()], -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([5, 0]), torch.tensor([1, 2], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("layout", ["whole", "heads first", "rows apart", "elements apart"])
def test_apply_rotary_emb(layout: str, offsets: int | Tensor, interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 12)
    if layout == "heads first":
        x = torch.randn(2, 3, 5, 12).transpose(1, 2)
    elif layout == "rows apart":
        x = torch.randn(2, 9, 3, 12)[:, 2:7]
    elif layout == "elements apart":
        x = torch.randn(2, 5, 3, 24)[..., ::2]
    kept = x.clone()
    first = offsets if isinstance(offsets, Tensor) else torch.tensor([offsets, offsets])
    expected = rotated(x, first[:, None] + torch.arange(5), interleaved)
    out = apply_rotary_emb(x, COS, SIN, interleaved, seqlen_offsets=offsets)
    if layout == "whole" and first.tolist() == [3, 3]:
        assert_close_to_reference(apply_rotary_emb_torch(x, COS[3:8], SIN[3:8], interleaved), expected)
    assert_close_to_reference(out, expected)
    assert_same_bits(x, kept)
    assert apply_rotary_emb(x, COS, SIN, interleaved, True, offsets) is x
    assert_same_bits(x, out)
    assert_close_to_reference(
        apply_rotary(x, COS, SIN, offsets, interleaved=interleaved, conjugate=True), kept.double()
    )


def test_apply_rotary_emb_of_a_ragged_batch() -> None:
    x = torch.randn(6, 3, 12)
    offsets = torch.tensor([4, 9, 1], dtype=torch.int32)
    out = apply_rotary_emb(x, COS, SIN, seqlen_offsets=offsets, cu_seqlens=starts([2, 0, 4]), max_seqlen=4)
    assert_close_to_reference(out, rotated(x, torch.tensor([4, 5, 1, 2, 3, 4])))


@pytest.mark.parametrize("num_tokens", [4, len(COS)])
def test_cos_and_sin_that_do_not_lie_row_by_row(num_tokens: int) -> None:
    """Fewer positions than the tables have, and all of them."""
    x = torch.randn(1, num_tokens, 2, 8)
    cos, sin = (table.t().contiguous().t() for table in (COS, SIN))
    assert_same_bits(apply_rotary(x, cos, sin, 0), apply_rotary(x, COS, SIN, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cos_and_sin_of_another_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(1, 4, 2, 8).to(dtype)
    expected = rotated(x, torch.arange(4)[None])
    assert_close_to_reference(apply_rotary_emb(x, COS, SIN), expected, expected.to(dtype))


@pytest.mark.parametrize("conjugate", [False, True])
def test_rows_of_long_cos_and_sin(conjugate: bool) -> None:
    """Of a table that must be converted, here of fp64 and between others, only the rows at the positions are."""
    x, offsets = torch.randn(2, 5, 3, 12), torch.tensor([7, 900])
    cos, sin = torch.rand(1000, 2 * 4, dtype=torch.float64).chunk(2, 1)
    whole = cos.float().contiguous(), sin.float().contiguous()
    with CountsConverted(torch.float64) as counts:
        out = apply_rotary(x, cos, sin, offsets, conjugate=conjugate)
    assert counts.rows == {10}
    assert_same_bits(out, apply_rotary(x, whole[0], -whole[1] if conjugate else whole[1], offsets))
    with pytest.raises(ValueError, match=r"^apply_rotary: seqlen_offsets: expected 0 to 999 .*, got 1000"):
        apply_rotary(x, cos, sin, offsets + 96, conjugate=conjugate)


@pytest.mark.parametrize("packing", ["qkv", "grouped", "kv"])
def test_packed(packing: str) -> None:
    """Queries and keys are rotated in place, keys by angles of their own if there are; values stay as they are."""
    positions = 2 + torch.arange(4).expand(2, 4)
    packed = (
        torch.randn(2, 4, 8, 12) if packing == "grouped" else torch.randn(2, 4, 3 if packing == "qkv" else 2, 3, 12)
    )
    kept = packed.clone()
    if packing == "kv":
        out = apply_rotary_emb_kv_(packed, COS, SIN, seqlen_offsets=2)
        assert_close_to_reference(packed[:, :, 0], rotated(kept[:, :, 0], positions))
        assert_same_bits(packed[:, :, 1], kept[:, :, 1])
    else:
        q, k, v = (slice(0, 4), slice(4, 6), slice(6, 8)) if packing == "grouped" else (0, 1, 2)
        num_heads_q = 4 if packing == "grouped" else None
        out = apply_rotary_emb_qkv_(packed, COS, SIN, COS, -SIN, seqlen_offsets=2, num_heads_q=num_heads_q)
        assert_close_to_reference(packed[:, :, q], rotated(kept[:, :, q], positions))
        assert_close_to_reference(packed[:, :, k], rotated(kept[:, :, k], positions, sign=-1))
        assert_same_bits(packed[:, :, v], kept[:, :, v])
    assert out is packed


def test_rotary_embedding() -> None:
    """cos and sin grow with the positions that are asked for."""
    layer = RotaryEmbedding(ROTARY_DIM, base=100.0)
    for seqlen, offset in ((3, 0), (5, 7), (2, 1)):
        qkv = torch.randn(2, seqlen, 3, 2, 12)
        angles = torch.outer(torch.arange(20.0), 100.0 ** (-torch.arange(0, ROTARY_DIM, 2) / ROTARY_DIM))
        expected = apply_rotary_emb_qkv_(qkv.clone(), angles.cos(), angles.sin(), seqlen_offsets=offset)
        q, kv = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()
        assert_close_to_reference(layer(qkv, seqlen_offset=offset), expected)
        q, kv = layer(q, kv, seqlen_offset=torch.tensor([offset, offset]))
        assert_close_to_reference(torch.cat([q[:, :, None], kv], 2), expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sin": SIN[:5]}, r"sin: expected shape \[20, 4\]"),
    ({"seqlen_offsets": 16}, r"seqlen_offsets: expected 0 to 19 .*, got 20"),
    ({"seqlen_offsets": -1}, "seqlen_offsets: expected 0 tokens or more .*, got -1"),
    ({"seqlen_offsets": torch.tensor([1])}, "seqlen_offsets: expected 2 elements, got 1"),
    ({"x": torch.randn(2, 5, 3, 6)}, "cos: expected"),
    ({"x": torch.randn(5, 3, 12)}, "x: expected 4 dimensions, got 3"),
    (
        {"x": torch.randn(5, 3, 12), "cu_seqlens": starts([2, 4])},
        "cu_seqlens: expected at most 5 .* last, got 6",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_rotary_refused(arguments: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.randn(2, 5, 3, 12), "cos": COS, "sin": SIN} | arguments
    kept = arguments["x"].clone()
    with pytest.raises(ValueError, match=f"^apply_rotary_emb: {message}"):
        apply_rotary_emb(**arguments, inplace=True)
    assert_same_bits(arguments["x"], kept)


def test_packed_rotary_refused() -> None:
    """Nothing is written, not even the queries where the pair of the keys is wrong."""
    qkv = torch.randn(2, 4, 3, 2, 12)
    kept = qkv.clone()
    with pytest.raises(ValueError, match=r"^apply_rotary_emb_qkv_: sin_k: expected a tensor"):
        apply_rotary_emb_qkv_(qkv, COS, SIN, COS)
    with pytest.raises(ValueError, match=r"^apply_rotary_emb_qkv_: sin_k: expected shape"):
        apply_rotary_emb_qkv_(qkv, COS, SIN, COS, SIN[:5])
    with pytest.raises(ValueError, match=r"^apply_rotary_emb_qkv_: num_heads_q: expected"):
        apply_rotary_emb_qkv_(qkv[:, :, 0], COS, SIN, num_heads_q=1)
    assert_same_bits(qkv, kept)
    with pytest.raises(ValueError, match=r"^RotaryEmbedding: scale_base: expected None, got 512"):
        RotaryEmbedding(8, scale_base=512)


EXPANDED = torch.ones(1).expand(2, 4, 3, 2, 12)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("apply_rotary: x", lambda: apply_rotary(EXPANDED[:, :, 0], COS, SIN, inplace=True)),
        ("apply_rotary_emb_qkv_: qkv", lambda: apply_rotary_emb_qkv_(EXPANDED, COS, SIN)),
        ("apply_rotary_emb_kv_: kv", lambda: apply_rotary_emb_kv_(EXPANDED[:, :, :2], COS, SIN)),
        (
            r"RotaryEmbedding\.forward: qkv",
            lambda: RotaryEmbedding(8)(EXPANDED[:, :, 0], EXPANDED[:, :, :2].contiguous()),
        ),
    ],
)
def test_expanded_rows_cannot_be_rotated(argument: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: expected memory for each element, got an expanded tensor$"):
        call()
    assert_same_bits(EXPANDED, torch.ones(EXPANDED.shape))


# ---- norms, activations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_rms_norm", [True, False])
@pytest.mark.parametrize("with_residual", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"zero_centered_weight": True}, {"rowscale": True}], ids=str)
def test_norms(
    dtype: torch.dtype, is_rms_norm: bool, with_residual: torch.dtype | None, options: dict[str, Any]
) -> None:
    """The norm sees the sum before it is rounded to the residual's dtype."""
    x, weight, bias = torch.randn(3, 5, 24).to(dtype), torch.rand(24).to(dtype), torch.randn(24).to(dtype)
    residual = None if with_residual is None else torch.randn(3, 5, 24).to(with_residual)
    rowscale = torch.rand(3, 5) if "rowscale" in options else None
    arguments = options | {"bias": bias if "bias" in options else None, "rowscale": rowscale, "residual": residual}
    function = rms_norm_fn if is_rms_norm else layer_norm_fn
    kept = x.clone()
    out, total = function(x, weight, eps=1e-5, prenorm=True, **arguments)

    summed = x.double() * (1 if rowscale is None else rowscale.double()[..., None])
    summed = summed if residual is None else summed + residual.double()
    scale = weight.double() + 1 if "zero_centered_weight" in options else weight.double()
    norm = functional.rms_norm if is_rms_norm else functional.layer_norm
    expected = norm(summed, (24,), eps=1e-5) * scale + (bias.double() if "bias" in options else 0)
    assert_close_to_reference(out, expected, expected.to(dtype))
    assert total.dtype == (with_residual or dtype)
    assert_close_to_reference(total, summed, summed.to(total.dtype))
    assert_same_bits(x, kept)


@pytest.mark.parametrize("function", [rms_norm_fn, layer_norm_fn])
def test_norms_of_parallel_layers(function: Callable[..., Any]) -> None:
    """Of a sum with x1, and a second norm of it by weight1 and bias1."""
    x, x1, residual = torch.randn(3, 3, 5, 24)
    weight, bias, weight1, bias1 = torch.rand(4, 24)
    options: dict[str, Any] = dict(x1=x1, weight1=weight1, bias1=bias1, eps=1e-5)
    out, out1, total = function(x, weight, bias, residual, prenorm=True, **options)
    expected_total = x.double() + x1.double() + residual.double()
    norm = functional.rms_norm if function is rms_norm_fn else functional.layer_norm
    unit = norm(expected_total, (24,), eps=1e-5)
    assert_close_to_reference(out, unit * weight + bias)
    assert_close_to_reference(out1, unit * weight1 + bias1)
    assert_close_to_reference(total, expected_total)
    assert_same_bits(torch.stack(function(x, weight, bias, residual, **options)), torch.stack([out, out1]))
    assert function(x, weight, bias, residual, return_dropout_mask=True, **options)[2:] == (None, None)
    with pytest.raises(ValueError, match=rf"^{function.__name__}: x1: expected shape"):
        function(x, weight, bias, x1=x1[:2])
    with pytest.raises(ValueError, match=rf"^{function.__name__}: rowscale: expected None, got a tensor"):
        function(x, weight, bias, x1=x1, rowscale=torch.ones(3, 5))
    with pytest.raises(ValueError, match=rf"^{function.__name__}: bias1: expected None, got a tensor"):
        function(x, weight, bias, bias1=bias1)


def test_sum_in_fp32_and_given_outputs() -> None:
    x, weight = torch.randn(2, 16).bfloat16(), torch.rand(16).bfloat16()
    given, given_sum = torch.empty(2, 16), torch.empty(2, 16)
    out, total = rms_norm_fn(
        x, weight, None, prenorm=True, residual_in_fp32=True, out_dtype=torch.float32, out=given, residual_out=given_sum
    )
    assert out is given and total is given_sum
    assert_close_to_reference(out, functional.rms_norm(x.double(), (16,), eps=1e-6) * weight.double())
    assert_same_bits(total, x.float())
    with pytest.raises(ValueError, match=r"^rms_norm_fn: out: expected shape \[2, 16\], got \[1, 16\]"):
        rms_norm_fn(x, weight, None, out=torch.empty(1, 16))
    with pytest.raises(ValueError, match=r"^rms_norm_fn: dropout_p: expected 0.0, got 0.5"):
        rms_norm_fn(x, weight, None, dropout_p=0.5)


@pytest.mark.parametrize("argument", ["out", "residual_out"])
@pytest.mark.parametrize("function", [rms_norm_fn, layer_norm_fn])
def test_memory_for_norms_is_checked(function: Callable[..., Any], argument: str) -> None:
    x, weight = torch.randn(2, 16).bfloat16(), torch.rand(16).bfloat16()
    assert_memory_is_checked(
        f"{function.__name__}: {argument}",
        torch.zeros(2, 16),
        lambda memory: function(x, weight, None, prenorm=True, **{argument: memory}),
    )


def test_modules_of_norms() -> None:
    x = torch.randn(4, 16)
    with torch.no_grad():
        for layer in (rms_norm.RMSNorm(16), RMSNorm(16), RMSNorm(16, zero_centered_weight=True)):
            assert_close_to_reference(layer(x), functional.rms_norm(x.double(), (16,), eps=1e-5))
    with pytest.raises(RuntimeError, match=r"^rms_norm_fn: weight: requires grad, but there is no backward"):
        RMSNorm(16)(x)


def test_activations() -> None:
    x, y = torch.randn(2, 3, 10)
    assert_close_to_reference(swiglu(x, y), functional.silu(x.double()) * y.double())
    assert_close_to_reference(fast_gelu_impl(x), functional.gelu(x.double(), approximate="tanh"))
    with pytest.raises(ValueError, match=r"^swiglu: y: expected shape \[3, 10\], as x has, got \[1, 10\]"):
        swiglu(x, y[:1])
    with pytest.raises(RuntimeError, match=r"^swiglu: x: requires grad"):
        swiglu(x.requires_grad_(), y)
