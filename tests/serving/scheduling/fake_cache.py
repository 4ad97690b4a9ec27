"""The paged cache with plain values for keys and values, and for states, to check what tables and slots lead to."""

from collections.abc import Iterable
from types import SimpleNamespace

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.scheduling.sequence import StateCopies
from pagedattn_serve.scheduling.table_rows import RELEASED


class FakeCache:
    """A device and a host pool, [num_blocks][block_size] values; None where nothing was written since `poison`.

    states, host_states: by slot, the value of the last token that the state has seen.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.blocks: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_blocks)]
        self.host_blocks: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_host_blocks)]
        self.states: list[int | None] = [None] * config.num_state_slots
        self.host_states: list[int | None] = [None] * config.num_host_state_slots

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        for block, host_block in pairs:
            self.host_blocks[host_block] = list(self.blocks[block])

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        for host_block, block in pairs:
            self.blocks[block] = list(self.host_blocks[host_block])

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for src, dst in pairs:
            self.blocks[dst] = list(self.blocks[src])

    def read_block(self, block: int) -> list[int | None]:
        return list(self.blocks[block])

    def write_block(self, block: int, values: list[int | None]) -> None:
        self.blocks[block] = list(values)

    def copy_states(self, copies: StateCopies) -> None:
        for pairs, source, target in (
            (copies.to_swap_out, self.states, self.host_states),
            (copies.to_swap_in, self.host_states, self.states),
            (copies.to_copy, self.states, self.states),
        ):
            values = [source[src] for src, _ in pairs]  # all are read before any is written
            for (_, dst), value in zip(pairs, values, strict=True):
                target[dst] = value
            pairs.clear()

    def write(self, block_table: list[int], start: int, values: list[int]) -> None:
        for position, value in enumerate(values, start):
            self.blocks[block_table[position // self.block_size]][position % self.block_size] = value

    def read(self, block_table: list[int], num_tokens: int) -> list[int | None]:
        return self._read(self.blocks, block_table, num_tokens)

    def read_host(self, block_table: list[int], num_tokens: int) -> list[int | None]:
        return self._read(self.host_blocks, block_table, num_tokens)

    def poison(self, blocks: Iterable[int], host_blocks: Iterable[int] = ()) -> None:
        """What nobody owns and nobody can find may hold anything."""
        for block in blocks:
            self.blocks[block] = [None] * self.block_size
        for block in host_blocks:
            self.host_blocks[block] = [None] * self.block_size

    def _read(self, blocks: list[list[int | None]], block_table: list[int], num_tokens: int) -> list[int | None]:
        values: list[int | None] = []
        for block in block_table[: -(-num_tokens // self.block_size)]:
            values += blocks[block] if block != RELEASED else [None] * self.block_size
        return values[:num_tokens]


class FakeStore:
    """In the place of `BlockStore`: what is put is there at once, and stays."""

    num_at_once = 2

    def __init__(self) -> None:
        self.blocks: dict[bytes, list[int | None]] = {}
        self.keys = self.blocks.keys()
        self.files = SimpleNamespace(num_read=0, num_written=0)
        self.has_room = True

    def put(self, key: bytes, block: list[int | None]) -> None:
        self.blocks[key] = block
        self.files.num_written += 1

    def read(self, keys: list[bytes]) -> dict[bytes, list[int | None]]:
        self.files.num_read += len(keys)
        return {key: self.blocks[key] for key in keys}
