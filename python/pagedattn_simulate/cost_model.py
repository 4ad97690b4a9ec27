"""How long a step takes: the bytes that it reads and the operations that it does, over what the hardware gives; and the
hardware that there are numbers for.

Kernels run one after the other, so their times add up. A kernel takes as long as its reads or its operations, whichever
takes longer (the roofline model: Williams et al., 2009).
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from pagedattn_serve.config import check_float, check_int, check_text, parse_json
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


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a model's times and memory depend on.

    num_parameters: all, which memory has to hold.
    num_layer_parameters: of what every token is multiplied with.
    num_head_parameters: of the last layer, to the vocabulary. Only tokens that sample are multiplied with it.
    num_kv_heads, head_size: where layers differ, the fewest and the largest.
    parameter_bytes: of one parameter. token_bytes: of the keys and values of one token, over all layers.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_parameters: int
    num_layer_parameters: int
    num_head_parameters: int
    max_model_len: int
    parameter_bytes: int
    token_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Of all parameters."""
        return self.num_parameters * self.parameter_bytes

    def num_shares(self, num_ranks: int) -> int:
        """Into how many parts so many ranks can cut keys and values: a head is not cut."""
        return min(num_ranks, self.num_kv_heads)


@dataclass(slots=True)
class StepWork:
    """What a step computes and moves, over all of its sequences.

    num_tokens: that run through the layers. num_samples: that run through the last layer.
    num_decode_keys: tokens that the decodes attend to. Each decode reads its own.
    num_prefill_keys: tokens whose keys and values the prompts read. A prompt's tokens read them together.
    num_prefill_pairs: for each token of a prompt, the tokens that it attends to.
    num_copied_tokens, num_swapped_tokens: of blocks that are copied within the cache, and from or to the host.
    """

    num_sequences: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    num_decode_keys: int = 0
    num_prefill_keys: int = 0
    num_prefill_pairs: int = 0
    num_copied_tokens: int = 0
    num_swapped_tokens: int = 0

    def add_decodes(self, num_sequences: int, num_keys: int) -> None:
        """A token of each, which attend to so many together, themselves among them."""
        self.num_sequences += num_sequences
        self.num_tokens += num_sequences
        self.num_samples += num_sequences
        self.num_decode_keys += num_keys

    def go_on(self) -> None:
        """Become the work of the next step, if both steps are nothing but decodes of the same sequences."""
        self.num_decode_keys += self.num_sequences

    def add_prompt(self, begin: int, num_tokens: int, num_samples: int) -> None:
        """Tokens [begin, begin + num_tokens) of a sequence, whose tokens before are in the cache."""
        end = begin + num_tokens
        self.num_sequences += 1
        self.num_tokens += num_tokens
        self.num_samples += num_samples
        self.num_prefill_keys += end
        self.num_prefill_pairs += (begin + 1 + end) * num_tokens // 2


class CostModel:
    """num_ranks: GPUs that share the model (tensor parallelism)."""

    def __init__(self, shape: ModelShape, hardware: Hardware, num_ranks: int = 1) -> None:
        self._hardware = hardware
        self._layer_bytes = shape.num_layer_parameters * shape.parameter_bytes / num_ranks
        self._layer_flops = 2 * shape.num_layer_parameters / num_ranks  # of a token
        self._head_bytes = shape.num_head_parameters * shape.parameter_bytes / num_ranks
        self._head_flops = 2 * shape.num_head_parameters / num_ranks
        self._token_bytes = shape.token_bytes / shape.num_shares(num_ranks)
        self._pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_size / num_ranks
        # Two sums a layer, after attention and after the MLP. A ring sends 2 (N - 1) / N of what is summed.
        self._num_sums = 2 * shape.num_layers if num_ranks > 1 else 0
        self._sum_bytes = 2 * (num_ranks - 1) / num_ranks * shape.hidden_size * shape.parameter_bytes  # of a token

    def seconds(self, work: StepWork) -> float:
        """Of one step."""
        hardware = self._hardware
        keys_per_second = hardware.attention_bytes / self._token_bytes
        pairs_per_second = hardware.attention_flops / self._pair_flops
        seconds = hardware.step_seconds + hardware.sequence_seconds * work.num_sequences
        if work.num_tokens:
            seconds += max(
                self._layer_bytes / hardware.weight_bytes, self._layer_flops * work.num_tokens / hardware.weight_flops
            )
            sum_seconds = self._sum_bytes * work.num_tokens / hardware.link_bytes
            seconds += self._num_sums * (hardware.link_seconds + sum_seconds)
        if work.num_samples:
            seconds += max(
                self._head_bytes / hardware.weight_bytes, self._head_flops * work.num_samples / hardware.weight_flops
            )
        seconds += max(work.num_decode_keys / keys_per_second, work.num_decode_keys / pairs_per_second)
        seconds += max(work.num_prefill_keys / keys_per_second, work.num_prefill_pairs / pairs_per_second)
        seconds += 2 * work.num_copied_tokens / keys_per_second  # read and written
        return seconds + work.num_swapped_tokens * self._token_bytes / hardware.host_bytes


# ---- hardware that there are numbers for -----------------------------------------------------------------------------

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
        content = parse_json(Path(name).read_text(encoding="utf-8"))
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
