"""What runs in the process that a `ProcessCore` starts: an `EngineCore` that does what the parent says.

The main thread reads what the parent says. A thread of its own sends the news, so that the engine's thread need not
wait for that: while a step computes, it leaves Python to others.
"""

import gc
import pickle
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Full, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

from pagedattn_serve.async_engine.core import EngineCore, News, facts_of
from pagedattn_serve.async_engine.news_wire import CHUNK, Frames, NewsPacker, framed
from pagedattn_serve.distributed.processes import end_child
from pagedattn_serve.errors import ArgumentTypeError, describe, portable

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine

MAX_UNSENT = 16  # messages, of a step each


def main(fd: int) -> NoReturn:
    """Run an engine. fd: a socket to the parent."""
    parent = Parent(fd)
    try:
        [(engine_args, initializer)] = parent.receive()
        if initializer is not None:
            initializer()
        from pagedattn_serve.engine import LLMEngine  # here, so that the initializer comes first

        engine = LLMEngine.from_engine_args(engine_args, partial(parent.send, "loading"))
    except Exception as error:
        parent.send("failed", portable(error))
        end_child(1)
    gc.collect()
    gc.freeze()  # what was imported is looked at by no collection again
    parent.send("loaded", facts_of(engine), engine.stats())
    outbox = Outbox(parent)
    core = EngineCore(engine, publish=outbox.put_news, finish=outbox.put_end, tell_hang=outbox.put_pulse)
    while True:
        for name, *args in parent.receive():
            follow(core, name, args)


def follow(core: EngineCore, name: str, args: list[Any]) -> None:
    """Do what a message says."""
    if name not in ("add", "call"):
        getattr(core, name)(*args)
        return
    key, data = args
    try:
        content = pickle.loads(data)
    except Exception as error:
        expected = "what a process can load that has another main module"
        argument = "f" if name == "call" else "sampling_params"
        refusal = ArgumentTypeError(argument, expected, describe(error))
        if name == "call":
            core.call(key, raising(refusal))
        else:
            core.refuse(key, refusal)
        return
    getattr(core, name)(key, content)


def raising(error: Exception) -> Callable[["LLMEngine"], NoReturn]:
    def f(_: "LLMEngine") -> NoReturn:
        raise error

    return f


class Parent:
    """The socket to the parent. Without the parent nothing is left to do: the process ends."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._frames = Frames()

    def receive(self) -> list[Any]:
        """Wait for messages; one at least."""
        while True:
            try:
                data = self._socket.recv(CHUNK)
            except ConnectionResetError:
                data = b""
            if not data:
                end_child(0)
            if messages := self._frames.feed(data):
                return messages

    def send(self, *message: Any) -> None:
        try:
            self._socket.sendall(framed(message))
        except (BrokenPipeError, ConnectionResetError):
            end_child(0)


class Outbox:
    """What the engine says to the parent, packed and sent by a thread. The engine waits if the parent does not read."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._packer = NewsPacker()
        self._unsent: Queue[tuple[str, Any]] = Queue(MAX_UNSENT)
        Thread(target=self._send_all, name="pagedattn-send", daemon=True).start()

    def put_news(self, news: News) -> None:
        self._unsent.put(("news", news))

    def put_pulse(self, hang: str | None) -> None:
        """Unless much is unsent: then the parent does not read."""
        with suppress(Full):
            self._unsent.put_nowait(("pulse", hang))

    def put_end(self, error: str | None) -> None:
        self._unsent.put(("end", error))

    def _send_all(self) -> None:
        try:
            while True:
                kind, content = self._unsent.get()
                self._parent.send(kind, self._packer.pack(content) if kind == "news" else content)
        except BaseException:  # a bug; without this thread nobody would hear of anything
            traceback.print_exc()
            end_child(1)
