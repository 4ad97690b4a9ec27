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


TABLES = {"cum_seq_lens_q": int32(0, 2, 3), "block_tables": torch.tensor([[6, 2], [0, -1]]), "seq_lens": int32(5, 3)}
OFFSETS = {name: PLAN[name] for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")}
SIZES = {name: value for name, value in PLAN.items() if name not in OFFSETS}


@pytest.mark.parametrize("form", ["flat", "csr", "dense", "dual"])
def test_forms_of_a_plan(form: str) -> None:
    """Lists by tables, what is behind a sequence's own pages being anything; and lists in an object."""
    tensors, metadata = tensors_of_run(), flashinfer.mla.MLAPlanMetadata
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0))
    wrapper.plan(**PLAN)
    expected = wrapper.run(*tensors)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0))
    lists: dict[str, dict[str, Any]] = {
        "flat": TABLES | {"max_q_len": 2},
        "csr": {"metadata": metadata.csr(*OFFSETS.values())},
        "dense": {"metadata": metadata.dense(*TABLES.values())},
        "dual": {"metadata": metadata.dual(**OFFSETS, **TABLES)},
    }
    wrapper.plan(**lists[form], **SIZES)
    assert_same_bits(wrapper.run(*tensors), expected)


def test_pairs_and_packed_tensors() -> None:
    """In place of four tensors. Catches a scale that is not in place of the plan's."""
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0))
    wrapper.plan(**PLAN, output_dtype=torch.bfloat16, lse_mode="base2", query_layout="packed", scale_mode="bmm-scalar")
    tensors = tensors_of_run()
    expected, expected_lse = wrapper.run(*tensors, return_lse=True)
    assert expected.dtype == torch.bfloat16
    q, cache = torch.cat(tensors[:2], 2), torch.cat(tensors[2:], 2)
    for query, kv_cache in ((q, cache), (tuple(tensors[:2]), cache), (q, tuple(tensors[2:]))):
        out, lse = wrapper.run(query=query, kv_cache=kv_cache, return_lse=True)
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)
    scaled = wrapper.run(query=q, kv_cache=cache, bmm1_scale=0.4, bmm2_scale=torch.tensor([2.0]))
    wrapper.plan(**PLAN | {"sm_scale": 0.4}, output_dtype=torch.bfloat16)
    assert_same_bits(scaled, 2 * wrapper.run(*tensors))


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
    "sinks": (ValueError, "use_sinks", True),
    "a scale of results": (ValueError, "output_scale", "per-tensor"),
    "scales of fp8": (ValueError, "scale_mode", "kv-per-tensor"),
    "results in fp8": (ValueError, "output_dtype", torch.float8_e4m3fn),
    "fewer logits": (ValueError, "skip_softmax", True),
    "metadata of another kind": (TypeError, "metadata", {}),
    "metadata beside lists": (ValueError, "metadata", flashinfer.mla.MLAPlanMetadata()),
    "no causal": (TypeError, "causal", None),
    "no number of heads": (TypeError, "num_heads", None),
    "no pages": (TypeError, "kv_indices", None),
    "lists of both forms": (ValueError, "block_tables", None),
}


@pytest.mark.parametrize("what", WRONG_PLANS)
def test_plans_that_are_refused(what: str) -> None:
    error, argument, value = WRONG_PLANS[what]
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0))
    changes = TABLES if what == "lists of both forms" else {argument: value}
    with pytest.raises(error, match=rf"^BatchMLAPagedAttentionWrapper\.plan: {argument}: expected .+, got .+"):
        wrapper.plan(**PLAN | changes)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("cum_seq_lens_q", int32(0, 3)),
        ("cum_seq_lens_q", None),
        ("block_tables", torch.tensor([6, 2])),
        ("block_tables", torch.zeros(2, 2)),
        ("seq_lens", int32(5, 9)),
        ("seq_lens", int32(5)),
    ],
)
def test_tables_that_are_refused(argument: str, value: Any) -> None:
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(0))
    with pytest.raises((ValueError, TypeError), match=rf"\.plan: {argument}: expected .+, got .+"):
        wrapper.plan(**SIZES | TABLES | {argument: value})


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
    "sinks": (ValueError, "sinks", {"sinks": torch.zeros(3)}),
    "one of two scales": (ValueError, "bmm2_scale", {"bmm1_scale": 0.5}),
    "the query twice": (ValueError, "q_nope", {"query": torch.zeros(3, 3, 32)}),
    "no query": (TypeError, "q_pe", {"q_pe": None}),
    "a query of another width": (
        ValueError,
        "query",
        {"q_nope": None, "q_pe": None, "query": torch.zeros(3, 3, 31)},
    ),
    "three parts": (ValueError, "kv_cache", {"ckv_cache": None, "kpe_cache": None, "kv_cache": (1, 2, 3)}),
    "another dtype of both parts": (
        TypeError,
        "kv_cache",
        {"ckv_cache": None, "kpe_cache": None, "kv_cache": torch.zeros(8, 4, 32).half()},
    ),
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
