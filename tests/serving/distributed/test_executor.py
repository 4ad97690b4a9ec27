"""The engine on two ranks: what it computes, and that its processes end with it. test_rank_faults.py has what fails."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, run, token_ids
from server_process import children_of, is_running, wait_for
from warm_ranks import StartedRanks

from pagedattn_serve import LLMEngine, SamplingParams
from pagedattn_serve.loading.loader import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def memfds() -> list[str]:
    """The memory files that this process has open or mapped."""
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [each for each in [*links, *maps] if "memfd:" in each]


@pytest.fixture(scope="module")
def engine(llama: Checkpoint, ranks: StartedRanks) -> Iterator[LLMEngine]:
    """With so few blocks that requests are swapped out; without cached prefixes, each run is like the first one."""
    yield LLMEngine(
        llama.path,
        block_size=8,
        num_blocks=20,
        max_model_len=64,
        max_num_batched_tokens=19,
        preemption_mode="swap",
        enable_prefix_caching=False,
        tensor_parallel_size=2,
    )


def test_tokens_are_those_of_hugging_face(engine: LLMEngine, llama: Checkpoint) -> None:
    """With chunks, swaps and copies of blocks; and alone, as CPU graphs."""
    params = SamplingParams(temperature=0, n=2, max_tokens=24, ignore_eos=True)
    outputs = run(engine, llama.prompts, params)
    for output, expected in zip(outputs, llama.expected, strict=True):
        assert [completion.token_ids for completion in output.outputs] == [expected] * 2
    assert engine.stats().num_swaps > 0
    assert token_ids(run(engine, llama.prompts[:1], GREEDY)) == llama.expected[:1]


def test_a_rank_has_a_slice(engine: LLMEngine, llama: Checkpoint) -> None:
    whole, slice = load_model(llama.path), engine.model_runner.model
    assert (slice.num_heads, slice.num_kv_heads) == (whole.num_heads // 2, whole.num_kv_heads // 2)
    [key_cache, *_] = engine.model_runner.cache_engine.kv_caches[0]
    assert key_cache.shape[1] == slice.num_kv_heads or key_cache.shape[2] == slice.num_kv_heads


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_left_of_an_engine(llama: Checkpoint, ranks: StartedRanks) -> None:
    num_threads, before = torch.get_num_threads(), memfds()
    engine = LLMEngine(llama.path, num_blocks=40, tensor_parallel_size=2)
    assert torch.get_num_threads() == max(1, num_threads // 2) and memfds() != before
    assert token_ids(run(engine, llama.prompts[:1], GREEDY)) == llama.expected[:1]
    assert is_running(ranks.pids[-1])
    del engine
    gc.collect()
    assert not is_running(ranks.pids[-1])
    assert torch.get_num_threads() == num_threads and memfds() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tensor_parallel_size=3), "tensor_parallel_size: expected a divisor of the 4 query heads"),
        (dict(tensor_parallel_size=2, num_blocks=10**9), "num_blocks: expected a cache that fits in memory"),
    ],
)
def test_an_error_of_the_start(llama: Checkpoint, ranks: StartedRanks, options: dict[str, Any], message: str) -> None:
    """It is that of one rank, and leaves no process."""
    num_started = len(ranks.processes)
    with pytest.raises((ValueError, MemoryError), match=f"^{message}"):
        LLMEngine(llama.path, **options)
    assert len(ranks.processes) - num_started == options["tensor_parallel_size"] - 1
    assert not any(map(is_running, ranks.pids[num_started:]))


PROGRAM = """
import sys
from pagedattn_serve import LLM, SamplingParams
llm = LLM(sys.argv[1], num_blocks=40, tensor_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
llm.generate(prompt_token_ids=[[1, 2]], sampling_params=params, use_tqdm=False)
print("generated", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["return", "SIGKILL"])
def test_a_program_leaves_no_rank(llama: Checkpoint, end: str) -> None:
    """The rank is one that the program has started itself, whether the program ends or is killed."""
    command = [sys.executable, "-X", "dev", "-c", PROGRAM, str(llama.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdin is not None and program.stdout is not None and program.stderr is not None
        assert program.stdout.readline() == b"generated\n"
        [rank] = children_of(program.pid)
        if end == "return":
            program.stdin.close()
        else:
            program.kill()
        program.wait(60)
        stderr = program.stderr.read().decode()
    assert "Warning" not in stderr and "Traceback" not in stderr
    wait_for(lambda: not is_running(rank))
