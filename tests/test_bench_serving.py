"""bench/serving.py, run as it is on a few short requests: what it reports must agree with itself."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "bench" / "serving.py"
SHORT = ["--requests", "6", "--mean-input", "8", "--mean-output", "6"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=300)


def report_of(path: Path, *arguments: str) -> dict:
    result = run(*SHORT, "--json", str(path), *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())


def check(report: dict) -> None:
    summary, requests, steps = report["summary"], report["requests"], report["steps"]
    assert len(requests) == summary["num_requests"] == 6
    assert sum(times["num_output_tokens"] for times in requests) == summary["num_output_tokens"]
    for times in requests:
        assert times["arrival"] <= times["first_token"] < times["finished"] <= summary["seconds"]
    for name in ("normalized_latency_s", "ttft_s", "tpot_s"):
        values = [value for rank, value in summary[name].items() if rank != "mean"]
        assert values[0] > 0 and values == sorted(values)
    for host in summary["host"].values():
        assert 0 < host["us"]["p50"] <= host["us"]["p99"]
    assert len(steps) == summary["host"]["all steps"]["num_steps"]
    for step in steps:
        assert 0 < step["host_seconds"] < step["seconds"] < step["end"] < summary["seconds"]
        assert 1 <= step["batch_size"] <= 6
        assert step["num_used_slots"] <= 16 * step["num_used_blocks"] <= 16 * summary["num_blocks"]
    assert steps[-1]["num_waiting"] == steps[-1]["num_used_blocks"] == 0


def test_with_peers(tmp_path):
    plot = tmp_path / "plot.png"
    plotting = ["--plot", str(plot)] if importlib.util.find_spec("matplotlib") else []
    report = report_of(tmp_path / "report.json", "--peer-requests", "3", "--rounds", "2", *plotting)
    check(report)
    assert plot.exists() == bool(plotting)
    assert {"engine", "generate, one by one", "generate, padded batches of 16"} <= set(report["peers"])
    assert "the same on the paged ops" in report["peers"]
    for peer in report["peers"].values():
        assert len(peer["seconds"]) == len(peer["cpu_seconds"]) == 2
        assert peer["ratio"] > 0 and peer["identical"] == 1


def test_poisson_arrivals(tmp_path):
    report = report_of(tmp_path / "report.json", "--rate", "50", "--peer-requests", "0")
    check(report)
    assert report["peers"] == {}
    arrivals = [times["arrival"] for times in report["requests"]]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0
    assert report["summary"]["seconds"] > arrivals[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "argument --requests: expected at least 1, got 0"),
        (["--rate", "0"], "argument --rate: expected a number above 0, got 0.0"),
        (["--model", "nowhere"], "model: expected a directory with a config.json, got nowhere"),
    ],
)
def test_bad_option(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"serving.py: error: {message}"
