"""Errors about arguments: their fields, the message that the fields make, and what re-raising keeps."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedattn_serve import ArgumentError, ArgumentTypeError, EngineArgs, SamplingParams
from pagedattn_serve.errors import ArgumentImportError, BadArgument, with_place
from pagedattn_serve.output_parsing.output_format import check_parsers

MANY_DIGITS: Any = 10**5000  # Python writes 4,300


def test_fields_and_message() -> None:
    error = ArgumentError("top_k", "an int >= 1", 0)
    assert (error.argument, error.expected, error.got) == ("top_k", "an int >= 1", "0")
    assert str(error) == "top_k: expected an int >= 1, got 0"
    assert (
        str(ArgumentError("stop", "none, as there is no tokenizer")) == "stop: expected none, as there is no tokenizer"
    )


@pytest.mark.parametrize(
    ("kind", "base"),
    [(ArgumentError, ValueError), (ArgumentTypeError, TypeError), (ArgumentImportError, ImportError)],
)
def test_what_catches_them(kind: type[BadArgument], base: type[Exception]) -> None:
    with pytest.raises(base):
        raise kind("name", "X", "Y")


def test_another_name_and_a_place_keep_the_fields() -> None:
    error = ArgumentTypeError("prompt", "a string", "int")
    renamed = error.renamed("text")
    assert type(renamed) is ArgumentTypeError and str(renamed) == "text: expected a string, got int"
    placed = with_place(renamed, "prompt 3 of 7")
    assert str(placed) == "prompt 3 of 7: text: expected a string, got int"
    # A place that begins with the argument's name stands for the name.
    own = error.at("prompt 3 of 7")
    assert str(own) == "prompt 3 of 7: expected a string, got int" and own.argument == "prompt"
    assert str(own.renamed("text")) == "prompt 3 of 7: text: expected a string, got int"
    plain = with_place(ValueError("no such thing"), "prompt 3 of 7")
    assert type(plain) is ValueError and str(plain) == "prompt 3 of 7: no such thing"


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(ArgumentError("n", "an int", None).at("prompt 1 of 1")))
    assert type(error) is ArgumentError and vars(error) == vars(ArgumentError("n", "an int", "None", "prompt 1 of 1"))


def test_parameters_raise_them() -> None:
    with pytest.raises(ArgumentError, match=r"^top_p: expected a number in \(0, 1\], got 2$") as caught:
        SamplingParams(top_p=2)
    assert (caught.value.argument, caught.value.expected, caught.value.got) == ("top_p", "a number in (0, 1]", "2")
    with pytest.raises(ArgumentTypeError) as wrong_type:
        SamplingParams(n="two")  # type: ignore[arg-type]
    assert (wrong_type.value.argument, wrong_type.value.got) == ("n", "'two' of type str")


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "seed", "top_k", "logit_bias"])
def test_an_int_that_python_does_not_write(name: str) -> None:
    value: Any = -MANY_DIGITS
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got one of 16,610 bits$"):
        SamplingParams(**{name: {5: value} if name == "logit_bias" else value})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ignore_eos": MANY_DIGITS}, "ignore_eos: expected a bool, got one of 16,610 bits of type int"),
        ({"stop": MANY_DIGITS}, "stop: expected a list of strings, got one of 16,610 bits of type int"),
        ({"stop": [MANY_DIGITS]}, "stop: expected strings, got one of 16,610 bits of type int"),
        ({"stop": {MANY_DIGITS}}, "stop: expected a list of strings, got set of type set"),
        ({"bad_words": [MANY_DIGITS]}, "bad_words: expected strings, got one of 16,610 bits of type int"),
        ({"early_stopping": MANY_DIGITS}, 'early_stopping: expected True, False or "never", got one of 16,610 bits'),
        ({"output_kind": MANY_DIGITS}, "output_kind: expected a RequestOutputKind, got one of 16,610 bits of type int"),
        ({"logits_processors": MANY_DIGITS}, "logits_processors: expected a list of callables, got one of 16,610 bits"),
        ({"logit_bias": [(MANY_DIGITS, 1, 2)]}, "logit_bias: expected pairs of token id and bias, got tuple"),
        ({"logit_bias": [(MANY_DIGITS, 1)] * 2}, "logit_bias: expected each token id once, got one of 16,610 bits"),
        ({"max_tokens": MANY_DIGITS, "min_tokens": MANY_DIGITS + 1}, "min_tokens: expected an int <= max_tokens"),
        ({"n": MANY_DIGITS, "best_of": 5}, "best_of: expected an int >= n, which is one of 16,610 bits, got 5"),
        ({"skip_reading_prefix_cache": MANY_DIGITS}, "skip_reading_prefix_cache: expected .*, got one of 16,610 bits"),
    ],
)  # fmt: skip
def test_such_an_int_where_something_else_is_expected(params: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        SamplingParams(**params)


def test_a_long_value_is_cut() -> None:
    """A message of 100,000 characters would bury what was expected, and fill a log."""
    message = r"^max_tokens: expected an int, got 'xx+\.\.\. \(100,002 characters\) of type str$"
    with pytest.raises(TypeError, match=message) as caught:
        SamplingParams(max_tokens="x" * 100_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1100


@pytest.mark.parametrize(
    "make",
    [
        lambda value: SamplingParams(early_stopping=value),
        lambda value: EngineArgs("m", load_format=value),
        lambda value: EngineArgs("m", scheduling_policy=value),
        lambda value: EngineArgs("m", kv_cache_dtype=value),
        lambda value: EngineArgs("m", quantization=value),
        lambda value: EngineArgs("m", speculation=value),
        lambda value: check_parsers(value, "auto"),
    ],
)
def test_an_array_where_a_word_is_expected(make: Callable[[Any], object]) -> None:
    """numpy compares an array with a text element by element, and the answer is neither true nor false."""
    with pytest.raises(BadArgument, match=r": expected .*, got "):
        make(np.array(["a", "b"]))
