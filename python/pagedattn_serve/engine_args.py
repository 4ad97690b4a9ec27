"""The options of an engine, each said once: its type, its default, and what it means.

`LLM` and `LLMEngine` take the options as keyword arguments, the command line has those that have a `Flag`, and
docs/serving.md has a table of all: the three are made from `EngineArgs`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Concatenate, NamedTuple, ParamSpec, TypeVar

from pagedattn_serve.config import FP8_DTYPES, UNBOUNDED, CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.options import Flag, options_of, size
from pagedattn_serve.vllm_arguments import engine_options, takes_arguments_of_vllm

if TYPE_CHECKING:
    import torch  # only for a type: the command line's help needs no torch

Self = TypeVar("Self")
Args = TypeVar("Args")
Options = ParamSpec("Options")
Config = TypeVar("Config", ModelConfig, CacheConfig, ParallelConfig, SchedulerConfig)

GivenScales = tuple[float, float] | Sequence[tuple[float, float]] | str | PathLike[str]


# Groups of the command line's help. What has no group says which model runs, and where.
CACHE = "cache; a SIZE is in bytes, or 512MiB, 4GiB"
ENGINE = "engine"


class EngineConfigs(NamedTuple):
    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig


@takes_arguments_of_vllm(engine_options)
@dataclass(frozen=True)
class EngineArgs:
    """The options of an engine, checked. Raises ValueError or TypeError, with the option's name, for a wrong one.

    An argument of vLLM's `EngineArgs` and `LLM` may be given as well, if its value means what happens here anyway.
    """

    model: Annotated[
        str | PathLike[str],
        "a Hugging Face directory (config.json; safetensors or pytorch_model.bin; tokenizer), where ~ is the home; a "
        "GGUF file; or the name of a repository in Hugging Face's cache",
    ]
    tokenizer: Annotated[
        str | PathLike[str] | None,
        "a directory, or a GGUF file, with another tokenizer than the model's",
        Flag(metavar="DIR"),
    ] = None
    dtype: Annotated[
        "str | torch.dtype",
        "auto (the checkpoint's dtype), float32 or float, float16 or half, bfloat16; in Python also a torch.dtype",
        Flag(),
    ] = "auto"
    device: Annotated[
        str,
        "cpu, cuda, cuda:N, or auto: CUDA where there is a device and this build has the kernels, else the CPU",
        Flag(),
    ] = "auto"
    block_size: Annotated[int, "tokens per cache block, a power of two from 1 to 256", Flag(CACHE)] = 16
    kv_cache_memory: Annotated[
        int | None,
        "bytes for the cache, of each rank; the cache takes no more than max_num_seqs sequences of max_model_len "
        "tokens could use. Default: 1 GiB on the CPU; on CUDA the memory that gpu_memory_utilization leaves",
        Flag(CACHE, "SIZE", size),
    ] = None
    num_blocks: Annotated[
        int | None,
        "blocks of the cache, each for block_size tokens of all layers; not together with kv_cache_memory",
        Flag(CACHE),
    ] = None
    max_num_seqs: Annotated[int, "most sequences running at once", Flag(ENGINE)] = 256
    max_num_batched_tokens: Annotated[
        int,
        "most tokens that run through the model in one step. A longer prompt runs in chunks. Beside other requests the "
        "chunks are small, so that the other requests go on and new requests start",
        Flag(ENGINE),
    ] = 2560
    max_model_len: Annotated[
        int | None,
        "most tokens of a sequence, prompt and output together. Default: the model's limit, or what the whole "
        "cache holds if that is less",
        Flag(ENGINE),
    ] = None
    swap_space: Annotated[
        float,
        "GiB of host memory, of each rank, for the blocks of requests that are swapped out; at most for as many blocks "
        "as the cache has",
        Flag(CACHE, "GIB"),
    ] = 4
    gpu_memory_utilization: Annotated[
        float,
        "share of the CUDA device that weights, activations and cache may take, in (0, 1]",
        Flag(CACHE, "SHARE"),
    ] = 0.9
    seed: Annotated[
        int | None,
        "seed of the random numbers for requests without a seed of their own; in Python None takes an arbitrary seed",
        Flag(ENGINE),
    ] = 0
    tensor_parallel_size: Annotated[
        int,
        "ranks that share the model: processes, each with its slice of the weights and of the cache. On CUDA each rank "
        "takes a device of its own",
        Flag(),
    ] = 1
    enforce_eager: Annotated[
        bool,
        "no CPU graphs (`pagedattn_ext.CPUGraph`). Without this option the model's steps of one token for each of up "
        "to 64 sequences run as graphs, and a profiler does not see their ops. On CUDA there are no graphs",
        Flag(ENGINE),
    ] = False
    trust_remote_code: Annotated[bool, "False, because the code of a checkpoint is never run"] = False
    preemption_mode: Annotated[
        str,
        "what becomes of the blocks of a request that makes room for another request: recompute drops the blocks and "
        "computes them again later; swap moves the blocks to host memory while swap_space lasts; auto swaps if the "
        "request has several sequences",
        Flag(ENGINE, "MODE"),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool,
        "let a prompt that begins like an earlier prompt take its blocks instead of computing them",
        Flag(CACHE, name="--no-prefix-caching"),
    ] = True
    scheduling_policy: Annotated[str, "fcfs (first come, first served) or priority", Flag(ENGINE, "POLICY")] = "fcfs"
    kv_cache_dtype: Annotated[
        str,
        "auto (the model's dtype), fp8 = fp8_e4m3, fp8_e5m2, or int8 (on the CPU); each takes half of 16 bits",
        Flag(CACHE, "DTYPE"),
    ] = "auto"
    kv_scales: Annotated[
        GivenScales | None,
        "numbers that divide the keys and values in an fp8 cache: a pair (k_scale, v_scale), a list with a pair for "
        "each layer (from `calibrate_kv_scales`), or a JSON file with either. Default: the checkpoint's, else 1",
        Flag(CACHE, "FILE"),
    ] = None
    speculation: Annotated[
        str | None,
        "ngram finds where the last few tokens of a sequence stood before, and guesses that the same tokens follow. "
        "The model verifies the guesses in one step: the tokens stay the same, and recurring text takes fewer steps. "
        "Default: no guesses",
        Flag(ENGINE, "METHOD"),
    ] = None
    num_speculative_tokens: Annotated[int, "most tokens guessed for a sequence in a step", Flag(ENGINE)] = 5
    quantization: Annotated[
        str | None,
        "int8 or int4 quantizes the weights of linear layers when they are loaded, only on the CPU. Default: the "
        "weights as the checkpoint has them, quantized or not",
        Flag(metavar="FORM"),
    ] = None
    max_beam_width: Annotated[
        int,
        "widest beam of a request (`SamplingParams.use_beam_search`). The work of a step for a beam grows with "
        "the square of its width, and other requests wait for the step",
        Flag(ENGINE),
    ] = 32
    distributed_executor_backend: Annotated[
        str,
        "where the ranks are, if there are several: mp takes CPUs of this machine; ray has a Ray cluster, which this "
        "machine is part of, reserve CPUs here or, if this machine has too few, on several machines",
        Flag(metavar="BACKEND"),
    ] = "mp"
    prefix_cache_dir: Annotated[
        str | PathLike[str] | None,
        "a directory for blocks of prefixes that several prompts begin with, and of registered prefixes: prompts find "
        "them after a restart, or when they have fallen out of the cache. On the CPU, for one rank, and for models "
        "that keep no states. Default: no blocks on disk",
        Flag(CACHE, "DIR"),
    ] = None
    prefix_cache_dir_size: Annotated[
        int,
        "most bytes that prefix_cache_dir takes; those that were not used for longest go (default: 10GiB)",
        Flag(CACHE, "SIZE", size),
    ] = 10 << 30
    allow_download: Annotated[
        bool,
        "download a model, or a tokenizer, that is the name of a repository of Hugging Face (HF_ENDPOINT, HF_TOKEN, "
        "HF_HOME) and is not in the cache as a whole. Without this option the network is never asked",
        Flag(),
    ] = False
    load_format: Annotated[
        str,
        "auto reads the checkpoint; dummy takes random weights of its shapes, to time a model: the directory needs its "
        "config.json alone, and a tokenizer where prompts are texts, as for the server and `pagedattn generate`",
        Flag(metavar="FORMAT"),
    ] = "auto"
    cpu_memory_utilization: Annotated[
        float | None,
        "on the CPU: the cache may take this share, in (0, 1], of the memory that is free once the model is loaded, "
        "within the limits of cgroups and RLIMIT_AS; replicas divide it. In place of kv_cache_memory, and on one rank",
        Flag(CACHE, "SHARE"),
    ] = None
    pipeline_parallel_size: Annotated[
        int,
        "stages that share the layers of the model, one after the other; each has tensor_parallel_size ranks. A step "
        "with many tokens runs in pieces, so that all stages work at once. On the CPU, for native families",
        Flag(),
    ] = 1

    @property
    def num_ranks(self) -> int:
        """The processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ArgumentError("kv_cache_memory", "None beside num_blocks, which says the same")
        if self.cpu_memory_utilization is not None:
            if self.num_blocks is not None or self.kv_cache_memory is not None:
                raise ArgumentError("cpu_memory_utilization", "None beside kv_cache_memory or num_blocks")
            if self.num_ranks != 1:
                expected = "None with several ranks, which would each take it: give kv_cache_memory"
                raise ArgumentError("cpu_memory_utilization", expected)
        self.create_engine_configs()  # the configs check all other options
        if self.prefix_cache_dir is not None and self.num_ranks > 1:
            raise ArgumentError("prefix_cache_dir", "None with several ranks", self.prefix_cache_dir)
        if self.kv_scales is not None and self.kv_cache_dtype not in FP8_DTYPES:
            raise ArgumentError("kv_scales", f"None with kv_cache_dtype {self.kv_cache_dtype}, which takes no scales")

    def create_engine_configs(self) -> EngineConfigs:
        """The options by the part of the engine that they are for. A max_model_len or num_blocks that is not given is
        UNBOUNDED until `engine_setup` puts in what model and memory allow."""
        return EngineConfigs(
            self._config(ModelConfig),
            self._config(
                CacheConfig,
                num_blocks=UNBOUNDED if self.num_blocks is None else self.num_blocks,
                kv_scales=None,  # the option may be a file: `choose_kv_scales` reads it
            ),
            self._config(ParallelConfig),
            self._config(
                SchedulerConfig,
                max_model_len=UNBOUNDED if self.max_model_len is None else self.max_model_len,
                policy=self.scheduling_policy,
            ),
        )

    def _config(self, config_type: Callable[..., Config], **others: object) -> Config:
        """A config whose fields are the options of the same names, but for `others`."""
        names = inspect.signature(config_type).parameters
        return config_type(**{name: value for name, value in vars(self).items() if name in names} | others)


OPTIONS = options_of(EngineArgs)
AsyncEngineArgs = EngineArgs  # by vLLM's name: the engine is the same


def takes_options(
    args_type: Callable[Options, Args],
) -> Callable[[Callable[[Self, Args], None]], Callable[Concatenate[Self, Options], None]]:
    """Let the method take what `args_type` takes instead: callers, type checkers and `inspect.signature` see each
    option."""

    def decorate(method: Callable[[Self, Args], None]) -> Callable[Concatenate[Self, Options], None]:
        @wraps(method)
        def with_options(self: Self, /, *args: Options.args, **kwargs: Options.kwargs) -> None:
            method(self, args_type(*args, **kwargs))

        this = next(iter(inspect.signature(method).parameters.values()))
        own = [each.replace(annotation=without_help(each)) for each in inspect.signature(args_type).parameters.values()]
        with_options.__signature__ = inspect.Signature([this, *own])  # type: ignore[attr-defined]
        return with_options

    return decorate


def without_help(option: inspect.Parameter) -> object:
    """The type of an option."""
    return option.annotation.__origin__ if hasattr(option.annotation, "__metadata__") else option.annotation
