"""pagedattn_ext.flashinfer against dense attention in fp64: masks, positions, widths, sinks, levels, graphs."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from brute_force import HEAD_SIZE, rows, starts
from checks import assert_close_to_reference, assert_same_bits
from flashinfer_batch import HEADS, KV_HEADS, PAGE_SIZE, WORKSPACE, Batch
from torch import Tensor

from pagedattn_ext import CPUGraph, flashinfer

LENGTHS_Q, LENGTHS_K = [3, 1, 2, 0, 2], [7, 6, 2, 3, 0]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(49)
        yield


def rotated(x: Tensor, first: int, rope_scale: float, rope_theta: float) -> Tensor:
    """LLaMA's rotation of tokens from the position `first` on, in complex numbers."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([rope_theta ** (-i / half) / rope_scale for i in range(half)], dtype=torch.float64)
    angles = torch.arange(first, first + len(x))[:, None, None] * frequencies
    turned = torch.complex(*x.double().split(half, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,  # bool [rows, keys]
    *,
    mode: str = "NONE",
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rope: tuple[float, float] = (1.0, 1e4),
) -> tuple[Tensor, Tensor]:
    """out, and the lse in base 2, of one sequence."""
    if mode == "ROPE_LLAMA":
        q, k = rotated(q, len(k) - len(q), *rope), rotated(k, 0, *rope)
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mode == "ALIBI":
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / q.shape[1]) for head in range(q.shape[1])])
        logits = logits + slopes[:, None, None] * (torch.arange(len(k)) - torch.arange(len(q))[:, None])
    logits = logits.masked_fill(~seen, -math.inf)
    terms = logits if sinks is None else torch.cat([logits, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    lse = terms.logsumexp(-1)
    weights = (logits - lse[..., None]).exp().nan_to_num(0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.t() / math.log(2)


def sees(num_rows: int, num_keys: int, causal: bool, window_left: int = -1) -> Tensor:
    position, key = torch.arange(num_keys - num_rows, num_keys)[:, None], torch.arange(num_keys)
    seen = key <= position if causal else torch.ones(num_rows, num_keys, dtype=torch.bool)
    return seen & (key >= position - window_left) if window_left >= 0 else seen


class Case:
    """A ragged batch, in pages or not, and its results."""

    def __init__(self, form: str, lengths_q: list[int] = LENGTHS_Q, lengths_k: list[int] = LENGTHS_K) -> None:
        self.q = rows(lengths_q, HEADS)
        self.batch = Batch(lengths_k, layout="NHD tuple" if form == "ragged" else form)
        self.starts = starts(lengths_q)
        self.tensors: tuple[Any, ...]
        if form == "ragged":
            self.wrapper: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
            self.tensors = torch.cat(self.q), torch.cat(self.batch.key), torch.cat(self.batch.value)
            sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": HEAD_SIZE}
            self.plan = partial(self.wrapper.plan, self.starts, starts(lengths_k), **sizes)
        else:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, self.batch.kv_layout)
            self.tensors = torch.cat(self.q), self.batch.cache
            self.plan = partial(self.wrapper.plan, self.starts, **self.batch.prefill_plan)

    def sees(self, causal: bool, window_left: int = -1) -> list[Tensor]:
        return [sees(len(q), len(k), causal, window_left) for q, k in zip(self.q, self.batch.key, strict=True)]

    @property
    def flat_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        q, *cache = self.tensors
        return (q, *cache) if len(cache) == 2 else (q, *cache[0])

    def expect(self, actual: tuple[Tensor, Tensor], seen: list[Tensor], **options: Any) -> None:
        sequences = zip(self.q, self.batch.key, self.batch.value, seen, strict=True)
        results = [dense(*sequence, **options) for sequence in sequences]
        for tensor, expected in zip(actual, map(torch.cat, zip(*results, strict=True)), strict=True):
            assert_close_to_reference(tensor, expected)


FORMS = ["NHD tuple", "HND tensor", "ragged"]


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_masks(form: str, is_packed: bool, mode: str) -> None:
    """Rows that see nothing, sequences without keys or rows, and segments that end within a byte; a window and a soft
    cap beside the mask; causal does not count."""
    case = Case(form)
    seen = [torch.rand(len(q), len(k)) < 0.6 for q, k in zip(case.q, case.batch.key, strict=True)]
    seen[0][1] = False
    flat = torch.cat([mask.flatten() for mask in seen])
    mask: dict[str, Any] = {"custom_mask": flat}
    if is_packed:
        indptr = starts([mask.numel() for mask in seen])
        mask = {"packed_custom_mask": flashinfer.segment_packbits(flat, indptr, bitorder="little")[0]}
    case.plan(**mask, causal=True, pos_encoding_mode=mode, logits_soft_cap=2.0)
    case.expect(case.wrapper.run_return_lse(*case.tensors), seen, mode=mode, softcap=2.0)

    case.plan(**mask, pos_encoding_mode=mode, window_left=2)
    case.expect(
        case.wrapper.run_return_lse(*case.tensors),
        [mask & sees(*mask.shape, causal=False, window_left=2) for mask in seen],
        mode=mode,
    )
    case.wrapper.plan(*case.plan.args, **case.plan.keywords, causal=True)  # a later plan has no mask
    case.expect(case.wrapper.run_return_lse(*case.tensors), case.sees(causal=True))


@pytest.mark.parametrize("is_packed", [False, True])
def test_mask_of_one_sequence(is_packed: bool) -> None:
    q, k, v = torch.randn(3, HEADS, HEAD_SIZE), *torch.randn(2, 5, KV_HEADS, HEAD_SIZE)
    seen = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
    mask = {"packed_custom_mask": flashinfer.packbits(seen, "little")} if is_packed else {"custom_mask": seen}
    actual = flashinfer.single_prefill_with_kv_cache(q, k, v, **mask, return_lse=True)  # type: ignore[arg-type]
    for tensor, expected in zip(actual, dense(q, k, v, seen), strict=True):
        assert_close_to_reference(tensor, expected)


def test_bits() -> None:
    """As numpy has them; each segment begins a byte."""
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1])
    assert flashinfer.packbits(x).tolist() == [0b10110011, 0b10100000]
    assert flashinfer.packbits(x, "little").tolist() == [0b11001101, 0b101]
    packed, indptr = flashinfer.segment_packbits(x, torch.tensor([0, 4, 4, 7, 11]))
    assert (packed.tolist(), indptr.tolist()) == ([0b10110000, 0b00100000, 0b11010000], [0, 1, 1, 2, 3])
    assert flashinfer.packbits(x[:0]).shape == (0,)
    with pytest.raises(
        ValueError, match=r"^segment_packbits: indptr: expected offsets .* at most 11 .*, got \[0, 12\]$"
    ):
        flashinfer.segment_packbits(x, torch.tensor([0, 12]))
    with pytest.raises(ValueError, match=r"^packbits: bitorder: expected 'big' or 'little', got 'bit'$"):
        flashinfer.packbits(x, "bit")


