"""varlen_attention: attention over keys and values that lie one after the other, against the reference."""

from itertools import pairwise

import pytest
import reference
import torch
from attention_cases import Case, cases, size_of_logits
from checks import DTYPES, assert_close_to_reference, assert_rejected, assert_same_bits, filled_with_nan
from hypothesis import given
from hypothesis import strategies as st
from op_table import OPS, runs_cuda_kernels

LAYOUTS = ["rows", "rows apart", "heads first"]


def laid_out(tensor: torch.Tensor, layout: str, device: torch.device) -> torch.Tensor:
    """A copy of [tokens, heads, head_size]: contiguous, with NaN between all heads and rows, or heads first."""
    num_tokens, num_heads, head_size = tensor.shape
    if layout == "rows apart":
        strided = filled_with_nan(num_tokens, num_heads + 1, head_size + 24, dtype=tensor.dtype, device=device)
        strided = strided[:, :num_heads, 8 : 8 + head_size]
    elif layout == "heads first":
        strided = torch.empty(num_heads, num_tokens, head_size, dtype=tensor.dtype, device=device).transpose(0, 1)
    else:
        strided = torch.empty(num_tokens, num_heads, head_size, dtype=tensor.dtype, device=device)
    return strided.copy_(tensor)


def make_arguments(case: Case, device: torch.device, layout: str = "rows") -> dict:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, case.head_size, generator=generator).to(case.dtype)

    rows, keys = ([0, *lens] for lens in zip(*case.lens, strict=True)) if case.lens else ([0], [0])
    num_heads = case.num_kv_heads * case.group_size
    starts = {"query_start_loc": torch.tensor(rows).cumsum(0), "key_start_loc": torch.tensor(keys).cumsum(0)}
    return {
        "query": normal(sum(rows), num_heads).to(device),
        **{name: laid_out(normal(sum(keys), case.num_kv_heads), layout, device) for name in ("key", "value")},
        **{name: (start if "seq_lens" in case.int64 else start.int()).to(device) for name, start in starts.items()},
        "scale": case.head_size**-0.5,
        "alibi_slopes": (torch.rand(num_heads, generator=generator) - 0.5).to(device) if case.alibi else None,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
        "sinks": torch.randn(num_heads, generator=generator).to(device) if case.sinks else None,
        "causal": case.causal,
        "right_window": case.right_window,
        "attention_chunk": case.attention_chunk,
    }


