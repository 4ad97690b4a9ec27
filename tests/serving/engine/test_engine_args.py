"""The options of an engine: said once, checked when they are made, and the same at every door."""

import argparse
import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from pagedattn_serve import DEMO_MODEL, LLM, EngineArgs, LLMEngine
from pagedattn_serve.cli.commands import engine_args, make_parser
from pagedattn_serve.config import UNBOUNDED, CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pagedattn_serve.engine_args import OPTIONS
from pagedattn_serve.options import add_options, flag_name

# Each option that reaches a config. Most have another value than their default.
GIVEN: dict[str, Any] = {
    "tokenizer": "other",
    "dtype": "bfloat16",
    "device": "cuda:1",
    "block_size": 32,
    "kv_cache_memory": None,
    "cpu_memory_utilization": None,
    "allow_download": True,
    "load_format": "dummy",
    "num_blocks": 9,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 77,
    "max_model_len": 66,
    "swap_space": 1.5,
    "gpu_memory_utilization": 0.5,
    "seed": 7,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 3,
    "distributed_executor_backend": "ray",
    "enforce_eager": True,
    "trust_remote_code": False,
    "preemption_mode": "swap",
    "enable_prefix_caching": False,
    "prefix_cache_dir_size": 1 << 20,
    "scheduling_policy": "priority",
    "kv_cache_dtype": "fp8",
    "speculation": "ngram",
    "num_speculative_tokens": 2,
    "quantization": "int4",
    "max_beam_width": 7,
}


@pytest.mark.parametrize("door", [LLM, LLMEngine])
def test_the_doors_take_the_options(door: type) -> None:
    parameters = inspect.signature(door).parameters
    assert list(parameters) == list(OPTIONS)
    for name, own in inspect.signature(EngineArgs).parameters.items():
        assert (parameters[name].default, parameters[name].kind) == (own.default, own.kind)


@pytest.mark.parametrize("door", [LLM, LLMEngine, EngineArgs])
def test_an_option_that_there_is_not(door: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_num_seq'"):
        door(DEMO_MODEL, max_num_seq=3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        door()


def test_options_are_checked_before_a_model_is_read() -> None:
    for door in (LLM, LLMEngine, EngineArgs):
        with pytest.raises(ValueError, match=r"^block_size: expected a power of two, got 24$"):
            door("no/such/directory", block_size=24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "dtype: expected auto, float32, float16, bfloat16, float, half, got float64"),
        ({"dtype": 16}, "dtype: expected auto, .*, got 16"),
        ({"dtype": 10**5000}, "dtype: expected auto, .*, got one of 16,610 bits"),
        ({"kv_cache_dtype": 10**5000}, "kv_cache_dtype: expected auto, .*, got one of 16,610 bits"),
        ({"device": 10**5000}, "device: expected auto, .*, got one of 16,610 bits"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype: expected auto, fp8, fp8_e4m3, fp8_e5m2, int8, got int4"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype: expected auto, .*, got None"),
        ({"max_model_len": 1}, "max_model_len: expected an int >= 2, got 1"),
        ({"kv_cache_memory": 0}, "kv_cache_memory: expected an int >= 1, got 0"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy: expected one of fcfs, priority, got 'lifo'"),
        ({"preemption_mode": "drop"}, "preemption_mode: expected one of .*, got 'drop'"),
        ({"speculation": "eagle"}, "speculation: expected None or \"ngram\", got 'eagle'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: expected an int >= 1, got 0"),
        ({"tensor_parallel_size": 65}, r"tensor_parallel_size: expected an int in \[1, 64\], got 65"),
        (
            {"tensor_parallel_size": 8, "pipeline_parallel_size": 9},
            r"pipeline_parallel_size: expected an int in \[1, 8\], got 9",
        ),
        ({"device": "cpu:0"}, "device: expected auto, cpu, cuda or cuda:N, got 'cpu:0'"),
        ({"num_blocks": 4, "kv_cache_memory": 10**6}, "kv_cache_memory: expected None beside num_blocks"),
        ({"prefix_cache_dir": "d", "enable_prefix_caching": False}, "prefix_cache_dir: expected None without prefix"),
        ({"prefix_cache_dir": "d", "tensor_parallel_size": 2}, "prefix_cache_dir: expected None with several ranks"),
        ({"prefix_cache_dir": "d", "pipeline_parallel_size": 2}, "prefix_cache_dir: expected None with several ranks"),
        ({"prefix_cache_dir": ""}, "prefix_cache_dir: expected a directory, got an empty text"),
        ({"prefix_cache_dir_size": 0}, "prefix_cache_dir_size: expected an int >= 1, got 0"),
    ],
)
def test_wrong_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EngineArgs("model", **options)


def test_options_do_not_change() -> None:
    args = EngineArgs("model")
    with pytest.raises(FrozenInstanceError):
        args.block_size = 8  # type: ignore[misc]


def test_configs_have_every_option() -> None:
    """Each option but kv_scales, which the checkpoint may say, reaches a config."""
    assert {"model", "kv_scales", "prefix_cache_dir", *GIVEN} == set(OPTIONS)
    assert EngineArgs("m", prefix_cache_dir="d").create_engine_configs().cache.prefix_cache_dir == "d"
    configs = EngineArgs("m", **GIVEN).create_engine_configs()
    assert [type(config) for config in configs] == [ModelConfig, CacheConfig, ParallelConfig, SchedulerConfig]
    found = {f.name: getattr(config, f.name) for config in configs for f in fields(config)}
    found["scheduling_policy"] = found.pop("policy")
    assert {name: found[name] for name in GIVEN} == GIVEN and found["model"] == "m"
    assert EngineArgs("m", kv_cache_memory=1 << 20).create_engine_configs().cache.kv_cache_memory == 1 << 20
    assert EngineArgs("m", cpu_memory_utilization=0.5).create_engine_configs().cache.cpu_memory_utilization == 0.5


def test_defaults_are_those_of_the_configs() -> None:
    configs = EngineArgs("m").create_engine_configs()
    assert configs == (
        ModelConfig(model="m"),
        CacheConfig(num_blocks=UNBOUNDED),
        ParallelConfig(),
        SchedulerConfig(max_model_len=UNBOUNDED),
    )


def test_an_engine_of_its_args() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(DEMO_MODEL, num_blocks=48, max_model_len=40))
    assert (engine.stats().num_blocks, engine.max_model_len) == (48, 40)


def test_the_command_line_gives_every_option_but_one() -> None:
    flags = {name: option for name, option in OPTIONS.items() if option.flag}
    assert {*flags, "model", "trust_remote_code"} == set(OPTIONS)
    given = {name: value for name, value in (GIVEN | {"kv_scales": "s"}).items() if name in flags and value is not None}
    assert {*given, "kv_cache_memory", "cpu_memory_utilization", "prefix_cache_dir"} == set(flags)
    arguments = ["serve", "m"]
    for name, value in given.items():
        arguments += [flag_name(name, OPTIONS[name]), *([] if isinstance(value, bool) else [str(value)])]
    assert engine_args(make_parser().parse_args(arguments), flags) == EngineArgs("m", **given)
    assert engine_args(make_parser().parse_args(["serve", "m"]), flags) == EngineArgs("m")


def test_the_help_of_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, OPTIONS)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    assert set(actions) == {name for name, option in OPTIONS.items() if option.flag}
    for name, action in actions.items():
        assert action.help is not None and OPTIONS[name].help in action.help
        assert action.default == OPTIONS[name].default
