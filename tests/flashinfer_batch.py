"""Batches as callers of FlashInfer have them."""

from typing import Any

import torch
from brute_force import HEAD_SIZE, Pages, rows, starts
from torch import Tensor

HEADS, KV_HEADS, PAGE_SIZE = 4, 2, 3
WORKSPACE = torch.empty(0, dtype=torch.uint8)


class Batch:
    """Sequences in pages, as FlashInfer's lists have them."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float32, layout: str = "NHD tuple") -> None:
        self.key, self.value = rows(lengths, KV_HEADS), rows(lengths, KV_HEADS)
        pages = Pages(16, PAGE_SIZE, KV_HEADS, HEAD_SIZE, dtype)
        table = pages.table(lengths)
        pages.write(table, self.key, self.value)
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        self.indptr = starts(counts)
        self.indices = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
        last = [length - max(0, count - 1) * PAGE_SIZE for length, count in zip(lengths, counts, strict=True)]
        self.last_page_len = torch.tensor(last, dtype=torch.int32)
        self.kv_layout, form = layout.split()
        caches = [pages.key, pages.value]
        if self.kv_layout == "HND":
            caches = [cache.transpose(1, 2) for cache in caches]
        self.cache = tuple(caches) if form == "tuple" else torch.stack(caches, 1)

    @property
    def plan(self) -> dict[str, Any]:
        return {
            "indptr": self.indptr,
            "indices": self.indices,
            "last_page_len": self.last_page_len,
            "num_qo_heads": HEADS,
            "num_kv_heads": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "page_size": PAGE_SIZE,
        }

    @property
    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indices, self.indptr, self.last_page_len

    @property
    def prefill_plan(self) -> dict[str, Any]:
        names = {"head_dim": "head_dim_qk"} | {n: f"paged_kv_{n}" for n in ("indptr", "indices", "last_page_len")}
        return {names.get(name, name): value for name, value in self.plan.items()}