def expected(arguments: dict, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    options = {name: arguments[name] for name in ("scale", "alibi_slopes", "sliding_window", "softcap", "sinks")}
    options |= {name: arguments[name] for name in ("causal", "right_window", "attention_chunk")}
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse = torch.zeros(query.shape[:2], dtype=torch.promote_types(dtype, torch.float32), device=query.device)
    starts = [pairwise(arguments[name].tolist()) for name in ("query_start_loc", "key_start_loc")]
    for rows, keys in zip(*starts, strict=True):
        of_rows, of_keys = slice(*rows), slice(*keys)
        out[of_rows], lse[of_rows] = reference.attention(
            query[of_rows], key[of_keys], value[of_keys], dtype=dtype, **options
        )
    return out, lse


def assert_varlen(arguments: dict, out: torch.Tensor, lse: torch.Tensor) -> None:
    expected_out, expected_lse = expected(arguments, torch.float64)
    assert_close_to_reference(out, expected_out, expected(arguments, out.dtype)[0])
    size_of_terms = size_of_logits(arguments["query"], arguments["scale"])
    assert_close_to_reference(lse, expected_lse, expected(arguments, torch.float32)[1], size_of_terms)


@given(cases(), st.sampled_from(LAYOUTS))
def test_varlen_attention(device, case, layout):
    arguments = make_arguments(case, device, layout)
    assert_varlen(arguments, *OPS.varlen_attention(**arguments))


def test_alibi_slopes_of_each_sequence(device):
    arguments = make_arguments(Case(((40, 700), (3, 30), (1, 600))), device)
    slopes = torch.linspace(-0.3, 0.7, 12, device=device).view(3, 4)
    out, _ = OPS.varlen_attention(**arguments | {"alibi_slopes": slopes})
    for s, (begin, end) in enumerate(pairwise(arguments["query_start_loc"].tolist())):
        for_all, _ = OPS.varlen_attention(**arguments | {"alibi_slopes": slopes[s]})
        assert_same_bits(out[begin:end], for_all[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_attention_over_a_cache_of_one_block(device, dtype):
    """Bit for bit on the CPU, in prefill and in decode: the same kernels read the same numbers."""
    arguments = make_arguments(Case(((40, 700), (3, 30), (1, 600)), dtype, head_size=72), device, "rows apart")
    out, lse = OPS.varlen_attention(**arguments)
    starts, blocks = arguments["key_start_loc"], torch.zeros(3, 700, dtype=torch.int32, device=device)
    for s, (begin, end) in enumerate(pairwise(starts.tolist())):
        blocks[s, : end - begin] = torch.arange(begin, end)
    paged = {name: value for name, value in arguments.items() if name not in ("key", "value", "key_start_loc")}
    paged |= {f"{name}_cache": arguments[name].unsqueeze(1) for name in ("key", "value")}  # a block for each token
    paged_out, paged_lse = OPS.paged_attention(block_tables=blocks, seq_lens=starts.diff().int(), **paged)
    if runs_cuda_kernels(device):
        assert_varlen(arguments, paged_out, paged_lse)
    else:
        assert_same_bits(out, paged_out)
        assert_same_bits(lse, paged_lse)


def starts_of(*starts: int) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32)


ERRORS = {
    "query dtype": ("query", TypeError, lambda a: {"query": a["query"].double()}),
    "key dtype": ("key", TypeError, lambda a: {"key": a["key"].half()}),
    "key rank": ("key", ValueError, lambda a: {"key": a["key"].flatten(1)}),
    "key not contiguous": ("key", ValueError, lambda a: {"key": a["key"].mT.contiguous().mT}),
    "value shape": ("value", ValueError, lambda a: {"value": a["value"][1:]}),
    "head size": ("(query|key)", ValueError, lambda a: {n: a[n][..., :6] for n in ("query", "key", "value")}),
    "no KV heads": ("key", ValueError, lambda a: {n: a[n][:, :0] for n in ("key", "value")}),
    "heads": ("query", ValueError, lambda a: {"query": a["query"][:, :3].contiguous()}),
    "query_start_loc dtype": ("query_start_loc", TypeError, lambda a: {"query_start_loc": a["query_start_loc"].half()}),
    "query_start_loc empty": ("query_start_loc", ValueError, lambda a: {"query_start_loc": starts_of()}),
    "query_start_loc end": ("query_start_loc", ValueError, lambda a: {"query_start_loc": starts_of(0, 1, 3)}),
    "key_start_loc shape": ("key_start_loc", ValueError, lambda a: {"key_start_loc": starts_of(0, 21)}),
    "key_start_loc start": ("key_start_loc", ValueError, lambda a: {"key_start_loc": starts_of(1, 9, 21)}),
    "key_start_loc falls": ("key_start_loc", ValueError, lambda a: {"key_start_loc": starts_of(0, 22, 21)}),
    "key_start_loc end": ("key_start_loc", ValueError, lambda a: {"key_start_loc": starts_of(0, 9, 22)}),
    "max_seq_len": ("max_seq_len", ValueError, lambda a: {"max_seq_len": 11}),
    "right_window though causal": ("right_window", ValueError, lambda a: {"right_window": 1}),
    "attention_chunk": ("attention_chunk", ValueError, lambda a: {"attention_chunk": -1}),
}


@pytest.mark.parametrize("what", ERRORS)
def test_varlen_attention_rejects(device, what):
    argument, error, change = ERRORS[what]
    arguments = make_arguments(Case(((1, 9), (1, 12)), head_size=16), device)
    assert_rejected("varlen_attention", arguments | change(arguments), argument, error)
