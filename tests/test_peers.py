"""tests/peers: what becomes of other people's tests is told apart. A wrong number must not pass for a refusal."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

PEER = """
import pytest
import torch
from names import MissingName
from pagedattn_ext import flash_attn, ops

ROWS = torch.ones(1, 1, 1, 8)

def test_passes():
    assert flash_attn.flash_attn_func(ROWS, ROWS, ROWS).shape == ROWS.shape

def test_skips_itself():
    pytest.skip("no GPU")

def test_is_refused_by_name():
    flash_attn.flash_attn_func(ROWS, ROWS, ROWS, dropout_p=0.5)

def test_lacks_a_name():
    MissingName("flash_attn").flash_attn_unheard_of(ROWS)

def test_lacks_a_module():
    import flash_attn_unheard_of

def test_finds_a_wrong_number():
    assert flash_attn.flash_attn_func(ROWS, ROWS, ROWS).sum() == 9

def test_raises_what_looks_like_a_refusal():
    raise ValueError("flash_attn_func: q: expected what the test itself has made")

def test_is_called_wrongly():
    flash_attn.flash_attn_func(ROWS)

def test_meets_an_error_of_ours_that_names_nothing():
    ops.rms_norm(ROWS, ROWS[0, 0, 0], epsilon=object())
"""


@pytest.fixture
def outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of the tests above, and of a file that cannot be imported."""
    monkeypatch.syspath_prepend(str(TESTS / "peers"))
    monkeypatch.syspath_prepend(str(TESTS / "adopters"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_peer.py").write_text(PEER)
    (tmp_path / "test_broken.py").write_text("1 / 0")
    plugin = importlib.import_module("outcomes").Outcomes()
    options = ["-q", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    pytest.main([*options, "--continue-on-collection-errors", str(tmp_path)], plugins=[plugin])
    return plugin


def test_outcomes(outcomes: Any) -> None:
    kinds = {test.split("::")[-1]: kind for kind, test, _ in outcomes.reasons}
    assert kinds == {
        "test_is_refused_by_name": "refused",
        "test_lacks_a_name": "missing",
        "test_lacks_a_module": "missing",
        "test_finds_a_wrong_number": "failed",
        "test_raises_what_looks_like_a_refusal": "failed",
        "test_is_called_wrongly": "failed",
        "test_meets_an_error_of_ours_that_names_nothing": "failed",
        "test_broken.py": "failed",
    }
    assert outcomes.counts == {"passed": 1, "refused": 1, "missing": 2, "failed": 5}
    reasons = {test.split("::")[-1]: reason for _, test, reason in outcomes.reasons}
    assert reasons["test_is_refused_by_name"] == "flash_attn_func: dropout_p: expected 0.0, got 0.5"
    assert reasons["test_lacks_a_name"] == "Missing: flash_attn.flash_attn_unheard_of"
