"""How long a step takes, and which hardware there is."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import HARDWARE, SHAPE

from pagedattn_serve.errors import ArgumentError, ArgumentTypeError
from pagedattn_simulate.cost_model import PRESETS, CostModel, Hardware, StepWork, find_hardware

FIELDS = [field.name for field in dataclasses.fields(StepWork)]
RATES = [field.name for field in dataclasses.fields(Hardware) if field.name.endswith(("_bytes", "_flops"))]
WORK = StepWork(3, 10, 3, 20, 30, 400, 16, 16)


def hardware(**numbers: Any) -> Hardware:
    return dataclasses.replace(HARDWARE, **numbers)


def test_a_step_by_hand() -> None:
    """Two decodes with 30 and 50 tokens in the cache: 1 ms of the step, 20 us of sequences, 1.2 ms to read the layers'
    1200 bytes (2 * 600 * 2 operations take 2.4 ms, so these count), 0.8 ms of the head (operations: 1.6 ms), and 10
    bytes and 64 operations for each of 80 keys."""
    work = StepWork()
    work.add_decodes(1, 30)
    work.add_decodes(1, 50)
    expected = 1e-3 + 2e-5 + 2.4e-3 + 1.6e-3 + 64 * 80 * 1e-6
    assert CostModel(SHAPE, HARDWARE).seconds(work) == pytest.approx(expected)
    fast = hardware(weight_flops=1e9, attention_flops=1e9)
    assert CostModel(SHAPE, fast).seconds(work) == pytest.approx(1e-3 + 2e-5 + 1.2e-3 + 0.8e-3 + 10 * 80 * 1e-6)


def test_a_chunk_by_hand() -> None:
    """Tokens 4 to 6 of a prompt attend to 5, 6 and 7 tokens. The chunk reads 7 keys, and samples nothing."""
    work = StepWork()
    work.add_prompt(4, 3, num_samples=0)
    assert work == StepWork(num_sequences=1, num_tokens=3, num_prefill_keys=7, num_prefill_pairs=18)
    assert CostModel(SHAPE, HARDWARE).seconds(work) == pytest.approx(1e-3 + 1e-5 + 3.6e-3 + 64 * 18e-6)


@given(
    numbers=st.lists(st.integers(0, 10_000), min_size=8, max_size=8),
    field=st.sampled_from(FIELDS),
    more=st.integers(1, 1000),
    num_ranks=st.sampled_from([1, 2, 4]),
)
def test_more_work_takes_no_less_time(numbers: list[int], field: str, more: int, num_ranks: int) -> None:
    model = CostModel(SHAPE, HARDWARE, num_ranks)
    work = StepWork(*numbers)
    larger = dataclasses.replace(work, **{field: getattr(work, field) + more})
    assert model.seconds(larger) >= model.seconds(work) > 0


@pytest.mark.parametrize("name", RATES)
def test_faster_hardware_takes_no_more_time(name: str) -> None:
    """And every number of the hardware counts in some step."""
    num_ranks = 2 if name == "link_bytes" else 1
    slow, fast = hardware(**{name: 1e3}), hardware(**{name: 1e9})
    assert CostModel(SHAPE, slow, num_ranks).seconds(WORK) > CostModel(SHAPE, fast, num_ranks).seconds(WORK)


def test_ranks_share_the_work_and_pay_for_sums() -> None:
    """With links that cost nothing, 2 ranks halve all but the fixed times. 4 ranks have 2 KV heads between them: keys
    are read no faster than by 2."""
    free = hardware(link_bytes=1e30, link_seconds=0, step_seconds=0, sequence_seconds=0, attention_flops=1e30)
    work = dataclasses.replace(WORK, num_swapped_tokens=0)
    seconds = {ranks: CostModel(SHAPE, free, ranks).seconds(work) for ranks in (1, 2, 4)}
    assert seconds[2] == pytest.approx(seconds[1] / 2)
    assert seconds[4] > seconds[1] / 4
    sums = CostModel(SHAPE, dataclasses.replace(free, link_seconds=1.0), 2).seconds(work) - seconds[2]
    assert sums == pytest.approx(2 * SHAPE.num_layers)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    assert find_hardware(name).name == name


def test_hardware_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(dataclasses.asdict(HARDWARE)))
    assert find_hardware(str(path)) == HARDWARE


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"memory": 0}, ArgumentError, "memory: expected an int >= 1, got 0"),
        ({"weight_bytes": 0}, ArgumentError, "weight_bytes: expected a number > 0, got 0"),
        ({"link_seconds": -1}, ArgumentError, "link_seconds: expected a number >= 0, got -1"),
        ({"name": 3}, ArgumentTypeError, "name: expected a string, got int"),
        ({"more": 3}, ArgumentError, "hardware: expected an object with attention_bytes, "),
    ],
)
def test_a_wrong_file(tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(dataclasses.asdict(HARDWARE) | change))
    with pytest.raises(error) as raised:
        find_hardware(str(path))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_of_something_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(content)
    with pytest.raises(ArgumentError, match="hardware: expected "):
        find_hardware(str(path))


def test_no_such_hardware() -> None:
    with pytest.raises(
        ArgumentError, match="hardware: expected A100-40, A100-80, H100, H200, cpu, or a JSON file, got TPU"
    ):
        find_hardware("TPU")
