"""SamplingParams and the two configs: what they take, and what they say when it is wrong."""

import math
from typing import Any

import pytest

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.sampling_params import SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, -1, None)
    assert (params.max_tokens, params.stop, params.ignore_eos) == (16, (), False)


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(0.0).greedy
    assert not SamplingParams(temperature=1e-3).greedy


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, ()), ("end", ("end",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())],
)
def test_stop_becomes_a_tuple(stop: Any, expected: tuple[str, ...]) -> None:
    params = SamplingParams(stop=stop)
    assert params.stop == params.stop_strings == expected
    assert hash(params) == hash(SamplingParams(stop=stop))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"top_p": 1e-6},
        {"top_k": 0},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"max_tokens": None},
        {"max_tokens": 1},
    ],
)
def test_edges_are_taken(kwargs: dict[str, Any]) -> None:
    SamplingParams(**kwargs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("max_tokens", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
    ],
)
def test_wrong_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", "1"),
        ("top_k", 1.0),
        ("top_k", True),
        ("seed", 0.5),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("stop", 3),
        ("stop", b"end"),
        ("stop", ["a", 3]),
        ("ignore_eos", 1),
    ],
)
def test_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got "):
        SamplingParams(**{name: value})


def test_config_defaults() -> None:
    config = SchedulerConfig(max_model_len=2)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 2560)
    cache = CacheConfig(num_blocks=1)
    assert (cache.block_size, cache.watermark) == (16, 0.01)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_model_len", 1, ValueError),
        ("max_model_len", 8.0, TypeError),
        ("max_num_seqs", 0, ValueError),
        ("max_num_seqs", True, TypeError),
        ("max_num_batched_tokens", 0, ValueError),
    ],
)
def test_wrong_scheduler_config(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        SchedulerConfig(**{"max_model_len": 8, name: value})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("num_blocks", 0, ValueError),
        ("num_blocks", "4", TypeError),
        ("block_size", 4, ValueError),
        ("block_size", 24, ValueError),
        ("block_size", 128, ValueError),
        ("block_size", 16.0, TypeError),
        ("watermark", -0.1, ValueError),
        ("watermark", 1.0, ValueError),
        ("watermark", math.nan, ValueError),
        ("watermark", None, TypeError),
    ],
)
def test_wrong_cache_config(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        CacheConfig(**{"num_blocks": 4, name: value})
