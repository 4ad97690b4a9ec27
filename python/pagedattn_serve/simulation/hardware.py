"""What a step's time depends on of the hardware: presets, and files of the same form."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from pagedattn_serve.config import check_float, check_int, check_text
from pagedattn_serve.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU, or the CPU. Bytes and operations are per second, as kernels reach them; `source` says whether anybody
    has measured that.

    memory: bytes, for weights and cache.
    weight_bytes, weight_flops: of linear layers.
    attention_bytes, attention_flops: of attention, which reads keys and values from blocks.
    host_bytes: between the cache and host memory, when blocks are swapped.
    link_bytes: to another GPU, in one direction. link_seconds: what an all-reduce takes at least.
    step_seconds: what every step takes beside its kernels: scheduling, inputs, launches.
    sequence_seconds: what each sequence of a step adds: sampling, outputs.
    source: where the numbers come from.
    """

    name: str
    memory: int
    weight_bytes: float
    weight_flops: float
    attention_bytes: float
    attention_flops: float
    host_bytes: float
    link_bytes: float
    link_seconds: float
    step_seconds: float
    sequence_seconds: float
    source: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is str:
                check_text(field.name, value)
            elif field.type is int:
                check_int(field.name, value, 1)
            elif field.name.endswith("_seconds"):
                check_float(field.name, value, 0)
            else:
                check_float(field.name, value, 0, but=0)


# A kernel that only reads memory got 4375 of the 4800 GB/s in the data sheet, on one H200. It is not a kernel of this
# project, and nobody has measured these kernels on a GPU here. Nobody has measured the rest either.
SHARE_OF_BANDWIDTH = 0.91
SHARE_OF_FLOPS = 0.6
DATA_SHEET = (
    f"data sheet; of it kernels are assumed to reach {SHARE_OF_BANDWIDTH:.0%} of the bandwidth (a plain read of memory "
    f"on one H200 did, not this project's kernels) and {SHARE_OF_FLOPS:.0%} of the operations; the times of a step and "
    "of a sum are assumed"
)


def _gpu(name: str, memory: int, bandwidth: float, flops: float, link_bytes: float, host_bytes: float) -> Hardware:
    """From the numbers of a data sheet; flops: dense, in 16 bits."""
    return Hardware(
        name=name,
        memory=memory,
        weight_bytes=bandwidth * SHARE_OF_BANDWIDTH,
        weight_flops=flops * SHARE_OF_FLOPS,
        attention_bytes=bandwidth * SHARE_OF_BANDWIDTH,
        attention_flops=flops * SHARE_OF_FLOPS,
        host_bytes=host_bytes,
        link_bytes=link_bytes,
        link_seconds=20e-6,
        step_seconds=2e-3,
        sequence_seconds=5e-6,
        source=DATA_SHEET,
    )


# As `bench/serving.py cost-model --format bfloat16 --hardware FILE` writes it. Between ranks nothing was measured.
_CPU = Hardware(
    name="cpu",
    memory=23 << 30,
    weight_bytes=2.29e10,
    weight_flops=1.02e11,
    attention_bytes=1.19e10,
    attention_flops=1.92e11,
    host_bytes=5.9e9,
    link_bytes=2.29e10,
    link_seconds=60e-6,
    step_seconds=3.95e-3,
    sequence_seconds=0.0,
    source="fitted to steps of the engine in bf16 on one thread of an Intel Xeon (Sapphire Rapids) with 2 CPUs",
)

PRESETS = {
    each.name: each
    for each in (
        _gpu("A100-40", 40 << 30, 1.555e12, 312e12, 300e9, 25e9),
        _gpu("A100-80", 80 << 30, 2.039e12, 312e12, 300e9, 25e9),
        _gpu("H100", 80 << 30, 3.35e12, 989e12, 450e9, 50e9),
        _gpu("H200", 141 * 10**9, 4.8e12, 989e12, 450e9, 50e9),
        _CPU,
    )
}


def find_hardware(name: str) -> Hardware:
    """A preset, or the JSON file of this name with the fields of `Hardware`. Raises ArgumentError if it is neither."""
    if name in PRESETS:
        return PRESETS[name]
    expected = f"{', '.join(PRESETS)}, or a JSON file"
    try:
        content = json.loads(Path(name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError("hardware", expected, name) from None
    except OSError as error:
        raise ArgumentError("hardware", expected, f"{name or 'an empty text'} ({error.strerror})") from None
    except ValueError as error:
        raise ArgumentError("hardware", f"{expected} that can be read", f"{name}: {error}") from None
    names = {field.name for field in dataclasses.fields(Hardware)}
    if not isinstance(content, dict) or content.keys() != names:
        got = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise ArgumentError("hardware", f"an object with {', '.join(sorted(names))} in {name}", got)
    return Hardware(**content)
