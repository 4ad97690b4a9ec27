"""merge_attn_states against the reference, and as what it is for: a context seen in two parts."""

import math
from dataclasses import replace

import pytest
import reference
import torch
from attention_cases import OPS, cases, make_arguments, make_caches
from checks import DTYPES, assert_close_to_reference, assert_rejected, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_ext import ops


def make_merge_arguments(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (3, 4, 16),
    spread: float = 1.0,  # of the lse
    seed: int = 0,
) -> dict:
    generator = torch.Generator().manual_seed(seed)
    prefix_output, suffix_output = torch.randn(2, *shape, generator=generator).to(dtype).to(device)
    prefix_lse, suffix_lse = (torch.randn(2, *shape[:2], generator=generator) * spread).to(device)
    return {
        "output": torch.full_like(prefix_output, math.nan),
        "output_lse": torch.full_like(prefix_lse, math.nan),
        "prefix_output": prefix_output,
        "prefix_lse": prefix_lse,
        "suffix_output": suffix_output,
        "suffix_lse": suffix_lse,
    }


def inputs_of(arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if not name.startswith("output")}


def assert_merge(arguments: dict) -> None:
    OPS.merge_attn_states(**arguments)
    expected_output, expected_lse = reference.merge_attn_states(**inputs_of(arguments))
    assert_close_to_reference(arguments["output"], expected_output)
    # An lse near 0 is what two terms leave of each other, and rounded as finely as the terms are.
    larger = torch.maximum(arguments["prefix_lse"], arguments["suffix_lse"])
    actual = torch.stack([arguments["output_lse"], larger])
    assert_close_to_reference(actual, torch.stack([expected_lse, larger.double()]))


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 70) | st.sampled_from([128, 256])),
    spread=st.sampled_from([0.1, 1.0, 10.0, 100.0, 1e4]),
    unseen=st.sampled_from([(), ("prefix_lse",), ("suffix_lse",), ("prefix_lse", "suffix_lse")]),
    seed=st.integers(0, 99),
)
def test_merge_attn_states(device, dtype, shape, spread, unseen, seed):
    """`unseen` parts have an lse of -inf in their first token."""
    arguments = make_merge_arguments(device, dtype, shape, spread, seed)
    for lse in unseen:
        arguments[lse][:1] = -math.inf
    assert_merge(arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_of_either_sign_is_an_empty_part(device, dtype):
    """As in vLLM and in flash-attn 2, whose lse of a row without keys is +inf."""
    arguments = make_merge_arguments(device, dtype)
    same = arguments | {name: arguments[name].clone() for name in ("output", "output_lse", "prefix_lse", "suffix_lse")}
    unseen = ((0, "prefix_lse"), (1, "suffix_lse"), (2, "prefix_lse"), (2, "suffix_lse"))
    for token, lse in unseen:
        arguments[lse][token], same[lse][token] = math.inf, -math.inf
    OPS.merge_attn_states(**arguments)
    assert_merge(same)
    assert_same_bits(arguments["output"], same["output"])
    assert_same_bits(arguments["output_lse"], same["output_lse"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_seen_is_zero(device, dtype):
    arguments = make_merge_arguments(device, dtype)
    arguments["prefix_lse"][1] = arguments["suffix_lse"][1] = -math.inf
    assert_merge(arguments)
    assert (arguments["output"][1] == 0).all()
    assert arguments["output_lse"][1].isneginf().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seen", "unseen"), [("prefix", "suffix"), ("suffix", "prefix")])
def test_one_part_seen_is_that_part(device, dtype, seen, unseen):
    arguments = make_merge_arguments(device, dtype, shape=(3, 4, 33), spread=30.0)
    arguments[f"{unseen}_lse"][:] = -math.inf
    OPS.merge_attn_states(**arguments)
    assert_same_bits(arguments["output"], arguments[f"{seen}_output"])
    assert_same_bits(arguments["output_lse"], arguments[f"{seen}_lse"])


@pytest.mark.parametrize("magnitude", [88.0, 89.0, 104.0, 1e4, 1e30, -1e4, -1e30])
def test_large_lse_do_not_overflow(device, magnitude):
    """Parts of equal weight, and one that outweighs the other."""
    arguments = make_merge_arguments(device)
    arguments["prefix_lse"][:] = magnitude
    arguments["suffix_lse"][:2], arguments["suffix_lse"][2:] = magnitude, -magnitude
    assert_merge(arguments)


def test_without_output_lse(device):
    arguments, same = make_merge_arguments(device), make_merge_arguments(device) | {"output_lse": None}
    OPS.merge_attn_states(**arguments)
    OPS.merge_attn_states(**same)
    assert_same_bits(same["output"], arguments["output"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens(device, several_threads, dtype):
    """Large enough to run in parallel."""
    assert_merge(make_merge_arguments(device, dtype, shape=(100, 16, 128)))


def test_wrapper(device):
    arguments = make_merge_arguments(device, torch.float16) | {"lse_base": 3.0}
    OPS.merge_attn_states(**arguments)
    output, lse = ops.merge_attn_states(**inputs_of(arguments))
    assert_same_bits(output, arguments["output"])
    assert_same_bits(lse, arguments["output_lse"])


@pytest.mark.parametrize("base", [math.e, 2.0, 1 + 2**-30])
def test_lse_of_equal_parts(device, base):
    """The logarithm is that of the base as a double: as a float, e has another one than 1, and 1 + 2**-30 is 1."""
    arguments = make_merge_arguments(device)
    arguments["prefix_lse"][:] = arguments["suffix_lse"][:] = 0.0
    OPS.merge_attn_states(**arguments, lse_base=base)
    assert_same_bits(arguments["output_lse"], torch.full((3, 4), math.log(2) / math.log(base), device=device))


@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize("base", [2.0, 10.0])
def test_lse_of_another_base(device, base, spread):
    """An lse times the logarithm of its base is the natural lse."""
    arguments = make_merge_arguments(device, spread=spread)
    natural = {name: arguments[name].double() * math.log(base) for name in ("prefix_lse", "suffix_lse")}
    OPS.merge_attn_states(**arguments, lse_base=base)
    output, lse = reference.merge_attn_states(**inputs_of(arguments) | natural)
    assert_close_to_reference(arguments["output"], output)
    torch.testing.assert_close(arguments["output_lse"].double(), lse / math.log(base), rtol=1e-6, atol=1e-6)


@given(cases(rows=st.just(1), options=False), st.data())
def test_a_context_seen_in_two_parts(device, case, data):
    """One decode row a sequence over the tokens before a cut, which may be anywhere, and over those from it on."""
    case = replace(case, cache=None, scales=None, alibi=False)
    arguments = make_arguments(case, device)
    seq_lens = arguments["seq_lens"].tolist()
    cuts = [data.draw(st.integers(0, seq_len)) for seq_len in seq_lens]
    prefix = arguments | {"seq_lens": torch.tensor(cuts, dtype=torch.int32, device=device)}

    # The second part starts on a block of its own, in the next of the batch's blocks.
    key_cache, value_cache = make_caches(len(arguments["key_cache"]) + len(cuts), case, case.dtype, device)
    block_tables = torch.zeros_like(arguments["block_tables"])
    next_block = 0
    for s, (cut, seq_len) in enumerate(zip(cuts, seq_lens, strict=True)):
        slots = reference.slots_of(arguments["block_tables"][s], seq_len, case.block_size)[cut:]
        key, value = reference.gather(arguments["key_cache"], arguments["value_cache"], slots)
        num_blocks = math.ceil(len(slots) / case.block_size)
        block_tables[s, :num_blocks] = torch.arange(next_block, next_block + num_blocks)
        next_block += num_blocks
        slots = reference.slots_of(block_tables[s], len(slots), case.block_size)
        key_cache, value_cache = reference.reshape_and_cache(key, value, key_cache, value_cache, slots)
    suffix = arguments | {
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": block_tables,
        "seq_lens": arguments["seq_lens"] - prefix["seq_lens"],
    }

    output, lse = ops.merge_attn_states(*OPS.paged_attention(**prefix), *OPS.paged_attention(**suffix))
    expected_output, expected_lse = reference.paged_attention(**arguments)
    eager, eager_fp32 = (
        reference.merge_attn_states(
            *reference.paged_attention(**prefix, dtype=dtype), *reference.paged_attention(**suffix, dtype=dtype), dtype
        )
        for dtype in (case.dtype, torch.float32)
    )
    assert_close_to_reference(output, expected_output, eager[0])
    assert_close_to_reference(lse, expected_lse, eager_fp32[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_of_an_empty_part_may_hold_anything(device, dtype):
    """0 times NaN would be NaN."""
    arguments = make_merge_arguments(device, dtype)
    for token, name in ((0, "prefix"), (1, "suffix"), (2, "prefix"), (2, "suffix")):
        arguments[f"{name}_lse"][token], arguments[f"{name}_output"][token] = -math.inf, math.nan
    OPS.merge_attn_states(**arguments)
    assert_same_bits(arguments["output"][0], arguments["suffix_output"][0])
    assert_same_bits(arguments["output"][1], arguments["prefix_output"][1])
    assert not arguments["output"][2].any()


@pytest.mark.parametrize("name", ["prefix_lse", "suffix_lse"])
def test_nan_comes_out(device, name):
    arguments = make_merge_arguments(device)
    arguments[name][0] = math.nan
    OPS.merge_attn_states(**arguments)
    assert arguments["output"][0].isnan().all() and arguments["output_lse"][0].isnan().all()
    assert arguments["output"][1:].isfinite().all() and arguments["output_lse"][1:].isfinite().all()


# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)
ERRORS = {
    "prefix_output rank": ("prefix_output", ValueError, lambda a: {"prefix_output": a["prefix_output"].flatten(1)}),
    "prefix_output without elements": (
        "prefix_output",
        ValueError,
        lambda a: {name: a[name][..., :0] for name in ("output", "prefix_output", "suffix_output")},
    ),
    "prefix_output dtype": ("prefix_output", TypeError, lambda a: {"prefix_output": a["prefix_output"].double()}),
    "prefix_output strided": (
        "prefix_output",
        ValueError,
        lambda a: {"prefix_output": a["prefix_output"].mT.contiguous().mT},
    ),
    "suffix_output shape": ("suffix_output", ValueError, lambda a: {"suffix_output": a["suffix_output"][:2]}),
    "suffix_output dtype": ("suffix_output", TypeError, lambda a: {"suffix_output": a["suffix_output"].half()}),
    "prefix_lse shape": ("prefix_lse", ValueError, lambda a: {"prefix_lse": a["prefix_lse"].T.contiguous()}),
    "prefix_lse dtype": ("prefix_lse", TypeError, lambda a: {"prefix_lse": a["prefix_lse"].half()}),
    "suffix_lse shape": ("suffix_lse", ValueError, lambda a: {"suffix_lse": a["suffix_lse"][:, :3].contiguous()}),
    "suffix_lse dtype": ("suffix_lse", TypeError, lambda a: {"suffix_lse": a["suffix_lse"].double()}),
    "output shape": ("output", ValueError, lambda a: {"output": a["output"][:2]}),
    "output dtype": ("output", TypeError, lambda a: {"output": a["output"].half()}),
    "output_lse shape": ("output_lse", ValueError, lambda a: {"output_lse": a["output_lse"][:2]}),
    "output_lse dtype": ("output_lse", TypeError, lambda a: {"output_lse": a["output_lse"].double()}),
    "lse_base 1": ("lse_base", ValueError, lambda a: {"lse_base": 1.0}),
    "lse_base inf": ("lse_base", ValueError, lambda a: {"lse_base": math.inf}),
    "output_lse in output": (
        "output_lse",
        ValueError,
        lambda a: {"output_lse": a["output"].flatten()[: a["output_lse"].numel()].view(a["output_lse"].shape)},
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_merge_attn_states_rejects(device, what):
    argument, error, change = ERRORS[what]
    arguments = make_merge_arguments(device)
    assert_rejected("merge_attn_states", arguments | change(arguments), argument, error)
