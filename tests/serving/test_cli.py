"""The `pagedattn` command, as a user runs it: on the demo model."""

import subprocess
import sys
from pathlib import Path

import pytest

from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams
from pagedattn_serve.cli import main

PROMPT = 'The "with" statement'


def completion(prompt: str, **params) -> str:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24} | params)
    return LLM(DEMO_MODEL).generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def test_the_installed_command_completes_a_prompt():
    command = [Path(sys.executable).parent / "pagedattn", "generate", "--prompt", PROMPT, "--max-tokens", "24"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == PROMPT + completion(PROMPT) + "\n"


def test_several_prompts_come_in_order(capsys):
    prompts = [PROMPT, "A class", "x"]
    assert main(["generate", *[word for p in prompts for word in ("--prompt", p)], "--max-tokens", "24"]) == 0
    assert capsys.readouterr().out == "\n\n".join(p + completion(p) for p in prompts) + "\n"


def test_sampling_options(capsys):
    options = ["--temperature", "0.9", "--top-k", "20", "--top-p", "0.9", "--seed", "7", "--stop", "the"]
    assert main(["generate", DEMO_MODEL, "--prompt", PROMPT, "--max-tokens", "24", *options]) == 0
    expected = completion(PROMPT, temperature=0.9, top_k=20, top_p=0.9, seed=7, stop="the")
    assert capsys.readouterr().out == PROMPT + expected + "\n"


def test_text_appears_while_it_is_generated(monkeypatch):
    written = []
    monkeypatch.setattr(sys.stdout, "write", written.append)
    main(["generate", "--prompt", PROMPT, "--max-tokens", "24"])
    assert len([text for text in written if text]) > 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/model", "--prompt", "x"], "expected a directory with a config.json, got no/such/model"),
        (["--prompt", ""], "expected 1 to 511 tokens"),
        (["--prompt", "word " * 600], "expected 1 to 511 tokens"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens: expected an int >= 1, got 0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature: expected a number >= 0, got -1.0"),
        (["--prompt", "x", "--dtype", "int8"], "dtype: expected auto, float32, float16, bfloat16, got int8"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert main(["generate", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("pagedattn: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    "arguments", [[], ["generate"], ["nonsense"], ["generate", "--prompt", "x", "--top-k", "many"]]
)
def test_wrong_usage_exits_with_2(arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
