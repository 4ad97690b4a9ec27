"""The tables of the rotary embedding, against the functions of transformers that its models are built with."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedattn_serve.models import rope
from pagedattn_serve.models.rope import cos_sin_cache

SCALINGS: dict[str, dict[str, Any]] = {
    "default": dict(),
    "linear": dict(factor=2.5),
    "dynamic": dict(factor=3.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    "yarn": dict(factor=4.0, original_max_position_embeddings=50),
    "longrope": dict(
        short_factor=[1.0 + 0.1 * i for i in range(10)],
        long_factor=[1.5 + i for i in range(10)],
        original_max_position_embeddings=50,
    ),
}


def make_config(rope_type: str, head_size: int = 20, max_position: int = 200, **parameters: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10000.0, **parameters},
    )


def reference(config: LlamaConfig, seq_len: Tensor | None = None) -> tuple[Tensor, float]:
    """Frequencies and attention factor, [rot_dim / 2]. seq_len: what "dynamic" and "longrope" look at."""
    if config.rope_parameters["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=seq_len)


def check(config: LlamaConfig, num_rows: int) -> None:
    """The whole table is that of the reference bit by bit, for a scaling that is the same at every position."""
    actual = cos_sin_cache(config, config.head_dim)
    frequencies, attention_factor = reference(config)
    positions = torch.arange(num_rows, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    assert actual.dtype == torch.float32 and actual.device.type == "cpu" and actual.is_contiguous()
    assert torch.equal(actual, torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor)


thetas = st.sampled_from([100.0, 10000.0, 500000.0, 1e6])
head_sizes = st.integers(2, 64).map(lambda half: 2 * half)
factors = st.floats(1.0, 32.0)
lengths = st.integers(8, 500)


@given(theta=thetas, head_size=head_sizes, length=lengths)
def test_default(theta: float, head_size: int, length: int) -> None:
    check(make_config("default", head_size, length, rope_theta=theta), length)


@given(theta=thetas, head_size=head_sizes, length=lengths, factor=factors)
def test_linear(theta: float, head_size: int, length: int, factor: float) -> None:
    config = make_config("linear", head_size, length, rope_theta=theta, factor=factor)
    check(config, int(length * factor))


@given(theta=thetas, head_size=head_sizes, length=lengths, factor=factors)
def test_dynamic(theta: float, head_size: int, length: int, factor: float) -> None:
    """A row is that of a sequence that ends there: what `generate` computes for its newest token."""
    config = make_config("dynamic", head_size, length, rope_theta=theta, factor=factor)
    check_dynamic(config, int(length * factor), step=37)


def test_dynamic_within_the_original_length_and_behind_it() -> None:
    config = make_config("dynamic", head_size=12, max_position=30, factor=4.0)
    check_dynamic(config, 120, step=1)
    actual = cos_sin_cache(config, 12)
    unscaled = cos_sin_cache(make_config("default", head_size=12, max_position=120), 12)
    assert torch.equal(actual[:30], unscaled[:30]) and not torch.equal(actual[30], unscaled[30])


def check_dynamic(config: LlamaConfig, num_rows: int, step: int) -> None:
    """Every `step`-th row, and those where the scaling begins."""
    actual = cos_sin_cache(config, config.head_dim)
    assert actual.shape == (num_rows, config.head_dim) and actual.dtype == torch.float32
    begin = config.max_position_embeddings
    positions = [p for p in range(num_rows) if p % step == 0 or begin - 2 < p < begin + 2 or p == num_rows - 1]
    angles = torch.stack([p * reference(config, seq_len=torch.tensor(p + 1))[0] for p in positions])
    assert torch.equal(actual[positions], torch.cat((angles.cos(), angles.sin()), dim=1))


@given(
    theta=thetas,
    head_size=head_sizes,
    factor=factors,
    original=st.integers(16, 200),
    low=st.floats(0.5, 2.0),
    width=st.floats(0.5, 8.0),
)
def test_llama3(theta: float, head_size: int, factor: float, original: int, low: float, width: float) -> None:
    config = make_config(
        "llama3",
        head_size,
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=low + width,
    )
    check(config, 200)


def test_the_three_bands_of_llama3() -> None:
    """Fast pairs as they are, slow ones divided by the factor, and at least one between."""
    plain, _ = reference(make_config("default", head_size=32))
    row = cos_sin_cache(make_config("llama3", head_size=32, **SCALINGS["llama3"]), 32)[1]
    ratios = (torch.atan2(row[16:], row[:16]) / plain).tolist()
    wavelengths = (2 * torch.pi / plain).tolist()
    kinds = ["fast" if w < 64 / 4 else "slow" if w > 64 else "between" for w in wavelengths]
    assert set(kinds) == {"fast", "between", "slow"}
    for ratio, kind in zip(ratios, kinds, strict=True):
        if kind == "between":
            assert 1.01 / 8 < ratio < 0.99
        else:
            assert ratio == pytest.approx(1.0 if kind == "fast" else 1 / 8, rel=1e-4)


@given(
    theta=thetas,
    head_size=head_sizes,
    factor=factors,
    length=lengths,
    original=st.integers(8, 200),
    options=st.fixed_dictionaries(
        {},
        optional={
            "attention_factor": st.floats(0.5, 2.0),
            "beta_fast": st.floats(8.0, 40.0),
            "beta_slow": st.floats(0.5, 4.0),
            "mscale": st.sampled_from([0.0, 0.5, 0.707, 1.0]),
            "mscale_all_dim": st.sampled_from([0.0, 0.5, 0.707, 1.0]),
            "truncate": st.sampled_from([True, False, None]),  # null is false
        },
    ),
)
def test_yarn(
    theta: float, head_size: int, factor: float, length: int, original: int, options: dict[str, float | bool | None]
) -> None:
    config = make_config(
        "yarn",
        head_size,
        length,
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        **options,
    )
    check(config, max(length, int(original * factor)))


def test_yarn_whose_truncate_is_null() -> None:
    """As false, while a scaling without the parameter truncates."""
    tables = [cos_sin_cache(make_config("yarn", factor=4.0, **option), 20) for option in ({}, {"truncate": None})]
    assert not torch.equal(*tables)
    check(make_config("yarn", factor=4.0, truncate=None), 800)


def test_yarn_without_a_factor() -> None:
    """It is the ratio of the lengths, as in the configs of DeepSeek-V3."""
    check(make_config("yarn", factor=None, original_max_position_embeddings=50), 200)


def test_yarn_without_an_original_length() -> None:
    check(make_config("yarn", max_position=50, factor=3.0), 150)


@given(
    theta=thetas,
    half=st.integers(1, 32),
    length=lengths,
    original=st.integers(8, 200),
    options=st.fixed_dictionaries({}, optional={"attention_factor": st.floats(0.5, 2.0), "factor": factors}),
    data=st.data(),
)
def test_longrope(
    theta: float, half: int, length: int, original: int, options: dict[str, float], data: st.DataObject
) -> None:
    """Rows within the original length are those of a short sequence, rows behind it those of a long one."""
    pair_factors = st.lists(st.floats(0.5, 60.0), min_size=half, max_size=half)
    config = make_config(
        "longrope",
        2 * half,
        length,
        rope_theta=theta,
        short_factor=data.draw(pair_factors),
        long_factor=data.draw(pair_factors),
        original_max_position_embeddings=original,
        **options,
    )
    actual = cos_sin_cache(config, 2 * half)
    num_rows = max(length, int(original * options.get("factor", length / original)))
    positions = torch.arange(num_rows, dtype=torch.float32)
    short, attention_factor = reference(config, seq_len=torch.tensor(original))
    long, _ = reference(config, seq_len=torch.tensor(original + 1))
    angles = torch.where(positions[:, None] < original, torch.outer(positions, short), torch.outer(positions, long))
    assert actual.shape == (num_rows, 2 * half) and actual.dtype == torch.float32
    assert torch.equal(actual, torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor)


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_a_table_in_parts(rope_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long table is made in parts, so that fp32 angles of millions of positions are never in memory at once."""
    config = make_config(rope_type, **SCALINGS[rope_type])
    whole = cos_sin_cache(config, 20)
    monkeypatch.setattr(rope, "POSITIONS_AT_ONCE", 64)
    assert torch.equal(cos_sin_cache(config, 20), whole)
    assert torch.equal(cos_sin_cache(config, 20, torch.bfloat16), whole.bfloat16())