# ---- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize("form", FORMS)
def test_positions(form: str, mode: str, causal: bool) -> None:
    """ALiBi goes on to grow behind a row, and counts rows, not their positions, in the lse. The older forward has
    options of its own."""
    case = Case(form)
    rope: dict[str, Any] = {"rope_scale": 2.0, "rope_theta": 500.0} if mode == "ROPE_LLAMA" else {}
    seen = case.sees(causal, 2)
    options: dict[str, Any] = {"causal": causal, "window_left": 2, "pos_encoding_mode": mode, **rope}
    case.plan(**options)
    case.expect(case.wrapper.run_return_lse(*case.tensors), seen, mode=mode, rope=(2.0, 500.0))
    case.plan()
    case.expect(case.wrapper.forward_return_lse(*case.tensors, **options), seen, mode=mode, rope=(2.0, 500.0))


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_decode_positions(num_rows: int, mode: str) -> None:
    """One row of each sequence, and several, which are causal."""
    case = Case("HND tuple", [num_rows] * 3, [7, 3, 2])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "HND", use_tensor_cores=True)
    wrapper.plan(**case.batch.plan, pos_encoding_mode=mode, q_len_per_req=num_rows)
    seen = [sees(num_rows, length, causal=True) for length in [7, 3, 2]]
    case.expect(wrapper.run(*case.tensors, return_lse=True, q_len_per_req=num_rows), seen, mode=mode)
    with pytest.raises(ValueError, match=rf"\.run: q_len_per_req: expected {num_rows}, as planned, got 5$"):
        wrapper.run(*case.tensors, q_len_per_req=5)


