"""`ProcessCore`: a handle, for an event loop, of an engine in a process of its own.

core_process.py has what runs in the process, and news_wire.py what passes.
"""

import asyncio
import logging
import pickle
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any

from pagedattn_serve.async_engine.core import EngineFacts, News
from pagedattn_serve.async_engine.news_wire import CHUNK, Frames, NewsUnpacker, framed
from pagedattn_serve.distributed.activity import HANG_SECONDS, LOOK_SECONDS, MAX_LOOKS, Activity
from pagedattn_serve.distributed.processes import how_it_ended, start_process
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import ArgumentTypeError, describe
from pagedattn_serve.outputs import EngineStats
from pagedattn_serve.progress import percent
from pagedattn_serve.requests.inputs import RequestArgs

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine

logger = logging.getLogger(__name__)

END_SECONDS = 1.0  # for a process to end once it has closed its socket
STOP_SECONDS = 30.0  # for the step that runs, and for blocks on their way to the disk, when the engine is to stop
POLL_SECONDS = 0.005


class ProcessCore(asyncio.Protocol):
    """An `EngineCore` in a process that this object starts. `wait_until_loaded` comes next, then `start`.

    The process ends with this object, and with the thread that made it if that is the main thread: a killed parent
    leaves no orphan. It ignores SIGINT and SIGTERM: the parent decides.

    Args:
        engine_args: of the engine.
        initializer: is called in the process before the model is loaded. Like all that goes there, it has to be
            something that pickle can name: a function of a module, or a `functools.partial` of one.

    facts, first_stats: set by `wait_until_loaded`. hang: what hangs, and how; None if nothing does.
    on_hang: called when `hang` changes.
    replica: the number of this core, if there are several. It is in the lines of the log that say how far loading is.
    """

    facts: EngineFacts
    first_stats: EngineStats

    def __init__(self, engine_args: EngineArgs, initializer: Callable[[], object] | None = None) -> None:
        self.engine_args = engine_args
        self.replica = 0
        self.hang: str | None = None
        self.on_hang: Callable[[], None] | None = None
        self._made = time.monotonic()
        self._num_silent = 0  # looks since the process has said something
        self._frames = Frames()
        self._outbox: list[bytes] = []  # what was said in this turn of the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.Transport | None = None
        self._has_told_end = False
        self._stopping: asyncio.TimerHandle | None = None  # runs while the process is to end
        self._is_given_up = False
        order = framed((engine_args, initializer))
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = start_process("pagedattn_serve.async_engine.core_process", theirs)
        with suppress(OSError):  # it has died: `wait_until_loaded` says how
            self._socket.sendall(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_loaded(self) -> None:
        """Wait until the engine takes requests. Raises what `LLMEngine` does, and ChildProcessError if the process has
        died."""
        try:
            answer = None
            while answer is None:
                data = self._receive()
                if not data:
                    self._wait_for_end()
                    raise ChildProcessError(f"{self._death()} while it loaded the model")
                for kind, *content in self._frames.feed(data):
                    if kind == "loading":
                        self._log_loading(*content)
                    elif kind == "failed":
                        raise content[0]
                    else:
                        answer = content
        except BaseException:
            self.kill()
            raise
        self.facts, self.first_stats = answer
        self._unpacker = NewsUnpacker(self.first_stats)

    def _log_loading(self, rank: int, done: int, total: int) -> None:
        seconds = time.monotonic() - self._made
        text = "replica %d, rank %d: %d%% of the weights are loaded, after %.1f s"
        logger.info(text, self.replica, rank, percent(done, total), seconds)

    def interrupt_loading(self) -> None:
        """Let `wait_until_loaded` raise in the thread that is in there."""
        self._process.kill()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    # ---- what `AsyncLLMEngine` asks of a core -----------------------------------------------------------------------

    async def start(self, deliver: Callable[[News], None], finish: Callable[[str | None], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver, self._finish = deliver, finish
        self._ended = self._loop.create_future()
        self._transport, _ = await self._loop.create_connection(lambda: self, sock=self._socket)
        self._send("start_threads")
        self._look_soon()

    def add(self, key: int, args: RequestArgs) -> None:
        """Raises TypeError for what cannot go to another process."""
        try:
            data = pickle.dumps(args, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            argument = "logits_processors" if getattr(args.sampling_params, "logits_processors", None) else "prompt"
            expected = "what can be pickled, because the engine runs in another process"
            raise ArgumentTypeError(argument, expected, describe(error)) from None
        self._send("add", key, data)

    def abort(self, key: int, is_left: bool) -> None:
        self._send("abort", key, is_left)

    def call(self, key: int, f: Callable[["LLMEngine"], object], replica: int = 0) -> None:
        """Raises TypeError for what cannot go to another process."""
        try:
            data = pickle.dumps(f, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            expected = "a function that can be pickled, because the engine runs in another process"
            raise ArgumentTypeError("f", expected, describe(error)) from None
        self._send("call", key, data)

    def cancel(self, key: int) -> None:
        self._send("cancel", key)

    def stop(self) -> None:
        """The process has STOP_SECONDS to end. Then it is killed: a process that hangs, or whose step takes long, would
        keep its callers waiting."""
        if self._loop is None or self._loop.is_closed():
            self.kill()
        elif self._transport is not None and self._stopping is None:
            self._send("stop")
            self._stopping = self._loop.call_later(STOP_SECONDS, self._give_up)

    async def join(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            await asyncio.shield(self._ended)

    # ---- the connection ---------------------------------------------------------------------------------------------

    def _send(self, *message: Any) -> None:
        """Send it at the end of this turn of the event loop, with all else that is said in this turn."""
        assert self._loop is not None
        if not self._outbox:
            # Not in the context of a request: what follows from a connection that breaks would stay in it.
            self._loop.call_soon(self._flush, context=Context())
        self._outbox.append(framed(message))

    def _flush(self) -> None:
        data = b"".join(self._outbox)
        self._outbox.clear()
        if self._transport is not None:  # else the process is gone
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._num_silent = 0
        for kind, content in self._frames.feed(data):
            if kind == "news":
                self._deliver(self._unpacker.unpack(content))
            elif kind == "pulse":
                self._take_hang(content)
            else:
                self._tell_end(content)
                if self._transport is not None:
                    self._transport.close()  # upon which the process ends
                    self._transport = None

    def connection_lost(self, error: Exception | None) -> None:
        assert self._loop is not None
        self._looking.cancel()
        if self._stopping is not None:
            self._stopping.cancel()
        self._transport = None
        self._reaping = self._loop.create_task(self._reap())

    def _look_soon(self) -> None:
        assert self._loop is not None
        self._looking = self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """While the process is well, it says so before each look."""
        self._num_silent += 1
        if self._num_silent >= MAX_LOOKS:
            how = ": it is stopped" if Activity(self.pid).is_stopped() else ""
            self._take_hang(f"{self._name} has not answered for {HANG_SECONDS:g} seconds{how}")
        self._look_soon()

    def _take_hang(self, hang: str | None) -> None:
        if hang != self.hang:
            self.hang = hang
            if self.on_hang is not None:
                self.on_hang()

    def _give_up(self) -> None:
        logger.error("%s has not stopped within %g seconds: it is killed", self._name, STOP_SECONDS)
        self._is_given_up = True
        self._process.kill()

    async def _reap(self) -> None:
        end = time.monotonic() + END_SECONDS
        while self._process.poll() is None:
            if time.monotonic() > end:
                self._process.kill()
            await asyncio.sleep(POLL_SECONDS)
        self.hang = None
        self._tell_end(None if self._is_given_up else self._death())
        self._ended.set_result(None)

    def _tell_end(self, error: str | None) -> None:
        if not self._has_told_end:
            self._has_told_end = True
            self._finish(error)

    # ---- the process ------------------------------------------------------------------------------------------------

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(CHUNK)
        except ConnectionResetError:  # it has died with a message unread
            return b""

    def _wait_for_end(self) -> None:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _name(self) -> str:
        return f"the engine core (process {self.pid})"

    def _death(self) -> str:
        return f"{self._name} {how_it_ended(self._process)}"
