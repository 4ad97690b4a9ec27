"""Ops for states: against token by token formulas in fp64, and bit for bit against themselves, in parts and alone."""

from typing import Any

import pytest
import reference
import torch
from checks import (
    DTYPES,
    assert_close_to_reference,
    assert_rejected,
    assert_same_bits,
    filled_with_nan,
    to_device,
    with_row_gap,
)
from op_calls import make_arguments
from op_table import OPS
from torch import Tensor

Arguments = dict[str, Any]

# Sequences without rows, of one, and of more than a kernel takes at once (16); in slots of any order.
LENGTHS = [1, 0, 37, 16, 1, 3]
SLOTS = [6, 2, 0, 7, -1, 3]
HAS_STATE = [True, True, False, True, True, False]
NUM_SLOTS = 9


def uniform(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(*shape, generator=generator) * 2 - 1).to(dtype)


def conv_call(
    n: int, dtype: torch.dtype, generator: torch.Generator, dim: int, width: int, state_len: int
) -> Arguments:
    return {
        "input": uniform(n, dim, generator=generator, dtype=dtype),
        "conv_states": uniform(NUM_SLOTS, dim, state_len, generator=generator, dtype=dtype),
        "weight": uniform(dim, width, generator=generator, dtype=dtype),
        "bias": uniform(dim, generator=generator, dtype=dtype),
    }