def test_one_decode_position() -> None:
    q, k, v = torch.randn(HEADS, HEAD_SIZE), *torch.randn(2, 5, KV_HEADS, HEAD_SIZE)
    for mode in ("ROPE_LLAMA", "ALIBI"):
        actual = flashinfer.single_decode_with_kv_cache(q, k, v, pos_encoding_mode=mode, return_lse=True)
        for tensor, expected in zip(actual, dense(q[None], k, v, sees(1, 5, True), mode=mode), strict=True):
            assert_close_to_reference(tensor, expected[0])


def test_slopes_of_any_number_of_heads() -> None:
    """Heads behind a power of 2: every second slope of twice as many. A head with q = 0 shows its slope."""
    q, k, v = torch.zeros(6, HEAD_SIZE), torch.zeros(2, 6, HEAD_SIZE), torch.eye(2)[:, None].expand(2, 6, 2)
    out = flashinfer.single_decode_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI")
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3], dtype=torch.float64)
    assert_close_to_reference(out[:, 1], slopes.sigmoid())


def test_rotation_compiled() -> None:
    """Without a break, where the numbers of rows and of keys are symbols."""
    rotate = partial(flashinfer.single_prefill_with_kv_cache, pos_encoding_mode="ROPE_LLAMA", causal=True)
    compiled = torch.compile(rotate, fullgraph=True, dynamic=True, backend="eager")
    for num_rows, num_keys in ((3, 5), (6, 4)):
        q, k, v = torch.randn(num_rows, HEADS, HEAD_SIZE), *torch.randn(2, num_keys, KV_HEADS, HEAD_SIZE)
        torch.testing.assert_close(compiled(q, k, v), rotate(q, k, v))


