"""The engine with layers split over ranks: it gives the bits of one rank, and what becomes of it when ranks fail.

On ranks of this host, and on two hosts, which are this one.
"""

import gc
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from embedders import expect_embeddings
from engine_runs import finish_all, run, token_ids
from failing_ranks import (
    GREEDY,
    add,
    error_of,
    expect_death_amid_a_step,
    fail_on_rank_0,
    interrupt_at_places,
)
from faulty_rank import RAISES, STOPS
from remote_rank import LocalPlacement
from server_process import is_running, wait_for
from test_interrupts import ROOT, expect_nothing_left
from warm_ranks import StartedRanks, memfds

from pagedattn_ext.sanitizer import CacheError
from pagedattn_serve import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from pagedattn_serve.distributed import communicator, launch, pipeline, workers
from pagedattn_serve.distributed.communicator import SharedMemoryCommunicator
from pagedattn_serve.distributed.pipeline import PipelineCommunicator, cut, partition_of, watch_layers
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.model_runner import StepInputs
from pagedattn_serve.loading.loader import load_model

# With so few blocks that requests are preempted; without cached prefixes, each run is like the first one.
SMALL: dict[str, Any] = dict(
    block_size=8, num_blocks=20, max_model_len=64, max_num_batched_tokens=19, enable_prefix_caching=False
)
LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FILES = {str(ROOT / f"distributed/{name}.py") for name in ("executor", "workers", "pipeline", "links", "channel")}


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Rank 0 cuts the steps of these tests, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "MIN_PIECE_TOKENS", 3)
        yield


@pytest.fixture(scope="module")
def uneven(get_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """Of three layers, with a tied embedding."""
    return get_checkpoint("llama-mqa-tied-bias")


@pytest.fixture(scope="module")
def engine(uneven: Checkpoint, ranks: StartedRanks) -> Iterator[LLMEngine]:
    """Two stages, of two layers and one."""
    yield LLMEngine(uneven.path, preemption_mode="swap", pipeline_parallel_size=2, **SMALL)


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (output.prompt_logprobs, [(each.token_ids, each.cumulative_logprob, each.logprobs) for each in output.outputs])
        for output in outputs
    ]


def test_tokens_are_those_of_hugging_face(engine: LLMEngine, uneven: Checkpoint) -> None:
    """With chunks, swaps and copies of blocks; and alone, as CPU graphs."""
    params = SamplingParams(temperature=0, n=2, max_tokens=24, ignore_eos=True)
    num_swaps = engine.stats().num_swaps
    outputs = run(engine, uneven.prompts, params)
    for output, expected in zip(outputs, uneven.expected, strict=True):
        assert [completion.token_ids for completion in output.outputs] == [expected] * 2
    assert engine.stats().num_swaps > num_swaps
    assert token_ids(run(engine, uneven.prompts[:1], LONG)) == uneven.expected[:1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, n=3, use_beam_search=True, max_tokens=8, logprobs=1),
    ],
)
def test_bits_are_those_of_one_rank(engine: LLMEngine, uneven: Checkpoint, params: SamplingParams) -> None:
    one = LLMEngine(uneven.path, preemption_mode="swap", **SMALL)
    assert bits(run(engine, uneven.prompts, params)) == bits(run(one, uneven.prompts, params))


def test_embeddings_are_those_of_one_rank(engine: LLMEngine, uneven: Checkpoint) -> None:
    """Beside requests that generate, in the same pieces."""
    expect_embeddings(engine, uneven, GREEDY)


def test_a_rank_has_its_layers(engine: LLMEngine) -> None:
    """Rank 0 the last ones, as it samples."""
    model = engine.model_runner.model
    assert [name for name, _ in model.named_modules() if name.endswith("mlp")] == ["model.layers.2.mlp"]
    assert len(engine.model_runner.cache_engine.kv_caches) == 1


def test_the_largest_stage_decides_how_many_blocks_there_are(uneven: Checkpoint, ranks: StartedRanks) -> None:
    """It has two of three layers, and is not that of rank 0."""
    options = dict(kv_cache_memory=1 << 16)
    one, two = (LLMEngine(uneven.path, pipeline_parallel_size=size, **options) for size in (1, 2))
    assert two.stats().num_blocks == one.stats().num_blocks * 3 // 2


