"""The `pagedattn` command, as a user runs it: on the demo model, and `info` on others."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from warm_python import run_python

from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams
from pagedattn_serve.cli import main
from pagedattn_serve.errors import how_to_install
from pagedattn_serve.loading.loader import build_model
from pagedattn_serve.models.linear import PackedLinear

PROMPT = 'The "with" statement'
COMMAND = Path(sys.executable).parent / "pagedattn"
DTYPES = "float32, float16, bfloat16, float, half"
# What an installation of the ops alone lacks.
HIDDEN = ["transformers", "safetensors", "huggingface_hub", "numpy"]


def completion(prompt: str, **params: Any) -> str:
    sampling_params = SamplingParams(**{"temperature": 0, "max_tokens": 24} | params)
    return LLM(DEMO_MODEL).generate(prompt, sampling_params, use_tqdm=False)[0].outputs[0].text


def test_the_command_and_llm_name_a_prompt_alike(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["x", "word " * 600, "y"]
    assert main(["generate", *[word for p in prompts for word in ("--prompt", p)]]) == 1
    with pytest.raises(ValueError, match=r"^prompt 2 of 3: expected 1 to 511 tokens") as error:
        LLM(DEMO_MODEL, num_blocks=64).generate(prompts, SamplingParams(max_tokens=128), use_tqdm=False)
    assert capsys.readouterr().err == f"pagedattn: error: {error.value}\n"


def test_the_installed_command_completes_a_prompt() -> None:
    command = [COMMAND, "generate", "--prompt", PROMPT, "--max-tokens", "24"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == PROMPT + completion(PROMPT) + "\n"


def test_several_prompts_come_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [PROMPT, "A class", "x"]
    assert main(["generate", *[word for p in prompts for word in ("--prompt", p)], "--max-tokens", "24"]) == 0
    assert capsys.readouterr().out == "\n\n".join(p + completion(p) for p in prompts) + "\n"


def test_sampling_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "0.9", "--top-k", "20", "--top-p", "0.9", "--seed", "7", "--stop", "the"]
    assert main(["generate", DEMO_MODEL, "--prompt", PROMPT, "--max-tokens", "24", *options]) == 0
    expected = completion(PROMPT, temperature=0.9, top_k=20, top_p=0.9, seed=7, stop="the")
    assert capsys.readouterr().out == PROMPT + expected + "\n"


def test_min_p(capsys: pytest.CaptureFixture[str]) -> None:
    """A share of 1 leaves the most likely token alone, a smaller one leaves more."""
    options = ["generate", "--prompt", PROMPT, "--max-tokens", "24", "--temperature", "2", "--seed", "3", "--min-p"]
    assert main([*options, "1"]) == 0
    assert capsys.readouterr().out == PROMPT + completion(PROMPT) + "\n"
    assert main([*options, "0.1"]) == 0
    sampled = completion(PROMPT, temperature=2, seed=3, min_p=0.1)
    assert capsys.readouterr().out == PROMPT + sampled + "\n"
    assert len({completion(PROMPT), sampled, completion(PROMPT, temperature=2, seed=3)}) == 3


def test_text_appears_while_it_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", written.append)
    main(["generate", "--prompt", PROMPT, "--max-tokens", "24"])
    assert len([text for text in written if text]) > 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt 1 of 1: "),
        (["--prompt", "word " * 600], "expected 1 to 511 tokens"),
        (["--prompt", "x", "--prompt", "word " * 600, "--prompt", "x"], "prompt 2 of 3: "),
        (["--prompt", "x", "--max-model-len", "513"], "--max-model-len: expected an int in [2, 512], got 513"),
        (["--prompt", "x", "--kv-cache-memory", "1KiB"], "--kv-cache-memory: expected at least one block"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["generate", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("pagedattn: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_within_the_generation(
    capsys: pytest.CaptureFixture[str], text_model: str, tmp_path: Path, as_json: bool
) -> None:
    """What there is of the outputs is written, then the error; no traceback."""
    shutil.copytree(text_model, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert main(["generate", str(tmp_path), "--prompt", "the", "--prompt", "cat", *["--json"] * as_json]) == 1
    captured = capsys.readouterr()
    message = "FloatingPointError: logits: expected numbers, got NaN or infinity for output token 0"
    assert captured.err.startswith(f"pagedattn: error: prompt 1 of 2: {message}") and captured.err.count("\n") == 1
    if as_json:
        lines = [json.loads(line) for line in captured.out.splitlines()]
        assert [line["finish_reason"] for line in lines] == ["error", "error"]
        assert all(line["error"].startswith(message) for line in lines)
    else:
        assert captured.out.split() == ["the", "cat"]


def test_prompts_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A line a prompt, spaces kept, empty lines left out."""
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPT}\r\n\n  indented é\n   \nlast")
    assert main(["generate", "--prompts-file", str(file), "--max-tokens", "8"]) == 0
    expected = [p + completion(p, max_tokens=8) for p in (PROMPT, "  indented é", "last")]
    assert capsys.readouterr().out == "\n\n".join(expected) + "\n"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("lines", [[b"A class", b"", b"caf\xe9 au lait", b"x"], [b"\xff"]], ids=["some", "all"])
