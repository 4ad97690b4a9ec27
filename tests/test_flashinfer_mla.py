"""FlashInfer's wrapper of latent attention: against the op, whose results have a test, and lists that do not fit."""

import math
from typing import Any

import pytest
import torch
from checks import assert_same_bits

from pagedattn_ext import flashinfer, ops


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Two sequences in pages of 4: 5 tokens in pages 6 and 2, with 2 rows; 3 tokens in page 0, with 1 row.
PLAN: dict[str, Any] = dict(
    qo_indptr=int32(0, 2, 3), kv_indptr=int32(0, 2, 3), kv_indices=int32(6, 2, 0, 7), kv_len_arr=int32(5, 3),
    num_heads=3, head_dim_ckv=24, head_dim_kpe=8, page_size=4, causal=True, sm_scale=0.2, q_data_type=torch.float32,
    kv_data_type=torch.float32,
)  # fmt: skip


def tensors_of_run(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 3, 24), (3, 3, 8), (8, 4, 24), (8, 4, 8)]
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_run_after_plan(dtype: torch.dtype, causal: bool) -> None:
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0))
    wrapper.plan(**PLAN | {"causal": causal})
    tensors = tensors_of_run(dtype)
    expected, natural_lse = ops.mla_attention(
        *tensors, torch.tensor([[6, 2], [0, 0]]), int32(5, 3), query_start_loc=int32(0, 2, 3), scale=0.2, causal=causal
    )
    memory, lse_memory = torch.empty_like(expected), torch.empty_like(natural_lse)
    out, lse = wrapper.run(*tensors, memory, lse_memory, True)
    assert out is memory and lse is lse_memory
    assert_same_bits(out, expected)
    torch.testing.assert_close(lse, natural_lse * math.log2(math.e))
    assert_same_bits(wrapper.run(*tensors, return_lse=True, return_lse_base_on_e=True)[1], natural_lse)
    assert_same_bits(wrapper.run(*tensors), expected)


def test_caches_that_are_slices_of_one() -> None:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(0))
    wrapper.plan(**PLAN)
    q_nope, q_pe, ckv, kpe = tensors_of_run()
    both = torch.cat([ckv, kpe], dim=2)
    assert_same_bits(wrapper.run(q_nope, q_pe, both[..., :24], both[..., 24:]), wrapper.run(q_nope, q_pe, ckv, kpe))


def test_lse_that_is_not_returned() -> None:
    """FlashInfer writes the lse into memory that is given, whether or not it returns it."""
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(0))
    wrapper.plan(**PLAN)
    tensors, memory = tensors_of_run(), torch.empty(3, 3)
    out = wrapper.run(*tensors, lse=memory)
    expected_out, expected_lse = wrapper.run(*tensors, return_lse=True)
    assert_same_bits(out, expected_out)
    assert_same_bits(memory, expected_lse)


def test_page_offsets_behind_those_of_the_sequences() -> None:
    """FlashInfer takes the number of sequences from the other lists, and does not look at more."""
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(0))
    wrapper.plan(**PLAN)
    tensors = tensors_of_run()
    expected = wrapper.run(*tensors)
    wrapper.plan(**PLAN | {"kv_indptr": int32(0, 2, 3, 99)})
    assert_same_bits(wrapper.run(*tensors), expected)


