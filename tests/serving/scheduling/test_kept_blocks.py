"""Blocks that are to be stored: in the order in which they came, some at a time."""

from pagedattn_serve.scheduling.kept_blocks import KeptBlocks


def keys(num_keys: int) -> list[bytes]:
    return [i.to_bytes(4) for i in range(num_keys)]


def test_blocks_are_taken_in_order_unless_stored_or_gone() -> None:
    kept, stored = KeptBlocks(), set[bytes]()
    a, b, c, d, e = keys(5)
    kept.want([a])
    kept.turn_on(stored)
    assert kept.take({a: 0}.get, 1) == []
    stored.add(a)
    kept.want([c, a, b, d, c, e])
    stored.add(d)
    assert kept.take({b: 1, c: 2, d: 3}.get, 1) == [(c, 2)]
    kept.want([c])
    assert kept.take({b: 1, c: 2, d: 3}.get, 5) == [(b, 1), (c, 2)]
    kept.want([e])
    kept.clear()
    assert kept.take({e: 4}.get, 5) == []