def test_stages_of_several_ranks(llama: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in each of two stages. The ranks compare what they read, and the sanitizer knows each piece."""
    monkeypatch.setenv("PAGEDATTN_CHECK", "1")
    monkeypatch.setenv("PAGEDATTN_SANITIZE", "1")
    options = dict(preemption_mode="recompute", tensor_parallel_size=2, pipeline_parallel_size=2)
    engine = LLMEngine(llama.path, **SMALL, **options)
    assert token_ids(run(engine, llama.prompts, LONG)) == llama.expected
    assert engine.stats().num_recomputes > 0


def test_stages_that_differ(get_checkpoint: Callable[[str], Checkpoint], ranks: StartedRanks) -> None:
    """In the windows of their layers, which the ranks of a model without stages would have in groups; and in the scales
    of their caches. With speculation, whose drafts have rows of their own."""
    path = get_checkpoint("qwen2-sliding").path
    scales = [(0.5 + layer, 1.5 + layer) for layer in range(4)]
    options = dict(kv_cache_dtype="fp8", kv_scales=scales, speculation="ngram", **SMALL)
    one, two = (LLMEngine(path, pipeline_parallel_size=size, **options) for size in (1, 2))
    prompts = [[1, 2, 3] * 5, [7, 8] * 12, [4]]
    assert bits(run(two, prompts, LONG)) == bits(run(one, prompts, LONG))
    assert two.scheduler.block_manager.windows == (None,)
    assert two.stats().num_proposed_tokens > 0


def test_the_sanitizer_finds_a_wrong_piece(
    uneven: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which a row does not see its last token."""
    between = StepInputs.between

    def shorter(inputs: StepInputs, begin: int, end: int) -> Any:
        piece, picked = between(inputs, begin, end)
        piece.seq_lens[-1] -= 1
        return piece, picked

    monkeypatch.setattr(StepInputs, "between", shorter)
    monkeypatch.setenv("PAGEDATTN_SANITIZE", "1")
    engine = LLMEngine(uneven.path, pipeline_parallel_size=2, **SMALL)
    with pytest.raises(CacheError, match=r"row \d has a length of \d+, expected \d+"):
        run(engine, uneven.prompts, LONG)


def test_pieces() -> None:
    """As many as stages can use, none of few tokens, all of about the same size; one without stages."""
    stages, sums = PipelineCommunicator(0, 2, 2), SharedMemoryCommunicator(0, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "MIN_PIECE_TOKENS", 10)
        assert [cut(num_tokens, stages) for num_tokens in (1, 19, 25)] == [[0, 1], [0, 19], [0, 12, 25]]
        assert len(cut(1000, stages)) == 2 * pipeline.MAX_PIECES_PER_STAGE + 1
        assert cut(1000, sums) == [0, 1000]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PipelineCommunicator, socket.socket]]:
    """Rank 0 of two stages, and the other end of its connection. It looks all the time, and has hardly any patience."""
    monkeypatch.setattr(communicator, "PATIENCE_SECONDS", 1e-6)
    monkeypatch.setattr(pipeline, "LOOK_SECONDS", 0)
    monkeypatch.setattr(pipeline, "CHECK_SECONDS", 0.001)
    ours, theirs = socket.socketpair()
    rank = PipelineCommunicator(0, 2, 2)
    rank.take_links({1: ours})
    with rank.create_group() as group, theirs:
        rank.join(group)
        yield rank, theirs
    rank.leave()


@pytest.mark.parametrize("at_work", [None, lambda: True])
def test_a_stage_waits_while_a_rank_computes(
    stage: tuple[PipelineCommunicator, socket.socket], monkeypatch: pytest.MonkeyPatch, at_work: Any
) -> None:
    """Or, if it cannot know that, as all ranks but rank 0, for as long as the others do."""
    rank, theirs = stage
    rank.at_work = at_work
    looks = iter([lambda: None, lambda: None, lambda: theirs.sendall(torch.ones(2).numpy().tobytes())])
    monkeypatch.setattr(rank, "check", lambda: next(looks)())
    assert torch.equal(rank.receive((1, 2), torch.float32), torch.ones(1, 2))


