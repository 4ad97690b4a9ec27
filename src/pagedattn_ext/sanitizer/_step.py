"""What a step is to do, and whether the index tensors of its ops say so."""

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ._cache_error import CacheError

Table = Sequence[int]


class Row(NamedTuple):
    """What a step is to do for a sequence: num_new tokens come behind the num_cached tokens in the cache."""

    owner: Hashable
    num_cached: int
    num_new: int


class Step:
    """rows: in the order of index tensors. tables: for each group of layers that of each row; empty if unknown.

    Raises CacheError if the tokens of a row do not fit in its table.
    """

    def __init__(self, rows: Sequence[Row], tables: Sequence[Sequence[Table]], block_size: int) -> None:
        self.rows, self.tables, self._block_size = rows, tables, block_size
        self.num_tokens = sum(row.num_new for row in rows)
        self._slots = [self._slots_of(group) for group in tables]

    def check_slots(self, slots: list[int], op: str, layer: Hashable) -> None:
        """That each token goes to its own slot, in one of the groups of layers. slots: of each token."""
        if not self.tables or slots in self._slots:
            return
        token = min((_differing(slots, of_group) for of_group in self._slots), key=len)[0]
        row = next(row for row, end in enumerate(accumulate(row.num_new for row in self.rows)) if token < end)
        own = " or ".join(str(of_group[token]) for of_group in self._slots)
        raise CacheError(
            op,
            f"token {token} of the step goes to a slot that is not its own, which is {own}",
            owner=self.rows[row].owner,
            block=slots[token] // self._block_size if slots[token] >= 0 else None,
            slot=slots[token],
            layer=layer,
        )

    def check_lens(self, lens: list[int], op: str, layer: Hashable) -> None:
        """lens: of each row."""
        for i, (length, row) in enumerate(zip(lens, self.rows, strict=True)):
            expected = row.num_cached + row.num_new
            if length != expected:
                problem = f"row {i} has a length of {length}, expected {expected}"
                raise CacheError(op, problem, owner=row.owner, layer=layer)

    def check_tables(self, tables: list[list[int]], read: list[range], op: str, layer: Hashable) -> None:
        """That rows read the blocks of their owners, in one of the groups of layers. read: places in each table."""
        own = [_blocks_at(of_group, read) for of_group in self.tables]
        blocks = _blocks_at(tables, read)
        if blocks in own:
            return
        wrong = min((_differing(_joined(blocks), _joined(of_group)) for of_group in own), key=len)[0]
        row, column = [(row, column) for row, columns in enumerate(read) for column in columns][wrong]
        problem = f"row {row} has another block at place {column} than its owner"
        raise CacheError(op, problem, owner=self.rows[row].owner, block=tables[row][column], layer=layer)

    def _slots_of(self, tables: Sequence[Table]) -> list[int]:
        """The slots of the new tokens."""
        slots, size = [], self._block_size
        for (owner, num_cached, num_new), table in zip(self.rows, tables, strict=True):
            end = num_cached + num_new
            if -(-end // size) > len(table):
                raise CacheError("tables", f"{end} tokens do not fit in {len(table)} blocks", owner=owner)
            slots += [table[i // size] * size + i % size for i in range(num_cached, end)]
        return slots


def _blocks_at(tables: Sequence[Table], places: list[range]) -> list[list[int]]:
    return [list(table[each.start : each.stop]) for table, each in zip(tables, places, strict=True)]


def _joined(lists: list[list[int]]) -> list[int]:
    return [value for each in lists for value in each]


def _differing(one: list[int], other: list[int]) -> list[int]:
    """Where two lists differ."""
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
