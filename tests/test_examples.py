"""What a reader copies: the programs in python/examples and bench, and the code in the README, all run as they are."""

import doctest
import functools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from warm_python import run_python

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def run(program: str, *arguments: str, stdin: str = "") -> str:
    return checked(run_python(ROOT / program, *arguments, stdin=stdin))


def checked(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    assert not re.search("error|warning", result.stderr, re.IGNORECASE), result.stderr
    return result.stdout


def test_demo():
    """In an interpreter of its own, as `make demo` starts one."""
    command = [sys.executable, str(ROOT / "python/examples/demo.py"), "--requests", "5"]
    out = checked(subprocess.run(command, capture_output=True, text=True, timeout=300))
    assert re.search(r"continuous batching on the paged cache +\d+ +1\.00x", out)
    assert re.search(r"one request at a time +\d+ +\d+\.\d\dx", out)
    assert re.search(r"padded batches of 16 +\d+ +\d+\.\d\dx", out)
    assert re.search(r"peak use of the cache: [1-9]\d* blocks of 16 tokens", out)
    wasted, reserved = map(float, re.search(r"wasted slots: (\S+)% \(reserving 512 .*: (\S+)%\)", out).groups())
    assert 0 < wasted < reserved < 100


def test_stream():
    lines = run("python/examples/stream.py").splitlines()
    assert {line.split()[0] for line in lines} == {"with", "late", "class"}
    assert "class aborted after 20 tokens" in lines
    texts = {name: [line for line in lines if line.startswith(name) and "'" in line] for name in ("with", "late")}
    assert len(texts["with"]) == 40 and texts["with"][-1].endswith(" length")
    # It came in the middle, and left before the others.
    assert len(texts["late"]) == 10 and lines.index(texts["late"][-1]) < lines.index(texts["with"][-1])


def test_help():
    """It was taken for the name of a model."""
    assert run("python/examples/stream.py", "--help").startswith("usage: stream.py [-h] ")


def test_tools(tmp_path):
    from scripted_models import make_scripted_model

    make_scripted_model(tmp_path)
    assert run("python/examples/tools.py", str(tmp_path)).splitlines() == [
        '[get_weather({"city": "Paris"}) is light rain in Paris]',
        '[get_weather({"city": "Rome"}) is heavy rain in Rome]',
        '{"city": "Rome", "rains": true}',
    ]


def test_chat():
    from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams

    questions = ["What is the with statement?", "What is a class?"]
    out = run("python/examples/chat.py", stdin="\n".join(questions))
    # In each turn, a line about the cache and the answer, which may have several.
    counts = [tuple(map(int, found)) for found in re.findall(r"^\[(\d+) of (\d+) tokens", out, flags=re.MULTILINE)]
    answers = [part.removesuffix("\n") for part in re.split(r"^\[.* in the cache\]\n", out, flags=re.MULTILINE)[1:]]
    (first, _), (second, num_tokens) = counts
    assert first == 0 and 32 <= second < num_tokens
    messages = [{"role": "system", "content": "You know the Python language reference."}]
    llm = LLM(DEMO_MODEL)
    for question, answer in zip(questions, answers, strict=True):
        messages.append({"role": "user", "content": question})
        [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
        assert output.outputs[0].text == answer
        messages.append({"role": "assistant", "content": answer})


def test_generate_batch():
    from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams

    lines = dict(line.split(" -> ") for line in run("python/examples/generate_batch.py").splitlines())
    params = SamplingParams(temperature=0, max_tokens=30)
    outputs = LLM(DEMO_MODEL, dtype="float32").generate([*lines], params, use_tqdm=False)
    assert len(lines) == 4
    assert [*lines.values()] == [repr(output.outputs[0].text) for output in outputs]


def test_train_demo_model(tmp_path):
    run("python/examples/train_demo_model.py", "--steps", "2", "--threads", "1", "--output", str(tmp_path / "model"))
    from pagedattn_serve import LLM, SamplingParams

    output = LLM(str(tmp_path / "model")).generate("The", SamplingParams(max_tokens=3), use_tqdm=False)[0]
    assert 1 <= len(output.outputs[0].token_ids) <= 3


@pytest.mark.parametrize("library", ["flash_attn", "flashinfer", "vllm_ops"])
def test_layers_of_other_libraries(library, capsys, monkeypatch):
    """Compiled as far as a graph of torch's ops, which is quick; tests/test_compile.py goes on to machine code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / f"python/examples/layer_of_{library}.py"))["main"]()
    *rows, last = capsys.readouterr().out.splitlines()
    assert last == "captured: True compiled: True"
    assert len(rows) == 2 and all(len(set(row.split())) > 5 for row in rows)


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", python_blocks(README), ids=lambda code: code.splitlines()[-1].strip()[:20])
def test_readme_code(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert "0" not in capsys.readouterr().out.splitlines()  # a count that shows what an option does shows something


def test_readme_has_its_examples():
    assert len(python_blocks(README)) == 3 and ">>>" in README


def test_readme_sessions():
    from pagedattn_ext import ops

    # doctest wants the traceback's header, which the README leaves out for the reader.
    text = re.sub(r"^(\w+Error: )", r"Traceback (most recent call last):\n\1", README, flags=re.MULTILINE)
    session = doctest.DocTestParser().get_doctest(
        text.replace("```", ""), {"torch": torch, "ops": ops}, "README", None, 0
    )
    results = doctest.DocTestRunner().run(session)
    assert results.attempted > 0 and results.failed == 0


def test_readme_decode_loop_is_attention():
    """The README's loop, checked: its last output is SDPA over all keys and values that it put into the cache."""
    (code,) = [code for code in python_blocks(README) if "reshape_and_cache" in code]
    code = code.replace("    ops.reshape_and_cache(", "    history.append((key, value))\n    ops.reshape_and_cache(")
    names = {"history": []}
    exec(compile(code, "README.md", "exec"), names)
    key, value = (torch.stack(tensors, dim=2).float() for tensors in zip(*names["history"], strict=True))
    query = names["query"].float()[:, :, None]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(names["out"].float(), expected[:, :, 0], rtol=2**-7, atol=2**-8)
