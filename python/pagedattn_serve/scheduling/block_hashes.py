"""What a full block is known by: the hash of its tokens and of the block before it, the first block's of the sequence's
salt."""

from hashlib import blake2b
from struct import Struct

from pagedattn_serve.scheduling.sequence import Sequence


class BlockHashes:
    """Hashes of blocks of one size."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._pack = Struct(f"{block_size}q").pack  # the tokens of a block as bytes

    def of(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The hashes of the sequence's first `num_blocks` blocks, which are full. There may be more of them."""
        hashes, size = sequence.block_hashes, self._size
        if len(hashes) < num_blocks:
            last = hashes[-1] if hashes else salt_hash(sequence.cache_salt)
            tokens = sequence.tokens(len(hashes) * size, num_blocks * size)
            for begin in range(0, len(tokens), size):
                last = blake2b(last + self._pack(*tokens[begin : begin + size]), digest_size=16).digest()
                hashes.append(last)
        return hashes


def salt_hash(salt: str) -> bytes:
    """What the hashes of a sequence's blocks begin with: nothing without a salt. With a salt, it differs from the hash
    of every block and from all tokens."""
    return blake2b(salt.encode(), digest_size=16, person=b"cache_salt").digest() if salt else b""
