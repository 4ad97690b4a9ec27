"""The functions of pagedattn_ext.flashinfer for layers with states, against those of mamba-ssm's and
flash-linear-attention's names, which have tests of their own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import assert_memory_is_checked, assert_same_bits
from torch import Tensor

from pagedattn_ext import CPUGraph, fla, mamba_ssm
from pagedattn_ext.flashinfer import chunk_gated_delta_rule
from pagedattn_ext.flashinfer.mamba import selective_state_update

TOKENS, K_DIM, V_DIM = 7, 8, 6
STARTS = torch.tensor([0, 4, 4, 7])


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(53)
        yield


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def inputs(heads: tuple[int, int, int] = (4, 4, 4)) -> tuple[Tensor, ...]:
    q, k = (torch.randn(TOKENS, num, K_DIM) for num in heads[:2])
    gates = torch.rand(2, TOKENS, max(heads))
    return q, k / k.norm(dim=-1, keepdim=True), torch.randn(TOKENS, heads[2], V_DIM), *gates


def by_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """With every head repeated."""
    heads = [each.repeat_interleave(g.shape[1] // each.shape[1], 1)[None] for each in (q, k, v)]
    out, states = fla.chunk_gated_delta_rule(
        *heads, g.log()[None], beta[None], initial_state=states, output_final_state=True, cu_seqlens=STARTS,
        state_v_first=True,
    )  # fmt: skip
    return out[0], states


@pytest.mark.parametrize("heads", [(2, 2, 4), (4, 2, 2), (4, 4, 4), (2, 4, 4)])
def test_chunk_gated_delta_rule(heads: tuple[int, int, int]) -> None:
    """Catches a gate taken as its logarithm, states that are not transposed, and heads that meet those of others."""
    rows, states = inputs(heads), torch.randn(3, 4, V_DIM, K_DIM)
    expected = by_fla(*rows, states)
    out, after = chunk_gated_delta_rule(*rows, None, states, True, STARTS)
    assert_close((out, after), expected)
    out = chunk_gated_delta_rule(*rows, 0.0, states, False, STARTS)
    assert_close(out, expected[0])


def test_chunk_gated_delta_rule_of_rows_to_normalize() -> None:
    q, k, *others = inputs()
    states, unit = torch.randn(3, 4, V_DIM, K_DIM), [each / (each.norm(dim=-1, keepdim=True)) for each in (q, k)]
    expected, after = by_fla(*unit, *others, states)
    rows = q, 3 * k, *others
    result = chunk_gated_delta_rule(*rows, None, states, True, STARTS, use_qk_l2norm_in_kernel=True)
    assert_close(result, (expected, after))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunk_gated_delta_rule_of_what_gates_are_made_of(dtype: torch.dtype) -> None:
    """Catches a rate that is not rounded to its dtype, and a gate domain that counts for a gate that is made here."""
    q, k, v, *_ = inputs()
    states, (gate, logit), (A_log, dt_bias) = (
        torch.randn(3, 4, V_DIM, K_DIM),
        *(torch.randn(2, TOKENS, 4), torch.randn(2, 4)),
    )
    gate, logit = gate.to(dtype), logit.to(dtype)
    decay = torch.exp(-A_log.exp() * torch.log1p(torch.exp(gate.float() + dt_bias)))
    rate = (1 / (1 + torch.exp(-logit.float()))).to(dtype).float()
    expected = by_fla(q, k, v, decay, rate, states)
    made = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "beta_is_logit": True, "gate_domain": "log"}
    assert_close(chunk_gated_delta_rule(q, k, v, gate, logit, None, states, True, STARTS, **made), expected)
    result = chunk_gated_delta_rule(
        q, k, v, decay.log(), rate, None, states, True, STARTS, backend="auto", max_seqlen=4, gate_domain="log",
        cu_seqlens_cpu=STARTS.tolist(),
    )  # fmt: skip
    assert_close(result, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_domain": "log2"}, "gate_domain: expected 'linear' or 'log', got 'log2'"),
        ({"A_log": torch.zeros(4)}, "A_log: expected None without use_gate_in_kernel, got a tensor"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(4)}, "dt_bias: expected a torch.Tensor, got NoneType"),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(1)},
            r"dt_bias: expected shape \[4\], got \[1\]",
        ),
        ({"use_gate_in_kernel": True, "g": None}, "g: expected a torch.Tensor, got NoneType"),
        ({"beta_is_logit": True, "beta": None}, "beta: expected a torch.Tensor, got NoneType"),
        ({"beta": torch.zeros(TOKENS, 1)}, r"beta: expected shape \[7, 4\], got \[7, 1\]"),
        ({"use_qk_l2norm_in_kernel": None}, "use_qk_l2norm_in_kernel: expected a bool, got NoneType"),
        ({"output_state_indices": STARTS}, "output_state_indices: expected None, got a tensor"),
        ({"checkpoint_state_indices": STARTS}, "checkpoint_state_indices: expected None, got a tensor"),
        ({"prefix_lens": STARTS}, "prefix_lens: expected None, got a tensor"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_refused_gates(changes: dict[str, Any], message: str) -> None:
    arguments = dict(zip(("q", "k", "v", "g", "beta"), inputs(), strict=True)) | {"cu_seqlens": STARTS} | changes
    with pytest.raises((ValueError, TypeError), match=f"^chunk_gated_delta_rule: {message}"):
        chunk_gated_delta_rule(**arguments)


def test_chunk_gated_delta_rule_of_slots() -> None:
    """A sequence without tokens leaves its slot as it is, and so does every slot that is no sequence's."""
    rows, pool = inputs(), torch.randn(5, 4, V_DIM, K_DIM)
    slots = torch.tensor([3, 0, 2])
    expected, states = by_fla(*rows, pool[slots])
    before, output = pool.clone(), torch.empty(TOKENS, 4, V_DIM)
    out, after = chunk_gated_delta_rule(
        *rows, None, pool, True, STARTS, output=output, output_state=pool, state_indices=slots
    )
    assert out is output and after is pool
    assert_close(out, expected)
    assert_close(pool[slots[[0, 2]]], states[[0, 2]])
    assert_same_bits(pool[[0, 1, 4]], before[[0, 1, 4]])


