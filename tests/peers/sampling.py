"""Of the cases of each parametrized test a sample: as many as are asked for, the same ones each time."""

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

# What takes long on a CPU is left out: by its longest sequence, and by the product of all its numbers.
MAX_LENGTH = 640
MAX_SIZE = 2**25
FEWER_TRIALS = {5_000_000: 100_000, 5_000: 20}  # of tests of random numbers


def sampled(axes: list[list[dict[str, Any]]], count: int, seed: str, num_trials: int = 1) -> list[dict[str, Any]]:
    """At most `count` combinations of the axes, none twice. An axis is a list of values for the same arguments. Each
    value comes about equally often, beside values of the other axes that chance has picked."""
    generator = random.Random(seed)
    cases: dict[str, dict[str, Any]] = {}
    columns = [shuffled_for_ever(axis, generator) for axis in axes]
    for _ in range(20 * count):
        case = {name: value for column in columns for name, value in next(column).items()}
        if is_wanted(case, num_trials):
            cases.setdefault(repr(case), case)
        if len(cases) == min(count, math.prod(map(len, axes))):
            break
    return list(cases.values())


def shuffled_for_ever(values: list[Any], generator: random.Random) -> Iterator[Any]:
    while True:
        yield from generator.sample(values, len(values))


def is_wanted(case: Mapping[str, Any], num_trials: int) -> bool:
    numbers = {name: value for name, value in case.items() if type(value) is int and value}
    longest = max((value for name, value in numbers.items() if "len" in name), default=0)
    is_for_gpu = case.get("dropout_p", 0) > 0 or case.get("compiled", False)  # training; Triton
    size = num_trials * math.prod(map(abs, numbers.values()))
    return longest <= MAX_LENGTH and size <= MAX_SIZE and not is_for_gpu


def with_fewer_trials(function: Any) -> int:
    """Changes the function. Returns how many trials it makes now."""
    code = function.__code__
    if not {"num_trials", "num_trails"} & {*code.co_varnames}:
        return 1
    function.__code__ = code.replace(co_consts=tuple(FEWER_TRIALS.get(value, value) for value in code.co_consts))
    return max((value for value in function.__code__.co_consts if value in FEWER_TRIALS.values()), default=1)


class Sampling:
    """A plugin of pytest."""

    def __init__(self, count: int) -> None:
        self.count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        axes = [axis_of(mark) for mark in metafunc.definition.iter_markers("parametrize")]
        if axes:
            names = [name for axis in axes for name in axis[0]]
            function = metafunc.function
            cases = sampled(axes, self.count, function.__qualname__, with_fewer_trials(function))
            metafunc.parametrize(names, [tuple(case.values()) for case in cases])
            # Else pytest itself would add what the marks say.
            metafunc.definition.iter_markers = lambda name=None: iter(())


def axis_of(mark: pytest.Mark) -> list[dict[str, Any]]:
    names, values = mark.args[:2]
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    axis = []
    for value in values:
        if isinstance(value, type(pytest.param())):  # its marks are about GPUs
            [*of_value] = value.values
        else:
            of_value = [value] if len(names) == 1 else value
        axis.append(dict(zip(names, of_value, strict=True)))
    return axis
