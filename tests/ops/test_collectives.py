"""Ranks that share memory: what they compute, how a group breaks, and what it leaves behind.

A rank is a process, forked from this one.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import DTYPES, ONE_RANK, assert_rejected, assert_same_bits, random_bits
from torch import Tensor

from pagedattn_ext import CPUGraph, SharedMemoryGroup, ops

FORK = multiprocessing.get_context("fork")
PATIENCE = 120  # seconds: beside three busy processes on two CPUs, ranks that take turns wait for a CPU at every call


class Ranks:
    """Processes, of which each joins a group and sends what work(group) returns, or the text of its error."""

    def __init__(self, world_size: int, work: Callable[[SharedMemoryGroup], Any], **options: Any) -> None:
        descriptor = SharedMemoryGroup.create(world_size, **options)
        self.processes, self.pipes = [], []
        for rank in range(world_size):
            mine, theirs = FORK.Pipe()
            process = FORK.Process(target=self._run, args=(descriptor, rank, work, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)
        os.close(descriptor)

    @staticmethod
    def _run(descriptor: int, rank: int, work: Callable[[SharedMemoryGroup], Any], pipe: Any) -> None:
        try:
            with SharedMemoryGroup(descriptor, rank) as group:
                pipe.send(work(group))
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}")

    def receive(self, rank: int) -> Any:
        assert self.pipes[rank].poll(PATIENCE), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def name(self, rank: int) -> str:
        return f"rank {rank} (process {self.processes[rank].pid})"

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


def join_all(world_size: int, **options: Any) -> list[SharedMemoryGroup]:
    """All ranks in this process."""
    descriptor = SharedMemoryGroup.create(world_size, **options)
    groups = [SharedMemoryGroup(descriptor, rank) for rank in range(world_size)]
    os.close(descriptor)
    return groups


def results(world_size: int, work: Callable[[SharedMemoryGroup], Any], **options: Any) -> list[Any]:
    with Ranks(world_size, work, **options) as ranks:
        return [ranks.receive(rank) for rank in range(world_size)]


def one(group: SharedMemoryGroup) -> Tensor:
    return ops.all_reduce_shared(torch.ones(4), group)


# ---- what they compute ---------------------------------------------------------------------------------------------


def inputs_of(world_size: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """With infinity, and elements whose sum depends on the order, overflows fp16, or is -0."""
    inputs = []
    for rank in range(world_size):
        input = torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 300
        input[::7] *= 1e-3
        input[3::11], input[5::13] = 40_000, -0.0
        input[2::17] = torch.inf if rank == 1 else 0.5
        inputs.append(input.to(dtype))
    return inputs


def sum_in_order(inputs: list[Tensor]) -> Tensor:
    total = inputs[0].float()
    for input in inputs[1:]:
        total = total + input.float()
    return total.to(inputs[0].dtype)


def reduce_many_sizes(group: SharedMemoryGroup) -> str:
    """The last sizes are summed by shares, and go in several pieces."""
    for dtype in DTYPES:
        for size in (0, 1, 15, 33, 1000, 20_001, 40_000, 300_001):
            inputs = inputs_of(group.world_size, size, dtype)
            input = inputs[group.rank]
            assert ops.all_reduce_shared(input, group) is input
            assert_same_bits(input, sum_in_order(inputs_of(group.world_size, size, dtype)))
    return "done"


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_all_reduce(max_bytes, world_size):
    assert results(world_size, reduce_many_sizes, max_bytes=max_bytes) == ["done"] * world_size


def gather_many_shapes(group: SharedMemoryGroup) -> str:
    """In pieces of 4096 bytes, which end within rows, and of nothing but bits."""
    for dtype in DTYPES:
        for shape in ((1,), (3, 5), (2, 0), (0, 4), (2, 3, 700), (2, 5000)):
            inputs = [
                random_bits(*shape, dtype=dtype, generator=torch.Generator().manual_seed(rank))
                for rank in range(group.world_size)
            ]
            expected = torch.cat(inputs, dim=-1)
            assert_same_bits(ops.all_gather_shared(inputs[group.rank], group), expected)
            out = torch.empty_like(expected)
            assert ops.all_gather_shared(inputs[group.rank], group, out=out) is out
            assert_same_bits(out, expected)
    return "done"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_gather(world_size):
    assert results(world_size, gather_many_shapes, max_bytes=4096) == ["done"] * world_size


def gather_whole_pieces_and_one_more(group: SharedMemoryGroup) -> str:
    for size in (1024, 1025, 2049):
        inputs = [torch.arange(size, dtype=torch.float32) + rank * 10_000 for rank in range(group.world_size)]
        out = torch.full((size * group.world_size,), torch.nan)
        assert_same_bits(ops.all_gather_shared(inputs[group.rank], group, out=out), torch.cat(inputs))
    return "done"


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_gather_ends_behind_whole_pieces(world_size):
    """A piece is 4096 bytes. The element behind the last whole piece is a piece too."""
    assert results(world_size, gather_whole_pieces_and_one_more, max_bytes=4096) == ["done"] * world_size


def test_threads_of_a_rank():
    """A large input is split among them. If another test had several threads, OpenMP would wait for them in the main
    thread of a forked child, which has none of them; a new thread starts threads of its own."""

    def on_three_threads(group: SharedMemoryGroup) -> str:
        torch.set_num_threads(3)
        return reduce_many_sizes(group)

    def work(group: SharedMemoryGroup) -> str:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(on_three_threads, group).result()

    assert results(2, work) == ["done"] * 2


def test_cpu_graph():
    """Ranks are threads here: a capture is of one thread."""

    def work(group: SharedMemoryGroup) -> list[float]:
        input, graph = torch.zeros(2, 3), CPUGraph()
        with graph.capture():
            sums = ops.all_reduce_shared(input.clone(), group)
            gathered = ops.all_gather_shared(sums * 2, group)
        found = []
        for step in range(3):
            input.fill_(step + group.rank)
            graph.replay()
            found.append(float(gathered[1, 5]))
        group.close()
        with pytest.raises(ValueError, match="all_reduce_shared: group: expected one that is open, got none"):
            graph.replay()
        return found

    groups, num_threads = join_all(2), len(os.listdir("/proc/self/task"))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, groups)) == [[2.0, 6.0, 10.0]] * 2
    # Python's thread ends before the system's, which may hold the lock of an allocator. If the next test forks
    # meanwhile, its child waits for this lock for ever.
    for _ in range(1000):
        if len(os.listdir("/proc/self/task")) <= num_threads:
            break
        time.sleep(0.01)


def count_calls(group: SharedMemoryGroup) -> tuple[int, str]:
    """Now and then a rank is late, so that others fall asleep; there are large calls among the small ones."""
    large = torch.empty(20_000)
    for step in range(5_000):
        if step % 1000 == 100 * group.rank:
            time.sleep(0.002)
        if step % 100 == 50:
            assert ops.all_reduce_shared(large.fill_(step), group)[-1] == group.world_size * step
        total = ops.all_reduce_shared(torch.full((5,), float(step + group.rank)), group)
        assert total[4] == 2 * step + 1, step
        gathered = ops.all_gather_shared(torch.full((2,), float(step - group.rank)), group)
        assert gathered.tolist() == [step, step, step - 1, step - 1]
    return step, "done"


def test_many_calls():
    assert results(2, count_calls) == [(4_999, "done")] * 2


def test_a_signal_while_waiting():
    """The op goes on, and Python handles the signal when the op is over."""
    ticks = []
    told, tell = os.pipe()

    def work(group: SharedMemoryGroup) -> tuple[float, bool]:
        if group.rank == 1:
            os.read(told, 1)  # that rank 0 is about to wait
            time.sleep(0.3)
        else:
            signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
            os.write(tell, b"x")
        total = float(one(group)[0])
        signal.setitimer(signal.ITIMER_REAL, 0)
        return total, bool(ticks)

    assert results(2, work) == [(2.0, True), (2.0, False)]
    os.close(told)
    os.close(tell)


def test_a_signal_while_waiting_for_a_rank_that_hangs():
    """A second later the op is over, long before the time-out, so that Python can handle the signal. It would find a
    wait that goes on, and one that ends at once."""

    def work(group: SharedMemoryGroup) -> tuple[float, bool, str | None]:
        if group.rank == 1:
            signal.pause()
        ticks: list[int] = []
        signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            one(group)
        return time.monotonic() - started, bool(ticks), group.broken

    with Ranks(2, work) as ranks:
        seconds, is_handled, reason = ranks.receive(0)
        assert 1 <= seconds < 25 and is_handled
        assert reason == f"{ranks.name(0)} was interrupted as it waited for {ranks.name(1)}"


# ---- a broken group ------------------------------------------------------------------------------------------------


def until_an_error(group: SharedMemoryGroup, call: Callable[[SharedMemoryGroup], object] = one) -> tuple[float, str]:
    """When the error came, and its text, which every later call repeats."""
    texts = set()
    with pytest.raises(RuntimeError) as error:
        while True:
            call(group)
    moment = time.monotonic()
    texts.add(str(error.value))
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            one(group)
        texts.add(str(error.value))
    assert len(texts) == 1
    assert texts == {f"all_reduce_shared: the group is broken: {group.broken}"}
    return moment, group.broken or ""


@contextmanager
def ranks_that_call(world_size: int, **options: Any) -> Iterator[Ranks]:
    """Ranks that do until_an_error, once each has made a call."""
    told, tell = os.pipe()

    def work(group: SharedMemoryGroup) -> tuple[float, str]:
        one(group)
        os.write(tell, b"x")
        return until_an_error(group)

    with Ranks(world_size, work, **options) as ranks:
        for _ in range(world_size):
            os.read(told, 1)
        yield ranks
    os.close(told)
    os.close(tell)


def test_a_killed_rank():
    """In mid-call, while others call as fast as they can."""
    with ranks_that_call(3) as ranks:
        killed = time.monotonic()
        os.kill(ranks.processes[1].pid, signal.SIGKILL)  # nobody waits for it: it stays a zombie
        for rank in (0, 2):
            moment, text = ranks.receive(rank)
            assert text == f"{ranks.name(1)} died"
            assert moment - killed < 25


def test_a_rank_that_is_killed_between_calls():
    """And what others say who do not come before it is dead."""

    def work(group: SharedMemoryGroup) -> tuple[float, str]:
        one(group)
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return until_an_error(group)

    with Ranks(2, work) as ranks:
        assert ranks.receive(0)[1] == f"{ranks.name(1)} died"


def test_a_stopped_rank():
    """After its time-out. When it goes on, it hears the same."""
    with ranks_that_call(2, timeout_seconds=2) as ranks:
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        texts = [ranks.receive(0)[1]]
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        texts.append(ranks.receive(1)[1])
        assert texts == [f"{ranks.name(1)} has not come within 2 seconds: it is stopped"] * 2


def test_a_stop_of_the_rank_that_waits():
    """As by Ctrl-Z and fg: the others had no time to come while it stood still."""
    told, tell = os.pipe()

    def work(group: SharedMemoryGroup) -> float:
        if group.rank == 1:
            os.read(told, 1)
        return float(one(group)[0])

    def until_it_is(state: str, process: Any) -> None:
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != state:
            assert process.is_alive()
            time.sleep(0.01)

    with Ranks(2, work, timeout_seconds=2) as ranks:
        waiting = ranks.processes[0]
        until_it_is("S", waiting)
        os.kill(waiting.pid, signal.SIGSTOP)
        until_it_is("T", waiting)
        time.sleep(2.5)
        os.kill(waiting.pid, signal.SIGCONT)
        until_it_is("S", waiting)
        os.write(tell, b"x")
        assert [ranks.receive(rank) for rank in range(2)] == [2.0, 2.0]
    os.close(told)
    os.close(tell)


def test_a_rank_that_never_joins():
    descriptor = SharedMemoryGroup.create(2, timeout_seconds=0.2)
    with SharedMemoryGroup(descriptor, rank=1) as group:
        assert until_an_error(group)[1] == "rank 0 has not joined within 0.2 seconds"
    os.close(descriptor)


def test_a_rank_that_leaves():
    def work(group: SharedMemoryGroup) -> tuple[float, str]:
        one(group)
        if group.rank == 1:
            return 0.0, "left"
        return until_an_error(group)

    with Ranks(2, work) as ranks:
        assert ranks.receive(0)[1] == f"{ranks.name(1)} has left the group"


@pytest.mark.parametrize("reason", ["input: expected no bug, got one", "input: got a bug (ValueError)", "é" * 2000])
def test_abort(reason):
    def work(group: SharedMemoryGroup) -> tuple[float, str]:
        if group.rank == 1:
            time.sleep(0.3)
            start = time.monotonic()
            group.abort(reason)
            group.abort("another reason")
            return start, group.broken or ""
        return until_an_error(group)

    (moment, text), (start, same) = results(2, work)
    assert text == same == reason.encode()[:1000].decode()
    assert moment - start < 25


@pytest.mark.parametrize(
    ("call", "called"),
    [
        (lambda group: ops.all_reduce_shared(torch.ones(5), group), "all_reduce_shared of 5 elements of float32"),
        (lambda group: ops.all_reduce_shared(torch.ones(0), group), "all_reduce_shared of 0 elements of float32"),
        (
            lambda group: ops.all_reduce_shared(torch.ones(4).half(), group),
            "all_reduce_shared of 4 elements of float16",
        ),
        (
            lambda group: ops.all_gather_shared(torch.ones(4), group),
            "all_gather_shared of 4 elements of float32 in rows of 4",
        ),
        (lambda group: ops.all_gather_shared(torch.ones(0), group), "all_gather_shared of 0 elements of float32"),
    ],
)
def test_another_call(call, called):
    """Nobody gets numbers that mean nothing."""

    def work(group: SharedMemoryGroup) -> str:
        with pytest.raises(RuntimeError, match="the group is broken"):
            call(group) if group.rank == 1 else one(group)
        return group.broken or ""

    with Ranks(2, work) as ranks:
        expected = (
            f"{ranks.name(0)} calls all_reduce_shared of 4 elements of float32, and {ranks.name(1)} calls {called}"
        )
        assert [ranks.receive(0), ranks.receive(1)] == [expected] * 2


def test_a_gather_of_other_rows() -> None:
    """Each rank would put the rows of the others elsewhere. A sum does not look at rows."""

    def work(group: SharedMemoryGroup) -> str:
        shape = (3, 2) if group.rank else (2, 3)
        assert_same_bits(ops.all_reduce_shared(torch.ones(6).view(shape), group), torch.full(shape, 2.0))
        with pytest.raises(RuntimeError, match="the group is broken"):
            ops.all_gather_shared(torch.ones(shape), group)
        return group.broken or ""

    with Ranks(2, work) as ranks:
        of_six = "all_gather_shared of 6 elements of float32 in rows of"
        expected = f"{ranks.name(0)} calls {of_six} 3, and {ranks.name(1)} calls {of_six} 2"
        assert [ranks.receive(0), ranks.receive(1)] == [expected] * 2


# ---- arguments, and what is left behind ----------------------------------------------------------------------------


@pytest.mark.parametrize(("reason", "error"), [("", ValueError), ("a\0b", ValueError), (None, TypeError)])
def test_a_reason_that_is_none(reason: Any, error: type[Exception]) -> None:
    """An empty reason broke the group, and `broken` said that nothing had."""
    descriptor = SharedMemoryGroup.create(1)
    with SharedMemoryGroup(descriptor, rank=0) as group:
        os.close(descriptor)
        with pytest.raises(error, match=r"^SharedMemoryGroup: reason: expected (a str|some characters, .* null), got "):
            group.abort(reason)
        assert group.broken is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "world_size: expected 1 to 64, got 0"),
        ({"world_size": 65}, ValueError, "world_size: expected 1 to 64, got 65"),
        ({"world_size": 2.0}, TypeError, "SharedMemoryGroup: world_size: expected an int, got float"),
        ({"max_bytes": 0}, ValueError, "max_bytes: expected 1 to 1099511627776, got 0"),
        ({"max_bytes": 1 << 41}, ValueError, "max_bytes: expected 1 to 1099511627776, got"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds: expected a finite number above 0, got 0"),
        ({"timeout_seconds": float("inf")}, ValueError, "timeout_seconds: expected a finite number above 0, got inf"),
        ({"timeout_seconds": 10**400}, ValueError, "timeout_seconds: expected a finite number above 0, got inf"),
        ({"timeout_seconds": True}, TypeError, "SharedMemoryGroup: timeout_seconds: expected a number, got bool"),
        ({"timeout_seconds": float("nan")}, ValueError, "timeout_seconds: expected a finite number above 0, got nan"),
        ({"timeout_seconds": None}, TypeError, "SharedMemoryGroup: timeout_seconds: expected a number, got NoneType"),
    ],
)
def test_create_with_a_wrong_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        SharedMemoryGroup.create(**{"world_size": 2} | arguments)


def test_join_with_a_wrong_argument(tmp_path):
    descriptor = SharedMemoryGroup.create(2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank: expected 0 to 1, got {rank}"):
            SharedMemoryGroup(descriptor, rank)
    with pytest.raises(TypeError, match="SharedMemoryGroup: rank: expected an int, got str"):
        SharedMemoryGroup(descriptor, "0")
    with (
        SharedMemoryGroup(descriptor, 1),
        pytest.raises(
            ValueError, match=rf"rank: expected one that has not joined yet, got rank 1 \(process {os.getpid()}\)"
        ),
    ):
        SharedMemoryGroup(descriptor, 1)
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        SharedMemoryGroup(descriptor, 0)
    with open(tmp_path / "file", "wb+") as file, pytest.raises(ValueError, match="descriptor: expected one from"):
        SharedMemoryGroup(file.fileno(), 0)


def test_memory_cannot_shrink():
    descriptor = SharedMemoryGroup.create(2)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 4096)
    os.close(descriptor)


def test_a_closed_group():
    (group,) = join_all(1)
    with group:
        handle = group.handle
        one(group)
    group.close()
    message = "all_reduce_shared: group: expected one that is open, got none"
    with pytest.raises(ValueError, match=message):
        one(group)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.pagedattn_ext.all_reduce_shared(torch.ones(4), handle)
    with pytest.raises(ValueError, match="SharedMemoryGroup: expected a group that is open, got a closed one"):
        group.abort("too late")


@pytest.mark.parametrize(
    ("op", "changes", "argument", "error"),
    [
        ("all_reduce_shared", {"input": torch.ones(4).double()}, "input", TypeError),
        ("all_reduce_shared", {"input": torch.ones(4, 4).T}, "input", ValueError),
        ("all_gather_shared", {"input": torch.ones(4, 4)[:, :2]}, "input", ValueError),
        ("all_gather_shared", {"out": torch.ones(2, 2).half()}, "out", TypeError),
        ("all_gather_shared", {"out": torch.ones(2, 3)}, "out", ValueError),
        ("all_gather_shared", {"out": torch.ones(2, 4)[:, :2]}, "out", ValueError),
    ],
)
def test_wrong_tensors(op, changes, argument, error):
    arguments = {"out": torch.ones(2, 2), "input": torch.ones(2, 2), "group": ONE_RANK.handle} | changes
    if op == "all_reduce_shared":
        del arguments["out"]
    assert_rejected(op, arguments, argument, error)


def test_out_is_input():
    input = torch.ones(2, 2)
    with pytest.raises(ValueError, match="all_gather_shared: out: expected other memory than that of input"):
        ops.all_gather_shared(input, ONE_RANK, out=input)


def counts() -> tuple[int, int]:
    """Open descriptors, and mappings of memory without a name."""
    with open("/proc/self/maps") as maps:
        return len(os.listdir("/proc/self/fd")), sum("memfd:pagedattn_ext" in line for line in maps)


def test_nothing_is_left():
    """Of groups that are closed, and of groups that nobody has any more."""
    before = counts()
    for _ in range(20):
        descriptor = SharedMemoryGroup.create(2, max_bytes=1 << 20)
        with SharedMemoryGroup(descriptor, 0):
            pass
        group = SharedMemoryGroup(descriptor, 1)
        with pytest.raises(ValueError, match="rank"):
            SharedMemoryGroup(descriptor, 1)
        assert counts() == (before[0] + 1, before[1] + 1)
        del group
        os.close(descriptor)
    assert counts() == before


def test_a_descriptor_of_another_process():
    """As a process of the same user gets one that was not started by the driver."""
    descriptor = SharedMemoryGroup.create(1)
    opened = os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR)
    with SharedMemoryGroup(opened, 0) as group:
        assert_same_bits(one(group), torch.ones(4))
    os.close(opened)
    os.close(descriptor)


def test_a_forked_child_does_not_leave():
    """It has the group of its parent, and drops it."""
    group, other = join_all(2, timeout_seconds=0.3)
    with group, other:
        child = FORK.Process(target=other.close)
        child.start()
        child.join()
        assert until_an_error(group)[1] == f"rank 1 (process {os.getpid()}) has not come within 0.3 seconds"