def test_no_sequences() -> None:
    """Catches a search among nothing."""
    rule, update = inputs(), scanned()
    state, pool = torch.zeros(0, 4, V_DIM, K_DIM), torch.randn(5, HEADS, DIM, STATE)
    out, _ = chunk_gated_delta_rule(
        *(each[:0] for each in rule), None, state, True, torch.tensor([0]), output_state=state
    )
    assert out.shape == (0, 4, V_DIM)
    named = {name: each[:0] if name in ("x", "dt", "B", "C", "z") else each for name, each in update.items()}
    assert selective_state_update(pool, **named).shape == (0, 3, HEADS, DIM)
    before = pool.clone()
    named = {name: each[:, :0] if name in ("x", "dt", "B", "C", "z") else each for name, each in update.items()}
    assert selective_state_update(pool, **named).shape == (BATCH, 0, HEADS, DIM)  # of no token
    assert_same_bits(pool, before)


def test_chunk_gated_delta_rule_without_gates() -> None:
    q, k, v, *_ = inputs()
    ones = torch.ones(TOKENS, 4)
    assert_close(
        chunk_gated_delta_rule(q, k, v, cu_seqlens=STARTS),
        by_fla(q, k, v, ones, ones, torch.zeros(3, 4, V_DIM, K_DIM))[0],
    )


BATCH, HEADS, DIM, STATE = 3, 4, 6, 5


def scanned(num_tokens: int = 3) -> dict[str, Tensor]:
    of_heads = {"A": -torch.rand(HEADS), "D": torch.randn(HEADS), "dt_bias": torch.randn(HEADS)}
    named = {name: each[:, None].expand(HEADS, DIM) for name, each in of_heads.items()}
    named["A"] = named["A"][..., None].expand(HEADS, DIM, STATE)
    x, z = torch.randn(2, BATCH, num_tokens, HEADS, DIM)
    dt = torch.rand(BATCH, num_tokens, HEADS)[..., None].expand(x.shape)
    B, C = torch.randn(2, BATCH, num_tokens, 2, STATE)
    return {"x": x, "dt": dt, "B": B, "C": C, "z": z} | named


