"""The system fingerprint: the same for the same model, another for all that may give other bits."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoint, change_config

import pagedattn_ext
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading import fingerprint
from pagedattn_serve.loading.fingerprint import file_digest


def fingerprint_of(path: str | Path, **options: Any) -> str:
    return LLMEngine(path, **{"num_blocks": 8} | options).system_fingerprint


def test_a_copy_of_a_model_has_the_same_and_all_else_another(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fingerprint_of(llama.path)
    assert re.fullmatch("fp_[0-9a-f]{16}", plain)
    copy = tmp_path / "copy"
    shutil.copytree(llama.path, copy)
    same = {"enforce_eager": True, "max_num_batched_tokens": 19, "num_blocks": 99, "seed": 5, "speculation": "ngram"}
    assert fingerprint_of(copy, **same) == plain

    others = [
        fingerprint_of(llama.path, **options)
        for options in (
            {"dtype": "bfloat16"},
            {"quantization": "int8"},
            {"kv_cache_dtype": "fp8"},
            {"kv_cache_dtype": "fp8", "kv_scales": (0.5, 0.5)},
            {"block_size": 8},
        )
    ]
    monkeypatch.setattr(pagedattn_ext, "cpu_capability", lambda: "another")
    others.append(fingerprint_of(llama.path))
    monkeypatch.undo()
    change_config(copy, rope_theta=500.0)
    others.append(fingerprint_of(copy))
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    others.append(fingerprint_of(copy))
    assert len({plain, *others}) == 1 + len(others)


def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size, its beginning and a piece of each step count. What lies between the pieces does not."""
    for name, value in dict(WHOLE=100, HEADER=40, STEP=20, PIECE=4).items():
        monkeypatch.setattr(fingerprint, name, value)
    file = tmp_path / "file"

    def changes(size: int) -> str:
        """Of each byte: whether the digest hangs on it."""
        content = bytearray(size)
        file.write_bytes(content)
        before = file_digest(file)
        told = ""
        for i in range(size):
            content[i] = 1
            file.write_bytes(content)
            told += ".x"[file_digest(file) != before]
            content[i] = 0
        return told

    assert changes(100) == "x" * 100
    assert changes(101) == "x" * 40 + ("x" * 4 + "." * 16) * 3 + "x"
    file.write_bytes(bytes(101))
    smaller = file_digest(file)
    file.write_bytes(bytes(102))
    assert file_digest(file) != smaller