def test_a_line_that_is_not_utf8_costs_no_other_its_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lines: list[bytes], as_json: bool
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\n".join(lines))
    assert main(["generate", "--prompts-file", str(file), "--max-tokens", "8", *["--json"] * as_json]) == 1
    captured = capsys.readouterr()
    prompts = [line.decode(errors="replace") for line in lines if line]
    texts = {p: "" if "\ufffd" in p else completion(p, max_tokens=8) for p in prompts}
    place = "0xe9 as byte 4 of line 3" if len(prompts) == 3 else "0xff as byte 1 of line 1"
    error = f"prompts-file: expected UTF-8 in {file}, got {place}"
    assert captured.err.splitlines()[-1].endswith(f": {error}")
    if as_json:
        answers = [json.loads(line) for line in captured.out.splitlines()]
        assert [(answer["prompt"], answer["text"]) for answer in answers] == list(texts.items())
        assert [answer.get("error") for answer in answers] == [error if "\ufffd" in p else None for p in prompts]
    else:
        assert captured.out == "\n\n".join(p + text for p, text in texts.items()) + "\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_standard_input_that_is_closed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """As a shell's `<&-` leaves it. There was a traceback."""
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--prompts-file", "-", *options]) == 2
    message = "--prompts-file: expected an open standard input for -, got a closed one"
    assert capsys.readouterr().err == f"pagedattn: error: {message}\n"


def test_lines_of_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the prompts, though the first of them ends last."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\nx".encode())))
    stop = completion("x", max_tokens=8)[3:6]
    assert stop not in completion(PROMPT, max_tokens=8)
    options = ["--json", "--max-tokens", "8", "--stop", stop]
    assert main(["generate", DEMO_MODEL, "--prompts-file", "-", *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    params = SamplingParams(temperature=0, max_tokens=8, stop=stop)
    outputs = LLM(DEMO_MODEL).generate([PROMPT, "x"], params, use_tqdm=False)
    assert [line["finish_reason"] for line in lines] == ["length", "stop"]
    assert lines == [
        {
            "prompt": output.prompt,
            "text": output.outputs[0].text,
            "token_ids": output.outputs[0].token_ids,
            "finish_reason": output.outputs[0].finish_reason,
        }
        for output in outputs
    ]


def test_engine_options(capsys: pytest.CaptureFixture[str], speaker_path: str, text_model: str, tmp_path: Path) -> None:
    """The model stops by itself; with `--ignore-eos` it goes to the length. Its tokenizer may lie elsewhere."""
    model = tmp_path / "model"
    shutil.copytree(speaker_path, model, ignore=shutil.ignore_patterns("tokenizer*"))
    scales = tmp_path / "scales.json"
    scales.write_text("[0.5, 0.25]")
    fp8 = ["--kv-cache-dtype", "fp8", "--kv-scales", str(scales)]
    arguments = ["generate", str(model), "--tokenizer", text_model, "--prompt", "the cat", "--json"]
    for options, finish_reason, num_tokens in [
        (["--num-blocks", "7"], "stop", None),
        (["--ignore-eos", "--max-model-len", "100", "--max-num-seqs", "1"], "length", 98),
        (["--ignore-eos", "--num-blocks", "4"], "length", 62),  # all that the cache holds
        (["--ignore-eos", "--num-blocks", "4", "--speculation", "ngram"], "length", 62),
        (["--ignore-eos", "--kv-cache-memory", f"{4 * 16 * 2 * 128 * 4 / 1024}KiB"], "length", 62),
        (["--ignore-eos", "--kv-cache-memory", f"{4 * 16 * 2 * 128 / 1024}KiB", *fp8], "length", 62),
    ]:
        assert main([*arguments, "--max-tokens", "200", *options]) == 0
        line = json.loads(capsys.readouterr().out)
        assert line["finish_reason"] == finish_reason
        assert num_tokens is None or len(line["token_ids"]) == num_tokens


# --- how it ends ---


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"pagedattn-serve {version('pagedattn-ext')}\n"


def test_an_instruction_set_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CPU_CAPABILITY", "avx9")
    result = run_python(COMMAND, "generate", "--prompt", "x")
    assert result.returncode == 1 and result.stderr.splitlines()[-1].endswith(", got avx9")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["info"], ["generate", "--prompt", "x"], ["generate", "--prompt", "x", "--json"]]
)
def test_a_reader_that_goes_away(arguments: list[str]) -> None:
    """As with `| head`: no complaint, and the status of what SIGPIPE ends. Output is buffered, as users have it:
    argparse passes over errors of its own writes."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        result = run_python(COMMAND, *arguments, stdout=stdout)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_standard_output_that_takes_nothing() -> None:
    with open("/dev/full", "w") as stdout:
        result = run_python(COMMAND, "--help", stdout=stdout)
    line = "pagedattn: error: standard output: expected a place to write to, got No space left on device\n"
    assert (result.returncode, result.stderr) == (1, line)


@pytest.mark.parametrize("arguments", [["info"], ["generate", "--prompt", "x", "--max-tokens", "1"]])
def test_a_standard_output_that_is_closed(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python then has None in its place, as under some daemons."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(arguments) == 0


INTERRUPTED = """
import importlib.abc, os, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from pagedattn_serve.cli import main
from pagedattn_serve.errors import how_to_install
sys.exit(main(["generate", "--prompt", "x"]))
"""


@pytest.mark.parametrize("module", ["argparse", "torch", "numpy._core", "transformers", "pagedattn_serve.models.llama"])
def test_an_interrupt_while_it_imports(module: str) -> None:
    """numpy, for one, makes an ImportError of it."""
    command = [sys.executable, "-c", INTERRUPTED, module]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "beginning"),
    [(["generate", "--prompt", PROMPT, "--max-tokens", "400", "--ignore-eos"], PROMPT[:5]), (["verify"], "condi")],
)
def test_an_interrupt_while_it_runs(arguments: list[str], beginning: str) -> None:
    process = subprocess.Popen([COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.read(5) == beginning
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (130, "")


def test_the_handler_of_interrupts_is_put_back() -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert main(["info"]) == 0 and main(["info", "no/such/model"]) == 2
    assert signal.getsignal(signal.SIGINT) is handler


def run_without(modules: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where some modules are not installed."""
    program = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(',')))\n"
    program += "from pagedattn_serve.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, ",".join(modules), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [["info"], ["generate", "--prompt", "x"]])
