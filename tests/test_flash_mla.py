"""FlashMLA's functions: against attention in fp64, and what they refuse by the names of their arguments."""

import math
from typing import Any

import pytest
import reference
import torch
from checks import assert_close_to_reference, assert_memory_is_checked

from pagedattn_ext.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata


def make_arguments(dtype: torch.dtype = torch.float32, sizes: tuple[int, int] = (48, 32), seqlen_q: int = 2) -> dict:
    """Two sequences of 3 and 70 tokens in pages of 64."""
    generator = torch.Generator().manual_seed(0)
    head_size, head_dim_v = sizes
    return {
        "q": torch.randn(2, seqlen_q, 5, head_size, generator=generator).to(dtype),
        "k_cache": torch.randn(4, 64, 1, head_size, generator=generator).to(dtype),
        "block_table": torch.tensor([[2, -1], [3, 0]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([3, 70], dtype=torch.int32),
        "head_dim_v": head_dim_v,
        "tile_scheduler_metadata": get_mla_metadata()[0],
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(48, 32), (40, 40), (576, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_mla_with_kvcache(dtype: torch.dtype, sizes: tuple[int, int], causal: bool) -> None:
    arguments = make_arguments(dtype, sizes)
    out, lse = flash_mla_with_kvcache(**arguments, softmax_scale=0.1, causal=causal)
    assert lse.shape == (2, 5, 2)
    for s, (blocks, length) in enumerate((([2], 3), ([3, 0], 70))):
        key = arguments["k_cache"][blocks].flatten(0, 1)[:length]
        options = {"scale": 0.1, "causal": causal}
        value = key[..., : sizes[1]]
        expected_out, expected_lse = reference.attention(arguments["q"][s], key, value, **options)
        eager_out, _ = reference.attention(arguments["q"][s], key, value, **options, dtype=dtype)
        assert_close_to_reference(out[s], expected_out, eager_out)
        _, eager_lse = reference.attention(arguments["q"][s], key, value, **options, dtype=torch.float32)
        assert_close_to_reference(lse[s].T, expected_lse, eager_lse)


def test_defaults_and_older_arguments() -> None:
    """The scale of the whole head; a plan of any version, by position."""
    arguments = make_arguments()
    old_plan = torch.zeros(132, 8, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    values = [value for name, value in arguments.items() if name != "tile_scheduler_metadata"]
    out, _ = flash_mla_with_kvcache(*values, *old_plan)
    expected, _ = flash_mla_with_kvcache(**arguments, softmax_scale=48**-0.5, causal=False)
    assert torch.equal(out, expected)


def test_rows_without_keys() -> None:
    """Zeros and +inf, as FlashMLA says; without any page as well."""
    arguments = make_arguments() | {"cache_seqlens": int32(0, 0)}
    for pages in (slice(None), slice(0)):
        given = {"k_cache": arguments["k_cache"][pages], "block_table": arguments["block_table"][:, pages]}
        out, lse = flash_mla_with_kvcache(**arguments | given)
        assert not out.any()
        assert torch.equal(lse, torch.full_like(lse, math.inf))


def test_heads_of_keys() -> None:
    """Each serves heads of q that follow each other."""
    arguments = make_arguments() | {"q": torch.randn(2, 2, 6, 48), "k_cache": torch.randn(4, 64, 3, 48)}
    out, lse = flash_mla_with_kvcache(**arguments, causal=True)
    for head in range(3):
        rows = slice(2 * head, 2 * head + 2)
        part = {"q": arguments["q"][:, :, rows], "k_cache": arguments["k_cache"][:, :, head : head + 1]}
        expected_out, expected_lse = flash_mla_with_kvcache(**arguments | part, causal=True)
        assert torch.equal(out[:, :, rows], expected_out)
        assert torch.equal(lse[:, rows], expected_lse)


def test_memory_for_results() -> None:
    """It may be a slice."""
    arguments = make_arguments()
    memory = torch.zeros(2, 2, 9, 32)[:, :, :5]
    out, _ = flash_mla_with_kvcache(**arguments, causal=True, out=memory)
    assert out is memory
    assert torch.equal(memory, flash_mla_with_kvcache(**arguments, causal=True)[0])
    memory = torch.zeros(3, 4, 32)
    assert flash_mla_sparse_fwd(**SPARSE, out=memory)[0] is memory
    assert torch.equal(memory, flash_mla_sparse_fwd(**SPARSE)[0])


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "q": (ValueError, "q", torch.zeros(2, 5, 48)),
    "two heads of keys for five": (ValueError, "k_cache", torch.zeros(4, 64, 2, 48)),
    "other keys": (ValueError, "k_cache", torch.zeros(4, 64, 1, 40)),
    "dtype of the cache": (TypeError, "k_cache", torch.zeros(4, 64, 1, 48, dtype=torch.float16)),
    "no block_table": (TypeError, "block_table", None),
    "a block that is not there": (ValueError, "block_table", torch.tensor([[2, 0], [4, 0]])),
    "lengths of another batch": (ValueError, "cache_seqlens", int32(3, 70, 1)),
    "a length that does not fit": (ValueError, "cache_seqlens", int32(3, 129)),
    "floats as lengths": (TypeError, "cache_seqlens", torch.tensor([3.0, 70.0])),
    "value size": (ValueError, "head_dim_v", 49),
    "bool as scale": (TypeError, "softmax_scale", True),
    "infinite scale": (ValueError, "softmax_scale", math.inf),
    "causal": (TypeError, "causal", 1),
    "fp8": (ValueError, "is_fp8_kvcache", True),
    "sparse": (ValueError, "indices", torch.zeros(2, 2, 4, dtype=torch.int32)),
    "sink": (ValueError, "attn_sink", torch.zeros(5)),
    "a scale of fp8": (ValueError, "descale_k", torch.ones(1)),
    "memory of another shape": (ValueError, "out", torch.zeros(2, 2, 5, 48)),
    "memory of another dtype": (TypeError, "out", torch.zeros(2, 2, 5, 32, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused(what: str) -> None:
    error, argument, value = WRONG[what]
    with pytest.raises(error, match=f"^flash_mla_with_kvcache: {argument}: expected .+, got .+"):
        flash_mla_with_kvcache(**make_arguments() | {argument: value})


SPARSE = {
    "q": torch.randn(3, 4, 40, generator=torch.Generator().manual_seed(1)),
    "kv": torch.randn(9, 2, 40, generator=torch.Generator().manual_seed(2)),
    # A token twice counts twice; -1 and 9 are none; the last row sees nothing.
    "indices": torch.tensor([[[8, -1, 2, 2], [0, 1, 9, 3]], [[5, 6, 7, 8]] * 2, [[-1, 9, 0, 1]] * 2]),
    "sm_scale": 0.3,
    "d_v": 32,
    "topk_length": torch.tensor([4, 3, 2], dtype=torch.int32),
}


@pytest.mark.parametrize("with_sink", [False, True])
def test_flash_mla_sparse_fwd(with_sink: bool) -> None:
    """In fp64. Catches tokens that a row does not see, and a sink in the lse."""
    sink = torch.tensor([0.5, -math.inf, math.inf, -1.0]) if with_sink else None
    out, max_logits, lse = flash_mla_sparse_fwd(**SPARSE, attn_sink=sink)
    for row, length in enumerate(SPARSE["topk_length"].tolist()):
        for head in range(4):
            chosen = SPARSE["indices"][row, head // 2, :length]
            keys = SPARSE["kv"][chosen[(chosen >= 0) & (chosen < 9)], head // 2].double()
            logits = keys @ SPARSE["q"][row, head].double() * 0.3
            sinks = logits.new_zeros(0) if sink is None else sink[head : head + 1].double()
            weights = torch.cat([logits, sinks]).softmax(0)[: len(logits)] if len(logits) else logits
            weights = torch.zeros_like(logits) if sinks.isposinf().any() else weights
            torch.testing.assert_close(out[row, head].double(), weights @ keys[:, :32], rtol=2e-5, atol=2e-6)
            expected = [float(logits.max()), float(logits.logsumexp(0))] if len(logits) else [-math.inf, math.inf]
            found = torch.stack([max_logits[row, head], lse[row, head]])
            torch.testing.assert_close(found, torch.tensor(expected), rtol=2e-6, atol=2e-6)


WRONG_SPARSE: dict[str, tuple[type[Exception], str, Any]] = {
    "q": (ValueError, "q", torch.zeros(3, 40)),
    "other keys": (ValueError, "kv", torch.zeros(9, 2, 32)),
    "dtype of kv": (TypeError, "kv", torch.zeros(9, 2, 40, dtype=torch.float16)),
    "floats as indices": (TypeError, "indices", torch.zeros(3, 2, 4)),
    "indices of other heads": (ValueError, "indices", torch.zeros(3, 1, 4, dtype=torch.int32)),
    "value size": (ValueError, "d_v", 41),
    "scale": (ValueError, "sm_scale", math.nan),
    "sinks of other heads": (ValueError, "attn_sink", torch.zeros(2)),
    "complex sinks": (TypeError, "attn_sink", torch.zeros(4, dtype=torch.complex64)),
    "lengths": (ValueError, "topk_length", int32(4, 3, 5)),
    "memory of another shape": (ValueError, "out", torch.zeros(3, 4, 40)),
}


@pytest.mark.parametrize("what", WRONG_SPARSE)
def test_what_sparse_prompts_refuse(what: str) -> None:
    error, argument, value = WRONG_SPARSE[what]
    with pytest.raises(error, match=f"^flash_mla_sparse_fwd: {argument}: expected .+, got .+"):
        flash_mla_sparse_fwd(**SPARSE | {argument: value})


def test_sinks_that_require_grad_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"^flash_mla_sparse_fwd: attn_sink: requires grad"):
        flash_mla_sparse_fwd(**SPARSE, attn_sink=torch.zeros(4, requires_grad=True))


MEMORY: dict[str, tuple[torch.Tensor, Any]] = {
    "flash_mla_with_kvcache: out": (
        torch.zeros(2, 2, 5, 32),
        lambda memory: flash_mla_with_kvcache(**make_arguments(), out=memory),
    ),
    "flash_mla_sparse_fwd: out": (torch.zeros(3, 4, 32), lambda memory: flash_mla_sparse_fwd(**SPARSE, out=memory)),
}


@pytest.mark.parametrize("argument", MEMORY)
def test_memory_for_results_is_checked(argument: str) -> None:
    assert_memory_is_checked(argument, *MEMORY[argument])
