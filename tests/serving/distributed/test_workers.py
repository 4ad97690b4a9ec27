"""The ranks as rank 0 sees them, where no process is needed to tell."""

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagedattn_serve import DEMO_MODEL, EngineArgs
from pagedattn_serve.config import CacheConfig
from pagedattn_serve.distributed import worker as worker_module
from pagedattn_serve.distributed.activity import RemoteWatch
from pagedattn_serve.distributed.channel import MAX_BYTES, Channel
from pagedattn_serve.distributed.communicator import PATIENCE_SECONDS
from pagedattn_serve.distributed.messages import Failed, Loaded, Loading, RankOrder, digest
from pagedattn_serve.distributed.worker import serve_rank, short
from pagedattn_serve.distributed.workers import Worker, Workers, _end
from pagedattn_serve.execution.model_runner import StepInputs


@pytest.fixture
def workers() -> Iterator[tuple[Workers, list[Channel]]]:
    """Rank 0's side of two ranks, and the channels of these ranks."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    process: Any = SimpleNamespace(pid=os.getpid())
    workers = Workers.__new__(Workers)
    workers._workers = [Worker(1 + i, Channel(ours), process) for i, (ours, _) in enumerate(pairs)]
    workers._death = workers._other_hosts = workers._on_loading = None
    yield workers, [Channel(theirs) for _, theirs in pairs]
    for pair in pairs:
        for side in pair:
            side.close()


def test_the_fewest_of_each_kind_that_a_rank_has_room_for(workers: tuple[Workers, list[Channel]]) -> None:
    of_rank_0, channels = workers
    for channel, room in zip(channels, [(9, 8, 7, 6), (19, 3, 2, 16)], strict=True):
        channel.send(Loaded(*room, None, ("", "")))
    own = CacheConfig(num_blocks=10, num_host_blocks=10, num_state_slots=10, num_host_state_slots=10)
    agreed = of_rank_0.smallest(own)
    assert (agreed.num_blocks, agreed.num_host_blocks) == (9, 3)
    assert (agreed.num_state_slots, agreed.num_host_state_slots) == (2, 6)


def test_a_rank_that_fails_before_rank_0_has_loaded(workers: tuple[Workers, list[Channel]]) -> None:
    """And ends: what it has said is kept until rank 0 asks."""
    of_rank_0, channels = workers
    channels[0].send(Loading(1, 4))
    channels[0].send(Failed(MemoryError("no memory for a slice")))
    channels[0].close()
    for done in range(2):
        of_rank_0.tell_loading(done, 4)
    with pytest.raises(MemoryError, match=r"^no memory for a slice$"):
        of_rank_0.smallest(CacheConfig(num_blocks=10))


def test_a_rank_that_takes_no_step_does_not_stop_rank_0_for_ever(workers: tuple[Workers, list[Channel]]) -> None:
    [worker, _] = workers[0]._workers
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker.begin_steps(ours)
        assert ours.gettimeout() == PATIENCE_SECONDS


@pytest.mark.parametrize("is_forked", [False, True])
def test_ranks_end_with_the_process_of_the_engine(is_forked: bool) -> None:
    """Not with a child that this process has forked."""
    ended: list[str] = []
    rank: Any = SimpleNamespace(kill=lambda: ended.append("rank"))
    undo = [lambda: ended.append("placement"), lambda: ended.append("threads")]
    _end([rank], os.getpid() + is_forked, undo)
    assert ended == ([] if is_forked else ["rank", "threads", "placement"])


def test_of_several_pulses_the_last_one_counts() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"w-")
        watch = RemoteWatch(ours)
        assert watch.look() is None and not watch.works()


def test_the_error_of_a_rank_fits_into_a_message() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        Channel(ours).send(Failed(short(ValueError("x" * MAX_BYTES))))
        failed, _ = Channel(theirs).receive()
    assert str(failed.error).startswith("ValueError: xxx")


def test_inputs_differ_where_the_model_reads_them() -> None:
    """The digest of PAGEDATTN_CHECK sees each block that holds tokens of a sequence, the last one too, and no other."""

    def digest_of(*blocks: int) -> bytes:
        ints = np.arange(2)
        inputs = StepInputs(ints, ints, ints[None], np.array([17, 5], np.int32), None, ints, 17)
        return digest(inputs, np.array(blocks, np.int32).reshape(1, 2, 2), block_size=16)

    assert digest_of(1, 2, 3, 0) == digest_of(1, 2, 3, 9)
    assert len({digest_of(1, 2, 3, 0), digest_of(9, 2, 3, 0), digest_of(1, 9, 3, 0), digest_of(1, 2, 9, 0)}) == 4


def test_a_rank_computes_with_its_share_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the loading on, which quantizes."""
    found: list[int] = []

    def load(*_: Any) -> None:
        found.append(torch.get_num_threads())
        raise MemoryError

    monkeypatch.setattr(worker_module, "load_model", load)
    before = torch.get_num_threads()
    configs = EngineArgs(DEMO_MODEL, device="cpu").create_engine_configs()
    order = RankOrder(1, 2, 1, before + 3, None, None, False, configs.model, configs.cache, configs.scheduler)
    channel: Any = SimpleNamespace(receive=lambda: (order, []), send=lambda _: None)
    try:
        serve_rank(channel)
    finally:
        torch.set_num_threads(before)
    assert found == [before + 3]
