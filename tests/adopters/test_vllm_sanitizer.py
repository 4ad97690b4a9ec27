"""PAGEDATTN_SANITIZE=1 under vLLM: bugs planted in its tables and its pool are found at once, and nothing else is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from test_vllm import GREEDY, PROMPTS, make_llm, serve
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from pagedattn_ext import vllm_plugin
from pagedattn_ext.sanitizer import CacheError

Harm = list[str]
Plant = Callable[[pytest.MonkeyPatch, Harm], None]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.setattr(CPUModelRunner, "_update_states", CPUModelRunner._update_states)  # put back at the end
    monkeypatch.setenv("PAGEDATTN_SANITIZE", "1")
    vllm_plugin.register()
    yield lambda kind: make_llm(tmp_path, kind)
    cleanup_dist_env_and_memory()


def watched(llm: LLM) -> Any:
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.worker.model_runner._pagedattn_watched


@pytest.mark.parametrize("kind", ["Qwen3", "Mistral"])
def test_what_is_right_is_left_alone(start: Callable[[str], Any], kind: str) -> None:
    """With chunks, prefixes and preemptions, and with a window. Each op of each layer was looked at."""
    from small_checkpoints import generate

    llm, model = start(kind)
    tokens, found = serve(llm)
    assert max(found) > 0
    assert tokens == [generate(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    sanitizer = watched(llm).sanitizer
    assert all(map(any, zip(*sanitizer._seen, strict=True)))  # in each cache


def writes_a_block_behind(monkeypatch: pytest.MonkeyPatch, harm: Harm) -> None:
    """A row of the tables gets its new block one place too far on."""
    append = BlockTable.append_row

    def append_row(self: BlockTable, block_ids: list[int], row: int) -> None:
        if block_ids and row == 1 and self.num_blocks_per_row[row] and not harm:
            harm.append("a gap")
            self.num_blocks_per_row[row] -= 1
        append(self, block_ids, row)

    monkeypatch.setattr(BlockTable, "append_row", append_row)


def swaps_rows(monkeypatch: pytest.MonkeyPatch, harm: Harm) -> None:
    """Two requests get the tables of each other."""
    commit = BlockTable.commit_block_table

    def commit_block_table(self: BlockTable, num_reqs: int) -> None:
        if num_reqs > 1 and self.num_blocks_per_row[0] and self.num_blocks_per_row[1]:
            harm.append("rows 0 and 1")
            self.block_table.np[[0, 1]] = numpy.array(self.block_table.np[[1, 0]])
        commit(self, num_reqs)

    monkeypatch.setattr(BlockTable, "commit_block_table", commit_block_table)


def hands_out_a_block_in_use(monkeypatch: pytest.MonkeyPatch, harm: Harm) -> None:
    get = BlockPool.get_new_blocks

    def get_new_blocks(self: BlockPool, num_blocks: int) -> Any:
        blocks = get(self, num_blocks)
        used = [each for each in self.blocks if each.ref_cnt and not each.is_null and each not in blocks]
        if blocks and len(used) > 5 and not harm:
            harm.append(f"{used[-1].block_id} once more")
            used[-1].ref_cnt += 1
            blocks[-1] = used[-1]
        return blocks

    monkeypatch.setattr(BlockPool, "get_new_blocks", get_new_blocks)


@pytest.mark.parametrize("plant", [writes_a_block_behind, swaps_rows, hands_out_a_block_in_use])
def test_bugs_are_found(start: Callable[[str], Any], plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    harm: Harm = []
    plant(monkeypatch, harm)
    llm, _ = start("Qwen3")
    with pytest.raises(CacheError):
        serve(llm)
    assert len(harm) == 1, "found later than in the step that did it"