def delta_call(
    n: int, dtype: torch.dtype, generator: torch.Generator, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> Arguments:
    return {
        "query": uniform(n, k_heads, k_dim, generator=generator, dtype=dtype),
        "key": uniform(n, k_heads, k_dim, generator=generator, dtype=dtype),
        "value": uniform(n, v_heads, v_dim, generator=generator, dtype=dtype),
        "g": -uniform(n, v_heads, generator=generator).abs(),
        "beta": uniform(n, v_heads, generator=generator).sigmoid().to(dtype),
        "states": uniform(NUM_SLOTS, v_heads, k_dim, v_dim, generator=generator),
        "use_qk_l2norm": True,
    }


def scan_call(
    n: int, dtype: torch.dtype, generator: torch.Generator, heads: int, head_dim: int, groups: int, state_size: int
) -> Arguments:
    """Of Mamba 1 if heads have one channel."""
    by_state = [state_size] if head_dim == 1 else []
    return {
        "input": uniform(n, heads, head_dim, generator=generator, dtype=dtype),
        "dt": uniform(n, heads, generator=generator, dtype=dtype) * 4,
        "A": -uniform(heads, *by_state, generator=generator).abs(),
        "B": uniform(n, groups, state_size, generator=generator, dtype=dtype),
        "C": uniform(n, groups, state_size, generator=generator, dtype=dtype),
        "states": uniform(NUM_SLOTS, heads, head_dim, state_size, generator=generator),
        "D": uniform(heads, generator=generator),
        "z": uniform(n, heads, head_dim, generator=generator, dtype=dtype),
        "dt_bias": uniform(heads, generator=generator),
        "dt_softplus": True,
    }


MAKE = {"causal_conv1d": conv_call, "gated_delta_rule": delta_call, "selective_scan": scan_call}
CASES = [
    ("causal_conv1d", (5, 4, 3)),
    ("causal_conv1d", (291, 4, 4)),  # more channels than a tile has
    ("causal_conv1d", (33, 1, 0)),
    ("causal_conv1d", (33, 8, 9)),
    ("gated_delta_rule", (1, 1, 1, 1)),
    ("gated_delta_rule", (2, 4, 24, 16)),
    ("gated_delta_rule", (1, 3, 20, 75)),  # vectors of columns at once, one, and part of one
    ("gated_delta_rule", (1, 2, 300, 33)),  # keys longer than a block of CUDA has threads
    ("selective_scan", (2, 3, 1, 5)),
    ("selective_scan", (4, 24, 2, 40)),  # groups that end within a tile of channels
    ("selective_scan", (37, 1, 1, 16)),
    ("selective_scan", (3, 2, 1, 200)),  # states of more than four vectors of a warp
]
ROWS = ("input", "query", "key", "value", "g", "beta", "dt", "B", "C", "z")


def make_call(op: str, sizes: tuple[int, ...], dtype: torch.dtype, lengths: list[int] = LENGTHS) -> Arguments:
    return MAKE[op](sum(lengths), dtype, torch.Generator().manual_seed(0), *sizes)


def sequences(lengths: list[int] = LENGTHS, slots: list[int] = SLOTS, has_state: list[bool] = HAS_STATE) -> Arguments:
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return {
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "state_indices": torch.tensor(slots, dtype=torch.int64),
        "has_initial_state": torch.tensor(has_state, dtype=torch.bool),
    }


def states_name(arguments: Arguments) -> str:
    return "conv_states" if "conv_states" in arguments else "states"


def run(op: str, arguments: Arguments, device: torch.device) -> tuple[Tensor, Tensor]:
    """Result and states; the arguments stay as they are."""
    name = states_name(arguments)
    states = arguments[name]
    given = to_device(arguments, device)
    given[name] = torch.empty_strided(states.shape, states.stride(), dtype=states.dtype, device=device).copy_(states)
    rows = given.get("value", given.get("input"))
    out = filled_with_nan(*rows.shape, dtype=rows.dtype, device=device)
    getattr(OPS, op)(out, **given)
    return out, given[name]


def expected(op: str, arguments: Arguments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return getattr(reference, op)(**arguments, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "sizes"), CASES, ids=str)
def test_formula(device, op, sizes, dtype):
    """Rows with gaps; NaN in all slots that must not matter, which stay as they are."""
    arguments = make_call(op, sizes, dtype) | sequences()
    states = arguments[states_name(arguments)]
    read = [slot for slot, has_state in zip(SLOTS, HAS_STATE, strict=True) if has_state and slot >= 0]
    states[[slot for slot in range(NUM_SLOTS) if slot not in read]] = torch.nan
    strided = {name: with_row_gap(arguments[name], 3) for name in ROWS if name in arguments}
    strided[states_name(arguments)] = with_row_gap(states, 5) if states.numel() else states
    out, after = run(op, arguments | strided, device)
    references = expected(op, arguments, torch.float64)
    # Plain PyTorch rounds every step of the states to the dtype; the ops have them in fp32.
    eager = expected(op, arguments, torch.float32)
    assert_close_to_reference(out.cpu(), references[0], eager[0])
    written = [slot for slot, length in zip(SLOTS, LENGTHS, strict=True) if length and slot >= 0]
    assert_close_to_reference(after.cpu()[written], references[1][written], eager[1][written])
    others = [slot for slot in range(NUM_SLOTS) if slot not in written]
    assert_same_bits(after.cpu()[others], states[others])


@pytest.mark.parametrize(("op", "sizes"), [CASES[1], CASES[6], CASES[9], CASES[10]], ids=str)
def test_parts_and_neighbours_change_no_bit(device, op, sizes):
    """A prompt in parts, each beside other sequences, as in one call alone."""
    length, has_state = 41, True
    whole = make_call(op, sizes, torch.bfloat16, [length])
    out, after = run(op, whole | sequences([length], [4], [has_state]), device)
    name = states_name(whole)
    for parts in ([17, 24], [1, 15, 16, 9], [40, 1]):
        others = make_call(op, sizes, torch.bfloat16, [50])
        states, begin, outs = whole[name], 0, []
        for part in parts:
            mixed = {
                key: torch.cat([others[key][:3], whole[key][begin : begin + part], others[key][3:9]])
                for key in ROWS
                if key in whole
            }
            batch = sequences([3, part, 6], [1, 4, 8], [False, has_state, True])
            result, states = run(op, whole | mixed | {name: states} | batch, device)
            outs.append(result[3 : 3 + part])
            begin += part
        assert_same_bits(torch.cat(outs), out)
        assert_same_bits(states[4], after[4])


@pytest.mark.parametrize("op", MAKE)
def test_one_row_a_sequence_and_all_defaults(device, op):
    """Without query_start_loc, state_indices and has_initial_state, and without any optional argument."""
    sizes = next(sizes for name, sizes in CASES if name == op)
    arguments = make_call(op, sizes, torch.float32, [1] * 4)
    for name in ("bias", "use_qk_l2norm", "D", "z", "dt_bias", "dt_softplus"):
        arguments.pop(name, None)
    if op == "selective_scan":
        arguments["dt"].abs_()
    out, after = run(op, arguments, device)
    assert_close_to_reference(
        out.cpu(), expected(op, arguments, torch.float64)[0], expected(op, arguments, torch.float32)[0]
    )
    explicit = sequences([1] * 4, [0, 1, 2, 3], [True] * 4)
    for actual, same in zip((out, after), run(op, arguments | explicit, device), strict=True):
        assert_same_bits(actual, same)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("causal_conv1d", {"silu": True}),
        ("causal_conv1d", {"bias": None}),
        ("gated_delta_rule", {"use_qk_l2norm": False, "scale": 0.3}),
        ("selective_scan", {"dt_min": 0.2, "dt_max": 0.9}),
        ("selective_scan", {"z": None, "D": None}),
    ],
    ids=str,
)
def test_options(device, op, options):
    sizes = next(sizes for name, sizes in CASES[1:] if name == op)
    arguments = make_call(op, sizes, torch.float32) | sequences() | options
    references, eager = expected(op, arguments, torch.float64), expected(op, arguments, torch.float32)
    for actual, wanted, plain in zip(run(op, arguments, device), references, eager, strict=True):
        assert_close_to_reference(actual.cpu(), wanted, plain)


