"""top_k and its transforms, and concat_mla_k, of pagedattn_ext.flashinfer, against loops of plain Python."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import assert_memory_is_checked, assert_same_bits
from torch import Tensor

from pagedattn_ext import CPUGraph, flashinfer
from pagedattn_ext.flashinfer.concat_ops import concat_mla_k

ROWS, LENGTH, K = 4, 21, 6


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(52)
        yield


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def chosen(scores: Tensor, k: int, tie_break: int) -> list[int]:
    """The ascending places of the k greatest."""
    sign = -1 if tie_break == 2 else 1
    order = sorted(range(len(scores)), key=lambda place: (-float(scores[place]), sign * place))
    return sorted(order[:k])


@pytest.mark.parametrize("tie_break", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k(dtype: torch.dtype, tie_break: int) -> None:
    """Among many ties. Catches the wrong one of several equal numbers, and values that are not at their indices."""
    scores = torch.randint(5, (ROWS, LENGTH)).to(dtype)
    values, indices = flashinfer.top_k(scores, K, tie_break=tie_break)
    assert indices.tolist() == [chosen(row, K, tie_break) for row in scores]
    assert_same_bits(values, scores.gather(1, indices))
    values, indices = flashinfer.top_k(scores, K, sorted=True, tie_break=flashinfer.TopKTieBreak(tie_break))
    assert_same_bits(values, scores.topk(K).values)
    assert_same_bits(values, scores.gather(1, indices))
    assert_same_bits(flashinfer.top_k(scores, K, sorted=True)[0], values)


# Rows with more than K tokens, with less, and without.
LENGTHS, STARTS = int32(9, 4, 0, 15), int32(3, 0, 7, 5)


def expected_places(scores: Tensor, starts: list[int], lengths: list[int]) -> list[list[int]]:
    rows = [row[start : start + length] for row, start, length in zip(scores, starts, lengths, strict=True)]
    places = [chosen(row, K, 1) for row in rows]
    return [row + [-1] * (K - len(row)) for row in places]


@pytest.mark.parametrize("with_starts", [False, True])
def test_transforms(with_starts: bool) -> None:
    """Catches places that count from the start of the scores instead of the row's, and a score of -inf that gives its
    place to no token."""
    scores = torch.randn(ROWS, LENGTH)
    scores[:, ::3] = -torch.inf
    starts = STARTS if with_starts else None
    places = expected_places(scores, STARTS.tolist() if with_starts else [0] * ROWS, LENGTHS.tolist())
    offsets = int32(100, 0, 7, 50)
    ragged = flashinfer.top_k_ragged_transform(scores, offsets, LENGTHS, K, tie_break=1, row_starts=starts)
    assert ragged.dtype == torch.int32
    pairs = zip(places, offsets.tolist(), strict=True)
    assert ragged.tolist() == [[offset + p if p >= 0 else -1 for p in row] for row, offset in pairs]

    table, batch, first = torch.randperm(30)[: 2 * 9].int().view(2, 9), int32(1, 0, 0, 1), int32(1, 0, 2, 3)
    out, raw = torch.empty(2, ROWS, K, dtype=torch.int32)
    slots = flashinfer.top_k_page_table_transform(
        scores, table, LENGTHS, K, batch, tie_break=1, row_starts=starts, page_table_row_starts=first,
        page_size=4, out=out, out_raw_indices=raw,
    )  # fmt: skip
    assert slots is out and raw.tolist() == places
    for row, (b, f) in enumerate(zip(batch.tolist(), first.tolist(), strict=True)):
        expected = [int(table[b, f + p // 4]) * 4 + p % 4 if p >= 0 else -1 for p in places[row]]
        assert out[row].tolist() == expected


def test_pages_of_a_token_start_where_the_scores_start() -> None:
    scores, table = torch.randn(ROWS, LENGTH), torch.randperm(ROWS * LENGTH).int().view(ROWS, LENGTH)
    slots = flashinfer.top_k_page_table_transform(scores, table, LENGTHS, K, row_starts=STARTS)
    for row, places in enumerate(expected_places(scores, STARTS.tolist(), LENGTHS.tolist())):
        start = int(STARTS[row])
        assert slots[row].tolist() == [int(table[row, start + p]) if p >= 0 else -1 for p in places]


def test_scores_that_differ_in_fp64_alone() -> None:
    scores = torch.tensor([[1, 1 + 2**-40, -torch.inf]], dtype=torch.float64)
    assert flashinfer.top_k_ragged_transform(scores, int32(0), int32(3), 1, tie_break=1).tolist() == [[1]]
    assert flashinfer.top_k_ragged_transform(scores, int32(0), int32(3), 3).tolist() == [[0, 1, 2]]


def test_more_than_there_are() -> None:
    assert flashinfer.top_k_ragged_transform(torch.zeros(1, 2), int32(5), int32(2), 4).tolist() == [[5, 6, -1, -1]]
    assert flashinfer.top_k_page_table_transform(torch.zeros(1, 2), int32([]), int32(0), 2).tolist() == [[-1, -1]]


@torch.inference_mode()
def test_captured() -> None:
    scores, lengths = torch.randn(2, LENGTH), int32(3, 3)
    graph = CPUGraph()
    with graph.capture():
        out = flashinfer.top_k_ragged_transform(scores, int32(0, 0), lengths, K)
    scores.copy_(torch.randn(2, LENGTH))
    lengths.fill_(LENGTH)
    graph.replay()
    assert out.tolist() == [chosen(row, K, 1) for row in scores]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_concat_mla_k(dtype: torch.dtype) -> None:
    k_nope, k_rope = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 1, 4).to(dtype)
    k = torch.empty(3, 2, 12, dtype=dtype)
    concat_mla_k(k, k_nope, k_rope)
    assert_same_bits(k.float(), torch.cat([k_nope.float(), k_rope.float().expand(3, 2, 4)], 2))


X = torch.zeros(ROWS, LENGTH)
TABLE = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
RAGGED, PAGES = flashinfer.top_k_ragged_transform, flashinfer.top_k_page_table_transform
WRONG: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    (flashinfer.top_k, [X, LENGTH + 1], {}, r"k: expected at most 21 \(the numbers of a row of input\), got 22"),
    (flashinfer.top_k, [X, 0], {}, "k: expected 1 or more, got 0"),
    (flashinfer.top_k, [X, 1], {"tie_break": 3}, "tie_break: expected 0, 1 or 2, got 3"),
    (RAGGED, [X, LENGTHS, int32(1, 2, 3, 22), K], {}, "lengths: expected 0 to 21, got 22"),
    (RAGGED, [X, LENGTHS, LENGTHS, K], {"row_starts": int32(0, 0, 0, 7)}, "lengths: expected at most 21 with .* 22"),
    (RAGGED, [X, LENGTHS[1:], LENGTHS, K], {}, "offsets: expected 4 elements, got 3"),
    (PAGES, [X, TABLE, LENGTHS, K], {"page_size": 0}, "page_size: expected 1 or more, got 0"),
    (
        PAGES,
        [X, TABLE, LENGTHS, K],
        {"page_size": 4, "row_starts": STARTS},
        "page_table_row_starts: expected a tensor with row_starts and a page_size of 4, got None",
    ),
    (PAGES, [X, TABLE[1:], LENGTHS, K], {}, "src_page_table: expected 4 rows, as input has, got 3"),
    (PAGES, [X, TABLE, LENGTHS, K, int32(0, 1, 2, 4)], {}, "row_to_batch: expected 0 to 3, got 4"),
    (PAGES, [X, TABLE[:, :3], LENGTHS, K], {}, "src_page_table: expected 15 pages, .* got 3"),
    (PAGES, [X, TABLE, LENGTHS, K], {"out": TABLE}, r"out: expected shape \[4, 6\], got \[4, 21\]"),
    (concat_mla_k, [torch.zeros(3, 2, 11), torch.zeros(3, 2, 8), torch.zeros(3, 1, 4)], {}, "k: expected shape"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "message"), WRONG, ids=lambda each: str(each)[:40])
def test_refused(function: Callable[..., Any], arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
        function(*arguments, **options)


def test_wrong_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^top_k: input: expected a float dtype, got int32"):
        flashinfer.top_k(TABLE, 1)
    with pytest.raises(TypeError, match=r"^top_k_page_table_transform: out: expected dtype int32, got uint8"):
        PAGES(X, TABLE, LENGTHS, K, out=torch.zeros(ROWS, K, dtype=torch.uint8))  # which would cut slots off
    with pytest.raises(TypeError, match=r"^concat_mla_k: k_rope: expected dtype float32, as k has, got float64"):
        concat_mla_k(torch.zeros(1, 1, 3), torch.zeros(1, 1, 2), torch.zeros(1, 1, 1).double())


MEMORY: dict[str, tuple[Tensor, Any]] = {
    "top_k_page_table_transform: out": (TABLE[:, :K], lambda memory: PAGES(X, TABLE, LENGTHS, K, out=memory)),
    "top_k_page_table_transform: out_raw_indices": (
        TABLE[:, :K],
        lambda memory: PAGES(X, TABLE, LENGTHS, K, out_raw_indices=memory),
    ),
}


@pytest.mark.parametrize("argument", MEMORY)
def test_memory_for_results_is_checked(argument: str) -> None:
    assert_memory_is_checked(argument, *MEMORY[argument])


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (torch.zeros(3, 2, 12, device="meta"), "expected a tensor on cpu, got one on meta"),
        (torch.zeros(12).expand(3, 2, 12), "expected memory for each element, got an expanded tensor"),
    ],
    ids=["meta", "expanded"],
)
def test_memory_for_keys_is_checked(k: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^concat_mla_k: k: {message}$"):
        concat_mla_k(k, torch.ones(3, 2, 8), torch.ones(3, 1, 4))
    assert k.is_meta or not k.any()


def test_modules_of_their_names() -> None:
    """The recipe of docs/adopt.md, and modules in which FlashInfer has a function a second time."""
    program = """
        import sys, pagedattn_ext.flashinfer

        for name in [name for name in sys.modules if name.startswith("pagedattn_ext.flashinfer")]:
            sys.modules[name.removeprefix("pagedattn_ext.")] = sys.modules[name]

        import flashinfer
        from flashinfer.concat_ops import concat_mla_k
        from flashinfer.dsv3_ops import concat_mla_k as of_dsv3
        from flashinfer.quantization import packbits, segment_packbits
        from flashinfer.quantization.packbits import packbits as of_module

        assert of_dsv3 is concat_mla_k
        assert of_module is packbits is flashinfer.packbits
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
