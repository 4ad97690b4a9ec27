"""`pagedattn simulate`, as a user runs it: a model is a config.json alone."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from pagedattn_serve import DEMO_MODEL
from pagedattn_serve.cli import main
from pagedattn_simulate.cost_model import find_hardware
from pagedattn_simulate.deployment import SYSTEMS

OPT_13B = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 5120,
    "word_embed_proj_dim": 5120,
    "ffn_dim": 20480,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "activation_function": "relu",
    "dtype": "float16",
    "torch_dtype": "float16",
}


@pytest.fixture(scope="module")
def opt_13b(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("opt-13b")
    (directory / "config.json").write_text(json.dumps(OPT_13B))
    return str(directory)


def simulate(*arguments: str) -> int:
    return main(["simulate", *arguments])


def table(text: str) -> list[dict[str, str]]:
    """The lines of both tables, by their columns; of percentiles that have the same name the last."""
    lines: list[dict[str, str]] = []
    for block in text.split("\n\n")[1:]:
        header, *rows = [re.split(r"\s{2,}", line) for line in block.splitlines()]
        read = [dict(zip(header, row, strict=True)) for row in rows]
        lines = [old | new for old, new in zip(lines or read, read, strict=True)]
    return lines


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Which shows only at the end, when all else is told."""
    assert simulate("--hardware", "cpu", "--rate", "1", "--duration", "9", "--json", "/dev/full") == 1
    line = "--json: expected a file that can be written, got /dev/full (No space left on device)"
    assert capsys.readouterr().err == f"pagedattn: error: {line}\n"


