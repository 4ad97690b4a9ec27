"""How much memory is free, from files as the kernel writes them; and the cache that takes a share of it."""

import logging
import resource
from pathlib import Path

import pytest
from checkpoints import Checkpoint

from pagedattn_serve.async_engine import engine as async_engine
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.execution import engine_setup
from pagedattn_serve.execution.free_memory import free_memory
from pagedattn_serve.sampling_params import SamplingParams

GIB = 1 << 30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with 8 GiB available, and a process of 1,000 pages in the cgroup /jobs/own."""
    proc = tmp_path / "proc"
    write(proc, meminfo=f"MemTotal: {16 << 20} kB\nMemFree: 5 kB\nMemAvailable: {8 << 20} kB")
    write(proc / "self", cgroup="0::/jobs/own", statm="1000 1 1 1 0 1 0")
    return proc


def test_what_the_machine_has(proc: Path, tmp_path: Path) -> None:
    assert free_memory(proc, tmp_path / "none") == 8 * GIB
    (proc / "self" / "cgroup").unlink()
    assert free_memory(proc, tmp_path / "none") == 8 * GIB


def test_limits_of_cgroups(proc: Path, tmp_path: Path) -> None:
    """The tightest of those around the process. The page cache that can be dropped is free; "max" is no limit."""
    root = tmp_path / "cgroup"
    write(root / "jobs" / "own", memory__max="max", memory__current=GIB, memory__stat="anon 5\ninactive_file 7")
    assert free_memory(proc, root) == 8 * GIB
    write(root / "jobs", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=f"inactive_file {GIB // 2}")
    assert free_memory(proc, root) == 3 * GIB // 2
    write(root / "jobs" / "own", memory__max=GIB, memory__current=2 * GIB)
    assert free_memory(proc, root) == 0, "beyond the limit"
    write(root / "other", memory__max=1, memory__current=1, memory__stat="")
    write(root / "jobs" / "own", memory__max="max")
    assert free_memory(proc, root) == 3 * GIB // 2


def test_limits_of_cgroups_of_version_1(proc: Path, tmp_path: Path) -> None:
    """In a container, whose own cgroup is the root there."""
    write(proc / "self", cgroup="5:cpu:/x\n4:memory:/docker/abc\n0::/")
    files = {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": GIB, "memory__stat": "total_inactive_file 9"}
    write(tmp_path / "cgroup" / "memory", **files)
    assert free_memory(proc, tmp_path / "cgroup") == GIB + 9


def test_the_limit_of_the_address_space(proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (GIB, resource.RLIM_INFINITY))
    assert free_memory(proc, tmp_path) == GIB - 1000 * resource.getpagesize()


def test_the_cache_takes_its_share(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says how much of how much. What the machine really has is read without a patch."""
    assert free_memory() > 0
    monkeypatch.setattr(engine_setup, "free_memory", lambda: 1_000_000)
    with caplog.at_level(logging.INFO):
        engine = LLMEngine(llama.path, cpu_memory_utilization=0.25)
    block_bytes = engine_setup.block_bytes_of(engine.model_runner.model, 16)
    assert engine.stats().num_blocks == 250_000 // block_bytes
    assert "the cache may take 250,000 of 1,000,000 free bytes" in caplog.text
    with pytest.raises(ValueError, match=rf"^cpu_memory_utilization: expected at least one block, {block_bytes} bytes"):
        LLMEngine(llama.path, cpu_memory_utilization=0.000001)


def test_an_engine_under_a_limit_of_the_address_space(llama: Checkpoint) -> None:
    """The real limit: an engine takes its share of what is left, and has room to serve with the rest. Without the limit
    it would take more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, hard))
    try:
        engine = LLMEngine(llama.path, cpu_memory_utilization=0.05, max_num_seqs=8192)
        engine.add_request("0", None, SamplingParams(max_tokens=3, ignore_eos=True), [1, 2, 3])
        outputs = [output for _ in range(3) for output in engine.step()]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    [last] = outputs[-1].outputs
    assert len(last.token_ids) == 3
    num_bytes = engine.stats().num_blocks * engine_setup.block_bytes_of(engine.model_runner.model, 16)
    assert GIB // 40 < num_bytes <= GIB // 20


def test_replicas_divide_the_share(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would find the same memory free."""

    class Started(Exception):
        pass

    def replicas(args: EngineArgs, num_replicas: int, initializer: object) -> None:
        raise Started(args.cpu_memory_utilization, num_replicas)

    monkeypatch.setattr(async_engine, "Replicas", replicas)
    with pytest.raises(Started) as started:
        args = EngineArgs(llama.path, cpu_memory_utilization=0.5)
        async_engine.AsyncLLMEngine.from_engine_args(args, data_parallel_size=2)
    assert started.value.args == (0.25, 2)
