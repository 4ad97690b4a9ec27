"""SamplingParams and the two configs: what they take, and what they say when it is wrong."""

import dataclasses
import functools
import math
from typing import Any

import pytest

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.sampling_params import MAX_LOGPROBS, SamplingParams, TokenRules, takes_prompt


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, -1, None)
    assert (params.max_tokens, params.stop, params.ignore_eos) == (16, (), False)
    assert (params.min_p, params.stop_token_ids, params.logprobs) == (0.0, (), None)
    assert (params.n, params.best_of, params.num_sequences) == (1, None, 1)
    assert (params.use_beam_search, params.length_penalty, params.early_stopping) == (False, 1.0, False)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.include_stop_str_in_output, params.min_tokens, params.prompt_logprobs) == (False, 0, None)
    assert (params.logit_bias, params.bad_words, params.allowed_token_ids) == ((), (), None)
    assert (params.skip_special_tokens, params.logits_processors, params.detokenize) == (True, (), True)
    assert not params.changes_logits


def test_arguments_go_by_name() -> None:
    """The first one was n in one vLLM, and is none in another."""
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        SamplingParams(2)  # type: ignore[misc]


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=0.0).greedy
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
        {"presence_penalty": -2},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 1e3},
        {"temperature": 1e9},
        {"min_tokens": 16},
        {"min_tokens": 99, "max_tokens": None},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": MAX_LOGPROBS},
        {"logit_bias": {0: -100, 5: 100}},
        {"logit_bias": {}},
        {"bad_words": []},
        {"allowed_token_ids": [0]},
        {"detokenize": False},
        {"detokenize": False, "stop": [], "bad_words": ["a"]},
        {"n": 3, "best_of": 3},
        {"temperature": 0, "n": 2, "best_of": 3},
        {"temperature": 0, "n": 2, "use_beam_search": True, "top_k": 0, "seed": 1},
        {"temperature": 0, "best_of": 2, "use_beam_search": True, "early_stopping": "never", "length_penalty": -1.5},
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
        ("temperature", 1e39),  # more than fp32 has
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("max_tokens", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", "\ud800"),
        ("bad_words", ["a", "\ud800"]),
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("stop_token_ids", [3, -1]),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("n", 0),
        ("best_of", 0),
        ("length_penalty", math.inf),
        ("early_stopping", "always"),
        ("presence_penalty", 2.01),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", 1e-39),
        ("min_tokens", -1),
        ("min_tokens", 17),  # max_tokens is 16
        ("prompt_logprobs", -1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: 10**400}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"three": 1.0}),
        ("logit_bias", {"\u0663": 1.0}),  # a digit, but not one of JSON's
        ("logit_bias", {"3": 1.0, 3: 1.0}),
        ("bad_words", ["a", ""]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [3, -1]),
        ("logprob_token_ids", [3, -1]),
        ("logprob_token_ids", [3] * 129),
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
        ("n", 1.0),
        ("best_of", True),
        ("use_beam_search", 1),
        ("length_penalty", "1"),
        ("early_stopping", 1),
        ("early_stopping", None),
        ("presence_penalty", "0"),
        ("frequency_penalty", None),
        ("repetition_penalty", True),
        ("include_stop_str_in_output", None),
        ("min_tokens", 1.0),
        ("prompt_logprobs", True),
        ("logit_bias", [3]),
        ("logit_bias", {3}),
        ("logit_bias", {3: "1"}),
        ("logit_bias", {3.0: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("bad_words", "a"),
        ("bad_words", [3]),
        ("skip_special_tokens", 1),
        ("allowed_token_ids", 3),
        ("allowed_token_ids", [3.0]),
        ("logprob_token_ids", 3),
        ("logits_processors", print),
        ("logits_processors", [3]),
        ("logits_processors", [lambda logits: logits]),
        ("logits_processors", [lambda a, b, c, d: d]),
        ("detokenize", None),
    ],
)
def test_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got "):
        SamplingParams(**{name: value})


