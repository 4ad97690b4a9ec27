"""The engine on two ranks: what it computes, and that its processes end with it. test_rank_faults.py has what fails."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, make_model
from embedders import expect_embeddings
from engine_runs import run, token_ids
from server_process import children_of, is_running, wait_for
from warm_ranks import StartedRanks, memfds

from pagedattn_serve import EngineArgs, LLMEngine, SamplingParams
from pagedattn_serve.distributed.launch import take_share, threads_of_rank
from pagedattn_serve.loading.loader import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


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


def test_groups_of_layers_on_ranks(get_checkpoint: Callable[[str], Checkpoint], ranks: StartedRanks) -> None:
    """Two groups, whose tables another rank has from what it is told alone. The ranks compare what they read."""
    sliding = get_checkpoint("qwen2-sliding")
    options = dict(block_size=8, num_blocks=20, max_num_batched_tokens=19, preemption_mode="swap")
    engine = LLMEngine(sliding.path, tensor_parallel_size=3, **options)
    assert engine.scheduler.block_manager.windows == (None, 9)
    assert token_ids(run(engine, sliding.prompts, GREEDY)) == sliding.expected
    assert engine.stats().num_preemptions > 0


def test_embeddings_are_those_of_one_rank(engine: LLMEngine, llama: Checkpoint) -> None:
    """Beside requests that generate; the rows of each rank go through its slice of the head, or past it."""
    expect_embeddings(engine, llama, GREEDY)


def test_a_rank_has_a_slice(engine: LLMEngine, llama: Checkpoint) -> None:
    whole, slice = load_model(llama.path), engine.model_runner.model
    num_kv_heads = slice.cache_shapes[0].num_kv_heads
    assert (slice.num_heads, num_kv_heads) == (whole.num_heads // 2, whole.cache_shapes[0].num_kv_heads // 2)
    [key_cache, *_] = engine.model_runner.cache_engine.kv_caches[0]
    assert key_cache.shape[1] == num_kv_heads


def test_each_rank_quantizes_its_slice(ranks: StartedRanks, tmp_path: Path) -> None:
    """Numbers are those of one rank, which they would not be if a rank kept the floats."""
    make_model("llama-gqa", hidden_size=64, head_dim=16, intermediate_size=128).save_pretrained(tmp_path)

    def logprobs(num_ranks: int) -> torch.Tensor:
        engine = LLMEngine(tmp_path, quantization="int4", num_blocks=20, tensor_parallel_size=num_ranks)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = run(engine, [[*range(40, 60)]], params)
        assert output.prompt_logprobs is not None
        return torch.tensor([logprob.logprob for each in output.prompt_logprobs[1:] for logprob in each.values()])

    torch.testing.assert_close(logprobs(2), logprobs(1), atol=1e-3, rtol=0)


def test_each_rank_says_how_far_it_has_loaded(llama: Checkpoint, ranks: StartedRanks) -> None:
    said: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    args = EngineArgs(llama.path, num_blocks=40, tensor_parallel_size=2)
    LLMEngine.from_engine_args(args, lambda rank, done, total: said[rank].append((done, total)))
    for rank in range(2):
        assert [4 * done // total for done, total in said[rank]] == [0, 1, 2, 3, 4]
    assert not said[2]


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


def test_threads_come_back_in_any_order() -> None:
    """As where a new engine is made before the old one ends. Each engine counts the threads that there are without any;
    what somebody sets meanwhile stays."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            num_ranks = [2, 4, 2]
            give_back = []
            for each in num_ranks:
                give_back.append(take_share(threads_of_rank(each), None))
                assert torch.get_num_threads() == 8 // each
            left = set(range(3))
            for i in order:
                give_back[i]()
                left.remove(i)
                assert torch.get_num_threads() == (8 // num_ranks[max(left)] if left else 8), order
        first, second = take_share(4, None), take_share(2, None)
        torch.set_num_threads(3)
        first()
        second()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


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
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
try:
    print("loaded", flush=True)
    while True:
        llm.generate(prompt_token_ids=[[1, 2]], sampling_params=params, use_tqdm=False)
except KeyboardInterrupt:
    [output] = llm.generate(prompt_token_ids=[[1, 2]], sampling_params=params, use_tqdm=False)
    print(output.outputs[0].finish_reason, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_program_leaves_no_rank(llama: Checkpoint, number: int) -> None:
    """Ctrl-C goes to all its processes, and only the program minds. The rank is one that it has started itself."""
    command = [sys.executable, "-X", "dev", "-c", PROGRAM, str(llama.path)]
    pipes: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, process_group=0, **pipes) as program:
        assert program.stdout is not None and program.stderr is not None
        assert program.stdout.readline() == b"loaded\n"
        [rank] = children_of(program.pid)
        if number == signal.SIGINT:
            os.killpg(program.pid, number)
        else:
            program.kill()
        stdout, stderr = program.communicate(timeout=60)
    assert (stdout, stderr) == (b"length\n" if number == signal.SIGINT else b"", b"")
    wait_for(lambda: not is_running(rank))