def test_softplus_of_steps_of_any_size(device):
    """Steps that are next to nothing keep their digits, and large ones are not infinite."""
    values = torch.tensor([-80.0, -20.0, -8.0, -1.0, -1e-3, 0.0, 0.5, 3.0, 19.0, 40.0, 1000.0])
    one = torch.ones(1, len(values), 1)
    arguments = {"input": one, "dt": values[None], "A": torch.zeros(len(values)), "B": one[:, :1], "C": one[:, :1]}
    arguments |= {"states": torch.zeros(1, len(values), 1, 1), "dt_softplus": True}
    out, _ = run("selective_scan", arguments, device)
    softplus = torch.nn.functional.softplus(values.double())
    torch.testing.assert_close(out.cpu().flatten().double(), softplus, rtol=1e-6, atol=0)


def test_weights_of_fp32_and_layouts_of_conv_states(device):
    """Weights of fp32 beside rows of bf16. States whose channels are adjacent, as those whose rows are, and as those of
    which no elements are."""
    arguments = make_call("causal_conv1d", (291, 4, 5), torch.bfloat16) | sequences()
    arguments |= {name: arguments[name].float() for name in ("weight", "bias")}
    out, after = run("causal_conv1d", arguments, device)
    wanted, eager = (expected("causal_conv1d", arguments, dtype)[0] for dtype in (torch.float64, torch.float32))
    assert_close_to_reference(out.cpu(), wanted, eager)
    adjacent = arguments["conv_states"].transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.stack([arguments["conv_states"]] * 2, dim=-1)[..., 0]
    for states in (adjacent, apart):
        for actual, same in zip(
            run("causal_conv1d", arguments | {"conv_states": states}, device), (out, after), strict=True
        ):
            assert_same_bits(actual.contiguous(), same)


WRONG: list[tuple[str, Arguments, str]] = [
    (op, change, next(iter(change)))
    for op in MAKE
    for change in (
        {"query_start_loc": torch.tensor([0, 2, 1, 3], dtype=torch.int32)},
        {"query_start_loc": torch.tensor([0, 1, 2, 4], dtype=torch.int32)},
        {"query_start_loc": torch.tensor([1, 1, 2, 3], dtype=torch.int32)},
        {"query_start_loc": torch.tensor([], dtype=torch.int32)},
        {"state_indices": torch.tensor([1, 6, -1])},
        {"state_indices": torch.tensor([1, -2, 0])},
        {"state_indices": torch.tensor([1, 0, 1])},
        {"state_indices": torch.tensor([1, 0])},
        {"has_initial_state": torch.tensor([True])},
    )
]
WRONG += [
    ("causal_conv1d", {"conv_states": torch.zeros(6, 14, 2)}, "conv_states"),
    ("causal_conv1d", {"conv_states": torch.zeros(6, 14, 33)}, "conv_states"),
    ("causal_conv1d", {"conv_states": torch.zeros(6, 14, 1).expand(6, 14, 3)}, "conv_states"),
    ("causal_conv1d", {"weight": torch.zeros(14, 9)}, "weight"),
    ("causal_conv1d", {"weight": torch.zeros(14, 0)}, "weight"),
    ("causal_conv1d", {"weight": torch.zeros(13, 4)}, "weight"),
    ("causal_conv1d", {"bias": torch.zeros(13)}, "bias"),
    ("gated_delta_rule", {"key": torch.zeros(3, 3, 11)}, "value"),
    ("gated_delta_rule", {"key": torch.zeros(3, 2, 513)}, "key"),
    ("gated_delta_rule", {"query": torch.zeros(3, 2, 4)}, "query"),
    ("gated_delta_rule", {"g": torch.zeros(3, 2)}, "g"),
    ("gated_delta_rule", {"states": torch.zeros(6, 4, 13, 11)}, "states"),
    ("gated_delta_rule", {"states": torch.zeros(1, 4, 11, 13).expand(6, 4, 11, 13)}, "states"),
    ("gated_delta_rule", {"scale": float("inf")}, "scale"),
    ("selective_scan", {"B": torch.zeros(3, 3, 11)}, "B"),
    ("selective_scan", {"B": torch.zeros(3, 2, 257)}, "B"),
    ("selective_scan", {"C": torch.zeros(3, 2, 4)}, "C"),
    ("selective_scan", {"A": torch.zeros(4, 4)}, "A"),
    ("selective_scan", {"dt": torch.zeros(3, 2)}, "dt"),
    ("selective_scan", {"z": torch.zeros(3, 4, 2)}, "z"),
    ("selective_scan", {"dt_min": 0.5, "dt_max": 0.4}, "dt_max"),
]


