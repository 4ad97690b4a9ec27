"""The plan of a decode call on the CPU, compiled as a library of its own: an op reports neither what it found to be
shared, nor how long it searched."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from compiled import compile_library
from torch import Tensor

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"


class Item(NamedTuple):
    """How much of a call one item of its plan takes."""

    num_rows: int
    num_kv_heads: int
    num_partitions: int


@dataclass(frozen=True)
class Planner:
    """plan_items for sequences with one row each."""

    library: ctypes.CDLL

    @classmethod
    def compile(cls) -> "Planner":
        """Needs a C++ compiler: CXX, or c++. Raises CalledProcessError if it fails."""
        sources = [HERE / "plan.cpp", CSRC / "attention/cpu/plan_items.cpp"]
        return cls(compile_library(sources, "-I", str(CSRC)))

    def plan(self, seq_lens: Tensor, block_tables: Tensor, num_heads: int, num_kv_heads: int) -> list[Item]:
        """For one thread, blocks of 16. seq_lens: [num_seqs], block_tables: [num_seqs, blocks], contiguous int32."""
        num_items = self.count(seq_lens, block_tables, num_heads, num_kv_heads)
        items = torch.empty(num_items, len(Item._fields), dtype=torch.int64)
        self.count(seq_lens, block_tables, num_heads, num_kv_heads, items)
        return [Item(*item) for item in items.tolist()]

    def count(
        self,
        seq_lens: Tensor,
        block_tables: Tensor,
        num_heads: int,
        num_kv_heads: int,
        items: Tensor | None = None,
    ) -> int:
        """Plans, and returns the number of items. The items go into `items`, if it is given."""
        sizes = (block_tables.shape[1], 16, num_heads, num_kv_heads, 1, 0 if items is None else len(items))
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (seq_lens, block_tables)]
        to = ctypes.c_void_p(None if items is None else items.data_ptr())
        plan = self.library.plan_decode
        plan.restype = ctypes.c_int64
        return int(plan(ctypes.c_int64(len(seq_lens)), *pointers, *map(ctypes.c_int64, sizes), to))


def decode_tables(num_seqs: int, seq_len: int, num_shared: int) -> tuple[Tensor, Tensor]:
    """(seq_lens, block_tables) of sequences that share their first `num_shared` tokens; blocks of 16, shuffled."""
    num_blocks, num_shared_blocks = -(-seq_len // 16), num_shared // 16
    tables = torch.randperm(num_seqs * num_blocks, dtype=torch.int32).view(num_seqs, num_blocks)
    tables[:, :num_shared_blocks] = tables[0, :num_shared_blocks].clone()
    return torch.full((num_seqs,), seq_len, dtype=torch.int32), tables
