"""What FlashInfer's functions refuse before an op sees it: caches that are no pairs, and states of other shapes."""

from typing import Any

import pytest
import torch
from brute_force import HEAD_SIZE, starts
from flashinfer_batch import HEADS, KV_HEADS, WORKSPACE, Batch

from pagedattn_ext import flashinfer


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            torch.zeros(16, 3, 2, 16),
            r"expected shape \[num_pages, 2, \.\.\.\] or a pair of tensors, got shape \[16, 3, ",
        ),
        ((torch.zeros(16, 3, 2, 16),) * 3, "expected a pair of tensors, got 3 elements$"),
        (None, "expected a tensor or a pair of tensors, got NoneType$"),
        ((None, None), "expected a torch.Tensor, got NoneType$"),
        ((torch.zeros(16, 3),) * 2, r"expected keys and values of 3 or 4 dimensions, got shape \[16, 3\]$"),
    ],
    ids=["one tensor", "three", "none", "pair of none", "without heads"],
)
def test_other_caches_than_pairs(cache: Any, message: str) -> None:
    batch, decode = Batch([4]), flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    decode.plan(**batch.plan)
    with pytest.raises((ValueError, TypeError), match=rf"^{type(decode).__name__}\.run: paged_kv_cache: {message}"):
        decode.run(torch.randn(1, HEADS, HEAD_SIZE), cache)
    rows, index = torch.randn(1, KV_HEADS, HEAD_SIZE), torch.zeros(1, dtype=torch.int32)
    with pytest.raises((ValueError, TypeError), match=rf"^append_paged_kv_cache: paged_kv_cache: {message}"):
        flashinfer.append_paged_kv_cache(rows, rows, index, index, cache, index, starts([1]), index + 1)


@pytest.mark.parametrize(
    ("v", "s", "message"),
    [
        ([5, 4, 16], [3, 5, 4], "v: expected 4 dimensions, got 3"),
        ([3, 5, 4, 16], [3, 5, 1], r"s: expected shape \[3, 5, 4\], got \[3, 5, 1\]$"),
        ([3, 5, 1, 16], [3, 5, 4], r"s: expected shape \[3, 5, 1\], got \[3, 5, 4\]$"),
    ],
)
def test_merges_of_states_of_other_shapes(v: list[int], s: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^merge_states: {message}"):
        flashinfer.merge_states(torch.zeros(v), torch.zeros(s))
