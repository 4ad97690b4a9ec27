"""The functions of causal-conv1d, mamba-ssm and flash-linear-attention on the ops for states: against transformers'
plain torch forms of the same functions, and under transformers' models, which find them by the libraries' names."""

import importlib
import inspect
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from checks import assert_memory_is_checked
from torch import Tensor
from transformers import Mamba2Config, MambaConfig, Qwen3NextConfig
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

import pagedattn_ext.causal_conv1d
import pagedattn_ext.fla
import pagedattn_ext.mamba_ssm
from pagedattn_ext import CPUGraph, ops
from pagedattn_ext.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from pagedattn_ext.causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
from pagedattn_ext.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from pagedattn_ext.mamba_ssm import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update

BATCH, LENGTH = 2, 9
MODULES = {"causal_conv1d": pagedattn_ext.causal_conv1d, "fla": pagedattn_ext.fla, "mamba_ssm": pagedattn_ext.mamba_ssm}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(50)
        yield


# Of flash-linear-attention 0.6.
GATE = "use_gate_in_kernel=False A_log=None dt_bias=None"
BETA = "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False cu_seqlens=None"
SIGNATURES = {
    causal_conv1d_fn: "x weight bias=None seq_idx=None initial_states=None return_final_states=False "
    "final_states_out=None activation=None",
    causal_conv1d_update: "x conv_state weight bias=None activation=None cache_seqlens=None conv_state_indices=None",
    chunk_gated_delta_rule: "q k v g beta scale=None initial_state=None output_final_state=False "
    f"use_qk_l2norm_in_kernel=False {BETA} cu_seqlens_cpu=None chunk_indices=None cp_context=None "
    f"{GATE} transpose_state_layout=None head_first=False **kwargs",
    fused_recurrent_gated_delta_rule: "q k v g=None gk=None gv=None beta=None scale=None initial_state=None "
    f"output_final_state=False use_qk_l2norm_in_kernel=False {GATE} {BETA} transpose_state_layout=None "
    "head_first=False cp_context=None **kwargs",
    selective_state_update: "state x dt A B C D=None z=None dt_bias=None dt_softplus=False state_batch_indices=None",
    mamba_chunk_scan_combined: "x dt A B C chunk_size D=None z=None dt_bias=None initial_states=None seq_idx=None "
    "cu_seqlens=None dt_softplus=False dt_limit=(0.0,inf) return_final_states=False return_varlen_states=False "
    "state_dtype=None",
    selective_scan_fn: "u delta A B C D=None z=None delta_bias=None delta_softplus=False return_last_state=False",
}


