"""Tables of the rotary position embedding (Su et al., 2021), with the scalings that stretch it over longer contexts.

A pair of elements turns by `position * frequency`. A scaling lowers the frequencies:
- linear: all frequencies by the same factor (position interpolation, Chen et al., 2023);
- dynamic: no frequency within the original length; behind it, more the further away a position is ("NTK-aware");
- llama3: slow frequencies by the factor, fast ones not at all, with a smooth passage between them (LLaMA 3.1);
- yarn: the same idea with another passage; besides, the logits rise with the factor (Peng et al., 2023);
- longrope: each pair has two factors, one within the original length, one behind it (Ding et al., 2024).

The frequencies are those of transformers bit by bit: each is computed in the same order. At position 10,000, an angle
moves by up to 1e-3 if its frequency is off by one unit in the last place.
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor

# How many positions have their angles in memory at once, in fp32 and several times: a model may know millions.
POSITIONS_AT_ONCE = 1 << 16


def cos_sin_cache(config: Any, head_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Cosines, then sines, of every position: [max_position, head_size], made on the CPU in fp32, rounded to `dtype`.

    config: of a Hugging Face model, with `rope_parameters` or, before transformers 5, `rope_theta` and `rope_scaling`.

    Raises ValueError for a kind of scaling that is not in ROPE_TYPES, and for a parameter that is missing or wrong.
    """
    rope = rope_parameters(config)
    table = torch.empty(max_position(config), head_size, dtype=dtype, device="cpu")
    for first in range(0, len(table), POSITIONS_AT_ONCE):
        rows = table[first : first + POSITIONS_AT_ONCE]
        positions = torch.arange(first, first + len(rows), dtype=torch.float32, device="cpu")
        rows.copy_(cosines_and_sines(rope, head_size, config.max_position_embeddings, positions))
    return table


def cosines_and_sines(rope: dict[str, Any], head_size: int, length: int, positions: Tensor) -> Tensor:
    """fp32 [num_positions, head_size]. length: the positions that the model has seen without scaling."""
    attention_factor = 1.0
    match rope["rope_type"]:
        case "default":
            angles = torch.outer(positions, frequencies(rope["rope_theta"], head_size))
        case "linear":
            angles = torch.outer(positions, frequencies(rope["rope_theta"], head_size) / rope["factor"])
        case "dynamic":
            angles = positions[:, None] * dynamic_frequencies(rope, head_size, length, positions)
        case "llama3":
            angles = torch.outer(positions, llama3_frequencies(rope, head_size))
        case "yarn":
            angles = torch.outer(positions, yarn_frequencies(rope, head_size))
            attention_factor = yarn_attention_factor(rope)
        case "longrope":
            angles = positions[:, None] * longrope_frequencies(rope, head_size, positions)
            attention_factor = longrope_attention_factor(rope)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor


# The parameters that each kind of scaling needs; a kind that is not here is an error.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
# Kinds of scaling that divide by the logarithm of a parameter, so the parameter must not be 1.
DIVIDES_BY_LOGARITHM = {"yarn": "rope_theta", "longrope": "original_max_position_embeddings"}
# Parameters that must be numbers above 0, where a config has them.
POSITIVE = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)


def rope_parameters(config: Any) -> dict[str, Any]:
    """The parameters in one form, however the config writes them: "rope_type", "rope_theta", what the type needs."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # null says nothing, but "truncate": null says false.
    rope = {name: value for name, value in given.items() if value is not None or name == "truncate"}
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    if rope["rope_type"] not in list(ROPE_TYPES):  # a list, as the type may have no hash
        raise ValueError(f"rope_type: expected one of {', '.join(ROPE_TYPES)}, got {rope['rope_type']!r}")
    if rope["rope_type"] != "default" and rope.get("partial_rotary_factor", 1) != 1:  # models without scaling ignore it
        got = f"{rope['partial_rotary_factor']} with rope_type {rope['rope_type']!r}"
        raise ValueError(f"partial_rotary_factor: expected 1, as all of a head turns, got {got}")
    if length := getattr(config, "original_max_position_embeddings", None):  # beside the other parameters, as in Phi-3
        rope["original_max_position_embeddings"] = length
    rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    for name in ROPE_TYPES[rope["rope_type"]]:
        if name not in rope:
            raise ValueError(f"{name}: expected one for rope_type {rope['rope_type']!r}, got none")
    for name in rope.keys() & POSITIVE:
        if not is_positive(rope[name]):
            raise ValueError(f"{name}: expected a number > 0, got {rope[name]!r}")
    of_logarithm = DIVIDES_BY_LOGARITHM.get(rope["rope_type"])
    if of_logarithm is not None and rope[of_logarithm] == 1:
        raise ValueError(f"{of_logarithm}: expected another number than 1 for rope_type {rope['rope_type']!r}, got 1")
    if rope["rope_type"] in ("yarn", "longrope"):
        rope.setdefault("factor", config.max_position_embeddings / rope["original_max_position_embeddings"])
    return rope


def is_positive(value: Any) -> bool:
    """Whether it is a number above 0 that a float can hold; JSON has NaN, infinity and larger ints, too."""
    return isinstance(value, int | float) and 0 < value <= sys.float_info.max


def max_position(config: Any) -> int:
    """Positions that the scaled embedding reaches: the longest sequence of the model."""
    rope = rope_parameters(config)
    length: int = config.max_position_embeddings
    if rope["rope_type"] in ("linear", "dynamic"):
        return int(length * rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        return max(length, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return length


def frequencies(theta: float | Tensor, head_size: int) -> Tensor:
    """Without scaling, theta ** (-2i / head_size): fp32 [head_size / 2], or [n, head_size / 2] for theta [n, 1]."""
    return 1.0 / powers(theta, head_size)


def powers(theta: float | Tensor, head_size: int) -> Tensor:
    """theta ** (2i / head_size), in the shape of `frequencies`."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    result: Tensor = theta**exponents
    return result