def test_all_systems_at_two_rates(opt_13b: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The paper's model on the paper's GPU: 800 KB a token, 15.7K slots. Table and JSON say the same."""
    path = tmp_path / "runs.json"
    options = ["--rate", "1,2", "--duration", "20", "--price", "2", "--json", str(path)]
    assert simulate(opt_13b, "--hardware", "A100-40", "--system", ",".join(SYSTEMS), *options) == 0
    text = capsys.readouterr().out
    assert "12.9B parameters, 25.7 GB; 800 KiB of cache a token" in text and "15,792 slots" in text
    assert f"\nnumbers   {find_hardware('A100-40').source}\n" in text
    lines, runs = table(text), json.loads(path.read_text())["runs"]
    assert [(line["system"], line["rate"]) for line in lines] == [(name, rate) for name in SYSTEMS for rate in "12"]
    for line, run in zip(lines, runs, strict=True):
        assert (line["system"], line["rate"]) == (run["system"], run["rate"])
        assert float(line["s/token"]) == pytest.approx(run["normalized_latency"]["mean"], rel=0.01)
        assert float(line["1M tok"]) == pytest.approx(run["cost_per_million"], rel=0.01)
        assert run["cost_per_million"] == pytest.approx(2 / 3600 / run["tokens_per_second"] * 1e6)
        assert run["num_requests"] == runs["12".index(run["rate"])]["num_requests"]


def test_what_is_said_of_the_numbers_of_a_gpu() -> None:
    """The one number that was measured is of a plain read, not of this project's kernels. The page says the same."""
    for name in ("A100-40", "A100-80", "H100", "H200"):
        assert find_hardware(name).source == (
            "data sheet; of it kernels are assumed to reach 91% of the bandwidth (a plain read of memory on one H200 "
            "did, not this project's kernels) and 60% of the operations; the times of a step and of a sum are assumed"
        )
    page = Path(__file__).resolve().parents[2] / "docs" / "simulate.md"
    assert f"\nnumbers   {find_hardware('A100-40').source}\n" in page.read_text()


def test_a_plot(opt_13b: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without matplotlib a sentence, and nothing is simulated; so for a file that cannot be."""
    options = ["--hardware", "A100-40", "--rate", "1,2", "--duration", "10", "--system", "paged,orca-max"]
    path = tmp_path / "runs.png"
    if importlib.util.find_spec("matplotlib") is None:
        assert simulate(opt_13b, *options, "--plot", str(path)) == 1
        captured = capsys.readouterr()
        assert (
            captured.err == "pagedattn: error: --plot needs matplotlib: pip install matplotlib\n" and not captured.out
        )
        return
    assert simulate(opt_13b, *options, "--plot", str(path)) == 0
    assert path.stat().st_size > 10_000
    for wrong, expected in (("runs.txt", "a file that ends with .png"), ("none/runs.png", "a directory that exists")):
        assert simulate(opt_13b, *options, "--plot", str(tmp_path / wrong)) == 2
        assert expected in capsys.readouterr().err


def test_the_rate_at_a_latency(opt_13b: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-latency", "0.1", "--duration", "20", "--lengths", "alpaca", "--max-num-seqs", "8"]
    assert simulate(opt_13b, "--hardware", "A100-40", "--system", "paged,fastertransformer", *options) == 0
    paged, fixed = table(capsys.readouterr().out)
    assert float(paged["rate"]) > 2 * float(fixed["rate"])
    assert max(float(paged["s/token"]), float(fixed["s/token"])) <= 0.1


def test_a_trace_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With every option of the scheduler and the cache; two replicas of two ranks."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output,priority\n0,100,20,1\n0.01,30,20,0\n")
    options = [
        "--scheduling-policy",
        "priority",
        "--preemption-mode",
        "swap",
        "--block-size",
        "32",
        "--num-blocks",
        "64",
    ]
    options += ["--no-prefix-caching", "--n", "2", "--shared-prefix", "50", "--tensor-parallel-size", "2"]
    assert simulate(DEMO_MODEL, "--hardware", "H100", "--trace", str(path), *options, "--data-parallel-size", "2") == 0
    text = capsys.readouterr().out
    [line] = table(text)
    assert line["rate"] == "trace" and float(line["shared"].rstrip("%")) > 0
    assert "2 x 2 H100" in text and "2,048 slots: 64 blocks of 32, on each replica" in text
    assert "2 outputs a request, after a shared prefix of 50 tokens" in text


def test_beams(opt_13b: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rate", "1", "--duration", "10", "--beam-width", "4", "--no-prefix-caching"]
    assert simulate(opt_13b, "--hardware", "A100-40", "--system", "paged,orca-oracle", *options) == 0
    text = capsys.readouterr().out
    paged, orca = table(text)
    assert float(paged["shared"].rstrip("%")) > 30 and orca["shared"] == "0.0%"
    assert "seed 0, 4 beams a request" in text


def test_lengths_of_a_file_are_in_tokens_of_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Name three colours.", "output": "Red, green and blue."}]))
    assert simulate(DEMO_MODEL, "--hardware", "H100", "--lengths", str(path), "--rate", "5", "--duration", "5") == 0
    assert table(capsys.readouterr().out)[0]["system"] == "paged"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--duration", "1e-9"], "--duration: expected time for a request at 1 a second, got 1e-09 s"),
        (["--rate", "1", "--n", "300"], "--n: expected at most 256 (max_num_seqs), got 300"),
        (
            ["--rate", "1", "--shared-prefix", "2047"],
            "--shared-prefix: expected at most 2046 tokens (max_model_len 2048)",
        ),
        (
            ["--rate", "1", "--tensor-parallel-size", "3"],
            "--tensor-parallel-size: expected a divisor of the model's ",
        ),
        (["--rate", "1", "--gpu-memory-utilization", "0.5"], "--hardware: expected memory for 25.7 GB of weights"),
        (["--max-latency", "0.001"], "--max-latency: expected what paged can hold at "),
    ],
)
def test_a_mistake_that_shows_beside_the_model_is_one_line(
    opt_13b: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert simulate(opt_13b, "--hardware", "A100-40", *arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("pagedattn: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_lengths_of_texts_need_a_tokenizer(opt_13b: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    assert simulate(opt_13b, "--hardware", "A100-40", "--rate", "1", "--lengths", str(path)) == 1
    assert "tokenizer: expected a directory with a tokenizer that counts the tokens of " in capsys.readouterr().err