def test_partial_rotary_factor() -> None:
    """All of a head turns: it is ignored without scaling, and an error with it, where Hugging Face's models fail."""
    check(make_config("default", partial_rotary_factor=0.5), 200)
    check(make_config("linear", partial_rotary_factor=1.0, **SCALINGS["linear"]), 500)
    for rope_type in SCALINGS.keys() - {"default"}:
        config = make_config(rope_type, partial_rotary_factor=0.5, **SCALINGS[rope_type])
        with pytest.raises(ValueError, match=rf"^partial_rotary_factor: expected 1, .*, got 0\.5 .*'{rope_type}'"):
            cos_sin_cache(config, 20)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("rope_type", SCALINGS)
def test_older_configs(rope_type: str, key: str) -> None:
    """`rope_theta` beside `rope_scaling`, as transformers 4 has them."""
    config = SimpleNamespace(
        max_position_embeddings=200, rope_theta=500.0, rope_scaling={key: rope_type, **SCALINGS[rope_type]}
    )
    expected = cos_sin_cache(make_config(rope_type, **SCALINGS[rope_type], rope_theta=500.0), 20)
    assert torch.equal(cos_sin_cache(config, 20), expected)


@pytest.mark.parametrize("fields", [dict(), dict(rope_scaling=None), dict(rope_parameters=None, rope_theta=None)])
def test_configs_that_say_nothing(fields: dict[str, Any]) -> None:
    config = SimpleNamespace(max_position_embeddings=200, **fields)
    assert torch.equal(cos_sin_cache(config, 20), cos_sin_cache(make_config("default"), 20))


