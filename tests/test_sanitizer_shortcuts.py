"""What `pagedattn_ext.sanitizer` does not look at again, because it has looked before, is left out while that holds."""

import pytest
import torch

from pagedattn_ext import allocate_kv_cache
from pagedattn_ext.sanitizer import CacheError, CacheSanitizer, Row

SIZE = 4
NUM_BLOCKS = 6


def watched(num_layers=2):
    sanitizer = CacheSanitizer(NUM_BLOCKS, SIZE)
    caches = allocate_kv_cache(NUM_BLOCKS, 1, 16, SIZE, num_layers=num_layers)
    for keys, values in caches:
        sanitizer.register(keys, values)
    return sanitizer, [keys for keys, _ in caches]


def write(sanitizer, keys, *slots):
    with sanitizer.writing(keys, torch.tensor(slots)):
        pass


def read(sanitizer, keys, table, length):
    sanitizer.check_read(keys, torch.tensor([table]), torch.tensor([length]))


def write_and_read(sanitizer, caches, block):
    for keys in caches:
        write(sanitizer, keys, *range(block * SIZE, (block + 1) * SIZE))
    sanitizer.expect([])  # a new step
    read(sanitizer, caches[0], [block], SIZE)


def test_a_block_is_not_whole_in_a_layer_that_comes_later():
    sanitizer, caches = watched()
    sanitizer.allocated("a", [2])
    write_and_read(sanitizer, caches, 2)
    [(keys, values)] = allocate_kv_cache(NUM_BLOCKS, 1, 16, SIZE, num_layers=1)
    sanitizer.register(keys, values, "late")
    with pytest.raises(CacheError, match=r"^read: a slot is read that was never written \(layer late, block 2, slot 8"):
        read(sanitizer, keys, [2], SIZE)


def renew(sanitizer, keys):
    sanitizer.renewed([2])


def free_and_take(sanitizer, keys):
    sanitizer.freed("a", [2])
    sanitizer.allocated("a", [2])


def truncate(sanitizer, keys):
    sanitizer.truncated("a", 3)


def copy_from_a_block_that_lacks_a_slot(sanitizer, keys):
    write(sanitizer, keys, 12, 13, 14)
    sanitizer.copied(keys, torch.tensor([[3, 2]]))


@pytest.mark.parametrize("event", [renew, free_and_take, truncate, copy_from_a_block_that_lacks_a_slot])
def test_a_block_is_not_whole_any_more(event):
    """Between two ops that are told the same."""
    sanitizer, caches = watched()
    sanitizer.draw({"a": [[2]], "b": [[3]]})
    write_and_read(sanitizer, caches, 2)
    event(sanitizer, caches[0])
    with pytest.raises(CacheError, match="a slot is read that was never written"):
        read(sanitizer, caches[0], [2], SIZE)


def test_a_block_that_is_shared_while_its_owner_has_it_keeps_what_is_written():
    sanitizer, caches = watched()
    sanitizer.draw({"a": [[2]]})
    write_and_read(sanitizer, caches, 2)
    sanitizer.draw({"a": [[2]], "b": [[2]]})
    read(sanitizer, caches[0], [2], SIZE)


@pytest.mark.parametrize(("slots", "owner"), [([11, 13, 16], "a"), ([11, 12, 17], "b")])
def test_the_owner_of_a_token_that_goes_elsewhere(slots, owner):
    """At both sides of where the tokens of a row end."""
    sanitizer, caches = watched()
    sanitizer.draw({"a": [[2, 3]], "b": [[4]]})
    sanitizer.expect([Row("a", 3, 2), Row("b", 0, 1)])
    with pytest.raises(CacheError) as error:
        write(sanitizer, caches[0], *slots)
    assert error.value.owner == owner
