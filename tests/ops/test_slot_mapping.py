"""The index arithmetic of an append, against Python's: batch_positions, compute_slot_mapping, and
consecutive_block_tables."""

from typing import Any

import pytest
import torch
from checks import assert_rejected
from op_table import OPS
from torch import Tensor

from pagedattn_ext import ops

BLOCK_SIZE, NUM_BLOCKS = 3, 20
DTYPES = [torch.int32, torch.int64]


def indices(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[3, 0, 1, 300], [2, 2], [1], []], ids=str)
@pytest.mark.parametrize("padding", [None, 0, 130])
def test_batch_positions(device, dtype, counts, padding):
    """padding None: no start_loc, so that all sequences have equally many tokens. Sequences without tokens, and more
    tokens than a block has threads."""
    if padding is None:
        counts = [counts[0]] * len(counts) if counts else counts
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    first = [7 * i for i in range(len(counts))]
    expected = [(seq, first[seq] + i) for seq, count in enumerate(counts) for i in range(count)]
    expected += [(-1, 0)] * (padding or 0)
    start_loc = None if padding is None else indices(starts, dtype, device)
    actual = OPS.batch_positions(start_loc, indices(first, dtype, device), len(expected))
    assert [tensor.dtype for tensor in actual] == [torch.int64, torch.int64]
    assert list(zip(*(tensor.tolist() for tensor in actual), strict=True)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["table", "strided table", "list"])
