"""generation_config.json: the defaults of sampling, what is not honoured, and which tokens end an output."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, greedy_reference
from engine_runs import completions, token_ids

from pagedattn_serve import DEMO_MODEL, LLM, LLMEngine, SamplingParams
from pagedattn_serve.loading.generation_config import eos_token_ids, generation_defaults


def write(directory: Path, fields: Any) -> str:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    (directory / "generation_config.json").write_text(text)
    return str(directory)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, dict()),
        ({"do_sample": True}, dict()),
        ({"do_sample": None, "temperature": None, "max_new_tokens": None}, dict()),
        ({"do_sample": False}, dict(temperature=0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, dict(temperature=0, top_p=0.9)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, dict(temperature=0.6, top_p=0.9)),  # as LLaMA 3 has it
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, dict(temperature=0.7, top_k=20, top_p=0.8)),
        ({"min_p": 0.1, "top_k": 0}, dict(min_p=0.1, top_k=0)),
        ({"max_new_tokens": 99}, dict(max_tokens=99)),
        ({"max_new_tokens": 99, "max_length": 20}, dict(max_tokens=99)),
        ({"max_length": 4096}, dict(max_tokens=None)),
        ({"repetition_penalty": 1.0, "num_beams": 1, "min_length": 0, "early_stopping": True}, dict()),
        ({"repetition_penalty": 1.05}, dict(repetition_penalty=1.05)),  # as Qwen2 has it
        ({"num_return_sequences": 3}, dict(n=3)),
        ({"stop_strings": "end"}, dict(stop="end")),
        ({"stop_strings": ["a", "b"]}, dict(stop=["a", "b"])),
        ({"min_new_tokens": 5}, dict(min_tokens=5)),
        ({"min_new_tokens": 40}, dict(min_tokens=40, max_tokens=40)),  # more than our own default
        ({"min_new_tokens": 40, "max_new_tokens": 50}, dict(min_tokens=40, max_tokens=50)),
        ({"min_new_tokens": 40, "max_length": 4096}, dict(min_tokens=40, max_tokens=None)),
        ({"sequence_bias": [[[7], 2.5], [[3], -1]]}, dict(logit_bias={7: 2.5, 3: -1})),
        ({"length_penalty": 0.5, "early_stopping": True}, dict()),
        ({"num_beams": 4, "do_sample": False}, dict(temperature=0, best_of=4, use_beam_search=True)),
        (
            {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": "never"}
            | {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2},
            dict(n=2, best_of=4, length_penalty=0.5, early_stopping="never", repetition_penalty=1.2)
            | dict(temperature=0, use_beam_search=True),
        ),
        ({"bos_token_id": 1, "pad_token_id": 2, "transformers_version": "5", "chat_format": "x"}, dict()),
    ],
)
def test_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    defaults = generation_defaults(Path(write(tmp_path, fields)))
    assert defaults.params == SamplingParams(**expected)
    assert defaults.max_length == (4096 if fields.get("max_length") == 4096 else None)
    assert defaults.bad_words == ()
    assert caplog.text == ""


def test_no_file(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path).params == SamplingParams()
    assert LLMEngine(DEMO_MODEL, num_blocks=64).get_default_sampling_params() == SamplingParams()


def test_what_is_not_honoured_is_named_once(
    llama: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(llama.path, tmp_path, dirs_exist_ok=True)
    bias = [[[7, 8], 1.0], [[3], -1]]
    beams = {"do_sample": True, "num_beams": 2, "early_stopping": True}
    write(tmp_path, {"no_repeat_ngram_size": 2, "sequence_bias": bias, "temperature": 0.5, **beams})
    with caplog.at_level(logging.WARNING, logger="pagedattn_serve.loading.generation_config"):
        engine = LLMEngine(str(tmp_path))
        engine.add_request("x", prompt_token_ids=[1])
    [message] = [r.getMessage() for r in caplog.records if r.name == "pagedattn_serve.loading.generation_config"]
    path = tmp_path / "generation_config.json"
    assert message == f"{path}: not honoured: no_repeat_ngram_size 2, num_beams 2, sequence_bias {bias}"
    assert engine.get_default_sampling_params() == SamplingParams(temperature=0.5)


@pytest.mark.parametrize("bias", [[[[3], 1000.0]], [[[3], 1], [[3], 2]], {"3": 1.0}, [3], 3, []])
def test_a_sequence_bias_that_is_no_logit_bias(tmp_path: Path, caplog: pytest.LogCaptureFixture, bias: Any) -> None:
    assert generation_defaults(Path(write(tmp_path, {"sequence_bias": bias}))).params == SamplingParams()
    assert ("not honoured: sequence_bias" in caplog.text) == (bias != [])


def test_bad_words_and_suppressed_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An end-of-sequence token alone is no bad word, as with Hugging Face, but can be suppressed."""
    fields = {"bad_words_ids": [[7], [1, 2], [9], [9, 9]], "suppress_tokens": [3, 9], "eos_token_id": [8, 9]}
    defaults = generation_defaults(Path(write(tmp_path, fields)))
    assert defaults.bad_words == ((7,), (1, 2), (9, 9), (3,), (9,))
    assert defaults.params == SamplingParams() and caplog.text == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, r"temperature: expected a number in \[0, 1e\+09\], got -1"),
        ({"temperature": "hot"}, "temperature: expected a number, got 'hot' of type str"),
        ({"top_p": 2}, r"top_p: expected a number in \(0, 1\], got 2"),
        ({"top_k": 1.5}, "top_k: expected an int, got 1.5"),
        ({"min_p": True}, "min_p: expected a number, got True"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an int >= 1, got 0"),
        ({"max_length": 0}, "max_length: expected an int >= 1, got 0"),
        ({"max_length": "long"}, "max_length: expected an int, got 'long'"),
        ({"repetition_penalty": 0}, r"repetition_penalty: expected a number in \[0.001, 1000\], got 0"),
        ({"num_return_sequences": 0}, "num_return_sequences: expected an int >= 1, got 0"),
        ({"num_beams": 2.0}, "num_beams: expected an int, got 2.0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_beams: expected an int >= n, which is 3, got 2"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping: expected True, False or"),
        ({"num_beams": 2, "length_penalty": "long"}, "length_penalty: expected a number, got 'long'"),
        ({"min_new_tokens": "5"}, "min_new_tokens: expected an int, got '5'"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens: expected an int <= max_tokens, which is 4"),
        ({"stop_strings": [3]}, "stop_strings: expected strings, got 3"),
        ({"bad_words_ids": [7]}, r"bad_words_ids: expected a list of lists of token ids, got \[7\]"),
        ({"bad_words_ids": [[]]}, "bad_words_ids: expected a list of lists of token ids"),
        ({"bad_words_ids": [["7"]]}, "bad_words_ids: expected an int, got '7'"),
        ({"suppress_tokens": 7}, "suppress_tokens: expected a list of token ids, got 7"),
        ({"suppress_tokens": [-1]}, "suppress_tokens: expected an int >= 0, got -1"),
        ({"do_sample": "no"}, "do_sample: expected true or false, got 'no'"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected an int or a list of ints, got '</s>'"),
        ({"eos_token_id": [1, None]}, "eos_token_id: expected an int or a list of ints"),
        ("[1]", "expected a JSON object, got list"),
        ("{'temperature': 1}", "expected a JSON object, got Expecting property name"),
        ("", "expected a JSON object, got Expecting value"),
    ],
)
def test_wrong_values_name_the_file_and_the_field(llama: Checkpoint, tmp_path: Path, fields: Any, message: str) -> None:
    shutil.copytree(llama.path, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=f"generation_config.json: {message}"):
        LLMEngine(write(tmp_path, fields))


def test_generate_without_parameters(llama: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(llama.path, tmp_path, dirs_exist_ok=True)
    llm = LLM(write(tmp_path, {"do_sample": False, "temperature": 0.6, "max_new_tokens": 20}))
    outputs = llm.generate(prompt_token_ids=llama.prompts, use_tqdm=False)
    assert token_ids(outputs) == [full[:20] for full in llama.expected]
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=20)
    given = llm.generate(None, llm.get_default_sampling_params(), llama.prompts, use_tqdm=False)
    assert completions(given) == completions(outputs)
    # Parameters of the caller are taken as they are.
    own = llm.generate(None, [SamplingParams(seed=1, max_tokens=3)] * 8, llama.prompts, use_tqdm=False)
    assert {len(ids) for ids in token_ids(own)} == {3} and token_ids(own) != [full[:3] for full in llama.expected]


def test_generation_equals_hugging_face_s_under_the_same_file(llama: Checkpoint, tmp_path: Path) -> None:
    """Penalty, bias, bad words and suppressed tokens, each of which changes the output."""
    shutil.copytree(llama.path, tmp_path, dirs_exist_ok=True)
    often = Counter(token_id for full in llama.expected for token_id in full).most_common(9)
    frequent = [token_id for token_id, _ in often]
    each: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"bad_words_ids": [[frequent[0]], llama.expected[3][4:7], [llama.prompts[3][-1], llama.expected[3][0]]]},
        {"suppress_tokens": frequent[1:3]},
        {"sequence_bias": [[[frequent[3]], -4.0], [[frequent[4]], 2.5]]},
        {"eos_token_id": frequent[5:7], "min_new_tokens": 12},
    ]
    for fields in [*each, {name: value for one in each for name, value in one.items()}]:
        llm = LLM(write(tmp_path, {"do_sample": False, "max_new_tokens": 24, **fields}))
        outputs = llm.generate(prompt_token_ids=llama.prompts, use_tqdm=False)
        expected = [greedy_reference(llama.model, prompt, 24, **fields) for prompt in llama.prompts]
        assert token_ids(outputs) == expected
        assert expected != llama.expected


