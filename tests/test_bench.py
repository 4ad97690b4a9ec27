"""bench/sweep.py and bench/targets.py: what they say about numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def find_notes(monkeypatch):
    """sweep.find_cliffs of an axis: (query heads per KV head, GB/s, ms) of each point, beside a probe of 20 GB/s."""
    monkeypatch.syspath_prepend(str(BENCH))
    from harness import Probe, Row
    from sweep import Case, find_cliffs

    probe = Probe("read", "GB/s", 10**9, lambda _: None)

    def find(*points: tuple[int, float, float]) -> list[str]:
        cases = [Case(str(i), (i,), [], group) for i, (group, _, _) in enumerate(points)]
        rows = [
            Row("", "", torch.float32, round(rate * ms * 1e6), probe, {"ours": [ms / 1e3], "probe": [0.05]})
            for _, rate, ms in points
        ]
        return find_cliffs(cases, rows)

    return find


def test_cliff(find_notes):
    assert find_notes((1, 20, 1), (1, 10, 1), (1, 16, 1), (1, 11, 1)) == ["", "CLIFF: 50% of 0", "", ""]
    assert find_notes((1, 20, 1)) == [""]


def test_arithmetic_is_no_cliff(find_notes):
    assert find_notes((4, 16, 1), (8, 8, 1), (16, 2, 1)) == ["", "", "CLIFF: 50% of 1"]


def test_short_calls_are_not_compared(find_notes):
    short = "bound by the cost of a call"
    assert find_notes((1, 1, 0.1), (1, 12, 1), (1, 20, 1), (1, 90, 0.1)) == [short, "", "", short]


def test_targets():
    command = [sys.executable, str(BENCH / "targets.py"), "--only", "rms_norm, 32 tokens, float32"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    required, measured, verdict = re.search(r"F\.rms_norm +(\S+)x +(\S+)x +(met|not met)\n", result.stdout).groups()
    assert required == "3.00" and verdict == ("met" if float(measured) >= 3 else "not met")
    assert f"\n{int(verdict == 'met')} of 1 met" in result.stdout