def test_compute_slot_mapping(device, dtype, form):
    """Sequences of one, three and no blocks; tokens in any order, and padding, whose position may be anything."""
    blocks = [[7], [2, 19, 0], []]
    tokens = [(1, 8), (0, 2), (-1, 99), (1, 3), (0, 0), (-5, -7), (1, 0)] * 40
    expected = [
        -1 if seq < 0 else blocks[seq][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for seq, position in tokens
    ]
    options = {}
    if form == "list":
        tables = indices([block for row in blocks for block in row], dtype, device)
        options = {"block_start_loc": indices([0, 1, 4, 4], dtype, device)}
        options["last_block_lens"] = indices([3, 1, 99], dtype, device)  # of no blocks: anything
    else:
        tables = indices([row + [-1] * (5 - len(row)) for row in blocks], dtype, device)
        tables = tables[:, :3] if form == "strided table" else tables[:, :3].contiguous()
    sequences, positions = (indices(list(column), dtype, device) for column in zip(*tokens, strict=True))
    slots = OPS.compute_slot_mapping(positions, tables, BLOCK_SIZE, NUM_BLOCKS, batch_indices=sequences, **options)
    assert slots.dtype == torch.int64
    assert slots.tolist() == expected


def test_compute_slot_mapping_of_one_token_a_sequence(device):
    tables = indices([[7, 3], [2, 19]], torch.int32, device)
    slots = OPS.compute_slot_mapping(indices([4, 2], torch.int64, device), tables, BLOCK_SIZE, NUM_BLOCKS)
    assert slots.tolist() == [3 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [None, [2, 0, 1]])
def test_consecutive_block_tables(device, dtype, padding):
    """A sequence's tokens, and others behind them, more than a block has threads."""
    first, width = [0, 200, 100], 150
    lengths = [150, 7, 1]
    options = {} if padding is None else {"left_padding": indices(padding, dtype, device)}
    tables = OPS.consecutive_block_tables(
        *(indices(values, dtype, device) for values in (first, [150, 207, 101], lengths)), width, 300, **options
    )
    assert tables.dtype == torch.int32
    expected = [
        [start + skipped + i for i in range(width)] for start, skipped in zip(first, padding or [0] * 3, strict=True)
    ]
    assert tables.tolist() == expected


POSITIONS = {"start_loc": [0, 2, 3], "first_positions": [5, 0], "num_tokens": 4}
LIST = {"positions": [4, 2], "block_tables": [7, 3, 2], "block_size": 3, "num_blocks": 8, "batch_indices": [0, 1]}
LIST |= {"block_start_loc": [0, 2, 3], "last_block_lens": [3, 1]}
TABLE = {"positions": [4, 2], "block_tables": [[7, 3], [2, 19]], "block_size": 3, "num_blocks": 20}
TOKENS = {"first_blocks": [0, 4], "end_blocks": [4, 8], "seq_lens": [4, 3], "max_num_blocks_per_seq": 4}
TOKENS |= {"num_blocks": 8, "left_padding": [1, 0]}
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("batch_positions", POSITIONS, {"start_loc": [0, 3, 2]}, "start_loc"),
    ("batch_positions", POSITIONS, {"start_loc": [1, 2, 3]}, "start_loc"),
    ("batch_positions", POSITIONS, {"start_loc": [0, 2, 5]}, "start_loc"),
    ("batch_positions", POSITIONS, {"start_loc": [0, 2]}, "start_loc"),
    ("batch_positions", POSITIONS, {"first_positions": [-1, 0]}, "first_positions"),
    ("batch_positions", POSITIONS, {"first_positions": [2**31 - 2, 0]}, "first_positions"),
    ("batch_positions", POSITIONS, {"num_tokens": -1}, "num_tokens"),
    ("batch_positions", POSITIONS, {"start_loc": None, "num_tokens": 3}, "num_tokens"),
    ("compute_slot_mapping", LIST, {"positions": [6, 2]}, "positions"),
    ("compute_slot_mapping", LIST, {"positions": [4, -1]}, "positions"),
    ("compute_slot_mapping", LIST, {"batch_indices": [0, 2]}, "batch_indices"),
    ("compute_slot_mapping", LIST, {"batch_indices": [0]}, "batch_indices"),
    ("compute_slot_mapping", LIST, {"block_tables": [7, 8, 2]}, "block_tables"),
    ("compute_slot_mapping", LIST, {"block_tables": [7, -1, 2]}, "block_tables"),
    ("compute_slot_mapping", LIST, {"block_tables": [[7, 3, 2]]}, "block_tables"),
    ("compute_slot_mapping", LIST, {"block_start_loc": [0, 2, 4]}, "block_start_loc"),
    ("compute_slot_mapping", LIST, {"block_start_loc": [0, 3, 2]}, "block_start_loc"),
    ("compute_slot_mapping", LIST, {"block_start_loc": []}, "block_start_loc"),
    ("compute_slot_mapping", LIST, {"last_block_lens": [4, 1]}, "last_block_lens"),
    ("compute_slot_mapping", LIST, {"last_block_lens": [3, 0]}, "last_block_lens"),
    ("compute_slot_mapping", LIST, {"block_size": 0}, "block_size"),
    ("compute_slot_mapping", LIST, {"num_blocks": -1}, "num_blocks"),
    ("compute_slot_mapping", LIST, {"block_size": 2**31}, "block_size"),  # slots beyond int64 at 2**62
    ("compute_slot_mapping", LIST, {"num_blocks": 2**31}, "num_blocks"),
    ("compute_slot_mapping", TABLE, {"positions": [4]}, "positions"),
    ("compute_slot_mapping", TABLE, {"positions": [4, 6]}, "positions"),
    ("compute_slot_mapping", TABLE, {"block_tables": [7, 3]}, "block_tables"),
    ("consecutive_block_tables", TOKENS, {"first_blocks": [-1, 4]}, "first_blocks"),
    ("consecutive_block_tables", TOKENS, {"end_blocks": [4, 3]}, "end_blocks"),
    ("consecutive_block_tables", TOKENS, {"end_blocks": [4, 9]}, "end_blocks"),
    ("consecutive_block_tables", TOKENS, {"seq_lens": [5, 3]}, "seq_lens"),
    ("consecutive_block_tables", TOKENS, {"seq_lens": [-1, 3]}, "seq_lens"),
    ("consecutive_block_tables", TOKENS, {"left_padding": [5, 0]}, "left_padding"),
    ("consecutive_block_tables", TOKENS, {"left_padding": [-1, 0]}, "left_padding"),
    ("consecutive_block_tables", TOKENS, {"max_num_blocks_per_seq": 2}, "max_num_blocks_per_seq"),
    ("consecutive_block_tables", TOKENS, {"max_num_blocks_per_seq": -1}, "max_num_blocks_per_seq"),
    ("consecutive_block_tables", TOKENS, {"num_blocks": 2**31}, "num_blocks"),
]


@pytest.mark.parametrize(("op", "arguments", "changes", "named"), WRONG, ids=str)
def test_what_does_not_fit_together(device, op, arguments, changes, named):
    tensors = {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for name, value in (arguments | changes).items()
    }
    assert_rejected(op, tensors, named, ValueError)


def test_a_result_that_does_not_fit_in_memory():
    """Torch's error has lost its reason by then, and names a header."""
    with pytest.raises(MemoryError, match=r"^batch_positions: torch cannot allocate the memory for a result$"):
        ops.batch_positions(None, torch.zeros(1, dtype=torch.int64), 2**62)
