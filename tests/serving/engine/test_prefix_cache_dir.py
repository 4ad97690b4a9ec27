"""Prefixes on disk: another engine finds them, bit for bit, and nothing that it must not find."""

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Checkpoint
from safetensors.torch import load_file, save_file

from pagedattn_serve import DEMO_MODEL, LLM
from pagedattn_serve import engine as engine_module
from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.config import CacheConfig
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.execution.block_store import open_block_store
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PREFIX = [*range(5, 45)]  # five blocks


def start(directory: Path, **options: Any) -> LLMEngine:
    options = {"block_size": 8, "max_model_len": 64, "num_blocks": 40, "prefix_cache_dir": directory, **options}
    return LLMEngine(options.pop("model", DEMO_MODEL), **options)


def ask(engine: LLMEngine, question: int, prefix: list[int] = PREFIX, **options: Any) -> RequestOutput:
    engine.add_request("a", None, GREEDY, [*prefix, question, 3], **options)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    engine.scheduler.block_manager.check_integrity()
    return next(output for output in reversed(outputs) if output.request_id == "a")


def num_cached(output: RequestOutput) -> int | None:
    assert output.metrics is not None
    return output.metrics.num_cached_tokens


def fill(directory: Path, **options: Any) -> LLMEngine:
    """An engine whose prefix is on disk."""
    engine = start(directory, **options)
    assert [num_cached(ask(engine, question)) for question in (50, 51)] == [0, 40]
    engine.flush()
    return engine


def test_blocks_that_cannot_be_inserted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is of their request alone: another that runs gets the tokens that it gets without."""
    fill(tmp_path)
    engine = start(tmp_path)
    expected = ask(engine, 60, [1, 2, 3])
    engine.add_request("b", None, GREEDY, [1, 2, 3, 60, 3])
    engine.step()

    def no_space(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(engine._stored, "insert", no_space)
    with pytest.raises(OSError, match="no space"):
        engine.add_request("a", None, GREEDY, [*PREFIX, 50, 3])
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [each.request_id for each in outputs if each.finished] == ["b"]
    assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
    engine.scheduler.block_manager.check_integrity()


def cached_blocks(engine: LLMEngine) -> dict[bytes, np.ndarray]:
    allocator = engine.scheduler.block_manager._allocator
    return {key: engine.model_runner.cache_engine.read_block(block) for key, block in allocator._block_of.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8", "kv_scales": (0.5, 0.25)},
        {"kv_cache_dtype": "int8", "quantization": "int8"},
    ],
    ids=["plain", "fp8", "int8"],
)
def test_a_restart_finds_the_prefix(tmp_path: Path, options: dict[str, Any]) -> None:
    first = fill(tmp_path, **options)
    second = start(tmp_path, **options)
    computed, found = ask(first, 52), ask(second, 52)
    assert (num_cached(computed), num_cached(found)) == (40, 40)
    assert found.outputs[0].token_ids == computed.outputs[0].token_ids
    before, after = cached_blocks(first), cached_blocks(second)
    assert before.keys() == after.keys() and len(before) == 5
    assert all(np.array_equal(block, before[key]) for key, block in after.items())
    stats = second.stats()
    assert (stats.num_read_blocks, stats.num_written_blocks, stats.num_found_tokens) == (5, 0, 40)
    assert first.stats().num_written_blocks == 5


def test_nothing_of_another_salt_is_found(tmp_path: Path) -> None:
    first = start(tmp_path)
    for salt in ("alice", ""):
        for question in (50, 51):
            ask(first, question, cache_salt=salt, prefix=PREFIX if salt else PREFIX[::-1])
    first.flush()
    second = start(tmp_path)
    assert num_cached(ask(second, 52)) == 0
    assert num_cached(ask(second, 52, cache_salt="bob")) == 0
    assert num_cached(ask(second, 52, prefix=PREFIX[::-1], cache_salt="alice")) == 0
    assert second.stats().num_read_blocks == 0
    assert num_cached(ask(second, 52, cache_salt="alice")) == 40
    assert num_cached(ask(second, 52, prefix=PREFIX[::-1])) == 40


def test_what_one_prompt_had_is_not_written_unless_it_is_registered(tmp_path: Path) -> None:
    first = start(tmp_path)
    ask(first, 50)
    first.flush()
    assert first.stats().num_written_blocks == 0
    assert first.register_prefix(PREFIX[:17]) == 16  # is in the cache
    assert first.register_prefix(PREFIX[::-1]) == 40  # is not
    ask(first, 50, prefix=PREFIX[::-1])
    first.flush()
    second = start(tmp_path)
    assert num_cached(ask(second, 50)) == 16
    assert num_cached(ask(second, 50, prefix=PREFIX[::-1])) == 40


def test_blocks_that_a_failed_step_has_not_computed_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt of the step has found the blocks of the first one, which hold anything when the step fails."""
    engine = start(tmp_path)
    for name in ("b", "c"):
        engine.add_request(name, None, GREEDY, [*PREFIX, 50, 3])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.executor, "execute", lambda _: 1 // 0)
        engine.step()
    engine.flush()
    assert engine.stats().num_written_blocks == 0
    ask(engine, 51)  # the step runs again
    engine.flush()
    assert engine.stats().num_written_blocks == 5


