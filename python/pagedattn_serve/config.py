"""What each part of the engine may use, checked once at construction, and the checks that do it.

The names of dtypes stand here without torch, so that options can be checked, and help printed, before torch is loaded.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from pagedattn_serve.errors import ArgumentError, ArgumentFileError, ArgumentOSError, ArgumentTypeError, shown

# The small LLaMA that comes with the package (see its README.md).
DEMO_MODEL = str(Path(__file__).parent / "demo_model")

DEFAULT_WATERMARK = 0.01
UNBOUNDED = sys.maxsize  # a limit that the options leave to the model or to the memory

# Names of an option, and torch's names for the dtypes.
DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",  # this name and the next are torch's and vLLM's as well
    "half": "float16",
}
FP8_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
CACHE_DTYPES = {**FP8_DTYPES, "int8": "int8"}
UTF8_TEXT = "text that UTF-8 can write"  # what an error expects of a text with a lone surrogate
MAX_RANKS = 64  # of a group that shares memory
MAX_REPLICAS = 256  # of an engine, each a process
QUANTIZATIONS = ("int8", "int4")
LOAD_FORMATS = ("auto", "dummy")


def check_int(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise TypeError unless `value` is an int (a bool is not), ValueError unless it lies in [minimum, maximum]."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(name, "an int", f"{shown(value)} of type {type(value).__name__}")
    if value < minimum or (maximum is not None and value > maximum):
        expected = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
        raise ArgumentError(name, f"an int {expected}", value)


def check_float(
    name: str, value: object, minimum: float = -math.inf, maximum: float = math.inf, *, but: float | None = None
) -> None:
    """Raise TypeError unless `value` is a float or an int (a bool is neither), ValueError unless it is finite and lies
    in [minimum, maximum]. but: one of the two, if the range is without it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ArgumentTypeError(name, "a number", f"{shown(value)} of type {type(value).__name__}")
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an int beyond what a float holds
        is_finite = False
    if not is_finite:
        raise ArgumentError(name, "a finite number", value)
    if not minimum <= value <= maximum or value == but:
        begin, end = "(" if but == minimum else "[", ")" if but == maximum else "]"
        inside = f"in {begin}{minimum:g}, {maximum:g}{end}"
        above = f"> {minimum:g}" if but == minimum else f">= {minimum:g}"
        raise ArgumentError(name, f"a number {above if maximum == math.inf else inside}", value)


def check_bool(name: str, value: object) -> bool:
    """`value`; raises TypeError unless it is a bool."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(name, "a bool", f"{shown(value)} of type {type(value).__name__}")
    return value


def check_text(name: str, value: object) -> str:
    """`value`; raises TypeError unless it is a string, ValueError unless UTF-8 can write it."""
    if not isinstance(value, str):
        raise ArgumentTypeError(name, "a string", type(value).__name__)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(name, UTF8_TEXT, error) from None
    return value


def read_file(name: str, file: str | PathLike[str]) -> bytes:
    """What is in a file. Raises an OSError, with the argument's name, for a file that cannot be read."""
    try:
        return Path(file).expanduser().read_bytes()
    except FileNotFoundError as error:
        raise ArgumentFileError(name, "a file that can be read", f"{file} ({error.strerror})") from None
    except OSError as error:
        raise ArgumentOSError(name, "a file that can be read", f"{file} ({error.strerror})") from None


def read_text(name: str, file: str | PathLike[str]) -> str:
    """The text in a file. Raises as `read_file` does, and ValueError for what is not UTF-8."""
    try:
        return read_file(name, file).decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(name, f"UTF-8 in {file}", error) from None


def parse_json(text: str, is_strict: bool = False) -> Any:
    """What JSON says. Raises ValueError for what is none, and for what is nested too deeply.

    is_strict: NaN and Infinity are none; Python writes them nevertheless, so they are in checkpoints.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant if is_strict else None)
    except RecursionError:
        raise ValueError("lists or objects that are nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(name, f"one of {', '.join(choices)}", shown(value))


def check_dtype(dtype: object) -> str:
    """The name of a dtype of a model, which may come as torch's, or "auto"; raises ArgumentError for any other."""
    name = shown(dtype, str).removeprefix("torch.")
    if name not in ("auto", *DTYPES):
        raise ArgumentError("dtype", f"auto, {', '.join(DTYPES)}", name or "an empty text")
    return name


def check_kv_cache_dtype(name: object) -> None:
    """Raise ArgumentError unless it is the name of a dtype of the cache."""
    if not isinstance(name, str) or name not in ("auto", *CACHE_DTYPES):
        raise ArgumentError("kv_cache_dtype", f"auto, {', '.join(CACHE_DTYPES)}", shown(name, str) or "an empty text")


