"""What the scheduler and the cache may use, checked once at construction, and the checks that do it."""

import math
from dataclasses import dataclass
from pathlib import Path

from pagedattn_serve.errors import ArgumentError, ArgumentTypeError

# The small LLaMA that comes with the package (see its README.md).
DEMO_MODEL = str(Path(__file__).parent / "demo_model")

DEFAULT_WATERMARK = 0.01


def check_int(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise TypeError unless `value` is an int (a bool is not), ValueError unless it lies in [minimum, maximum]."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(name, "an int", f"{value!r} of type {type(value).__name__}")
    if value < minimum or (maximum is not None and value > maximum):
        expected = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
        raise ArgumentError(name, f"an int {expected}", value)


def check_float(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a float or an int (a bool is neither), ValueError unless it is finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ArgumentTypeError(name, "a number", f"{value!r} of type {type(value).__name__}")
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an int beyond what a float holds
        is_finite = False
    if not is_finite:
        raise ArgumentError(name, "a finite number", value)


def check_bool(name: str, value: object) -> bool:
    """`value`; raises TypeError unless it is a bool."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(name, "a bool", f"{value!r} of type {type(value).__name__}")
    return value


def check_text(name: str, value: object) -> str:
    """`value`; raises TypeError unless it is a string, ValueError unless UTF-8 can write it."""
    if not isinstance(value, str):
        raise ArgumentTypeError(name, "a string", type(value).__name__)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(name, "text that UTF-8 can write", error) from None
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of the choices."""
    if value not in choices:
        raise ArgumentError(name, f"one of {', '.join(choices)}", repr(value))


@dataclass(slots=True, frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one scheduler.

    max_model_len: most tokens a sequence may hold, prompt and output together; at least 2, one of each.
    max_num_seqs: most sequences running at once.
    max_num_batched_tokens: most tokens run through the model in one step, over all sequences. A longer prompt is a long
        one (`Scheduler`).
    policy: "fcfs", first come first served, or "priority", by priority and then by arrival.
    preemption_mode: what becomes of the blocks of a request that makes room: "recompute" drops them, "swap" moves them
        to host memory as long as there is room, "auto" swaps where a request has several sequences.
    speculation: "ngram", what followed the last time that a sequence said the same is verified in one step; or None.
    num_speculative_tokens: of a sequence and step, at most.
    max_beam_width: widest beam of a request; each step sorts more than the square of its width.
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
        if self.speculation is not None and self.speculation != "ngram":
            raise ArgumentError("speculation", 'None or "ngram"', repr(self.speculation))
        check_int("num_speculative_tokens", self.num_speculative_tokens, 1)
        check_int("max_beam_width", self.max_beam_width, 1)


@dataclass(slots=True, frozen=True, kw_only=True)
class CacheConfig:
    """Size of the paged key-value cache, in blocks.

    num_blocks: physical blocks in the pool.
    block_size: tokens per block; a power of two from 8 to 256.
    watermark: share of the blocks, in [0, 1) and rounded up, that admitting a sequence leaves free for those that run.
    num_host_blocks: blocks of the pool in host memory that others are swapped out to.
    enable_prefix_caching: whether blocks are found by their tokens.
    kv_cache_dtype: "auto" (the model's), "fp8" or "fp8_e4m3", "fp8_e5m2".
    kv_scales: (k_scale, v_scale) of each layer, for a cache in fp8; None: all are 1.
    """

    num_blocks: int
    block_size: int = 16
    watermark: float = DEFAULT_WATERMARK
    num_host_blocks: int = 0
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_scales: tuple[tuple[float, float], ...] | None = None

    def __post_init__(self) -> None:
        check_int("num_blocks", self.num_blocks, 1)
        check_int("block_size", self.block_size, 8, 256)
        if self.block_size & (self.block_size - 1):
            raise ArgumentError("block_size", "a power of two", self.block_size)
        check_int("num_host_blocks", self.num_host_blocks, 0)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_float("watermark", self.watermark)
        if not 0 <= self.watermark < 1:
            raise ArgumentError("watermark", "a share in [0, 1)", self.watermark)
        check_int("num_host_blocks", self.num_host_blocks, 0)
