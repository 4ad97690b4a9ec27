"""The lists of a plan of latent attention, in either form, as the op takes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._index_checks import check_indices, check_range, check_starts
from ..ops._call import check_rank
from ._plan import refusal
from .page import tables_of


@dataclass(frozen=True)
class MLAPlanMetadata:
    """The lists of a plan in one object: by offsets (`csr`), by tables (`dense`), or both, where the offsets count."""

    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> "MLAPlanMetadata":
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Tensor, block_tables: Tensor, seq_lens: Tensor, max_q_len: int | None = None
    ) -> "MLAPlanMetadata":
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        *,
        cum_seq_lens_q: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_q_len: int | None = None,
    ) -> "MLAPlanMetadata":
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    def has_offsets(self) -> bool:
        lists = self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len_arr
        return any(each is not None for each in lists)

    def has_tables(self) -> bool:
        return any(each is not None for each in (self.cum_seq_lens_q, self.block_tables, self.seq_lens))


@dataclass(frozen=True)
class Sequences:
    """Which pages and rows the sequences have."""

    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    names: dict[str, str]  # what `plan` calls the three


def sequences_of_plan(function: Callable[..., Any], lists: MLAPlanMetadata, page_size: int) -> Sequences:
    """Raises ValueError and TypeError for lists that do not fit together."""
    if lists.has_tables() and not lists.has_offsets():
        return _by_tables(function, lists.cum_seq_lens_q, lists.block_tables, lists.seq_lens, page_size)
    return _by_offsets(function, lists.qo_indptr, lists.kv_indptr, lists.kv_indices, lists.kv_len_arr, page_size)


def _by_offsets(
    function: Callable[..., Any], qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, page_size: int
) -> Sequences:
    check_indices(function, "kv_indices", kv_indices)
    for name, tensor in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("kv_len_arr", kv_len_arr)):
        check_indices(function, name, tensor)
    if qo_indptr.shape[0] == kv_len_arr.shape[0] + 1:
        kv_indptr = kv_indptr[: qo_indptr.shape[0]]
    check_starts(function, "kv_indptr", kv_indptr, largest=kv_indices.shape[0])
    batch = kv_indptr.shape[0] - 1
    check_starts(function, "qo_indptr", qo_indptr, batch)
    check_indices(function, "kv_len_arr", kv_len_arr, batch)
    num_pages = kv_indptr.diff().tolist()
    for sequence, (length, pages) in enumerate(zip(kv_len_arr.tolist(), num_pages, strict=True)):
        if not 0 <= length <= pages * page_size:
            most = f"0 to {pages * page_size}, the slots of {pages} pages,"
            raise refusal(function, "kv_len_arr", most, f"{length} at sequence {sequence}")
    device = kv_indices.device
    return Sequences(
        tables_of(kv_indices, kv_indptr.to(device), max(num_pages, default=0), sum(num_pages)),
        kv_len_arr.to(device),
        qo_indptr.to(device),
        {"block_tables": "kv_indices", "seq_lens": "kv_len_arr", "query_start_loc": "qo_indptr"},
    )


def _by_tables(
    function: Callable[..., Any], cum_seq_lens_q: Any, block_tables: Any, seq_lens: Any, page_size: int
) -> Sequences:
    check_rank(function.__qualname__, "block_tables", block_tables, 2)
    check_indices(function, "block_tables", block_tables.flatten())
    batch, most_pages = block_tables.shape
    check_starts(function, "cum_seq_lens_q", cum_seq_lens_q, batch)
    check_range(function, "seq_lens", seq_lens, batch, most_pages * page_size)
    device = block_tables.device
    return Sequences(
        block_tables, seq_lens.to(device), cum_seq_lens_q.to(device), {"query_start_loc": "cum_seq_lens_q"}
    )