@pytest.mark.parametrize(("op", "changes", "named"), WRONG, ids=str)
def test_what_does_not_fit_together(device, op, changes, named):
    arguments = make_arguments(op) | changes
    if len(arguments["query_start_loc"]) == 4 and named == "state_indices":
        arguments["query_start_loc"] = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    assert_rejected(op, arguments, named, ValueError)


@pytest.mark.parametrize("op", MAKE)
def test_rows_of_out_that_overlap(device, op):
    arguments = make_arguments(op)
    arguments["out"] = arguments["out"][:1].expand_as(arguments["out"])
    assert_rejected(op, arguments, "out", ValueError)


@pytest.mark.parametrize(
    ("op", "sizes", "read"),
    [
        ("causal_conv1d", (5, 4, 3), "input"),
        ("gated_delta_rule", (2, 2, 16, 16), "query"),
        ("gated_delta_rule", (2, 2, 16, 16), "key"),
    ],
    ids=str,
)
def test_out_in_memory_that_is_read_later(device, op, sizes, read):
    arguments = to_device(make_call(op, sizes, torch.float32, [3]), device)
    assert_rejected(op, {"out": arguments[read], **arguments}, "out", ValueError)


def test_weights_of_fp16_beside_rows_of_fp32(device):
    arguments = to_device(make_call("causal_conv1d", (5, 4, 3), torch.float32, [3]), device)
    arguments |= {name: arguments[name].half() for name in ("weight", "bias")}
    arguments["out"] = torch.zeros_like(arguments["input"])
    assert_rejected("causal_conv1d", arguments, "weight", TypeError)


@pytest.mark.parametrize("op", MAKE)
def test_slots_are_checked_without_query_start_loc(device, op):
    arguments = make_arguments(op) | {"query_start_loc": None, "has_initial_state": None}
    assert_rejected(op, arguments | {"state_indices": torch.tensor([1, 6, -1])}, "state_indices", ValueError)


@pytest.mark.parametrize("op", MAKE)
def test_more_sequences_than_slots(device, op):
    arguments = make_arguments(op) | {"state_indices": None}
    arguments[states_name(arguments)] = arguments[states_name(arguments)][:2]
    assert_rejected(op, arguments, "state_indices", ValueError)


@pytest.mark.parametrize("op", MAKE)
def test_nothing_to_do(device, op):
    """No sequences; and sequences without rows, whose states stay."""
    sizes = next(sizes for name, sizes in CASES if name == op)
    arguments = make_call(op, sizes, torch.float32, [])
    for given in (sequences([], [], []), sequences([0, 0], [3, -1], [False, True])):
        out, after = run(op, arguments | given, device)
        assert out.shape[0] == 0
        assert_same_bits(after.cpu(), arguments[states_name(arguments)])


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("op", MAKE)
@pytest.mark.usefixtures("several_threads")
def test_threads_change_no_bit(device, op):
    sizes = {"causal_conv1d": (4096, 4, 3), "gated_delta_rule": (4, 8, 64, 64), "selective_scan": (16, 64, 1, 64)}[op]
    arguments = make_call(op, sizes, torch.float32) | sequences()
    several = run(op, arguments, device)
    torch.set_num_threads(1)
    for actual, same in zip(several, run(op, arguments, device), strict=True):
        assert_same_bits(actual, same)


@pytest.mark.parametrize("op", MAKE)
def test_nan_stays_in_its_sequence(device, op):
    """NaN in one sequence's row: its result and state show it, and nothing of another sequence does."""
    sizes = next(sizes for name, sizes in CASES[1:] if name == op)
    arguments = make_call(op, sizes, torch.float32) | sequences()
    name = {"causal_conv1d": "input", "gated_delta_rule": "g", "selective_scan": "dt"}[op]
    arguments[name][5] = torch.nan  # of the sequence of 37 rows, in slot 0
    out, after = (tensor.cpu() for tensor in run(op, arguments, device))
    assert out[5].isnan().all()
    assert out[38:].isfinite().all()
    assert out[:5].isfinite().all()
    assert after[0].isnan().all() or op == "causal_conv1d"
    assert after[1:].isfinite().all()


def test_each_item_is_taken_once(several_threads):
    """Taken twice, an item would advance its state twice."""
    n = 20000
    x, b = torch.ones(n, 1, 1), torch.ones(n, 1, 16)
    for _ in range(20):
        states, out = torch.zeros(n, 1, 1, 16), torch.empty(n, 1, 1)
        OPS.selective_scan(out, x, torch.ones(n, 1), torch.zeros(1), b, b, states)
        assert (states == 1).all()