@pytest.mark.parametrize(("function", "signature"), SIGNATURES.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_signature(function: Callable[..., Any], signature: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    texts = (str(p.replace(annotation=inspect.Parameter.empty)).replace(" ", "") for p in parameters)
    assert " ".join(texts) == signature


def test_modules_of_their_names() -> None:
    """Under the libraries' names, for programs that import from where the libraries have them."""
    program = """
        import sys
        import pagedattn_ext.causal_conv1d, pagedattn_ext.fla, pagedattn_ext.flash_mla, pagedattn_ext.mamba_ssm

        for name in ("causal_conv1d", "fla", "mamba_ssm"):
            sys.modules[name] = getattr(pagedattn_ext, name)

        import causal_conv1d, fla, mamba_ssm
        from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update
        from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
        from fla.modules import FusedLayerNormSwishGate, FusedRMSNormGated, FusedRMSNormSwishGate
        from fla.modules.fused_norm_gate import FusedRMSNormSwishGate
        from fla.modules.norm import FusedLayerNormGated, FusedRMSNormGated
        from fla.modules.norm.fused_norm_gate import FusedRMSNormGated, rms_norm_gated
        from fla.ops import chunk_gated_delta_rule, chunk_gdn, fused_recurrent_gdn
        from fla.ops.gated_delta_rule import chunk_gdn, fused_recurrent_gated_delta_rule, fused_recurrent_gdn
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule, chunk_gdn
        from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule, fused_recurrent_gdn
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
        from mamba_ssm.ops.triton.layernorm_gated import RMSNorm, rmsnorm_fn
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        modules = causal_conv1d, fla, mamba_ssm, pagedattn_ext.flash_mla
        assert [module.__version__[:3] for module in modules] == ["1.6", "0.6", "2.3", "1.0"]
        assert chunk_gdn is chunk_gated_delta_rule and fused_recurrent_gdn is fused_recurrent_gated_delta_rule
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("adjacent", ["rows", "channels"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_causal_conv1d(adjacent: str, activation: str | None) -> None:
    x = torch.randn(BATCH, LENGTH, 6).transpose(1, 2) if adjacent == "channels" else torch.randn(BATCH, 6, LENGTH)
    weight, bias = torch.randn(6, 4), torch.randn(6)
    whole = modeling_qwen3_next.causal_conv1d_fn(x, weight, bias, activation=activation)
    assert_close(causal_conv1d_fn(x, weight, bias, activation=activation), whole)
    memory = torch.empty(BATCH, 6, 3)
    first, states = causal_conv1d_fn(
        x[..., :5], weight, bias, return_final_states=True, final_states_out=memory, activation=activation
    )
    assert states is memory
    rest = causal_conv1d_fn(x[..., 5:], weight, bias, initial_states=states, activation=activation)
    assert_close(torch.cat([first, rest], dim=-1), whole)
    for width in (1, 2):  # tokens at once
        state, same = torch.zeros(BATCH + 3, 6, 4), torch.zeros(BATCH, 6, 4)
        slots, outs = torch.tensor([4, 1], dtype=torch.int32), []
        for begin in range(0, 8, width):
            part = x[..., begin : begin + width]
            outs.append(causal_conv1d_update(part, state, weight, bias, activation, conv_state_indices=slots))
            modeling_qwen3_next.causal_conv1d_update(part, same, weight, bias, activation)
        assert_close(torch.cat(outs, dim=-1), whole[..., :8])
        assert_close(state[slots.long()], same)
    flat = causal_conv1d_update(x[..., 8], state, weight, bias, activation, conv_state_indices=slots)
    assert_close(flat, whole[..., 8])


def test_causal_conv1d_of_sequences_side_by_side() -> None:
    """As each sequence alone; what a batch holds does not follow what the one before holds."""
    x, weight, bias = torch.randn(BATCH, 6, LENGTH), torch.randn(6, 4), torch.randn(6)
    seq_idx = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2], [2, 2, 2, 3, 3, 3, 3, -1, -1]], dtype=torch.int32)
    out = causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx, activation="silu")
    parts: list[tuple[int, slice]] = [(0, slice(0, 4)), (0, slice(4, 5)), (0, slice(5, 9))]
    for s, rows in [*parts, (1, slice(0, 3)), (1, slice(3, 7))]:
        alone = causal_conv1d_fn(x[s : s + 1, :, rows], weight, bias, activation="silu")
        assert torch.equal(out[s, :, rows], alone[0])
    assert not out[1, :, 7:].any()


@pytest.mark.parametrize("seq_len", [1, 2, 5])
@pytest.mark.parametrize("with_slots", [False, True])
def test_causal_conv1d_update_of_rings(with_slots: bool, seq_len: int) -> None:
    """As states that are moved along; the token at position p is in column p % state_len."""
    state_len, before = 4, [6, 3]
    weight, bias = torch.randn(6, 4), torch.randn(6)
    moved = torch.randn(BATCH, 6, state_len)
    slots = torch.tensor([4, 1], dtype=torch.int32)
    rings = torch.randn(5, 6, state_len) if with_slots else torch.empty(BATCH, 6, state_len)
    of_sequence = slots.tolist() if with_slots else [0, 1]
    for s, length in enumerate(before):
        rings[of_sequence[s]][:, [(length + i) % state_len for i in range(state_len)]] = moved[s]
    untouched = rings[0].clone()
    x = torch.randn(BATCH, 6, seq_len)
    options: dict[str, Any] = {"conv_state_indices": slots} if with_slots else {}
    lengths = torch.tensor(before, dtype=torch.int32)
    out = causal_conv1d_update(x, rings, weight, bias, "silu", cache_seqlens=lengths, **options)
    assert torch.equal(out, causal_conv1d_update(x, moved, weight, bias, "silu"))
    for s, length in enumerate(before):
        columns = [(length + seq_len + i) % state_len for i in range(state_len)]
        assert torch.equal(rings[of_sequence[s]][:, columns], moved[s])
    if with_slots:
        assert torch.equal(rings[0], untouched)
        for s in 0, 1:  # with padding beside, as alone
            padding = {"conv_state_indices": torch.full((2,), -1).index_fill(0, torch.tensor([s]), 3)}
            alone = rings.clone()
            own = causal_conv1d_update(
                x[s : s + 1], alone, weight, bias, "silu", lengths[s : s + 1], padding["conv_state_indices"][s : s + 1]
            )
            out = causal_conv1d_update(x, rings, weight, bias, "silu", cache_seqlens=lengths, **padding)
            assert torch.equal(out[s], own[0])
            assert not out[1 - s].any()
            assert torch.equal(rings, alone)
        kept, padding = rings.clone(), {"conv_state_indices": torch.full((2,), -1)}
        for states in rings, rings[:0]:  # which may not be there, either
            out = causal_conv1d_update(x, states, weight, bias, "silu", cache_seqlens=lengths, **padding)
            assert not out.any()
        assert torch.equal(rings, kept)


def test_rings_in_slots_in_a_graph() -> None:
    """Where the padding is may change from a step to the next."""
    x, weight, rings = torch.randn(BATCH, 6), torch.randn(6, 4), torch.randn(5, 6, 4)
    lengths, slots = torch.tensor([6, 3], dtype=torch.int32), torch.tensor([4, 1], dtype=torch.int32)
    graph = CPUGraph()
    with graph.capture():
        captured = causal_conv1d_update(x, rings, weight, cache_seqlens=lengths, conv_state_indices=slots)
    for given in [-1, 3], [2, -1], [-1, -1], [0, 2]:
        slots.copy_(torch.tensor(given))
        expected = rings.clone()
        out = causal_conv1d_update(x, expected, weight, cache_seqlens=lengths, conv_state_indices=slots)
        graph.replay()
        assert torch.equal(captured, out)
        assert torch.equal(rings, expected)


def test_causal_conv1d_varlen_states() -> None:
    x, starts = torch.randn(7, 3), torch.tensor([0, 5, 5, 7])
    states = causal_conv1d_varlen_states(x, starts, 3)
    assert states.stride(1) == 1
    assert torch.equal(states[0], x[2:5].T)
    assert not states[1].any()
    assert torch.equal(states[2], torch.cat([torch.zeros(1, 3), x[5:7]]).T)
    with pytest.raises(ValueError, match=r"^causal_conv1d_varlen_states: cu_seqlens: expected at most 6 last, got 7"):
        causal_conv1d_varlen_states(x[:6], starts, 3)


@pytest.mark.parametrize("normalise", [False, True])
def test_gated_delta_rule(normalise: bool) -> None:
    q, k = torch.randn(2, BATCH, LENGTH, 2, 8)
    k = k / k.norm(dim=-1, keepdim=True)
    v, g, beta = torch.randn(BATCH, LENGTH, 4, 5), -torch.rand(BATCH, LENGTH, 4), torch.rand(BATCH, LENGTH, 4)
    before = torch.randn(BATCH, 4, 8, 5)
    options: dict[str, Any] = dict(g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=normalise)
    given = before.clone()
    expected = modeling_qwen3_next.torch_chunk_gated_delta_rule(q, k, v, **options, initial_state=before)
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        out, state = function(q, k, v, **options, initial_state=given)
        assert_close((out, state), expected)
        assert torch.equal(given, before)
        assert function(q, k, v, g=g, beta=beta)[1] is None
        # Both sequences in a batch of 1
        ragged = [tensor.flatten(0, 1).unsqueeze(0) for tensor in (q, k, v, g, beta)]
        packed = options | {"g": ragged[3], "beta": ragged[4], "cu_seqlens": torch.tensor([0, LENGTH, 2 * LENGTH])}
        out, state = function(*ragged[:3], **packed, initial_state=given)
        assert_close((out.view(v.shape), state), expected)


def test_gated_delta_rule_without_gates() -> None:
    q, k, v = torch.randn(3, BATCH, LENGTH, 2, 8)
    gates = torch.zeros(BATCH, LENGTH, 2)
    expected = fused_recurrent_gated_delta_rule(q, k, v, g=gates, beta=gates + 1)
    assert torch.equal(fused_recurrent_gated_delta_rule(q, k, v)[0], expected[0])


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_what_is_computed_in_the_kernel(function: Callable[..., Any]) -> None:
    """Gates of what they are made of, and states the other way round: as of gates and states that are given."""
    q, k, v = torch.randn(3, BATCH, LENGTH, 2, 8)
    v = v[..., :5]
    raw, beta = torch.randn(2, BATCH, LENGTH, 2)
    log, bias, before = torch.randn(2), torch.randn(2), torch.randn(BATCH, 2, 8, 5)
    g = -log.exp() * torch.nn.functional.softplus(raw + bias)
    options: dict[str, Any] = dict(output_final_state=True)
    expected_out, expected_state = function(q, k, v, g=g, beta=2 * beta.sigmoid(), initial_state=before, **options)
    options |= dict(use_gate_in_kernel=True, A_log=log, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    turned = before.transpose(2, 3).contiguous()
    out, state = function(q, k, v, g=raw, beta=beta, dt_bias=bias, initial_state=turned, state_v_first=True, **options)
    assert_close((out, state.transpose(2, 3)), (expected_out, expected_state))
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        older, _ = function(
            q, k, v, g=raw, beta=beta, dt_bias=bias, initial_state=turned, transpose_state_layout=True, **options
        )
    assert torch.equal(older, out)


def test_several_dtypes() -> None:
    """Computed in fp32, as of the same numbers in fp32; the result has the dtype of the tensor that it is like."""
    half = torch.float16
    q, k, v = torch.randn(3, BATCH, LENGTH, 2, 8)
    g, beta = -torch.rand(BATCH, LENGTH, 2), torch.rand(BATCH, LENGTH, 2)
    out, _ = chunk_gated_delta_rule(q, k, v.to(half), g, beta.to(half))
    assert torch.equal(out, chunk_gated_delta_rule(q, k, v.to(half).float(), g, beta.to(half).float())[0].to(half))

    state, x, dt = torch.randn(BATCH, 4, 6, 8), torch.randn(BATCH, 4, 6), torch.randn(BATCH, 4, 6)
    A, (B, C) = -torch.rand(4, 6, 8), torch.randn(2, BATCH, 2, 8)
    out = selective_state_update(state.clone(), x.to(half), dt.to(half), A, B, C)
    expected = selective_state_update(state.clone(), x.to(half).float(), dt.to(half).float(), A, B, C)
    assert torch.equal(out, expected.to(half))

    u, delta = torch.randn(2, BATCH, 6, LENGTH)
    B, C = torch.randn(2, BATCH, 8, LENGTH)
    out = selective_scan_fn(u.to(half), delta, A[0], B, C)
    assert torch.equal(out, selective_scan_fn(u.to(half).float(), delta, A[0], B, C).to(half))


def test_complex_numbers_are_refused() -> None:
    """Torch would drop their imaginary part."""
    u, (B, C) = torch.zeros(BATCH, 6, LENGTH), torch.zeros(2, BATCH, 8, LENGTH)
    with pytest.raises(TypeError, match=r"^selective_scan_fn: A: expected a real dtype, got complex64"):
        selective_scan_fn(u, u, torch.zeros(6, 8, dtype=torch.complex64), B, C)
    with pytest.raises(TypeError, match=r"^selective_scan_fn: B: expected a real dtype, got complex64"):
        selective_scan_fn(u, u, torch.zeros(6, 8), B.to(torch.complex64), C)
    x, dt, A, weight = (
        torch.zeros(BATCH, LENGTH, 4, 6),
        torch.zeros(BATCH, LENGTH, 4),
        torch.zeros(4),
        torch.zeros(6, 4),
    )
    channels, states = torch.zeros(6, dtype=torch.complex64), torch.zeros(BATCH, 4, 6, 8, dtype=torch.complex64)
    groups, of_head = torch.zeros(BATCH, LENGTH, 2, 8), torch.zeros(4, 6, 8)
    for function, arguments, options, name in (
        (causal_conv1d_fn, [u, weight.to(torch.complex64)], {}, "weight"),
        (causal_conv1d_fn, [u, weight], {"bias": channels}, "bias"),
        (causal_conv1d_fn, [u, weight], {"initial_states": states[:, 0, :, :3]}, "initial_states"),
        (selective_state_update, [states, x[:, 0], x[:, 0], of_head, *[groups[:, 0]] * 2], {}, "state"),
        (mamba_chunk_scan_combined, [x, dt, A, groups, groups, 4], {"initial_states": states}, "initial_states"),
        (chunk_gated_delta_rule, [x, x, x, dt, dt], {"initial_state": states[..., :6]}, "initial_state"),
    ):
        with pytest.raises(
            TypeError, match=rf"^{function.__name__}: {name}: expected a (real|float) dtype, got complex64"
        ):
            function(*arguments, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selective_state_update_of_mamba_2(dtype: torch.dtype) -> None:
    heads, head_dim, groups, size = 4, 6, 2, 8
    state = torch.randn(BATCH + 1, heads, head_dim, size).to(dtype)
    x, z = torch.randn(2, BATCH, heads, head_dim)
    A, D, bias = -torch.rand(heads, 1, 1), torch.randn(heads, 1), torch.randn(heads, 1)
    dt, (B, C) = torch.randn(BATCH, heads, 1), torch.randn(2, BATCH, groups, size)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    expanded = (dt.expand_as(x), A.expand(heads, head_dim, size), B, C)
    options = dict(D=D.expand(heads, head_dim), z=z, dt_bias=bias.expand(heads, head_dim), dt_softplus=True)
    same = state[slots.long()].float()
    expected = modeling_mamba2.mamba2_selective_state_update(same, x, *expanded, **options)
    untied = [tensor.clone(memory_format=torch.contiguous_format) for tensor in expanded]
    for arguments in (expanded, untied):
        updated = state.clone()
        out = selective_state_update(updated, x, *arguments, **options, state_batch_indices=slots)
        assert_close(out, expected)
        torch.testing.assert_close(updated[slots.long()], same.to(dtype))
        assert torch.equal(updated[1], state[1])


@pytest.mark.parametrize("slots", [None, torch.tensor([3, -1], dtype=torch.int32)], ids=["batch", "slots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selective_state_update_compiled(dtype: torch.dtype, slots: Tensor | None) -> None:
    state = torch.randn(BATCH if slots is None else 5, 4, 6, 8).to(dtype)
    x, dt = torch.randn(BATCH, 4, 6), torch.randn(BATCH, 4, 6)
    A, (B, C) = -torch.rand(4, 6, 8), torch.randn(2, BATCH, 2, 8)
    updated = state.clone()
    torch.compiler.reset()
    compiled = torch.compile(selective_state_update, fullgraph=True, backend="aot_eager")
    out = compiled(updated, x, dt, A, B, C, state_batch_indices=slots)
    assert torch.equal(out, selective_state_update(state, x, dt, A, B, C, state_batch_indices=slots))
    assert torch.equal(updated, state)


@pytest.mark.parametrize("slots", [None, torch.tensor([2, 0], dtype=torch.int32)], ids=["batch", "slots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_that_do_not_lie_row_by_row_are_written(dtype: torch.dtype, slots: Tensor | None) -> None:
    """As many slots as sequences, or more; and one slot more than that, of which only some are converted."""
    x, dt, A, (B, C) = torch.ones(2, 4, 6), torch.ones(2, 4, 6), -torch.rand(4, 6, 8), torch.randn(2, 2, 2, 8)
    for num_slots in (2,) if slots is None else (3, 4):
        state = torch.randn(num_slots, 4, 6, 8).to(dtype)
        transposed = state.transpose(2, 3).contiguous().transpose(2, 3)
        out = selective_state_update(transposed, x, dt, A, B, C, state_batch_indices=slots)
        assert torch.equal(out, selective_state_update(state, x, dt, A, B, C, state_batch_indices=slots))
        assert torch.equal(transposed, state)


def test_states_of_16_bits_in_other_slots_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that another thread writes meanwhile, and the bits of NaN."""
    module = importlib.import_module("pagedattn_ext.mamba_ssm.ops.triton.selective_state_update")
    pool, scan = torch.randn(6, 4, 6, 8).bfloat16(), module.scan
    pool[5].view(torch.int16).fill_(-112)  # a NaN that conversions would change
    x, dt, A, (B, C) = torch.ones(3, 4, 6), torch.ones(3, 4, 6), -torch.rand(4, 6, 8), torch.randn(2, 3, 2, 8)
    slots = torch.tensor([3, -1, 1], dtype=torch.int32)
    expected, states = pool.clone(), pool[[3, 1]].float()
    expected[4] = 7
    right = selective_state_update(states, x[:2], dt[:2], A, B[::2], C[::2])
    expected[[3, 1]] = states.bfloat16()

    def scan_while_another_writes(*args: Any, **kwargs: Any) -> Any:
        pool[4] = 7
        return scan(*args, **kwargs)

    monkeypatch.setattr(module, "scan", scan_while_another_writes)
    out = selective_state_update(pool, x, dt, A, B, C, state_batch_indices=slots)
    assert torch.equal(out[::2], right)
    assert not out[1].any()
    assert torch.equal(pool.view(torch.int16), expected.view(torch.int16))


def test_slots_of_states_of_16_bits_are_checked() -> None:
    """At replays, too. Nothing is written before the error."""
    pool, slots = torch.randn(4, 4, 6, 8).half(), torch.tensor([3, 1], dtype=torch.int32)
    x, dt, A, (B, C) = torch.ones(2, 4, 6), torch.ones(2, 4, 6), -torch.rand(4, 6, 8), torch.randn(2, 2, 2, 8)

    def update(pool: Tensor) -> Tensor:
        return selective_state_update(pool, x, dt, A, B, C, state_batch_indices=slots)

    graph = CPUGraph()
    with graph.capture():
        captured = update(pool)
    for wrong, got in (([4, 1], "expected -1 .padding. to 3, got 4"), ([1, 1], "got 1 again")):
        slots.copy_(torch.tensor(wrong))
        before = pool.clone()
        for call, name in ((lambda: update(pool), "selective_state_update: state_batch_indices"), (graph.replay, "")):
            with pytest.raises(ValueError, match=f"{name}.*{got}"):
                call()
        assert torch.equal(pool, before)
    slots.copy_(torch.tensor([0, 2]))
    mine = pool.clone()
    graph.replay()
    assert torch.equal(captured, update(mine))
    assert torch.equal(pool, mine)
    for bad, message in (
        (slots.float(), "expected dtype int32 or int64"),
        (slots[None], "expected .*shape"),
        ([0, 2], "expected a"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^selective_state_update: state_batch_indices: {message}"):
            selective_state_update(pool, x, dt, A, B, C, state_batch_indices=bad)  # type: ignore[arg-type]


def test_mamba_1() -> None:
    dim, size = 6, 8
    u, delta, z = torch.randn(3, BATCH, dim, LENGTH)
    A, D, bias = -torch.rand(dim, size), torch.randn(dim), torch.randn(dim)
    B, C = torch.randn(2, BATCH, size, LENGTH)
    arguments = (u, delta, A, B, C, D, z)
    options: dict[str, Any] = dict(delta_bias=bias, delta_softplus=True, return_last_state=True)
    expected = modeling_mamba.mamba_selective_scan(*arguments, **options)
    assert_close(selective_scan_fn(*arguments, **options), expected)
    state, outs = torch.zeros(BATCH, dim, size), []
    for t in range(LENGTH):
        now = [tensor[..., t] for tensor in (u, delta, B, C, z)]
        outs.append(selective_state_update(state, *now[:2], A, *now[2:4], D, now[4], bias, dt_softplus=True))
    assert_close((torch.stack(outs, dim=-1), state), expected)


def test_negative_steps_of_mamba_1() -> None:
    """Without softplus a step may be less than 0, and is not the default limit of Mamba 2."""
    u, step, A = torch.ones(1, 1, 1), torch.full((1, 1, 1), -0.5), torch.tensor([[-1.0]])
    state = torch.zeros(1, 1, 1)
    out = selective_state_update(state, u[..., 0], step[..., 0], A, u[..., 0], u[..., 0])
    assert selective_scan_fn(u, step, A, u, u, return_last_state=True) == (-0.5, -0.5)
    assert (out, state) == (-0.5, -0.5)
    unlimited = dict(dt_limit=(-math.inf, math.inf), return_final_states=True)
    rows = u.view(1, 1, 1, 1)
    assert mamba_chunk_scan_combined(rows, step, A[0], rows, rows, 4, **unlimited) == (-0.5, -0.5)
    assert mamba_chunk_scan_combined(rows, step, A[0], rows, rows, 4) == 0


@pytest.mark.parametrize("constant", ["B", "C", "both"])
def test_mamba_1_with_the_same_numbers_at_all_tokens(constant: str) -> None:
    u, delta = torch.randn(2, BATCH, 6, LENGTH)
    A, B, C = -torch.rand(6, 8), torch.randn(6, 8), torch.randn(BATCH, 2, 8, LENGTH)
    C = torch.randn(6, 8) if constant == "both" else C
    if constant == "C":
        B, C = C, B
    everywhere = [
        tensor[None, :, :, None].expand(BATCH, 6, 8, LENGTH) if tensor.dim() == 2 else tensor.repeat_interleave(3, 1)
        for tensor in (B, C)
    ]
    assert_close(selective_scan_fn(u, delta, A, B, C), selective_scan_fn(u, delta, A, *everywhere))


def test_mamba_2_of_sequences_side_by_side() -> None:
    heads, head_dim, size = 4, 6, 8
    x, dt, A = torch.randn(BATCH, LENGTH, heads, head_dim), torch.rand(BATCH, LENGTH, heads), -torch.rand(heads)
    B, C = torch.randn(2, BATCH, LENGTH, 2, size)
    before = torch.randn(BATCH, heads, head_dim, size)
    seq_idx = torch.tensor([[0] * 4 + [1] * 5, [0] * LENGTH], dtype=torch.int32)
    options: dict[str, Any] = dict(return_final_states=True)
    out, states = mamba_chunk_scan_combined(x, dt, A, B, C, 4, initial_states=before, seq_idx=seq_idx, **options)
    for s, rows, initial in ((0, slice(0, 4), before[:1]), (0, slice(4, 9), None), (1, slice(0, 9), before[1:])):
        of_rows = [tensor[s : s + 1, rows] for tensor in (x, dt, B, C)]
        alone, state = mamba_chunk_scan_combined(*of_rows[:2], A, *of_rows[2:], 4, initial_states=initial, **options)
        assert torch.equal(out[s, rows], alone[0])
        if rows.stop == LENGTH:
            assert torch.equal(states[s], state[0])
    nothing = [tensor[:0] for tensor in (x, dt, B, C)]
    out, states = mamba_chunk_scan_combined(*nothing[:2], A, *nothing[2:], 4, seq_idx=seq_idx[:0], **options)
    assert out.shape == (0, LENGTH, heads, head_dim)
    assert states.shape == (0, heads, head_dim, size)


def test_mamba_2_with_numbers_of_channels() -> None:
    x, z = torch.randn(2, BATCH, LENGTH, 4, 6)
    dt, A, D = torch.rand(BATCH, LENGTH, 4), -torch.rand(4), torch.randn(4)
    B, C = torch.randn(2, BATCH, LENGTH, 2, 8)
    expected = mamba_chunk_scan_combined(x, dt, A, B, C, 4, D=D, z=z)
    assert_close(mamba_chunk_scan_combined(x, dt, A, B, C, 4, D=D[:, None].expand(4, 6), z=z), expected)
    with pytest.raises(ValueError, match=r"^mamba_chunk_scan_combined: D: expected shape \[4, 6\], got \[6, 4\]"):
        mamba_chunk_scan_combined(x, dt, A, B, C, 4, D=torch.zeros(6, 4))


def test_mamba_chunk_scan_combined() -> None:
    heads, head_dim, groups, size = 4, 6, 2, 8
    x, z = torch.randn(2, BATCH, LENGTH, heads, head_dim)
    dt, A, D, bias = torch.randn(BATCH, LENGTH, heads), -torch.rand(heads), torch.randn(heads), torch.randn(heads)
    B, C = torch.randn(2, BATCH, LENGTH, groups, size)
    before = torch.randn(BATCH, heads, head_dim, size)
    options: dict[str, Any] = dict(D=D, dt_bias=bias, initial_states=before, dt_softplus=True, dt_limit=(0.1, 2.0))
    out, states = modeling_mamba2.mamba2_chunk_scan(x, dt, A, B, C, 4, **options, return_final_states=True)
    expected = out * torch.nn.functional.silu(z), states
    assert_close(mamba_chunk_scan_combined(x, dt, A, B, C, 4, z=z, **options, return_final_states=True), expected)
    x1, z1, dt1, B1, C1 = (tensor.flatten(0, 1).unsqueeze(0) for tensor in (x, z, dt, B, C))
    starts = torch.tensor([0, LENGTH, 2 * LENGTH])
    out, states = mamba_chunk_scan_combined(
        x1, dt1, A, B1, C1, 4, z=z1, **options, cu_seqlens=starts, return_varlen_states=True
    )
    assert_close((out.view(x.shape), states), expected)
    out, final, states = mamba_chunk_scan_combined(
        x1, dt1, A, B1, C1, 4, z=z1, **options, cu_seqlens=starts, return_final_states=True, return_varlen_states=True
    )
    assert_close((out.view(x.shape), states), expected)
    assert_close(final, expected[1][-1:])  # of the last sequence, as the layer Mamba2 asks for them
    final.zero_()
    assert_close(states, expected[1])


X, W = torch.zeros(2, 6, 3), torch.zeros(6, 4)
QKV, GATES = [torch.zeros(2, 3, 4, 8)] * 3, [torch.zeros(2, 3, 4)] * 2
SCANNED = [QKV[0], GATES[0], torch.zeros(4), *QKV[1:], 4]
WRONG: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    (causal_conv1d_fn, [X[0], W], {}, "x: expected 3 dimensions"),
    (
        causal_conv1d_fn,
        [X, W],
        {"seq_idx": torch.zeros(2, 3).int(), "return_final_states": True},
        "seq_idx: expected None with return_final_states, got a tensor",
    ),
    (
        causal_conv1d_fn,
        [X, W],
        {"seq_idx": torch.zeros(2, 3).int(), "final_states_out": torch.zeros(2, 6, 3)},
        "seq_idx: expected None with final_states_out, got a tensor",
    ),
    (causal_conv1d_fn, [X, W], {"seq_idx": torch.zeros(2, 4).int()}, r"seq_idx: expected shape \[2, 3\]"),
    (
        selective_scan_fn,
        [X, X, W, *[torch.zeros(2, 4, 3)] * 2],
        {"z": torch.zeros(6, 5)},
        r"z: expected shape \[2, 6, 3\], got \[6, 5\]",
    ),
    (
        selective_state_update,
        [QKV[0], *[QKV[0][..., 0]] * 2, QKV[0][0], *[QKV[0][:, 0]] * 2],
        {"z": torch.zeros(5)},
        r"z: expected shape \[2, 3, 4\], got \[5\]",
    ),
    (mamba_chunk_scan_combined, SCANNED, {"z": torch.zeros(5)}, r"z: expected shape \[2, 3, 4, 8\], got \[5\]"),
    (mamba_chunk_scan_combined, SCANNED, {"dt_limit": None}, r"dt_limit: expected \(least, greatest\), got None"),
    (mamba_chunk_scan_combined, SCANNED, {"dt_limit": (2.0, 1.0)}, r"dt_limit: expected .+ or more, got 1"),
    (causal_conv1d_fn, [X, W], {"initial_states": torch.zeros(2, 6, 4)}, "initial_states: expected shape"),
    (causal_conv1d_fn, [X, W], {"activation": "gelu"}, "activation: expected None, "),
    (
        causal_conv1d_update,
        [X, torch.zeros(2, 6, 2), W],
        {},
        r"conv_state: expected the last 3 \(weight has a width of 4\) to 32 rows",
    ),
    (
        causal_conv1d_update,
        [X, torch.zeros(2, 6, 3), W],
        {"cache_seqlens": torch.zeros(3).int()},
        "cache_seqlens: expected 2 elements, got 3",
    ),
    (
        causal_conv1d_update,
        [X, torch.zeros(2, 6, 3), W],
        {"cache_seqlens": torch.zeros(2).int(), "conv_state_indices": torch.tensor([0, 2])},
        r"conv_state_indices: expected -1 \(padding\) to 1, got \[0, 2\]",
    ),
    (
        causal_conv1d_update,
        [X, torch.zeros(3, 6, 3), W],
        {"cache_seqlens": torch.zeros(2).int()},
        "conv_state: expected 2 states, one for each sequence of x, got 3",
    ),
    (chunk_gated_delta_rule, [*QKV, *GATES], {"allow_neg_eigval": True}, "allow_neg_eigval: expected False without"),
    (
        chunk_gated_delta_rule,
        [*QKV, *GATES],
        {"use_gate_in_kernel": True, "A_log": torch.zeros(3)},
        r"A_log: expected shape \[4\], got \[3\]",
    ),
    (
        chunk_gated_delta_rule,
        [*QKV, *GATES],
        {"state_v_first": True, "transpose_state_layout": True},
        "transpose_state_layout: expected None with state_v_first",
    ),
    (
        causal_conv1d_update,
        [X, torch.zeros(2, 6, 3), W],
        {"conv_state_indices": torch.tensor([0, 2])},
        r"conv_state_indices: expected -1 \(padding\) to 1, got 2",
    ),
    (
        mamba_chunk_scan_combined,
        [torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2), torch.zeros(2), *torch.zeros(2, 1, 3, 1, 8), 4],
        {"cu_seqlens": torch.tensor([0, 3]), "return_final_states": True},
        "return_final_states: expected False, got True",
    ),
    (mamba_chunk_scan_combined, SCANNED, {"return_varlen_states": True}, "return_varlen_states: expected False"),
    (chunk_gated_delta_rule, [*QKV, *GATES], {"head_first": True}, "head_first: expected False"),
    (chunk_gated_delta_rule, [*QKV, *GATES], {"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens: expected None with"),
    (
        mamba_chunk_scan_combined,
        [torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2), torch.zeros(2), *torch.zeros(2, 1, 3, 1, 8), 4],
        {"cu_seqlens": torch.tensor([0, 9, 3])[::2]},
        "cu_seqlens: expected dimensions from 0 on to be contiguous",
    ),
    (chunk_gated_delta_rule, [*QKV, *GATES], {"initial_state": torch.zeros(2, 4, 8)}, "initial_state: expected shape"),
    (fused_recurrent_gated_delta_rule, QKV, {"gk": torch.zeros(1)}, "gk: expected None, got a tensor"),
    (fused_recurrent_gated_delta_rule, QKV, {"beta": QKV[2]}, r"beta: expected shape \[2, 3, 4\], got \[2, 3, 4, 8\]"),
    (fused_recurrent_gated_delta_rule, QKV, {"head_first": True}, "head_first: expected False"),
    (fused_recurrent_gated_delta_rule, [QKV[0][:, :2], *QKV[1:]], {}, "q: expected shape"),
    (
        causal_conv1d_update,
        [X, torch.zeros(2, 6, 3), W],
        {"cache_seqlens": torch.tensor([0, -1])},
        r"cache_seqlens: expected 0 or more, got \[0, -1\]",
    ),
    (
        causal_conv1d_update,
        [X, torch.zeros(2, 6, 3), W],
        {"cache_seqlens": torch.zeros(2).int(), "conv_state_indices": torch.tensor([1, 1])},
        r"conv_state_indices: expected every slot once, got \[1, 1\]",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "options", "message"), WRONG, ids=lambda each: str(each)[:40])
def test_refused(function: Callable[..., Any], arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
        function(*arguments, **options)


MEMORY: dict[str, tuple[Tensor, Any]] = {
    "causal_conv1d_fn: final_states_out": (
        torch.zeros(2, 6, 3),
        lambda memory: causal_conv1d_fn(X + 1, W, final_states_out=memory),
    ),
    "causal_conv1d_update: conv_state": (
        torch.zeros(2, 6, 3),
        lambda memory: causal_conv1d_update(X + 1, memory, W, cache_seqlens=torch.zeros(2).int()),
    ),
    "selective_state_update: state": (
        torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16),
        lambda memory: selective_state_update(
            memory, *[torch.ones(2, 3, 4)] * 2, torch.ones(3, 4, 8), *[torch.ones(2, 3, 8)] * 2
        ),
    ),
}


@pytest.mark.parametrize("argument", MEMORY)
def test_memory_for_results_is_checked(argument: str) -> None:
    assert_memory_is_checked(argument, *MEMORY[argument])


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_no_tensors(function: Callable[..., Any]) -> None:
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(TypeError, match=rf"^{function.__name__}: {required[0].name}: expected a torch.Tensor, got int"):
        function(*[1] * len(required))


def test_gradients_are_refused() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.zeros(6, 4, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"^causal_conv1d_fn: weight: requires grad"):
            causal_conv1d_fn(torch.zeros(2, 6, 3), weight)


SMALL: dict[str, Any] = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, intermediate_size=48)
QWEN: dict[str, Any] = dict(
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0, mlp_only_layers=[0, 1],
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
MODELS: list[tuple[Any, str, Any, str]] = [
    (modeling_qwen3_next, "Qwen3NextForCausalLM", Qwen3NextConfig(**SMALL, **QWEN), "gated_delta_rule"),
    (
        modeling_mamba2,
        "Mamba2ForCausalLM",
        Mamba2Config(**SMALL, head_dim=16, num_heads=4, state_size=8, n_groups=2),
        "selective_scan",
    ),
    (modeling_mamba, "MambaForCausalLM", MambaConfig(**SMALL, state_size=8), "selective_scan"),
]


@pytest.mark.parametrize(("module", "name", "config", "called"), MODELS, ids=lambda each: getattr(each, "__name__", ""))
def test_models_of_transformers(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, config: Any, called: str
) -> None:
    """The tokens that the model generates on transformers' torch forms. A module of a model looks for the libraries
    when it is imported."""
    prompt = torch.randint(0, 97, (2, 7))
    options: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    plain = getattr(module, name)(config).eval()
    expected = plain.generate(prompt, **options)
    for library, ours in MODULES.items():
        monkeypatch.setitem(sys.modules, library, ours)
    monkeypatch.delitem(sys.modules, module.__name__)
    package = sys.modules[module.__name__.rpartition(".")[0]]
    with monkeypatch.context() as patched:
        patched.setattr(package, module.__name__.rpartition(".")[2], module)
        again = importlib.import_module(module.__name__)
    model = getattr(again, name)(config).eval()
    model.load_state_dict(plain.state_dict())
    spies = {op: mock.Mock(wraps=getattr(ops, op)) for op in ("causal_conv1d", called)}
    for op, spy in spies.items():
        monkeypatch.setattr(ops, op, spy)
    assert torch.equal(model.generate(prompt, **options), expected)
    assert all(spy.call_count >= options["max_new_tokens"] for spy in spies.values())
