"""What the CPU's plan of a call takes together. That results do not depend on it is in test_shared_blocks.py."""

from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def planner():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        from attention.plan import Planner

        yield Planner.compile()


def plan(planner, seq_lens: list[int], tables: list[list[int]]) -> list[tuple[int, int, int]]:
    """[rows, KV heads, partitions] of each item, for 8 query heads on 2 KV heads."""
    lens, blocks = torch.tensor(seq_lens, dtype=torch.int32), torch.tensor(tables, dtype=torch.int32)
    return [tuple(item) for item in planner.plan(lens, blocks, 8, 2)]


def tables_sharing(num_shared: int, num_seqs: int = 4, num_blocks: int = 66) -> list[list[int]]:
    own = range(num_shared, num_blocks)
    return [[*range(num_shared), *(100 + s * num_blocks + i for i in own)] for s in range(num_seqs)]


def test_nothing_shared(planner):
    """A sequence is an item, with all KV heads."""
    assert plan(planner, [1056] * 4, tables_sharing(0)) == [(1, 2, 3)] * 4


@pytest.mark.parametrize("num_shared", [64, 65])
def test_what_is_shared_is_planned_once(planner, num_shared):
    """Two partitions for all rows, once for each KV head; in the third sequences part, or do so within its blocks."""
    items = plan(planner, [1056] * 4, tables_sharing(num_shared))
    if num_shared == 64:
        assert items == [(4, 1, 2)] * 2 + [(1, 2, 1)] * 4
    else:
        assert items == [(4, 1, 3)] * 2


def test_two_families(planner):
    """Interleaved: what begins with the same block is found wherever it is in the batch."""
    one, other = tables_sharing(64, 2), tables_sharing(64, 2)
    other = [[1000 + block for block in table] for table in other]
    items = plan(planner, [1024] * 4, [one[0], other[0], one[1], other[1]])
    assert items == [(2, 1, 2)] * 4


def test_a_sequence_alone_stays_alone(planner):
    tables = tables_sharing(64, 3)
    tables[1] = [2000 + block for block in tables[1]]
    assert sorted(plan(planner, [1024] * 3, tables)) == [(1, 2, 2), (2, 1, 2), (2, 1, 2)]


def test_blocks_behind_a_sequences_end_are_not_looked_at(planner):
    """Of 500 tokens, the second partition is not there to be shared."""
    items = plan(planner, [1024, 500, 1024], tables_sharing(66, 3))
    assert sorted(items) == [(2, 1, 1), (2, 1, 1), (3, 1, 1), (3, 1, 1)]
