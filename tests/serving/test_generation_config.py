"""generation_config.json: the defaults of sampling, what is not honoured, and which tokens end an output."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoint, completions, token_ids

from pagedattn_serve import DEMO_MODEL, LLM, LLMEngine, SamplingParams
from pagedattn_serve.generation_config import eos_token_ids, generation_defaults


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
        ({"bos_token_id": 1, "pad_token_id": 2, "transformers_version": "5", "chat_format": "x"}, dict()),
    ],
)
def test_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    defaults = generation_defaults(Path(write(tmp_path, fields)))
    assert defaults.params == SamplingParams(**expected)
    assert defaults.max_length == (4096 if fields == {"max_length": 4096} else None)
    assert caplog.text == ""


def test_no_file(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path).params == SamplingParams()
    assert LLMEngine(DEMO_MODEL, num_blocks=64).get_default_sampling_params() == SamplingParams()


def test_what_is_not_honoured_is_named_once(
    llama: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(llama.path, tmp_path, dirs_exist_ok=True)
    write(tmp_path, {"repetition_penalty": 1.05, "num_beams": 4, "bad_words_ids": [[7]], "temperature": 0.5})
    with caplog.at_level(logging.WARNING, logger="pagedattn_serve.generation_config"):
        engine = LLMEngine(str(tmp_path))
        engine.add_request("x", prompt_token_ids=[1])
    [message] = [r.getMessage() for r in caplog.records if r.name == "pagedattn_serve.generation_config"]
    path = tmp_path / "generation_config.json"
    assert message == f"{path}: not honoured: repetition_penalty 1.05, num_beams 4, bad_words_ids [[7]]"
    assert engine.get_default_sampling_params() == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature: expected a number >= 0, got -1"),
        ({"temperature": "hot"}, "temperature: expected a number, got 'hot' of type str"),
        ({"top_p": 2}, r"top_p: expected a number in \(0, 1\], got 2"),
        ({"top_k": 1.5}, "top_k: expected an int, got 1.5"),
        ({"min_p": True}, "min_p: expected a number, got True"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an int >= 1, got 0"),
        ({"max_length": 0}, "max_length: expected an int >= 1, got 0"),
        ({"max_length": "long"}, "max_length: expected an int, got 'long'"),
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
