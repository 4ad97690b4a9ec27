"""Attention as flash-attn and FlashInfer describe it, row by row in fp64; ragged batches, and paged caches of their
layout."""

from itertools import accumulate

import torch
from torch import Tensor

HEAD_SIZE = 16


def attend(
    query: Tensor,  # [num_rows, num_heads, head_size], the last rows of the sequence
    key: Tensor,  # [seq_len, num_kv_heads, head_size]
    value: Tensor,  # like key, its heads of any width
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),  # (left, right), both inclusive; -1 is no window
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int = 0,  # a row sees the tokens of its own chunk of so many; 0 is no chunks
) -> tuple[Tensor, Tensor]:
    """out [num_rows, num_heads, head_size] and lse [num_rows, num_heads]."""
    num_rows, num_heads, head_size = query.shape
    seq_len, num_kv_heads, _ = key.shape
    left, right = window[0], 0 if causal else window[1]
    out = torch.zeros(num_rows, num_heads, value.shape[-1], dtype=torch.float64)
    lse = torch.full((num_rows, num_heads), -torch.inf, dtype=torch.float64)
    for row in range(num_rows):
        position = seq_len - num_rows + row
        first = 0 if left < 0 else max(0, position - left)
        end = seq_len if right < 0 else min(seq_len, position + right + 1)
        if chunk:
            chunk_begin = position // chunk * chunk
            first, end = max(first, chunk_begin), min(end, chunk_begin + chunk)
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            tokens = torch.arange(first, max(first, end))
            logits = key[tokens, kv_head].double() @ query[row, head].double() * (scale or head_size**-0.5)
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            if slopes is not None:
                logits = logits - slopes[head].double() * (tokens - position).abs()
            terms = logits if sinks is None else torch.cat([logits, sinks[head : head + 1].double()])
            if len(terms):
                lse[row, head] = terms.logsumexp(0)
                out[row, head] = torch.exp(logits - lse[row, head]) @ value[tokens, kv_head].double()
    return out, lse


def attend_all(query: list[Tensor], key: list[Tensor], value: list[Tensor], **options: object) -> tuple[Tensor, Tensor]:
    """The rows of several sequences, one after the other."""
    results = [attend(*tensors, **options) for tensors in zip(query, key, value, strict=True)]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def rows(lengths: list[int], heads: int, head_size: int = HEAD_SIZE) -> list[Tensor]:
    """Of each sequence random rows [length, heads, head_size]."""
    return [torch.randn(length, heads, head_size) for length in lengths]


def starts(lengths: list[int]) -> Tensor:
    """Where each sequence begins, int32 [num_seqs + 1]."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class Pages:
    """A pair of caches [num_pages, page_size, num_kv_heads, head_size] full of NaN, whose pages are dealt out in no
    order. The values have strides of their own. With `interleaved`, both are views of one tensor."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        *,
        interleaved: bool = False,
    ) -> None:
        shape = (num_pages, page_size, num_kv_heads, head_size)
        if interleaved:
            both = torch.full((num_pages, 2, page_size, num_kv_heads, head_size), torch.nan).to(dtype)
            self.key, self.value = both.unbind(1)
        else:
            self.key = torch.full(shape, torch.nan).to(dtype)
            wider = torch.full((num_pages, page_size + 1, num_kv_heads + 1, head_size + 16), torch.nan).to(dtype)
            self.value = wider[:, :page_size, :num_kv_heads, :head_size]
        self.page_size = page_size
        self._free = torch.randperm(num_pages).tolist()

    def table(self, lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """Block tables of new sequences with room for these lengths, with -1 behind their pages."""
        counts = [-(-length // self.page_size) for length in lengths]
        table = torch.full((len(lengths), max(counts)), -1, dtype=dtype)
        for row, count in zip(table, counts, strict=True):
            row[:count] = torch.tensor([self._free.pop() for _ in range(count)], dtype=dtype)
        return table

    def write(self, table: Tensor, key: list[Tensor], value: list[Tensor]) -> None:
        """The first tokens of each sequence of the table."""
        for row, keys, values in zip(table.tolist(), key, value, strict=True):
            for token in range(len(keys)):
                page, offset = row[token // self.page_size], token % self.page_size
                self.key[page, offset], self.value[page, offset] = keys[token], values[token]

    def read(self, row: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first tokens of a sequence."""
        tokens = torch.arange(length)
        pages = row.long()[tokens // self.page_size]
        return self.key[pages, tokens % self.page_size], self.value[pages, tokens % self.page_size]