def check_quantization(quantization: object) -> None:
    """Raise ArgumentError unless it is None or one of QUANTIZATIONS."""
    if quantization is not None and (not isinstance(quantization, str) or quantization not in QUANTIZATIONS):
        expected = f"None, {' or '.join(QUANTIZATIONS)} (leave it out for a quantized checkpoint)"
        raise ArgumentError("quantization", expected, shown(quantization))


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelConfig:
    """Which model, how it is loaded, and where it runs. The fields are those of `EngineArgs`."""

    model: str | PathLike[str]
    tokenizer: str | PathLike[str] | None = None
    dtype: Any = "auto"
    device: str = "auto"
    quantization: str | None = None
    seed: int | None = 0
    enforce_eager: bool = False
    trust_remote_code: bool = False
    load_format: str = "auto"
    allow_download: bool = False

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ArgumentError("device", "auto, cpu, cuda or cuda:N", shown(self.device))
        check_quantization(self.quantization)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        check_bool("enforce_eager", self.enforce_eager)
        check_bool("allow_download", self.allow_download)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        if check_bool("trust_remote_code", self.trust_remote_code):
            raise ArgumentError("trust_remote_code", "False, as running a checkpoint's own code is not supported")


@dataclass(slots=True, frozen=True, kw_only=True)
class ParallelConfig:
    """How many processes share the model."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str = "mp"

    def __post_init__(self) -> None:
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        check_int("pipeline_parallel_size", self.pipeline_parallel_size, 1, MAX_RANKS // self.tensor_parallel_size)
        check_choice("distributed_executor_backend", self.distributed_executor_backend, ("mp", "ray"))

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(slots=True, frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one scheduler. The fields are those of `EngineArgs`; policy is its scheduling_policy.

    max_model_len is at least 2: a token of the prompt and one of the output.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    policy: str = "fcfs"
    preemption_mode: str = "auto"
    speculation: str | None = None
    num_speculative_tokens: int = 5
    max_beam_width: int = 32

    def __post_init__(self) -> None:
        check_int("max_model_len", self.max_model_len, 2)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_choice("scheduling_policy", self.policy, ("fcfs", "priority"))
        check_choice("preemption_mode", self.preemption_mode, ("auto", "recompute", "swap"))
        is_ngram = isinstance(self.speculation, str) and self.speculation == "ngram"
        if self.speculation is not None and not is_ngram:
            raise ArgumentError("speculation", 'None or "ngram"', shown(self.speculation))
        check_int("num_speculative_tokens", self.num_speculative_tokens, 1)
        check_int("max_beam_width", self.max_beam_width, 1)


@dataclass(slots=True, frozen=True, kw_only=True)
class CacheConfig:
    """Size of the paged key-value cache, in blocks, and what bounds the size where num_blocks is UNBOUNDED.

    The fields are those of `EngineArgs`, but for six:

    watermark: share of the blocks, in [0, 1) and rounded up, that admitting a sequence leaves free for those that run.
    num_host_blocks: blocks of the pool in host memory that others are swapped out to.
    windows: of each group of layers, which has block tables of its own: the tokens up to a row's own that its layers
        see, at most; None: all.
    kv_scales: (k_scale, v_scale) of each layer with a cache of its own, for a cache in fp8; None: all are 1.
    num_state_slots: sequences whose states have room, for a model whose layers keep a state; 0: the model keeps none.
    num_host_state_slots: the same in host memory, for sequences that are swapped out.
    """

    num_blocks: int
    block_size: int = 16
    watermark: float = DEFAULT_WATERMARK
    num_host_blocks: int = 0
    windows: tuple[int | None, ...] = (None,)
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_memory_utilization: float | None = None
    swap_space: float = 4
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_scales: tuple[tuple[float, float], ...] | None = None
    num_state_slots: int = 0
    num_host_state_slots: int = 0
    prefix_cache_dir: str | PathLike[str] | None = None
    prefix_cache_dir_size: int = 10 << 30

    def __post_init__(self) -> None:
        check_int("num_blocks", self.num_blocks, 1)
        check_int("block_size", self.block_size, 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ArgumentError("block_size", "a power of two", self.block_size)
        check_int("num_host_blocks", self.num_host_blocks, 0)
        check_int("num_state_slots", self.num_state_slots, 0)
        check_int("num_host_state_slots", self.num_host_state_slots, 0)
        for window in self.windows:
            if window is not None:
                check_int("windows", window, 1)
        if self.kv_cache_memory is not None:
            check_int("kv_cache_memory", self.kv_cache_memory, 1)
        check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, but=0)
        if self.cpu_memory_utilization is not None:
            check_float("cpu_memory_utilization", self.cpu_memory_utilization, 0, 1, but=0)
        check_float("swap_space", self.swap_space, 0)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_int("prefix_cache_dir_size", self.prefix_cache_dir_size, 1)
        if self.prefix_cache_dir is not None:
            if not isinstance(self.prefix_cache_dir, str | PathLike):
                raise ArgumentTypeError("prefix_cache_dir", "a path", type(self.prefix_cache_dir).__name__)
            if self.prefix_cache_dir == "":  # as a shell makes of a variable that is not set; not the working directory
                raise ArgumentError("prefix_cache_dir", "a directory", "an empty text")
            if not self.enable_prefix_caching:
                raise ArgumentError("prefix_cache_dir", "None without prefix caching", self.prefix_cache_dir)
        check_kv_cache_dtype(self.kv_cache_dtype)
        if self.kv_cache_dtype == "int8" and self.block_size < 8:
            raise ArgumentError("block_size", "at least 8 with kv_cache_dtype int8", self.block_size)
        check_float("watermark", self.watermark, 0, 1, but=1)

    @property
    def swap_bytes(self) -> int:
        """swap_space in bytes."""
        return int(min(self.swap_space * (1 << 30), UNBOUNDED))  # an int holds no infinity