# ---- widths and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 24, 32, 40])
@pytest.mark.parametrize("form", FORMS)
def test_values_of_another_width(form: str, width: int) -> None:
    case = Case(form)
    case.batch.value = [torch.randn(len(k), KV_HEADS, width) for k in case.batch.key]
    if form == "ragged":
        case.tensors = *case.tensors[:2], torch.cat(case.batch.value)
    else:
        key_cache, _ = case.batch.cache.unbind(1) if form == "HND tensor" else case.batch.cache
        value_cache = torch.full((*key_cache.shape[:-1], width), math.nan)
        pages = value_cache.transpose(1, 2) if form == "HND tensor" else value_cache
        for values, start, end in zip(case.batch.value, case.batch.indptr, case.batch.indptr[1:], strict=False):
            for token, value in enumerate(values):
                pages[case.batch.indices[start:end][token // PAGE_SIZE], token % PAGE_SIZE] = value
        case.tensors = case.tensors[0], (key_cache, value_cache)
    case.plan(head_dim_vo=width, causal=True)
    seen = case.sees(causal=True)
    case.expect(case.wrapper.run_return_lse(*case.tensors), seen)
    with pytest.raises(
        ValueError, match=rf"\.run: (v|paged_kv_cache: values): expected shape \[.*, {width}\], as planned, got"
    ):
        case.wrapper.run(case.tensors[0], *([case.tensors[1]] * 2 if form == "ragged" else [[case.tensors[1][0]] * 2]))


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_values_that_begin_the_keys(use_cuda_graph: bool) -> None:
    """As in a latent cache, which is read where it lies: graphs refuse copies."""
    case = Case("NHD tuple", [2, 1], [7, 4])
    key_cache = case.batch.cache[0]
    case.batch.value = [k[..., :8] for k in case.batch.key]
    pages = case.batch.indptr, case.batch.indices, case.batch.last_page_len
    buffers = [tensor.clone() for tensor in (case.starts, *pages)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", use_cuda_graph, *buffers)
    wrapper.plan(case.starts, **case.batch.prefill_plan, head_dim_vo=8, causal=True)
    actual = wrapper.run(case.tensors[0], (key_cache, key_cache[..., :8]), return_lse=True)
    case.expect(actual, [sees(2, 7, True), sees(1, 4, True)])
    if use_cuda_graph:
        with pytest.raises(ValueError, match=r"\.run: paged_kv_cache: expected values that are the start of the keys"):
            wrapper.run(case.tensors[0], (key_cache, case.batch.cache[1][..., :8]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_ragged_fp8(dtype: torch.dtype) -> None:
    """As the keys in fp16 that are multiplied with the scales."""
    case = Case("ragged")
    q, k, v = case.tensors
    k, v = k.to(dtype), v.to(dtype)
    case.plan(causal=True)
    actual = case.wrapper.run_return_lse(q.half(), k, v, k_scale=0.25, v_scale=0.5)
    expected = case.wrapper.run_return_lse(q.half(), k.half() * 0.25, v.half() * 0.5)
    assert_same_bits(actual[0], expected[0])
    assert_close_to_reference(actual[1], expected[1].double())


@pytest.mark.parametrize("form", FORMS)
def test_slices_of_wider_heads(form: str) -> None:
    """Queries, and keys and values without pages: pages have such heads in all tests."""
    case = Case(form)
    case.tensors = tuple(
        torch.nn.functional.pad(x, (8, 8))[..., 8:-8] if isinstance(x, Tensor) and x.dim() == 3 else x
        for x in case.tensors
    )
    case.plan(causal=True)
    case.expect(case.wrapper.run_return_lse(*case.tensors), case.sees(causal=True))


@pytest.mark.parametrize("form", ["NHD tuple", "ragged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"], ids=str)
def test_dtype_of_results(dtype: Any, form: str) -> None:
    case = Case(form)
    case.plan()
    expected = case.wrapper.run(*case.tensors)
    case.plan(o_data_type=dtype)
    assert_same_bits(case.wrapper.run(*case.tensors), expected.bfloat16())
    out = torch.empty_like(expected)
    assert case.wrapper.run(*case.tensors, out=out) is out
    with pytest.raises(ValueError, match=r"\.plan: o_data_type: expected a dtype of torch, or its name, got 'bf16'$"):
        case.plan(o_data_type="bf16")


def test_lse_of_other_base_and_layout() -> None:
    case = Case("NHD tuple")
    case.plan()
    _, lse = case.wrapper.run_return_lse(*case.tensors)
    _, natural = case.wrapper.run_return_lse(*case.tensors, lse_base="ln")
    assert_close_to_reference(natural, lse.double() * math.log(2))
    given = torch.empty(lse.t().shape)
    assert case.wrapper.run_return_lse(*case.tensors, lse_layout="HN", lse=given)[1] is given
    assert_same_bits(given, lse.t().contiguous())
    for argument in ("lse_base", "lse_layout"):
        with pytest.raises(ValueError, match=rf"\.run: {argument}: expected '\w+' or '\w+', got 'x'$"):
            case.wrapper.run(*case.tensors, **{argument: "x"})


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"pos_encoding_mode": "ROPE_LLAMA"}], ids=str)
def test_rows_over_no_keys(options: dict[str, Any]) -> None:
    k = torch.empty(0, KV_HEADS, HEAD_SIZE)
    q = torch.randn(3, HEADS, HEAD_SIZE)
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, k, return_lse=True, **options)
    assert (out.any().item(), (lse == -math.inf).all().item()) == (False, True)
    assert not flashinfer.single_decode_with_kv_cache(q[0], k, k).any()
    assert flashinfer.single_prefill_with_kv_cache(q[:0], k, k, **options).shape == (0, HEADS, HEAD_SIZE)


# ---- sinks, levels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["NHD tuple", "ragged"])
def test_sinks_by_position(form: str) -> None:
    """run(q, ..., sinks, sm_scale), of the wrapper that is made for this, and by jit_args."""
    case = Case(form)
    sinks = torch.randn(HEADS)
    jit_args = ["uri", *[torch.float32] * 3, torch.int32, HEAD_SIZE, HEAD_SIZE]
    jit_args += [["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", "struct"]
    wrapper: Any = type(case.wrapper)(WORKSPACE, jit_args=jit_args, jit_kwargs={"use_sliding_window": False})
    wrappers = [wrapper]
    if form != "ragged":
        wrappers.append(flashinfer.BatchAttentionWithAttentionSinkWrapper(WORKSPACE))
    for each in wrappers:
        each.plan(*case.plan.args, **case.plan.keywords, causal=True, sm_scale=3.0)
        actual = each.run(*case.tensors, sinks, HEAD_SIZE**-0.5, return_lse=True)
        seen = case.sees(causal=True)
        case.expect(actual, seen, sinks=sinks)
        with pytest.raises(ValueError, match=r"\.run: args: expected sinks and sm_scale, got 1 arguments$"):
            each.run(*case.tensors, sinks)
        with pytest.raises(ValueError, match=r"\.run: sinks: expected a tensor, by jit_args, got None$"):
            each.run(*case.tensors)


@pytest.mark.parametrize("causal", [False, True])
def test_levels(causal: bool) -> None:
    """Two pages that all rows share, a page that two sequences share, and pages of their own: as one sequence each."""
    shared = 2 * PAGE_SIZE
    batch, lengths_q = Batch([shared, PAGE_SIZE, 4, 2, 5]), [2, 1, 3]
    q = rows(lengths_q, HEADS)
    lists = [batch.indices[a:b] for a, b in zip(batch.indptr, batch.indptr[1:], strict=False)]
    last = batch.last_page_len
    levels = [
        (starts([6]), starts([2]), lists[0], last[:1]),
        (starts([3, 3]), starts([1, 0]), lists[1], last[:2] * 0 + PAGE_SIZE),
        (starts(lengths_q), starts([2, 1, 2]), torch.cat(lists[2:]), last[2:]),
    ]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, WORKSPACE, "NHD")
    wrapper.plan(*map(list, zip(*levels, strict=True)), HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE, causal=causal)  # type: ignore[arg-type]
    parts = [[0, 1, 2], [0, 1, 3], [0, 4]]
    expected = [
        dense(rows_q, *(torch.cat([x[i] for i in part]) for x in (batch.key, batch.value)), seen)[0]
        for rows_q, part in zip(q, parts, strict=True)
        for seen in [sees(len(rows_q), sum(len(batch.key[i]) for i in part), causal)]
    ]
    assert_close_to_reference(wrapper.run(torch.cat(q), batch.cache), torch.cat(expected))
    with pytest.raises(ValueError, match=r"Wrapper\.plan: paged_kv_indices_arr: expected 3 tensors, .*, got 2$"):
        wrapper.plan(
            [starts([6])] * 3, [starts([2])] * 3, lists[:2], [last[:1]] * 3, HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE
        )
    with pytest.raises(
        ValueError, match=r"^MultiLevelCascadeAttentionWrapper\.plan: paged_kv_indptr_arr\[0\]: expected at mo"
    ):
        wrapper.plan(
            [starts([6])] * 3, [starts([9])] * 3, [lists[0]] * 3, [last[:1]] * 3, HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE
        )


def test_older_levels() -> None:
    """A prefix beside the pages, for one row and for several rows of each sequence."""
    batch = Batch([4, 2])
    k, v = torch.randn(2, 5, KV_HEADS, HEAD_SIZE)
    for lengths_q in ([1, 1], [2, 1]):
        q = rows(lengths_q, HEADS)
        wrapper: Any
        if lengths_q == [1, 1]:
            wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
            wrapper.begin_forward(*batch.plan.values())
            out = wrapper.forward(torch.cat(q), k, v, batch.cache)
        else:
            wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
            wrapper.begin_forward(starts(lengths_q), *batch.plan.values())
            out = wrapper.forward(torch.cat(q), k, v, batch.cache, causal=True)
        pairs = [
            (torch.cat([k, own_k]), torch.cat([v, own_v])) for own_k, own_v in zip(batch.key, batch.value, strict=True)
        ]
        expected = [dense(x, *pair, sees(len(x), len(pair[0]), True))[0] for x, pair in zip(q, pairs, strict=True)]
        assert_close_to_reference(out, torch.cat(expected))
        with pytest.raises(
            ValueError, match=r"^Batch\w+SharedPrefixPagedKVCacheWrapper\.forward: v_shared: expected shape"
        ):
            wrapper.forward(torch.cat(q), k, v[:, :1], batch.cache)


def test_batch_attention() -> None:
    """Prompts and new tokens, by the lengths of sequences."""
    case = Case("HND tensor")
    wrapper = flashinfer.BatchAttention("HND", device="cpu")
    lists = case.starts, case.batch.indptr, case.batch.indices
    sizes = HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE, PAGE_SIZE
    wrapper.plan(*lists, torch.tensor(LENGTHS_K, dtype=torch.int32), *sizes, causal=True, logits_soft_cap=2.0)
    seen = case.sees(causal=True)
    case.expect(wrapper.run(*case.tensors, logits_soft_cap=2.0), seen, softcap=2.0)
    with pytest.raises(
        ValueError, match=r"^BatchAttention\.run: logits_soft_cap: expected 0 or 2\.0, as planned, got 1\.0$"
    ):
        wrapper.run(*case.tensors, logits_soft_cap=1.0)
    with pytest.raises(
        ValueError, match=r"^BatchAttention\.plan: kv_len_arr: expected lengths that end in the last of \[3,"
    ):
        wrapper.plan(*lists, torch.tensor([7, 9, 2, 3, 0], dtype=torch.int32), *sizes)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize("plan_of", ["plan", "fast_decode_plan"])
def test_decode_in_a_graph(plan_of: str, mode: str) -> None:
    """A replay sees the last plan: other pages, more pages than at the capture, and a sequence without pages."""
    cases = [Case("NHD tuple", [1] * 3, lengths) for lengths in ([1, 2, 3], [7, 3, 11], [4, 0, 2])]
    buffers = torch.zeros(4, dtype=torch.int32), torch.zeros(9, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    plan = wrapper.plan if plan_of == "plan" else partial(flashinfer.fast_decode_plan, wrapper)
    q, caches = torch.empty(3, HEADS, HEAD_SIZE), [torch.zeros(16, PAGE_SIZE, KV_HEADS, HEAD_SIZE) for _ in range(2)]
    graph = CPUGraph()
    for i, case in enumerate(cases):
        plan(**case.batch.plan, pos_encoding_mode=mode)
        lists = case.batch.indptr, case.batch.indices, case.batch.last_page_len
        for buffer, given in zip(buffers, lists, strict=True):
            assert_same_bits(buffer[: len(given)], given)
        for tensor, given in zip([q, *caches], [torch.cat(case.q), *case.batch.cache], strict=True):
            tensor.copy_(given)
        if i == 0:
            with torch.inference_mode(), graph.capture():
                results = wrapper.run(q, (caches[0], caches[1]), return_lse=True)
        graph.replay()
        case.expect(results, case.sees(causal=True), mode=mode)
    assert wrapper.is_cuda_graph_enabled


@pytest.mark.parametrize("kind", ["NONE", "ROPE_LLAMA", "ALIBI", "mask"])
@pytest.mark.parametrize("form", ["NHD tuple", "ragged"])
def test_prefill_in_a_graph(form: str, kind: str) -> None:
    """Later plans may have fewer rows, which leaves rows of zeros, and fewer keys. ALiBi is not causal."""
    lengths = ([3, 1, 2], [6, 4, 5]), ([1, 5, 0], [2, 7, 3]), ([1, 0, 3], [1, 0, 9])
    cases = [Case(form, *lengths_of_case) for lengths_of_case in lengths]
    first = cases[0]
    buffers = {"qo_indptr_buf": first.starts.clone(), "kv_indptr_buf": starts([6, 4, 5])}
    if form != "ragged":
        del buffers["kv_indptr_buf"]
        for name in ("indptr", "indices", "last_page_len"):
            buffers[f"paged_kv_{name}_buf"] = getattr(first.batch, name).clone()
    wrapper = type(first.wrapper)(WORKSPACE, use_cuda_graph=True, **buffers)
    q, keys, values = (tensor.clone() for tensor in first.flat_tensors)
    graph = CPUGraph()
    for case in cases:
        options: dict[str, Any] = {"mode": "NONE" if kind == "mask" else kind}
        seen = case.sees(causal=kind != "ALIBI")
        if kind == "mask":
            seen = [torch.rand(mask.shape) < 0.6 for mask in seen]
            mask = {"custom_mask": torch.cat([mask.flatten() for mask in seen])}
            wrapper.plan(*case.plan.args, **case.plan.keywords, **mask)
        else:
            wrapper.plan(*case.plan.args, **case.plan.keywords, causal=kind != "ALIBI", pos_encoding_mode=kind)
        num_rows, num_keys = sum(map(len, case.q)), sum(map(len, case.batch.key)) if form == "ragged" else len(keys)
        for tensor, given in zip((q[:num_rows], keys[:num_keys], values[:num_keys]), case.flat_tensors, strict=True):
            tensor.copy_(given)
        if case is first:
            with torch.inference_mode(), graph.capture():
                cache = (keys, values) if form == "ragged" else ((keys, values),)
                results = wrapper.run(q, *cache, return_lse=True)
        graph.replay()
        case.expect((results[0][:num_rows], results[1][:num_rows]), seen, **options)
        assert not results[0][num_rows:].any()
    too_many = Case(form, [4, 3, 1], [5, 4, 3])
    if form == "ragged" or kind != "NONE":
        with pytest.raises(
            ValueError, match=r"\.plan: qo_indptr: expected at most 6 last, the room of the graph, got 8$"
        ):
            mask = {"custom_mask": torch.ones(35)} if kind == "mask" else {"pos_encoding_mode": kind}
            wrapper.plan(*too_many.plan.args, **too_many.plan.keywords, **mask)


def test_room_in_a_graph_for_more_rows_than_in_the_first_plan() -> None:
    cases = [Case("NHD tuple", *lengths) for lengths in (([2, 0, 1], [6, 4, 5]), ([3, 1, 4], [6, 4, 5]))]
    buffers = {"qo_indptr_buf": cases[0].starts.clone()}
    for name in ("indptr", "indices", "last_page_len"):
        buffers[f"paged_kv_{name}_buf"] = getattr(cases[0].batch, name).clone()
    wrapper = type(cases[0].wrapper)(WORKSPACE, use_cuda_graph=True, **buffers, max_total_num_rows=8)
    _, keys, values = (tensor.clone() for tensor in cases[0].flat_tensors)
    q = torch.zeros(8, HEADS, HEAD_SIZE)
    graph = CPUGraph()
    for case in cases:
        wrapper.plan(*case.plan.args, **case.plan.keywords, causal=True, pos_encoding_mode="ROPE_LLAMA")
        num_rows = sum(map(len, case.q))
        for tensor, given in zip((q[:num_rows], keys, values), case.flat_tensors, strict=True):
            tensor.copy_(given)
        if case is cases[0]:
            with torch.inference_mode(), graph.capture():
                results = wrapper.run(q, (keys, values), return_lse=True)
        graph.replay()
        case.expect((results[0][:num_rows], results[1][:num_rows]), case.sees(causal=True), mode="ROPE_LLAMA")
        assert not results[0][num_rows:].any()
    too_many = Case("NHD tuple", [4, 3, 2], [6, 4, 5])
    with pytest.raises(ValueError, match=r"\.plan: qo_indptr: expected at most 8 last, the room of the graph, got 9$"):
        wrapper.plan(*too_many.plan.args, **too_many.plan.keywords, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(ValueError, match=r"__init__: max_total_num_rows: expected None without use_cuda_graph, got 8$"):
        type(wrapper)(WORKSPACE, max_total_num_rows=8)


def test_hints_of_newer_versions() -> None:
    """They change nothing. A plan needs no workspace."""
    paged, ragged = (Case(form, [3, 1, 2], [6, 4, 5]) for form in ("NHD tuple", "ragged"))
    lists = paged.batch.indptr, paged.batch.indices, paged.batch.last_page_len
    sizes = HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, jit_kwargs=None)
    assert decode.workspace_size(*lists, *sizes) == (0, 0)
    assert paged.wrapper.workspace_size(*paged.plan.args, **paged.plan.keywords) == (0, 0)
    ragged.plan(qo_indptr_cpu=ragged.starts, kv_indptr_cpu=None)
    for plan in (partial(decode.plan, *lists, *sizes), paged.plan, ragged.plan):
        with pytest.raises(ValueError, match=r"\.plan: use_token_head_sf: expected False, got True$"):
            plan(use_token_head_sf=True)


@pytest.mark.parametrize("kind", ["mask", "rotation", "narrow values"])
@pytest.mark.parametrize("page", [-1, 16])
def test_copies_of_pages_that_are_not_there(page: int, kind: str) -> None:
    """Where `run` copies, torch would take -1 as the last page."""
    batch, width = Batch([4]), HEAD_SIZE // 2 if kind == "narrow values" else HEAD_SIZE
    batch.indices[1] = page
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    options: dict[str, Any] = {"custom_mask": torch.ones(8)} if kind == "mask" else {"head_dim_vo": width}
    options["pos_encoding_mode"] = "ROPE_LLAMA" if kind == "rotation" else "NONE"
    wrapper.plan(starts([2]), **batch.prefill_plan, **options)
    key_cache, value_cache = batch.cache
    with pytest.raises(ValueError, match=rf"\.run: paged_kv_indices: expected blocks of 0 to 15, got {page}"):
        wrapper.run(torch.randn(2, HEADS, HEAD_SIZE), (key_cache, value_cache[..., :width]))


def test_replay_of_pages_that_are_not_there() -> None:
    batch = Batch([4])
    buffers = [tensor.clone() for tensor in (batch.indptr, batch.indices, batch.last_page_len)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    wrapper.plan(**batch.plan, pos_encoding_mode="ROPE_LLAMA")
    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        wrapper.run(torch.randn(1, HEADS, HEAD_SIZE), batch.cache)
    batch.indices[1] = -1
    wrapper.plan(**batch.plan, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(ValueError, match=r"block_tables: expected blocks of 0 to 15, got -1"):
        graph.replay()


@pytest.mark.parametrize("form", FORMS)
def test_other_rows_than_planned(form: str) -> None:
    case = Case(form)
    mask = torch.ones(sum(q * k for q, k in zip(LENGTHS_Q, LENGTHS_K, strict=True)))
    for options in ({"custom_mask": mask}, {"pos_encoding_mode": "ROPE_LLAMA"}):
        case.plan(**options)
        q, *rest = case.tensors
        with pytest.raises(ValueError, match=r"\.run: q: expected 8 rows, as planned, got 7$"):
            case.wrapper.run(q[:-1], *rest)
        if form == "ragged":
            k, v = rest
            with pytest.raises(ValueError, match=r"\.run: k: expected 18 rows, as planned, got 17$"):
                case.wrapper.run(q, k[:-1], v[:-1])


def test_refused_in_graphs() -> None:
    """Nothing is written to the buffers before an error."""
    batch = Batch([4, 2])
    buffers = [tensor.clone() for tensor in (batch.indptr, batch.indices, batch.last_page_len)]
    before = [buffer.clone() for buffer in buffers]
    decode = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    other = Batch([1, 1, 1])
    with pytest.raises(
        ValueError, match=r"\.plan: indptr: expected 3 elements \(the size of paged_kv_indptr_buffer\), got 4"
    ):
        decode.plan(**other.plan)
    other = Batch([9, 9])
    with pytest.raises(
        ValueError, match=r"\.plan: indices: expected at most 3 elements \(the size of paged_kv_indices_b"
    ):
        decode.plan(**other.plan)
    for buffer, old in zip(buffers, before, strict=True):
        assert_same_bits(buffer, old)
    with pytest.raises(
        ValueError, match=r"__init__: paged_kv_indices_buffer: expected a tensor with use_cuda_graph, got No"
    ):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            WORKSPACE, use_cuda_graph=True, paged_kv_indptr_buffer=batch.indptr
        )
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, starts([1, 1]), *buffers)
    prefill.plan(starts([1, 1]), **batch.prefill_plan)
    with pytest.raises(ValueError, match=r"\.plan: custom_mask: expected None, as in the first plan, got a mask$"):
        prefill.plan(starts([1, 1]), **batch.prefill_plan, custom_mask=torch.ones(6))
    with pytest.raises(
        ValueError, match=r"\.plan: pos_encoding_mode: expected 'NONE', as in the first plan, got 'ALIBI'$"
    ):
        prefill.plan(starts([1, 1]), **batch.prefill_plan, pos_encoding_mode="ALIBI")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 1.0}, "logits_soft_cap"),
        ({"pos_encoding_mode": "ALIBI", "custom_mask": torch.ones(3, 5)}, "pos_encoding_mode"),
    ],
    ids=str,
)
def test_refused_together(options: dict[str, Any], argument: str) -> None:
    q, k = torch.randn(3, HEADS, HEAD_SIZE), torch.randn(5, KV_HEADS, HEAD_SIZE)
    with pytest.raises(ValueError, match=rf"^single_prefill_with_kv_cache: {argument}: expected .* with "):
        flashinfer.single_prefill_with_kv_cache(q, k, k, **options)
