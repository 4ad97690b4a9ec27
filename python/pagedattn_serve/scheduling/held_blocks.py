"""How many blocks a sequence holds: of a group of layers with a window, those that the window shows and those of the
step's tokens."""

from bisect import bisect_right

from pagedattn_serve.config import UNBOUNDED, CacheConfig


def num_behind(window: int | None, num_computed: int, block_size: int) -> int:
    """How many blocks of a sequence lie behind the window of the token after `num_computed` others."""
    return 0 if window is None else max(0, num_computed + 1 - window) // block_size


def max_held_blocks(num_tokens: int, config: CacheConfig, max_num_batched_tokens: int) -> int:
    """Blocks that one sequence holds at most, over all groups of layers, until it has so many tokens."""
    size = config.block_size
    return sum(max_held_of_group(num_tokens, window, size, max_num_batched_tokens) for window in config.windows)


def max_held_of_group(num_tokens: int, window: int | None, block_size: int, max_num_batched_tokens: int) -> int:
    """`max_held_blocks` of one group of layers."""
    num_blocks = -(-num_tokens // block_size)
    if window is None:
        return num_blocks
    num_seen = window - 1 + max_num_batched_tokens
    return min(num_blocks, (num_seen + block_size - 2) // block_size + 1)  # the first may be the last of its block


def max_num_tokens(config: CacheConfig, max_num_batched_tokens: int) -> int:
    """Tokens of the longest sequence that fits in the cache alone; UNBOUNDED if any does."""
    if max_held_blocks(UNBOUNDED, config, max_num_batched_tokens) <= config.num_blocks:
        return UNBOUNDED

    def num_held(num_blocks: int) -> int:
        return max_held_blocks(num_blocks * config.block_size, config, max_num_batched_tokens)

    return config.block_size * (bisect_right(range(config.num_blocks + 1), config.num_blocks, key=num_held) - 1)
