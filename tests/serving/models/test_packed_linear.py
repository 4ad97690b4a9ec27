"""Packed linear layers: the results of `nn.Linear`, whatever the number of rows, in bounded memory."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from pagedattn_serve.models.packed_linear import PackedLinear, padded_num_rows

GROWTH = """
from pathlib import Path
import torch
from torch import nn
from pagedattn_serve.models.packed_linear import PackedLinear

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

torch.set_num_threads(1)
layer = PackedLinear(nn.Linear(64, 64))
hidden = torch.zeros(640, 64)
with torch.inference_mode():
    layer(hidden)
    before = resident_mib()
    for num_rows in range(1, 641):
        layer(hidden[:num_rows])
    print(resident_mib() - before)
"""


def test_padded_numbers_of_rows() -> None:
    padded = [padded_num_rows(num_rows) for num_rows in range(2561)]
    assert padded[:33] == list(range(33)) and padded[33:41] == [36] * 4 + [40] * 4
    assert padded[64] == 64 and padded[65] == 72 and padded[2049] == 2304 and padded[2560] == 2560
    assert padded == sorted(padded)
    assert all(num_rows <= padded[num_rows] <= num_rows * 9 / 8 for num_rows in range(2561))
    assert all(padded_num_rows(num_rows) == num_rows for num_rows in padded)
    assert len(set(padded[1:])) == 82


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (33,), (2, 35), (7, 3, 5)])
def test_every_row_is_that_of_the_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(48, 30, bias)
    hidden = torch.randn(*shape, 48, generator=generator)
    with torch.inference_mode():
        out = PackedLinear(linear)(hidden)
        expected = linear(hidden)
    assert out.shape == expected.shape and out.is_contiguous()
    torch.testing.assert_close(out, expected)


def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    layer = PackedLinear(nn.Linear(200, 97))
    hidden = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = layer(hidden)
        for num_rows in (*range(1, 70), 127, 129, 200, 255, 257, 299):
            assert torch.equal(layer(hidden[:num_rows]), whole[:num_rows]), num_rows


def test_memory_does_not_grow_with_every_number_of_rows() -> None:
    """66 numbers of rows at half a MiB; each of the 640 by itself would take 300 MiB and more."""
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=120)
    assert float(run.stdout) < 80