def test_a_stage_waits_no_more_if_one_that_shares_its_memory_gives_up(
    stage: tuple[PipelineCommunicator, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, theirs = stage
    looks = iter([lambda: rank._near.abort("rank 1: no memory"), theirs.close])
    monkeypatch.setattr(rank, "check", lambda: next(looks)())
    with pytest.raises(RuntimeError, match=r"^the group is broken: rank 1: no memory$"):
        rank.receive((1, 2), torch.float32)


def test_a_group_after_one_that_has_broken_is_whole(stage: tuple[PipelineCommunicator, socket.socket]) -> None:
    rank, theirs = stage
    theirs.close()
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        rank.receive((1, 2), torch.float32)
    assert rank.broken is not None
    rank.leave()
    assert rank.broken is None


def test_a_stage_ends_within_a_layer_if_the_group_breaks(
    stage: tuple[PipelineCommunicator, socket.socket], uneven: Checkpoint
) -> None:
    rank, theirs = stage
    model = load_model(uneven.path, partition=partition_of(rank))
    watch_layers(model, rank)
    theirs.close()
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        model.get_submodule("model.layers.2")()


# ---- ranks that fail ------------------------------------------------------------------------------------------------


@pytest.fixture
def start(
    uneven: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLMEngine]]:
    """Makes an engine of so many stages, on so many hosts, whose ranks have these faults. In the end no process is
    left."""
    num_started, before = len(ranks.processes), memfds()

    def start(num_stages: int, num_hosts: int, fault: str | None = None) -> LLMEngine:
        options: dict[str, Any] = dict(num_blocks=40, enable_prefix_caching=False, pipeline_parallel_size=num_stages)
        if num_hosts > 1:
            faults = {1: fault}
            monkeypatch.setattr(launch, "RayPlacement", partial(LocalPlacement, ranks, num_hosts, faults))
            options["distributed_executor_backend"] = "ray"
        ranks.fault = fault
        return LLMEngine(uneven.path, **options)

    yield start
    ranks.fault = None
    gc.collect()  # errors that the test has seen keep frames, and the frames keep engines
    wait_for(lambda: not any(map(is_running, ranks.pids[num_started:])))
    assert memfds() == before


@pytest.mark.parametrize(("num_hosts", "rank"), [(1, 2), (3, 1)])
def test_ranks_that_fail(
    start: Callable[..., LLMEngine],
    uneven: Checkpoint,
    ranks: StartedRanks,
    monkeypatch: pytest.MonkeyPatch,
    num_hosts: int,
    rank: int,
) -> None:
    """In the first stage, or in one that others wait for on both sides; then rank 0. The error is that of the rank, and
    the engine goes on with the right tokens. If a rank is killed, the engine is broken for good."""
    engine = start(3, num_hosts, "tokens")
    expected = [expected[:6] for expected in uneven.expected[:3]]
    add(engine, *uneven.prompts[:3])
    engine.step()
    engine.add_request("bad", None, GREEDY, [1, RAISES])
    name = f"rank {rank} (process {ranks.pids[-3 + rank]}{' on 127.0.0.1' if num_hosts > 1 else ''})"
    assert error_of(engine.step) == f"RuntimeError: {name}: MemoryError: no memory amid a step"
    assert len(engine.fail_batch("it failed")) == 4
    expect_nothing_left(engine)
    add(engine, *uneven.prompts[:2])
    fail_on_rank_0(engine, monkeypatch)
    assert token_ids(finish(engine)) == expected[:2]
    ended = "has ended" if num_hosts > 1 else "was killed by SIGKILL"
    expect_death_amid_a_step(engine, f"ExecutorDeadError: {name} {ended}")


def finish(engine: LLMEngine) -> list[RequestOutput]:
    outputs = finish_all(engine)
    return [outputs[name][-1] for name in sorted(outputs)]


def test_a_stage_that_stops(
    start: Callable[..., LLMEngine], ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "PATIENCE_SECONDS", 2)
    engine = start(2, 1, "tokens")
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 0.2)
    add(engine, [1, STOPS])
    rank = f"rank 1 (process {ranks.pids[-1]})"
    assert error_of(engine.step) == (
        f"ExecutorDeadError: {rank} has not answered for 0.2 s, after RuntimeError: the group is broken: "
        "rank 1 has not come, and no rank has computed within 2 seconds"
    )


@pytest.mark.parametrize("joins", [False, True])
def test_interrupts(engine: LLMEngine, uneven: Checkpoint, joins: bool) -> None:
    """At places of what is new with stages, of steps and of a new group. The next requests have their tokens, and
    nothing is left open."""

    def expect_right_tokens() -> None:
        expected = [expected[:6] for expected in uneven.expected[:3]]
        assert token_ids(run(engine, uneven.prompts[:3], GREEDY)) == expected

    assert interrupt_at_places(engine, expect_right_tokens, FILES, joins) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pipeline_parallel_size=4), "pipeline_parallel_size: expected at most 3, the layers of the model, got 4"),
        (
            dict(tensor_parallel_size=3, pipeline_parallel_size=2, distributed_executor_backend="ray"),
            "tensor_parallel_size: expected a divisor of the 2 ranks of a machine, so that a stage .*, got 3",
        ),
    ],
)
def test_an_error_of_the_start(
    uneven: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(launch, "RayPlacement", partial(LocalPlacement, ranks, 3, {}))
    num_started = len(ranks.processes)
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        LLMEngine(uneven.path, **options)
    assert len(ranks.processes) == num_started  # 50 processes that only end again would take long


def test_stages_are_on_cpus() -> None:
    parallel = EngineArgs("model", pipeline_parallel_size=2).create_engine_configs().parallel
    with pytest.raises(ArgumentError, match=r"^pipeline_parallel_size: expected 1 on cuda, as stages .*, got 2$"):
        launch.choose_launch(parallel, "cuda")