def test_no_output_is_lost_where_a_block_cannot_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a request that has its last token, and never gets its output."""
    expected = ask(start(tmp_path / "other"), 51).outputs[0].token_ids
    engine = start(tmp_path)

    def read_block(_: int) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.model_runner.cache_engine, "read_block", read_block)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):  # the second makes the prefix one that belongs on disk
            assert ask(engine, 51).outputs[0].token_ids == expected
    assert "blocks are not written to prefix_cache_dir" in caplog.text


def test_what_falls_out_of_the_cache_comes_back(tmp_path: Path) -> None:
    engine = fill(tmp_path, num_blocks=8)
    expected = ask(engine, 52).outputs[0].token_ids
    for begin in (60, 110):  # each takes six of the eight blocks
        assert num_cached(ask(engine, 50, prefix=[*range(begin, begin + 40)])) == 0
    found = ask(engine, 52)
    assert (num_cached(found), found.outputs[0].token_ids) == (40, expected)


def test_blocks_that_come_back_push_none_of_their_own_prefix_out(tmp_path: Path) -> None:
    """The beginning of the prompt is what the cache would give away first."""
    fill(tmp_path)
    engine = start(tmp_path, num_blocks=8)
    assert num_cached(ask(engine, 50, prefix=PREFIX[:16])) == 16
    ask(engine, 50, prefix=[*range(60, 100)])
    assert engine.stats().num_cached_blocks == 7  # two of the prefix are the oldest of these
    assert num_cached(ask(engine, 52)) == 40
    assert engine.stats().num_read_blocks == 2 + 3


def test_damaged_files_are_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = fill(tmp_path)
    expected = ask(first, 52).outputs[0].token_ids
    for file in tmp_path.glob("*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    second = start(tmp_path)
    with caplog.at_level(logging.WARNING):
        found = ask(second, 52)
    assert (num_cached(found), found.outputs[0].token_ids) == (0, expected)
    assert [record.getMessage().partition(" is ignored: ")[2][:9] for record in caplog.records] == ["expected "] * 5
    ask(second, 53)
    second.flush()
    assert num_cached(ask(start(tmp_path), 54)) == 40


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_another_model_has_a_folder_of_its_own(
    tmp_path: Path, llama: Checkpoint, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the difference: one number of one tensor, which the system's fingerprint may not see."""
    monkeypatch.setattr(engine_module, "checkpoint_digest", lambda *_: bytes(32))
    model, directory = tmp_path / "model", tmp_path / "blocks"
    shutil.copytree(llama.path, model)

    def num_folders(**options: Any) -> int:
        start(directory, model=str(model), quantization=quantization, **options)
        return len(list(directory.iterdir()))

    assert [num_folders(), num_folders(), num_folders(block_size=16), num_folders()] == [1, 1, 2, 2]
    weights = load_file(model / "model.safetensors")
    for i, (name, weight) in enumerate(sorted(weights.items()), 1):
        other = weight.clone()
        other.view(-1)[-1] += 1
        save_file({**weights, name: other}, model / "model.safetensors", {"format": "pt"})
        assert num_folders() == 2 + i, name
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert num_folders() == 2 + len(weights)


def test_a_batch_that_failed_keeps_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is to run again, nothing is put into free blocks, which may still have to be copied."""
    fill(tmp_path)
    engine = start(tmp_path)
    engine.add_request("b", None, GREEDY, [*range(60, 70)])
    with monkeypatch.context() as patch:
        patch.setattr(engine.model_runner, "run_model", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert num_cached(ask(engine, 52)) == 0
    assert engine.stats().num_read_blocks == 5


def test_llm_and_a_server_write_when_they_end(tmp_path: Path) -> None:
    """What is left when the requests have ended is written, before the engine is gone."""
    llm = LLM(DEMO_MODEL, block_size=8, num_blocks=40, max_model_len=64, prefix_cache_dir=tmp_path / "llm")
    llm.generate(prompt_token_ids=[[*PREFIX, 50]], sampling_params=GREEDY, use_tqdm=False)
    llm.generate(prompt_token_ids=[[*PREFIX, 51]], sampling_params=GREEDY, use_tqdm=False)
    del llm
    assert len(list(tmp_path.glob("llm/*/*.safetensors"))) == 5

    async def serve() -> list[int | None]:
        engine = AsyncLLMEngine(start(tmp_path / "served"))
        found = []
        for question in (50, 51):
            outputs = [each async for each in engine.generate({"prompt_token_ids": [*PREFIX, question]}, GREEDY)]
            found.append(num_cached(outputs[-1]))
        await engine.shutdown()
        return found

    assert asyncio.run(serve()) == [0, 40]
    assert len(list(tmp_path.glob("served/*/*.safetensors"))) == 5


def test_blocks_of_a_gpu_are_refused(tmp_path: Path) -> None:
    engine = start(tmp_path)
    runner = engine.model_runner
    runner.device = "cuda:0"
    config = CacheConfig(num_blocks=1, prefix_cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^prefix_cache_dir: expected None on cuda:0: blocks on disk are for the CPU"):
        open_block_store("fp_0", runner, config)
