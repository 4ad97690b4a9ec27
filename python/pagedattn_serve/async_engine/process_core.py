"""An engine in a process of its own, for an event loop: its handle `ProcessCore`, what passes, and what runs there.

What passes are pickles of plain tuples over a socket. Each side sends one message for all that it has to say at once. A
message is its length in eight bytes, then the pickle.

In the process, the main thread reads what the parent says. A thread of its own sends the news, so that the engine's
thread need not wait for that: while a step computes, it leaves Python to others.
"""

import asyncio
import gc
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from operator import attrgetter
from queue import Full, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

from pagedattn_serve.async_engine.core import EngineCore, EngineFacts, News, facts_of
from pagedattn_serve.distributed.activity import HANG_SECONDS, LOOK_SECONDS, MAX_LOOKS, Activity
from pagedattn_serve.distributed.processes import how_it_ended, start_process
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import ArgumentTypeError, describe, portable
from pagedattn_serve.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from pagedattn_serve.progress import percent
from pagedattn_serve.requests.inputs import RequestArgs

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine

logger = logging.getLogger(__name__)

HEADER = struct.Struct("=Q")
CHUNK = 1 << 18  # bytes to read at once
MAX_UNSENT = 16  # messages, of a step each
END_SECONDS = 1.0  # for a process to end once it has closed its socket
STOP_SECONDS = 30.0  # for the step that runs, and for blocks on their way to the disk, when the engine is to stop
POLL_SECONDS = 0.005
numbers_of = attrgetter(*EngineStats.__slots__)


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
            self._process = start_process("pagedattn_serve.async_engine.process_core", theirs)
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


# ---- what runs in the process ---------------------------------------------------------------------------------------


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
        end(1)
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


def end(status: int) -> NoReturn:
    """End now: threads may be amid a step or a tokenizer, in which the interpreter's own end would crash."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
                end(0)
            if messages := self._frames.feed(data):
                return messages

    def send(self, *message: Any) -> None:
        try:
            self._socket.sendall(framed(message))
        except (BrokenPipeError, ConnectionResetError):
            end(0)


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
            end(1)


# ---- what passes ----------------------------------------------------------------------------------------------------


def framed(message: object) -> bytes:
    """A message as bytes. Raises what pickle does, of many types."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


class Frames:
    """Messages out of the bytes of a socket, which come in pieces of any size."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are whole now."""
        received = self._received
        received += data
        messages: list[Any] = []
        begin = 0
        while len(received) - begin >= HEADER.size:
            [length] = HEADER.unpack_from(received, begin)
            end = begin + HEADER.size + length
            if end > len(received):
                break
            messages.append(pickle.loads(received[begin + HEADER.size : end]))
            begin = end
        del received[:begin]
        return messages


# ---- news: what never changes, and what has not changed, is not sent again ------------------------------------------


class NewsPacker:
    """The engine's side."""

    def __init__(self) -> None:
        self._stats: EngineStats | None = None  # that were sent last
        self._metrics: dict[int, RequestMetrics] = {}  # that were sent last, of each unfinished request with outputs

    def pack(self, news: News) -> tuple[Any, ...]:
        stats = None if news.stats is self._stats else numbers_of(news.stats)
        self._stats = news.stats
        refused = [(key, portable(error)) for key, error in news.refused]
        results = [(key, _pack_result(result, error)) for key, result, error in news.results]
        outputs = [self._pack_output(key, output) for key, output in news.outputs]
        return stats, news.num_waiting, news.queued, refused, outputs, results

    def _pack_output(self, key: int, output: RequestOutput) -> tuple[Any, ...]:
        last = self._metrics.get(key)
        metrics = output.metrics
        about = None
        if last is None or output.error is not None:
            request = (output.request_id, output.prompt, output.prompt_token_ids)
            about = (*request, output.error, output.argument_error, output.prompt_logprobs, output.embedding)
        times = None
        if metrics is not last:
            times = (metrics.arrival_time, metrics.first_token_time, metrics.finished_time, metrics.num_cached_tokens)
        if output.finished:
            self._metrics.pop(key, None)
        else:
            self._metrics[key] = metrics
        completions = [
            (
                *(each.index, each.text, each.token_ids, each.cumulative_logprob, each.logprobs),
                *(each.finish_reason, each.stop_reason),
            )
            for each in output.outputs
        ]
        return key, completions, output.finished, times, about


class NewsUnpacker:
    """The callers' side. stats: the engine's before the first news."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        # The first output of each unfinished request, with the latest metrics.
        self._last: dict[int, tuple[tuple[str, str | None, list[int]], RequestMetrics]] = {}

    def unpack(self, packed: tuple[Any, ...]) -> News:
        stats, num_waiting, queued, refused, outputs, results = packed
        if stats is not None:
            self._stats = EngineStats(*stats)
        return News(
            self._stats,
            num_waiting,
            queued,
            refused,
            [(output[0], self._unpack_output(*output)) for output in outputs],
            [(key, *_unpack_result(data)) for key, data in results],
        )

    def _unpack_output(
        self, key: int, completions: list[Any], finished: bool, times: Any | None, about: Any | None
    ) -> RequestOutput:
        error = argument_error = prompt_logprobs = embedding = None
        if about is None:
            request, metrics = self._last[key]
        else:
            *request, error, argument_error, prompt_logprobs, embedding = about
        if times is not None:
            metrics = RequestMetrics(*times)
        if finished:
            self._last.pop(key, None)
        elif times is not None:
            self._last[key] = request, metrics
        outputs = [CompletionOutput(*each) for each in completions]
        about_all = (error, argument_error, prompt_logprobs, embedding)
        return RequestOutput(*request, outputs, finished, metrics, *about_all)


# ---- results, which may be of any type ------------------------------------------------------------------------------


def _pack_result(result: object, error: BaseException | None) -> bytes:
    try:
        return pickle.dumps((result, None if error is None else portable(error)))
    except Exception as reason:
        error = TypeError(f"call: expected a result that can be pickled, got {type(result).__name__}: {reason}")
        return pickle.dumps((None, error))


def _unpack_result(data: bytes) -> tuple[Any, Any]:
    try:
        return pickle.loads(data)
    except Exception as reason:
        return None, TypeError(f"call: expected a result that this process can load, got {describe(reason)}")