def dynamic_frequencies(rope: dict[str, Any], head_size: int, original_length: int, positions: Tensor) -> Tensor:
    """Frequencies of each position, [num_positions, head_size / 2]: those of a sequence that ends at the position.

    So a token keeps its key when the sequence grows, as in Hugging Face's `generate` with its cache.
    """
    lengths = torch.clamp(positions + 1, min=original_length)
    stretch = rope["factor"] * lengths / original_length - (rope["factor"] - 1)
    # torch takes the power of a single number in fp64, and so does transformers with its single sequence length.
    theta = rope["rope_theta"] * (stretch.double() ** (head_size / (head_size - 2))).float()
    return frequencies(theta[:, None], head_size)


def llama3_frequencies(rope: dict[str, Any], head_size: int) -> Tensor:
    """[head_size / 2]. How much a frequency is lowered depends on how often it turns within the original length."""
    plain = frequencies(rope["rope_theta"], head_size)
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / plain)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share_of_plain = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share_of_plain) * plain / rope["factor"] + share_of_plain * plain


def yarn_frequencies(rope: dict[str, Any], head_size: int) -> Tensor:
    """[head_size / 2]. The passage is linear in the index of the pair."""
    theta, length = rope["rope_theta"], rope["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return head_size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(rope.get("beta_fast", 32)), pair_that_turns(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    pairs = torch.arange(head_size // 2, dtype=torch.float32, device="cpu")
    share_of_scaled = ((pairs - first) / ((last - first) or 1e-3)).clamp(0, 1)
    share_of_plain = 1 - share_of_scaled
    of_pairs = powers(theta, head_size)
    return 1.0 / (rope["factor"] * of_pairs) * (1 - share_of_plain) + 1.0 / of_pairs * share_of_plain


def yarn_attention_factor(rope: dict[str, Any]) -> float:
    """Queries and keys are multiplied by this number, which grows with the logarithm of the scaling's factor."""

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if "attention_factor" in rope:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return growth(rope["mscale"]) / growth(rope["mscale_all_dim"])
    return growth(1.0)


def longrope_frequencies(rope: dict[str, Any], head_size: int, positions: Tensor) -> Tensor:
    """Frequencies of each position, [num_positions, head_size / 2]: those of a sequence that ends at the position."""
    of_pairs = powers(rope["rope_theta"], head_size)
    names = ("short_factor", "long_factor")
    short, long = (1.0 / (pair_factors(rope, name, len(of_pairs)) * of_pairs) for name in names)
    return torch.where(positions[:, None] < rope["original_max_position_embeddings"], short, long)


def pair_factors(rope: dict[str, Any], name: str, num_pairs: int) -> Tensor:
    """fp32 [num_pairs]."""
    factors = rope[name]
    if not isinstance(factors, list) or len(factors) != num_pairs:
        got = f"{len(factors)}" if isinstance(factors, list) else f"{factors!r}"
        raise ValueError(f"{name}: expected a list of {num_pairs} numbers, one a pair of a head's elements, got {got}")
    if not all(is_positive(factor) for factor in factors):
        raise ValueError(f"{name}: expected numbers > 0, got {factors}")
    return torch.tensor(factors, dtype=torch.float32, device="cpu")


def longrope_attention_factor(rope: dict[str, Any]) -> float:
    """Queries and keys are multiplied by this number, at every position."""
    if "attention_factor" in rope:
        return float(rope["attention_factor"])
    growth = math.log(max(rope["factor"], 1.0)) / math.log(rope["original_max_position_embeddings"])
    return math.sqrt(1.0 + growth)