def test_the_config_is_left_as_it_is() -> None:
    scaling = dict(type="yarn", factor=4.0, attention_factor=None)
    config = SimpleNamespace(max_position_embeddings=200, rope_theta=500.0, rope_scaling=dict(scaling))
    cos_sin_cache(config, 20)
    assert vars(config) == dict(max_position_embeddings=200, rope_theta=500.0, rope_scaling=scaling)


@pytest.mark.parametrize("rope_type", ["proportional", "su", "mrope", "Linear", "", ["linear"], {"linear": 2.0}])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_unknown_types(rope_type: object, field: str) -> None:
    config = SimpleNamespace(max_position_embeddings=200, **{field: dict(rope_type=rope_type, factor=2.0)})
    with pytest.raises(ValueError, match=re.escape(f"longrope, got {rope_type!r}")):
        cos_sin_cache(config, 20)


@pytest.mark.parametrize(
    ("rope_type", "name"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
        ("longrope", "short_factor"),
        ("longrope", "long_factor"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_parameters_that_are_missing(rope_type: str, name: str, is_there: bool) -> None:
    """Not there, or None, which is the same."""
    scaling = {"rope_type": rope_type, **SCALINGS[rope_type], name: None}
    if not is_there:
        del scaling[name]
    with pytest.raises(ValueError, match=rf"^{name}: .*'{rope_type}'"):
        cos_sin_cache(SimpleNamespace(max_position_embeddings=200, rope_scaling=scaling), 20)


@pytest.mark.parametrize(
    ("rope_type", "parameters", "message"),
    [
        ("default", dict(rope_theta="10000"), "rope_theta: expected a number > 0, got '10000'"),
        ("default", dict(rope_theta=-1), "rope_theta: expected a number > 0, got -1"),
        ("default", dict(rope_theta=float("nan")), "rope_theta: expected a number > 0, got nan"),
        ("default", dict(rope_theta=10**400), "rope_theta: expected a number > 0, got 10000"),
        ("linear", dict(factor=float("inf")), "factor: expected a number > 0, got inf"),
        ("linear", dict(factor="two"), "factor: expected a number > 0, got 'two'"),
        ("dynamic", dict(factor=0), "factor: expected a number > 0, got 0"),
        ("llama3", dict(low_freq_factor=[1.0]), r"low_freq_factor: expected a number > 0, got \[1.0\]"),
        ("yarn", dict(rope_theta=1.0), "rope_theta: expected another number than 1 for rope_type 'yarn', got 1"),
        ("longrope", dict(original_max_position_embeddings=1), "original_max_position_embeddings: .* than 1 .*, got 1"),
        ("yarn", dict(original_max_position_embeddings="50"), "original_max_position_embeddings: .* '50'"),
        ("longrope", dict(short_factor=[1.0] * 9), "short_factor: expected a list of 10 numbers, .*, got 9"),
        ("longrope", dict(long_factor=2.0), "long_factor: expected a list of 10 numbers, .*, got 2.0"),
        ("longrope", dict(long_factor=["x"] * 10), "long_factor: expected numbers > 0, got"),
        ("longrope", dict(long_factor=[10**400] * 10), "long_factor: expected numbers > 0, got"),
    ],
)
def test_parameters_that_are_wrong(rope_type: str, parameters: dict[str, Any], message: str) -> None:
    scaling = {"rope_type": rope_type, **SCALINGS[rope_type], **parameters}
    with pytest.raises(ValueError, match=f"^{message}"):
        cos_sin_cache(SimpleNamespace(max_position_embeddings=200, rope_parameters=scaling), 20)