@pytest.mark.parametrize("modules", [HIDDEN, *([name] for name in HIDDEN)], ids=",".join)
def test_without_what_serving_needs(modules: list[str], arguments: list[str]) -> None:
    result = run_without(modules, *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    names = ", ".join(sorted(modules))
    assert result.stderr == f"pagedattn: error: pagedattn_serve: expected {names}: {how_to_install()}\n"


def test_help_needs_no_more_than_python() -> None:
    for arguments in (["--help"], ["--version"], ["generate", "--help"], ["info", "--help"]):
        result = run_without([*HIDDEN, "torch"], *arguments)
        assert (result.returncode, result.stderr) == (0, "")


# --- info ---

OF_WINDOWS = ["layer groups", "full length"]  # lines that only models with windows have


def info(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """What each line says, by its name."""
    capsys.readouterr()  # what was written while the checkpoint was made
    assert main(["info", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [(line[:15].rstrip(), line[15:]) for line in captured.out.splitlines()]
    assert [name for name, _ in lines if name not in OF_WINDOWS] == [
        "model",
        "architecture",
        "runs",
        "parameters",
        "dtype",
        "linear layers",
        "layers",
        "heads",
        "vocabulary",
        "max_model_len",
        "cache",
        "that fit",
    ]
    return dict(lines)


def test_info_of_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    with safe_open(Path(DEMO_MODEL) / "model.safetensors", framework="pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    # 4 layers, 2 KV heads, 64 numbers a head in 2 bytes, keys and values: 2048 bytes a token.
    assert info(capsys) == {
        "model": DEMO_MODEL,
        "architecture": "LlamaForCausalLM",
        "runs": "native",
        "parameters": f"{count:,} ({2 * count:,} bytes)",
        "dtype": "bfloat16",
        "linear layers": f"{PackedLinear.FORM} (on the CPU)",
        "layers": "4",
        "heads": "4 query, 2 key-value, of size 64",
        "vocabulary": "2,048",
        "max_model_len": "512 tokens",
        "cache": "2,048 bytes per token, 32,768 per block of 16",
        "that fit": "32,768 blocks (524,288 tokens) in 1,073,741,824 bytes",
    }


def test_info_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "float32", "--block-size", "64", "--kv-cache-memory", "1000000"]
    shown = info(capsys, DEMO_MODEL, *options)
    count = int(info(capsys)["parameters"].split()[0].replace(",", ""))
    assert shown["dtype"] == "float32" and shown["parameters"] == f"{count:,} ({4 * count:,} bytes)"
    assert shown["cache"] == "4,096 bytes per token, 262,144 per block of 64"
    assert shown["that fit"] == "3 blocks (192 tokens) in 1,000,000 bytes"
    shown = info(capsys, DEMO_MODEL, *options, "--kv-cache-dtype", "fp8")
    assert shown["dtype"] == "float32"
    assert shown["cache"] == "1,024 bytes per token, 65,536 per block of 64"
    assert shown["that fit"] == "15 blocks (960 tokens) in 1,000,000 bytes"


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("1000000", 1_000_000),
        ("100KiB", 102_400),
        ("512MiB", 1 << 29),
        ("4GiB", 4 << 30),
        ("1.5 gib", 3 << 29),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(capsys: pytest.CaptureFixture[str], size: str, num_bytes: int) -> None:
    assert info(capsys, "--kv-cache-memory", size)["that fit"].endswith(f" in {num_bytes:,} bytes")


def test_info_of_a_checkpoint(capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint) -> None:
    """Every architecture, against Hugging Face's own model."""
    shown = info(capsys, checkpoint.path, "--block-size", "8", "--kv-cache-memory", "100000")
    model, config = checkpoint.model, checkpoint.model.config
    num_heads, num_layers = config.num_attention_heads, config.num_hidden_layers
    num_kv_heads = getattr(config, "num_key_value_heads", num_heads)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    count = sum(parameter.numel() for parameter in model.parameters())
    token_bytes = 2 * num_layers * num_kv_heads * -(-head_size // 4) * 4 * 4  # of fp32, four at a time
    windows = build_model(checkpoint.path).cache_groups().windows
    block_bytes = 8 * token_bytes // len(windows)
    num_blocks = 100_000 // block_bytes
    has_windows = windows != (None,)
    assert [name in shown for name in OF_WINDOWS] == [has_windows] * 2
    num_tokens = f"{8 * (num_blocks // len(windows)):,} tokens" + " within the windows" * has_windows
    cache = f"{token_bytes:,} bytes per token, {block_bytes:,} per block of 8"
    cache += ", which is of one group of layers" * (len(windows) > 1)
    assert {name: value for name, value in shown.items() if name not in OF_WINDOWS} == {
        "model": checkpoint.path,
        "architecture": type(model).__name__,
        "runs": "native",
        "parameters": f"{count:,} ({4 * count:,} bytes)",
        "dtype": "float32",
        "linear layers": f"{PackedLinear.FORM} (on the CPU)",
        "layers": f"{num_layers}",
        "heads": f"{num_heads} query, {num_kv_heads} key-value, of size {head_size}",
        "vocabulary": "97",
        "max_model_len": f"{LLM(checkpoint.path).llm_engine.max_model_len} tokens",
        "cache": cache,
        "that fit": f"{num_blocks:,} blocks ({num_tokens}) in 100,000 bytes",
    }


def test_info_says_what_the_engine_takes(capsys: pytest.CaptureFixture[str], llama: Checkpoint) -> None:
    shown = info(capsys, llama.path, "--kv-cache-memory", "200000")
    assert shown["max_model_len"] == "128 tokens"
    num_blocks = LLM(llama.path, kv_cache_memory=200_000).llm_engine.stats().num_blocks
    assert shown["that fit"].startswith(f"{num_blocks} blocks ({16 * num_blocks} tokens)")


def test_info_reads_no_weights(capsys: pytest.CaptureFixture[str], llama: Checkpoint, tmp_path: Path) -> None:
    shutil.copy(Path(llama.path) / "config.json", tmp_path)
    assert info(capsys, str(tmp_path)) == {**info(capsys, llama.path), "model": str(tmp_path)}


def test_a_cache_of_no_block_is_known_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--kv-cache-memory", "1"]) == 1
    message = "--kv-cache-memory: expected at least one block, 32768 bytes, got 1"
    assert capsys.readouterr() == ("", f"pagedattn: error: {message}\n")


@pytest.mark.parametrize("size", ["1.5", "GiB", "", "1 GB", "-", "1e9", "0x10", "1.5.5MiB"])
def test_sizes_that_are_none(capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["info", "--kv-cache-memory", size])
    assert exit.value.code == 2 and f"TiB, got {size!r}" in capsys.readouterr().err


def test_info_of_an_architecture_that_is_not_supported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    assert main(["info", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("pagedattn: error: architecture: ") and "BertModel" in captured.err