BEAMS: dict[str, Any] = {"temperature": 0, "n": 2, "use_beam_search": True}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of: expected an int >= n, which is 3, got 2"),
        ({"length_penalty": 0.9}, "length_penalty: expected 1 without use_beam_search, got 0.9"),
        ({"early_stopping": True}, "early_stopping: expected False without use_beam_search, got True"),
        ({"early_stopping": "never"}, "early_stopping: expected False without use_beam_search, got 'never'"),
        (BEAMS | {"temperature": 1}, "temperature: expected 0, as use_beam_search draws nothing, got 1"),
        (BEAMS | {"top_p": 0.9}, "top_p: expected 1, as use_beam_search draws nothing, got 0.9"),
        (BEAMS | {"top_k": 5}, "top_k: expected -1, as use_beam_search draws nothing, got 5"),
        (BEAMS | {"logprob_token_ids": [1]}, r"logprob_token_ids: expected none with use_beam_search, got \[1\]"),
        (BEAMS | {"min_p": 0.1}, "min_p: expected 0, as use_beam_search draws nothing, got 0.1"),
        (BEAMS | {"n": 1}, "best_of: expected a beam width of 2 at least with use_beam_search, as one of width 1 is"),
        ({"detokenize": False, "stop": "end"}, r"detokenize: expected True, as stop strings \('end',\) are looked for"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: expected an int <= max_tokens, which is 4, got 5"),
    ],
)
def test_what_contradicts_itself(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams(**kwargs)


def test_how_many_sequences() -> None:
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=3, best_of=5).num_sequences == 5
    assert SamplingParams(**BEAMS, best_of=6).beam_width == 6
    assert SamplingParams(**BEAMS).beam_width == 2


def test_what_is_kept_is_the_request_s_own_and_can_be_hashed() -> None:
    bias, words, allowed = {"7": 1, "0": -2.5}, ["a", "b"], [3, 4]
    processors: list[Any] = [lambda output_token_ids, logits: logits]
    params = SamplingParams(logit_bias=bias, bad_words=words, allowed_token_ids=allowed, logits_processors=processors)
    same = dataclasses.replace(params)
    for given in (words, allowed, processors):
        given.clear()
    bias.clear()
    assert params.logit_bias == params.bias_of_token_ids == ((7, 1), (0, -2.5))
    assert (params.bad_words, params.allowed_token_ids) == (("a", "b"), (3, 4))
    assert params.logits_processors is not None and len(params.logits_processors) == 1
    assert params == same and hash(params) == hash(same)
    assert params != dataclasses.replace(params, logit_bias={7: 1})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"logit_bias": {0: 0}},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [1]},
        {"logits_processors": [lambda output_token_ids, logits: logits]},
    ],
)
def test_what_changes_logits(kwargs: dict[str, Any]) -> None:
    params = SamplingParams(**kwargs)
    assert params.changes_logits
    [name] = kwargs
    assert not dataclasses.replace(params, **{name: getattr(SamplingParams(), name)}).changes_logits


def test_token_ids_that_the_model_does_not_have() -> None:
    SamplingParams(logit_bias={9: 1}, allowed_token_ids=[0, 9]).check_token_ids(10)
    for name, value in (("logit_bias", {10: 1}), ("allowed_token_ids", [0, 10]), ("logprob_token_ids", [0, 10])):
        with pytest.raises(ValueError, match=rf"^{name}: expected an int in \[0, 9\], got 10"):
            SamplingParams(**{name: value}).check_token_ids(10)
    with pytest.raises(ValueError, match=r"^allowed_token_ids: expected at most 10 token ids, the vocabulary, got 11"):
        SamplingParams(allowed_token_ids=[3] * 11).check_token_ids(10)


def test_the_forms_of_a_logits_processor() -> None:
    class Processor:
        def __call__(self, prompt_token_ids: Any, output_token_ids: Any, logits: Any) -> Any: ...

    assert not takes_prompt(lambda output_token_ids, logits: logits)
    assert not takes_prompt(lambda output_token_ids, logits, scale=2.0: logits)  # its third is its own affair
    assert takes_prompt(lambda prompt_token_ids, output_token_ids, logits: logits)
    assert takes_prompt(Processor()) and not takes_prompt(functools.partial(Processor(), [1]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"end_token_ids": (3, -1)}, "end_token_ids: expected an int >= 0, got -1"),
        ({"bad_words": ((3,), ())}, "bad_words: expected one token id at least in each, got none"),
        ({"bad_words": ((3, -1),)}, "bad_words: expected an int >= 0, got -1"),
    ],
)
def test_wrong_token_rules(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TokenRules(**kwargs)


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
        ("block_size", 0, ValueError),
        ("block_size", 24, ValueError),
        ("block_size", 512, ValueError),
        ("block_size", 16.0, TypeError),
        ("num_host_blocks", -1, ValueError),
        ("num_host_blocks", 1.0, TypeError),
        ("watermark", -0.1, ValueError),
        ("watermark", 1.0, ValueError),
        ("watermark", math.nan, ValueError),
        ("watermark", None, TypeError),
    ],
)
def test_wrong_cache_config(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        CacheConfig(**{"num_blocks": 4, name: value})