def test_append_paged_mla_kv_cache() -> None:
    """Token by token; a token of a negative sequence is skipped."""
    caches = ckv_cache, kpe_cache = torch.zeros(8, 4, 24), torch.zeros(8, 4, 8)
    ckv, kpe = torch.randn(4, 24), torch.randn(4, 8)
    pages = (int32(6, 2, 0), int32(0, 2, 3), int32(1, 3))
    where = [(0, 0), (0, 4), (-1, 0), (1, 2)]
    sequences, positions = (int32(*numbers) for numbers in zip(*where, strict=True))
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, sequences, positions, *caches, *pages)
    expected_ckv, expected_kpe = torch.zeros_like(ckv_cache), torch.zeros_like(kpe_cache)
    for row, page, place in ((0, 6, 0), (1, 2, 0), (3, 0, 2)):
        expected_ckv[page, place], expected_kpe[page, place] = ckv[row], kpe[row]
    assert_same_bits(ckv_cache, expected_ckv)
    assert_same_bits(kpe_cache, expected_kpe)
    ckv, kpe = torch.randn(4, 24), torch.randn(4, 8)  # others, to see that they are not written
    for arguments, message in (
        ((ckv, kpe[:3], sequences, positions, *caches), "append_ckv: expected 4 rows, as positions, got 4 and 3"),
        ((ckv, kpe, sequences, positions, ckv_cache, kpe_cache[:7]), r"kpe_cache: expected shape \[8, 4, 8\]"),
        ((ckv, kpe.half(), sequences, positions, *caches), "kpe_cache: expected shape .* of torch.float16"),
        ((ckv, kpe, sequences, positions + 4, *caches), "positions: expected .+, got "),
        ((ckv, kpe.clone().requires_grad_(), sequences, positions, *caches), "append_kpe: requires grad"),
        (
            (ckv, kpe, sequences, positions, ckv_cache, kpe_cache.repeat(1, 1, 2)[..., ::2]),
            "kpe_cache: expected .+, got",
        ),
        ((ckv, kpe.double(), sequences, positions, ckv_cache, kpe_cache.double()), "kpe_cache: expected dtype .+, got"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=f"^append_paged_mla_kv_cache: {message}"):
            flashinfer.append_paged_mla_kv_cache(*arguments, *pages)
    for wrong, got in ((torch.tensor([1.0, 3.7]), "float32"), (torch.tensor([True, True]), "bool"), (3, "int")):
        with pytest.raises(TypeError, match=rf"^append_paged_mla_kv_cache: kv_last_page_len: expected .+, got {got}"):
            flashinfer.append_paged_mla_kv_cache(ckv, kpe, sequences, positions, *caches, *pages[:2], wrong)
        with pytest.raises(TypeError, match=rf"^append_paged_kv_cache: kv_last_page_len: expected .+, got {got}"):
            keys = torch.zeros(8, 2, 4, 1, 24)
            flashinfer.append_paged_kv_cache(ckv[:, None], ckv[:, None], sequences, positions, keys, *pages[:2], wrong)
    wide = torch.tensor([1, 2**32 + 3])  # as int32 they fit
    with pytest.raises(ValueError, match=r"^append_paged_mla_kv_cache: kv_last_page_len: expected 1 to 4 .*, got 429"):
        flashinfer.append_paged_mla_kv_cache(ckv, kpe, sequences, positions, *caches, *pages[:2], wide)
    with pytest.raises(ValueError, match=r"^append_paged_kv_cache: kv_last_page_len: expected 1 to 4 .*, got 429496"):
        flashinfer.append_paged_kv_cache(ckv[:, None], ckv[:, None], sequences, positions, keys, *pages[:2], wide)
    assert_same_bits(ckv_cache, expected_ckv)
    assert_same_bits(kpe_cache, expected_kpe)


WRONG_PLANS: dict[str, tuple[type[Exception], str, Any]] = {
    "rows do not begin at 0": (ValueError, "qo_indptr", int32(1, 2, 3)),
    "rows of another batch": (ValueError, "qo_indptr", int32(0, 3)),
    "pages fall": (ValueError, "kv_indptr", int32(0, 3, 2)),
    "more pages than there are": (ValueError, "kv_indptr", int32(0, 2, 5)),
    "pages as floats": (TypeError, "kv_indices", torch.zeros(4)),
    "a length beyond the pages": (ValueError, "kv_len_arr", int32(9, 3)),
    "a length into the neighbour's page": (ValueError, "kv_len_arr", int32(5, 5)),
    "a negative length": (ValueError, "kv_len_arr", int32(5, -1)),
    "lengths of another batch": (ValueError, "kv_len_arr", int32(5)),
    "no page size": (ValueError, "page_size", 0),
    "a bool as scale": (TypeError, "sm_scale", True),
    "profiler": (ValueError, "use_profiler", True),
}


@pytest.mark.parametrize("what", WRONG_PLANS)
def test_plans_that_are_refused(what: str) -> None:
    error, argument, value = WRONG_PLANS[what]
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0))
    with pytest.raises(error, match=rf"^BatchMLAPagedAttentionWrapper\.plan: {argument}: expected .+, got .+"):
        wrapper.plan(**PLAN | {argument: value})


WRONG_RUNS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "other heads": (ValueError, "q_nope", {"q_nope": torch.zeros(3, 4, 24)}),
    "more rows": (ValueError, "qo_indptr", {"q_nope": torch.zeros(4, 3, 24), "q_pe": torch.zeros(4, 3, 8)}),
    "other pages": (ValueError, "kpe_cache", {"kpe_cache": torch.zeros(8, 5, 8)}),
    "too few pages": (
        ValueError,
        "kv_indices",
        {"ckv_cache": torch.zeros(5, 4, 24), "kpe_cache": torch.zeros(5, 4, 8)},
    ),
    "another dtype": (TypeError, "ckv_cache", {"ckv_cache": torch.zeros(8, 4, 24, dtype=torch.float16)}),
    "memory of another shape": (ValueError, "out", {"out": torch.zeros(1, 3, 24)}),
    "a scale of fp8": (ValueError, "ckv_scale", {"ckv_scale": 0.5}),
    "of cutlass": (ValueError, "page_table", {"page_table": torch.zeros(2, 2)}),
}


@pytest.mark.parametrize("what", WRONG_RUNS)
def test_runs_that_are_refused(what: str) -> None:
    error, argument, changes = WRONG_RUNS[what]
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0))
    wrapper.plan(**PLAN)
    arguments = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), tensors_of_run(), strict=True))
    with pytest.raises(error, match=rf"^BatchMLAPagedAttentionWrapper\.run: {argument}: expected .+, got .+"):
        wrapper.run(**arguments | changes)


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(ValueError, match=r"__init__: use_cuda_graph: expected False, got True"):
        flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0), use_cuda_graph=True)
    with pytest.raises(RuntimeError, match=r"call plan\(\) first"):
        flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0)).run(*tensors_of_run())
