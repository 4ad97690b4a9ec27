"""Ranks that torchrun starts."""

import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import Checkpoint
from engine_runs import run, token_ids
from server_process import SLOW_COMMAND, running
from torch.distributed import TCPStore
from warm_python import run_python
from warm_ranks import StartedRanks

from pagedattn_serve import AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from pagedattn_serve.cli import main
from pagedattn_serve.distributed import torchrun
from pagedattn_serve.distributed.torchrun import rank_of_torchrun

COMMAND = ("-m", "torch.distributed.run", "--nproc-per-node", "2")

PROGRAM = """
import os, sys
from pagedattn_serve import LLM, SamplingParams
llm = LLM(sys.argv[1], num_blocks=40, tensor_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
[output] = llm.generate(prompt_token_ids=eval(sys.argv[2]), sampling_params=params, use_tqdm=False)
print(os.environ["RANK"], output.outputs[0].token_ids)
try:
    LLM(sys.argv[1], num_blocks=40, tensor_parallel_size=2)
except RuntimeError as error:
    print(error)
"""


def test_rank_0_has_the_engine(llama: Checkpoint, tmp_path: Path) -> None:
    """And the other rank serves it until it ends. A second engine does not wait for ranks that cannot come."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_python(*COMMAND, program, str(llama.path), str(llama.prompts[:1]))
    refusal = "a program that torchrun has started has one engine with tensor_parallel_size, and this is a second one"
    assert (done.returncode, done.stdout) == (0, f"0 {llama.expected[0][:6]}\n{refusal}\n"), done.stderr


def test_a_server_ends_when_its_requests_have_ended() -> None:
    """torchrun sends SIGTERM to all processes that it has started, and to their children. A stream goes on to its end,
    for which it needs the engine's process and both ranks."""
    launcher = [sys.executable, *COMMAND, "--no-python"]
    body = {"model": "demo_model", "prompt": "A class", "max_tokens": 500, "ignore_eos": True, "stream": True}
    options = ("--tensor-parallel-size", "2")
    with running(*options, python=sys.executable, program=SLOW_COMMAND, launcher=launcher) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            events = response.iter_lines()
            next(events)
            server.process.send_signal(signal.SIGTERM)
            *_, last, done = [event.removeprefix("data: ") for event in events if event]
        assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
        server.process.wait(60)
        assert "in_flight=1" in server.stderr and "stopped" in server.stderr


def environment_of(rank: int, world_size: int, local_world_size: int, port: int = 1) -> dict[str, str]:
    """What torchrun tells a rank, on machines with so many ranks each."""
    facts = {"TORCHELASTIC_RUN_ID": "a run id of someone's own, " * 9, "TORCHELASTIC_RESTART_COUNT": 0}
    facts |= {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
    facts |= {"GROUP_WORLD_SIZE": world_size // local_world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return {name: str(value) for name, value in facts.items()}


def as_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch, *args: int) -> None:
    for name, value in environment_of(*args).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_ranks_on_several_machines(
    llama: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch, num_stages: int
) -> None:
    """Two on each of two, which are this one; with two stages, one on each. Without torchrun, but with a store as it
    has one."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for rank in (1, 2, 3):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ranks.start("torchrun_rank", theirs)
            ours.sendall(json.dumps(environment_of(rank, 4, 2, store.port)).encode())
    as_rank_of_torchrun(monkeypatch, 0, 4, 2, store.port)
    sizes = dict(tensor_parallel_size=4 // num_stages, pipeline_parallel_size=num_stages)
    engine = LLMEngine(llama.path, num_blocks=40, **sizes)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    try:
        assert token_ids(run(engine, llama.prompts[:2], params)) == [expected[:6] for expected in llama.expected[:2]]
        executor: Any = engine.executor
        assert [bool(worker.ip) for worker in executor._workers._workers] == [False, True, True]
        del engine, executor
        gc.collect()
        assert [process.wait(60) for process in ranks.processes[-3:]] == [0, 0, 0]
    finally:
        torchrun._listeners.pop().close()


def test_verify_tries_what_one_engine_can(
    llama: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what it has not tried: what needs another engine, and other threads, which rank 0 alone would have."""
    port = os.getpid()  # which makes the ranks meet where no other test does
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ranks.start("torchrun_rank", theirs)
        ours.sendall(json.dumps(environment_of(1, 2, 2, port)).encode())
    as_rank_of_torchrun(monkeypatch, 0, 2, 2, port)
    try:
        assert main(["verify", str(llama.path), "--tensor-parallel-size", "2"]) == 0
        gc.collect()
        assert ranks.processes[-1].wait(60) == 0
    finally:
        torchrun._listeners.pop().close()
    _, _, *rows, last = capsys.readouterr().out.splitlines()
    verdicts = [row.split()[-1] for row in rows]
    assert verdicts == ["yes"] * 3 + ["tried"] * 2 + ["yes"] + ["tried"] * 7
    assert rows[-1].split() == ["with", "speculation,", "alone", "0", "nothing", "not", "tried"]
    assert last == "the same, bit for bit, under all 4 conditions that were tried"


def test_rank_0_alone_has_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    as_rank_of_torchrun(monkeypatch, 1, 2, 2)
    monkeypatch.setattr(torchrun, "START_SECONDS", 0.0)
    assert main(["verify", "--tensor-parallel-size", "2"]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "pagedattn: error: rank 0 has made no engine within 0 s\n")


def test_only_rank_0_starts_a_process_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_of_torchrun(monkeypatch, 1, 2, 2)
    monkeypatch.setattr(torchrun, "START_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match=r"^rank 0 has made no engine within 0 s$"):
        AsyncLLMEngine.from_engine_args(EngineArgs("no/such/model", tensor_parallel_size=2))


def test_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would wait for ranks that serve another one."""
    as_rank_of_torchrun(monkeypatch, 0, 2, 2)
    with pytest.raises(ValueError, match=r"^data_parallel_size: expected 1 with ranks that torchrun .*, got 2$"):
        AsyncLLMEngine.from_engine_args(EngineArgs("no/such/model", tensor_parallel_size=2), data_parallel_size=2)


def test_ranks_are_as_many_as_torchrun_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_of_torchrun(2) is None
    as_rank_of_torchrun(monkeypatch, 3, 4, 2)
    assert rank_of_torchrun(1) is None
    with pytest.raises(ValueError, match=r"^tensor_parallel_size: expected 4, as many as the processes .*, got 2$"):
        rank_of_torchrun(2)
    assert rank_of_torchrun(4) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # and one on the other machine
    with pytest.raises(ValueError, match=r"the same number on each machine, got 3 of 4 on this one$"):
        rank_of_torchrun(4)


def test_ray_does_not_place_ranks_that_torchrun_has_started(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_of_torchrun(monkeypatch, 0, 2, 2)
    with pytest.raises(ValueError, match=r"^distributed_executor_backend: expected mp with ranks .*, got ray$"):
        LLMEngine(llama.path, tensor_parallel_size=2, distributed_executor_backend="ray")
