"""What runs in an engine's process, here without an engine: what its engine says is sent, or the process ends."""

import multiprocessing
import threading
import time
from typing import Any

from async_runs import TIMEOUT
from server_process import wait_for

from pagedattn_serve.async_engine.core_process import MAX_UNSENT, Outbox


class SlowParent:
    """What an `Outbox` sends to, which reads once it may."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.received: list[Any] = []

    def send(self, *message: Any) -> None:
        self.may_read.wait()
        self.received.append(message)


def test_a_core_waits_for_a_parent_that_does_not_read() -> None:
    """Else what is unsent would take more and more memory. Nothing is lost, and all comes in its order."""
    parent: Any = SlowParent()
    outbox = Outbox(parent)
    expected = [("end", str(i)) for i in range(MAX_UNSENT + 2)]  # one of them is being sent
    for _, error in expected[:-1]:
        outbox.put_end(error)
    engine = threading.Thread(target=outbox.put_end, args=(expected[-1][1],))
    engine.start()
    engine.join(0.1)
    assert engine.is_alive()
    parent.may_read.set()
    engine.join()
    wait_for(lambda: parent.received == expected)


def test_a_core_that_cannot_send_ends() -> None:
    """With a bug in what packs the news, its callers would wait forever."""

    def run_core() -> None:
        parent: Any = SlowParent()
        outbox = Outbox(parent)
        outbox.put_news(None)  # type: ignore[arg-type]
        time.sleep(TIMEOUT)

    core = multiprocessing.get_context("fork").Process(target=run_core)
    core.start()
    core.join(TIMEOUT)
    assert core.exitcode == 1
