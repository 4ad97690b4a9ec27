"""The paged cache with tokens in the place of keys and values, to check what a block table leads to."""

from pagedattn_serve.config import CacheConfig


class FakeCache:
    """[num_blocks][block_size] tokens. Where every token is unique, a slot of another sequence is seen at once."""

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.blocks: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_blocks)]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for src, dst in pairs:
            self.blocks[dst] = list(self.blocks[src])

    def write(self, block_table: list[int], start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start):
            self.blocks[block_table[position // self.block_size]][position % self.block_size] = token

    def read(self, block_table: list[int], num_tokens: int) -> list[int | None]:
        return [self.blocks[block_table[i // self.block_size]][i % self.block_size] for i in range(num_tokens)]