def token_by_token(state: Tensor, named: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """By mamba-ssm's function: the results, and the states behind each token."""
    outs, states = [], []
    state = state.clone()
    for token in range(named["x"].shape[1]):
        now = {name: each[:, token] if name in ("x", "dt", "B", "C", "z") else each for name, each in named.items()}
        outs.append(mamba_ssm.selective_state_update(state, **now, dt_softplus=True))
        states.append(state.clone())
    return torch.stack(outs, 1), states


def test_selective_state_update_of_a_token() -> None:
    named, pool = scanned(1), torch.randn(5, HEADS, DIM, STATE)
    slots = torch.tensor([4, 9, 1])
    expected, states = token_by_token(pool[[4, 0, 1]], named)
    before = pool.clone()
    one = {name: each[:, 0] if name in ("x", "dt", "B", "C", "z") else each for name, each in named.items()}
    out = torch.empty(BATCH, HEADS, DIM)
    result = selective_state_update(pool, **one, dt_softplus=True, state_batch_indices=slots, pad_slot_id=9, out=out)
    assert result is out
    assert_close(out[[0, 2]], expected[[0, 2], 0])
    assert out[1].count_nonzero() == 0
    assert_close(pool[[4, 1]], states[0][[0, 2]])
    assert_same_bits(pool[[0, 2, 3]], before[[0, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_state_update_of_drafts(dtype: torch.dtype) -> None:
    """The states behind each token go to a buffer, and the slots stay. Catches states that are rounded between tokens,
    as those of bf16 would be."""
    named, pool = scanned(), torch.randn(5, HEADS, DIM, STATE).to(dtype)
    slots, rows = torch.tensor([4, -1, 1]), torch.tensor([2, 0, 1])
    expected, states = token_by_token(pool[[4, 0, 1]].float(), named)
    before, buffer = pool.clone(), torch.zeros(BATCH, 4, HEADS, DIM, STATE)
    out = selective_state_update(
        pool, **named, dt_softplus=True, state_batch_indices=slots, disable_state_update=True,
        intermediate_states_buffer=buffer, intermediate_state_indices=rows, cache_steps=3,
    )  # fmt: skip
    assert_close(out[[0, 2]], expected[[0, 2]])
    assert out[1].count_nonzero() == 0
    assert_same_bits(pool, before)
    assert_close(buffer[[2, 1], :3], torch.stack(states, 1)[[0, 2]])
    assert buffer[0].count_nonzero() == 0 and buffer[:, 3].count_nonzero() == 0


def test_selective_state_update_captured() -> None:
    """Catches slots that are read when the graph is captured."""
    named, pool, slots = scanned(), torch.randn(5, HEADS, DIM, STATE), torch.tensor([4, -1, 1])
    graph, before = CPUGraph(), pool.clone()
    with graph.capture():
        out = selective_state_update(pool, **named, dt_softplus=True, state_batch_indices=slots)
    pool.copy_(before)
    slots.copy_(torch.tensor([0, 3, -1]))
    graph.replay()
    expected, states = token_by_token(before[[0, 3, 1]], named)
    assert_close(out[:2], expected[:2])
    assert_close(pool[[0, 3]], states[-1][:2])
    assert_same_bits(pool[[1, 2, 4]], before[[1, 2, 4]])


def test_selective_state_update_into_other_slots() -> None:
    named, pool = scanned(), torch.randn(7, HEADS, DIM, STATE)
    expected, states = token_by_token(pool[[4, 2, 1]], named)
    before = pool.clone()
    out = selective_state_update(
        pool, **named, dt_softplus=True, state_batch_indices=torch.tensor([4, 2, 1]),
        dst_state_batch_indices=torch.tensor([0, -1, 6]),
    )  # fmt: skip
    assert_close(out, expected)
    assert_close(pool[[0, 6]], states[-1][[0, 2]])
    assert_same_bits(pool[1:6], before[1:6])


def test_selective_state_update_of_mamba_1() -> None:
    """Without heads, in its slot and in another one."""
    x, dt, z = torch.randn(3, BATCH, DIM)
    (B, C), A, D = torch.randn(2, BATCH, STATE), -torch.rand(DIM, STATE), torch.randn(DIM)
    state = torch.randn(BATCH, DIM, STATE)
    expected_state, other = state.clone(), torch.cat([state, torch.zeros_like(state)])
    expected = mamba_ssm.selective_state_update(expected_state, x, dt, A, B, C, D, z, dt_softplus=True)
    slots = torch.arange(BATCH) + BATCH
    out = selective_state_update(other, x, dt, A, B, C, D, z, dt_softplus=True, dst_state_batch_indices=slots)
    assert_close((out, other), (expected, torch.cat([state, expected_state])))
    assert_close(selective_state_update(state, x, dt, A, B, C, D, z, dt_softplus=True), expected)
    assert_close(state, expected_state)


RULE: list[Any] = [torch.zeros(TOKENS, 4, 8)] * 3
GATES = torch.zeros(TOKENS, 4)
POOL = torch.zeros(5, 4, 8, 8)
UPDATE: list[Any] = [
    torch.zeros(5, HEADS, DIM, STATE), *[torch.zeros(BATCH, 2, HEADS, DIM)] * 2, torch.zeros(HEADS, DIM, STATE),
    *[torch.zeros(BATCH, 2, 2, STATE)] * 2, None,
]  # fmt: skip
STARTED = {"cu_seqlens": STARTS}
INDICES, TWICE = torch.tensor([0, 1, 5]), torch.tensor([2, 0, 2])
WRONG: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    (
        chunk_gated_delta_rule,
        RULE,
        STARTED | {"checkpoint_every_n_tokens": 64},
        "checkpoint_every_n_tokens: expected 0",
    ),
    (chunk_gated_delta_rule, [*RULE, GATES[1:]], STARTED, r"g: expected shape \[7, 4\], got \[6, 4\]"),
    (chunk_gated_delta_rule, [RULE[0][:, :3], RULE[1][:, :3], RULE[2]], STARTED, "v: expected heads whose number"),
    (chunk_gated_delta_rule, [RULE[0], RULE[1][:, :3], RULE[2]], STARTED, "k: expected 4 heads, as q has, or 4"),
    (chunk_gated_delta_rule, RULE, {"cu_seqlens": STARTS + 1}, "cu_seqlens: expected 0 first, got 1"),
    (chunk_gated_delta_rule, RULE, STARTED | {"initial_state": POOL}, r"initial_state: expected shape \[3, 4, 8, 8\]"),
    (
        chunk_gated_delta_rule,
        RULE,
        STARTED | {"initial_state": POOL, "state_indices": INDICES},
        "state_indices: expected 0 to 4, got 5",
    ),
    (
        chunk_gated_delta_rule,
        RULE,
        STARTED | {"output_final_state": True, "state_indices": INDICES},
        "output_state: expected an explicit output_state pool",
    ),
    (selective_state_update, UPDATE, {"state_batch_indices": INDICES}, "state_batch_indices: expected -1 to 4, got 5"),
    (
        chunk_gated_delta_rule,
        RULE,
        STARTED | {"output_final_state": True, "state_indices": TWICE, "output_state": POOL},
        "state_indices: expected every slot once, got 2 again at sequence 2",
    ),
    (
        selective_state_update,
        UPDATE,
        {"state_batch_indices": TWICE},
        "state_batch_indices: expected every slot once, got 2 again at sequence 2",
    ),
    (
        selective_state_update,
        UPDATE,
        {"intermediate_states_buffer": torch.zeros(BATCH, 2)},
        "intermediate_states_buffer: expected 5 dimensions, got 2",
    ),
    (selective_state_update, UPDATE, {"cu_seqlens": STARTS}, "cu_seqlens: expected None, got a tensor"),
    (
        selective_state_update,
        UPDATE,
        {"intermediate_states_buffer": torch.zeros(BATCH, 1, HEADS, DIM, STATE)},
        "intermediate_states_buffer: expected room for 2 tokens of each sequence, got 1",
    ),
    (selective_state_update, UPDATE, {"out": torch.zeros(1)}, r"out: expected shape \[3, 2, 4, 6\], got \[1\]"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "message"), WRONG, ids=lambda each: str(each)[:40])
def test_refused(function: Callable[..., Any], arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
        function(*arguments, **options)


def update(state: Any, **options: Any) -> None:
    selective_state_update(state, torch.ones(3, 2, 4, 6), *UPDATE[2:], **options)


MEMORY: dict[str, tuple[Tensor, Any]] = {
    "chunk_gated_delta_rule: output": (
        torch.zeros(TOKENS, 4, 8),
        lambda memory: chunk_gated_delta_rule(*RULE, **STARTED, output=memory),
    ),
    "chunk_gated_delta_rule: output_state": (
        torch.zeros(3, 4, 8, 8, dtype=torch.bfloat16),
        lambda memory: chunk_gated_delta_rule(*RULE, **STARTED, output_final_state=True, output_state=memory),
    ),
    "selective_state_update: out": (torch.zeros(3, 2, 4, 6), lambda memory: update(UPDATE[0], out=memory)),
    "selective_state_update: state": (torch.zeros(5, 4, 6, 5, dtype=torch.bfloat16), update),
    "selective_state_update: intermediate_states_buffer": (
        torch.zeros(3, 2, 4, 6, 5, dtype=torch.bfloat16),
        lambda memory: update(UPDATE[0], intermediate_states_buffer=memory),
    ),
}


@pytest.mark.parametrize("argument", MEMORY)
def test_memory_for_results_is_checked(argument: str) -> None:
    assert_memory_is_checked(argument, *MEMORY[argument])
