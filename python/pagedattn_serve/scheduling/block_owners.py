"""Who holds each block of a pool."""

from pagedattn_serve.scheduling.block_allocator import BlockAllocator
from pagedattn_serve.scheduling.sequence import Sequence
from pagedattn_serve.scheduling.table_rows import RELEASED, Tables, held


def block_owners(allocator: BlockAllocator, tables: dict[Sequence, Tables], groups: list[list[Sequence]]) -> list[int]:
    """For each block of a pool, the index of a group that holds it; -1 if no group does."""
    owners = [-1] * allocator.num_blocks
    num_left = allocator.num_owned_blocks
    # A sequence shares its beginning. So the first round goes from the end of each table to the first block that has an
    # owner, and looks at each block once. If blocks that were swapped in were computed by another sequence at the same
    # time, merging can leave blocks without an owner before that place. The second round finds them.
    for ends_at_shared in (True, False):
        for index, sequences in enumerate(groups):
            for table in (table for sequence in sequences for table in tables.get(sequence, [])):
                for block in reversed(held([table])):
                    if owners[block] < 0:
                        owners[block] = index
                        num_left -= 1
                    elif ends_at_shared:
                        break
        if num_left == 0:
            break
    return owners


def check_owners(allocator: BlockAllocator, tables: dict[Sequence, Tables]) -> None:
    """Raise AssertionError unless each block's reference count is the number of tables that hold it."""
    allocator.check_integrity()
    num_holders = [0] * allocator.num_blocks
    for sequence, of_sequence in tables.items():
        blocks = held(of_sequence)
        assert len(set(blocks)) == len(blocks), f"{sequence.request_id} holds a block twice: {of_sequence}"
        assert RELEASED not in blocks, f"{sequence.request_id} has given back a later block: {of_sequence}"
        for block in blocks:
            num_holders[block] += 1
    counts = allocator.ref_counts()
    assert counts == num_holders, "; ".join(
        f"block {block}: reference count {count}, in {number} tables"
        for block, (count, number) in enumerate(zip(counts, num_holders, strict=True))
        if count != number
    )