@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.3, "suppress_tokens": [3, 4], "min_new_tokens": 6}])
def test_beams_equal_hugging_face_s_under_the_same_file(
    llama: Checkpoint, tmp_path: Path, changes: dict[str, Any]
) -> None:
    shutil.copytree(llama.path, tmp_path, dirs_exist_ok=True)
    beams = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.7, "early_stopping": True}
    fields = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": llama.expected[2][3], **beams, **changes}
    llm = LLM(write(tmp_path, fields))
    assert llm.get_default_sampling_params().use_beam_search
    outputs = llm.generate(prompt_token_ids=llama.prompts[2:6], use_tqdm=False)
    for output, prompt in zip(outputs, llama.prompts[2:6], strict=True):
        tokens = torch.tensor([prompt])
        options = {**fields, "attention_mask": torch.ones_like(tokens), "pad_token_id": fields["eos_token_id"]}
        expected = llama.model.generate(tokens, **options)[:, len(prompt) :].tolist()
        for completion, ids in zip(output.outputs, expected, strict=True):
            assert completion.token_ids == ids[: len(completion.token_ids)]
            assert set(ids[len(completion.token_ids) :]) <= {fields["eos_token_id"]}  # as padding


def test_max_length_counts_the_prompt(llama: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(llama.path, tmp_path, dirs_exist_ok=True)
    llm = LLM(write(tmp_path, {"do_sample": False, "max_length": 30}))
    outputs = llm.generate(prompt_token_ids=llama.prompts, use_tqdm=False)
    lengths = [max(30 - len(prompt), 1) for prompt in llama.prompts]  # one where the prompt is as long already
    assert [len(ids) for ids in token_ids(outputs)] == lengths
    [longer] = llm.generate(None, SamplingParams(temperature=0, max_tokens=None), llama.prompts[:1], use_tqdm=False)
    assert len(longer.outputs[0].token_ids) == 127


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        (None, None, set()),
        ({}, None, set()),
        ({"eos_token_id": None}, None, set()),
        ({"eos_token_id": 7}, None, {7}),
        ({"eos_token_id": 0}, None, {0}),  # as in the demo model
        ({"eos_token_id": [7, 8, 7]}, None, {7, 8}),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, {9}),  # generation_config.json decides
        ({"eos_token_id": 7}, {"eos_token_id": [0, 9]}, {0, 9}),
        ({"eos_token_id": 7}, {"eos_token_id": 0}, {0}),
        ({"eos_token_id": 7}, {"eos_token_id": None}, {7}),
        ({"eos_token_id": 7}, {"eos_token_id": -1}, set()),  # the id of no token
        ({"eos_token_id": [-1, 7]}, None, {7}),
        ({"text_config": {"eos_token_id": 8}}, None, {8}),  # as models that see have it
        ({"eos_token_id": 7, "text_config": {"eos_token_id": 8}}, None, {7}),
        ({"eos_token_id": [7, 8]}, {"max_length": 20}, {7, 8}),
        ({}, {"eos_token_id": [1]}, {1}),
        (None, {"eos_token_id": 1}, {1}),
    ],
)
def test_eos_token_ids(
    tmp_path: Path,
    config: dict[str, Any] | None,
    generation_config: dict[str, Any] | None,
    expected: set[int],
) -> None:
    for name, fields in [("config.json", config), ("generation_config.json", generation_config)]:
        if fields is not None:
            (tmp_path / name).write_text(json.dumps(fields))
    assert eos_token_ids(tmp_path) == expected
