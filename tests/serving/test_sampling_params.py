"""SamplingParams and the two configs: what they take, and what they say when it is wrong."""

import dataclasses
import math
from typing import Any

import pytest

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.sampling_params import MAX_LOGPROBS, SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, -1, None)
    assert (params.max_tokens, params.stop, params.ignore_eos) == (16, (), False)
    assert (params.min_p, params.stop_token_ids, params.logprobs) == (0.0, (), None)


def test_order_of_the_positional_ones() -> None:
    params = SamplingParams(0.5, 0.9, 10, 3, 20, "end", True)
    assert params == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=10, seed=3, max_tokens=20, stop="end", ignore_eos=True
    )


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


@pytest.mark.parametrize(("stop_token_ids", "expected"), [(None, ()), ([], ()), ([7, 0], (7, 0)), ((7,), (7,))])
def test_stop_token_ids_become_a_tuple(stop_token_ids: Any, expected: tuple[int, ...]) -> None:
    params = SamplingParams(stop_token_ids=stop_token_ids)
    assert params.stop_token_ids == params.stop_ids == expected
    assert hash(params) == hash(SamplingParams(stop_token_ids=stop_token_ids))


def test_a_list_given_stays_the_caller_s() -> None:
    stop, stop_token_ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids)
    stop.append("b")
    stop_token_ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))


def test_a_copy_with_a_change_is_checked_as_well() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3], logprobs=0)
    assert dataclasses.replace(params, min_p=0.5) == SamplingParams(
        stop=["end"], stop_token_ids=(3,), logprobs=0, min_p=0.5
    )
    with pytest.raises(ValueError, match=r"^min_p: "):
        dataclasses.replace(params, min_p=2)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"top_p": 1e-6},
        {"top_k": 0},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"max_tokens": None},
        {"max_tokens": 1},
        {"min_p": 0},
        {"min_p": 1},
        {"logprobs": 0},
        {"logprobs": MAX_LOGPROBS},
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
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("stop_token_ids", [3, -1]),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
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
        ("min_p", "0.1"),
        ("min_p", None),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", {3}),
        ("stop_token_ids", [3.0]),
        ("stop_token_ids", [True]),
        ("logprobs", 1.0),
        ("logprobs", True),
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
        ("block_size", 512, ValueError),
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
