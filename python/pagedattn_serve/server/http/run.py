"""The process that serves an app: sockets, signals, and an end in stages."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.connection import connection_class
from pagedattn_serve.server.http.sockets import are_loopback, listen, port_of, remove_abandoned

logger = logging.getLogger(__name__)

MakeApp = Callable[[AsyncLLMEngine, ServerConfig], ASGIApp]

KEEP_ALIVE_SECONDS = 65  # of an idle connection: longer than that of clients and proxies, so that they close first
FLUSH_SECONDS = 3.0  # when the server stops, clients have this time to take answers that are complete
POLL_SECONDS = 0.02
WARNING_SECONDS = 10.0  # between warnings that connections wait for free files, at least


def run_server(make_app: MakeApp, engine: AsyncLLMEngine, config: ServerConfig, sockets: list[socket.socket]) -> int:
    """Serve on the sockets of `bind`, in the main thread, until a signal or the engine's end; returns the exit status.

    After SIGTERM or SIGINT no new connection is taken, and requests in flight have `shutdown_timeout` to end. Then the
    rest is aborted, each request with an answer that says so; the status is 0. A second signal ends the process at
    once; the status is 128 plus the signal's number. If the engine breaks, the requests in flight get errors, and the
    process ends with status 1.
    """
    allow_many_connections()
    gc.collect()
    gc.freeze()  # or each full collection looks at all that was imported: 180 ms in which nobody is served
    gc.set_threshold(50_000, 20, 50)  # with the usual ones, 2,000 streams spend two fifths of the time on garbage
    return asyncio.run(serve(make_app, engine, config, sockets))


async def serve(make_app: MakeApp, engine: AsyncLLMEngine, config: ServerConfig, sockets: list[socket.socket]) -> int:
    try:
        server = Server(make_app(engine, with_hosts(config, sockets)), engine, config)
        engine.on_death = server.stop
        await engine.start()
        with server.capture_signals():  # before anybody can know that the server is ready
            listen(config.host, sockets)
            announce(engine, config, sockets)
            await server.serve(sockets)
    finally:
        await engine.shutdown()
        if config.uds is not None:
            for each in sockets:
                each.close()
            remove_abandoned(config.uds)  # unless another server has taken the place of this one
    if engine.error is None:
        return 0
    logger.error("the engine broke: %s", engine.error)
    return 1


def with_hosts(config: ServerConfig, sockets: list[socket.socket]) -> ServerConfig:
    """The config with allowed hosts filled in: a server for this machine alone answers only to its own names."""
    if config.allowed_hosts is None and are_loopback(sockets):
        return replace(config, allowed_hosts=())
    return config


class Server(uvicorn.Server):
    """uvicorn's server, which ends in another way."""

    def __init__(self, app: ASGIApp, engine: AsyncLLMEngine, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(config.read_timeout),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                backlog=1,  # of asyncio; that of the kernel is the `Listener`'s
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )
        self._engine = engine
        self._shutdown_timeout = config.shutdown_timeout
        self._warning_due = 0.0

    def stop(self) -> None:
        """Begin to stop. Any thread may call this, and so may a signal handler."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals that end the server. Unlike uvicorn, do not raise them again afterwards."""
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._handle_error)
        await super().startup(sockets)

    def _handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What nobody catches. While no file is free for a connection, asyncio tries again every second, for ever."""
        if context.get("message") != "socket.accept() out of system resource":
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._warning_due:
            self._warning_due = time.monotonic() + WARNING_SECONDS
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.warning("a connection waits: %s; this process may open %d", context["exception"].strerror, limit)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Four stages, each for what the stage before has left: wait, abort, cut off, leave the rest to asyncio."""
        seconds = self._shutdown_timeout if self._engine.error is None else FLUSH_SECONDS
        logger.info("stopping", extra={"fields": {"in_flight": len(self.server_state.tasks), "wait_seconds": seconds}})
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # at once if it is idle, else after its answer
        await self._wait(seconds, for_idle_tls=False)
        await self._engine.shutdown()
        await self._wait(FLUSH_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._wait(FLUSH_SECONDS)
        logger.info("stopped")

    async def _wait(self, seconds: float, for_idle_tls: bool = True) -> None:
        """Wait until no connection and no request is left, but at most so many seconds.

        for_idle_tls: also for connections that have their answers, whose clients have to agree to the end of TLS. A
        client that keeps one for later does not look.
        """
        end = time.monotonic() + seconds
        while (self.server_state.tasks or self._has_connections(for_idle_tls)) and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)

    def _has_connections(self, with_idle_tls: bool) -> bool:
        all_count = with_idle_tls or not self.config.is_ssl
        return any(all_count or not each.transport.is_closing() for each in self.server_state.connections)


def allow_many_connections() -> None:
    """Raise the limit of open files as far as this process may. The default is enough for a thousand connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def announce(engine: AsyncLLMEngine, config: ServerConfig, sockets: list[socket.socket]) -> None:
    """Say what is served, and where: as a table on standard output, or, if the log is JSON, as a line of the log."""
    facts = start_facts(engine, config, sockets)
    logger.info("ready after %.1f s: %s", seconds_of_process(), facts["URL"])
    if config.log_format == "json":
        logger.info("serving", extra={"fields": facts})
    else:
        print("\n".join(f"{name:15}{value}" for name, value in facts.items()), flush=True)
    if not config.api_keys and not are_loopback(sockets):
        logger.warning("whoever can reach %s can use this server, as it asks for no API key (--api-key)", config.host)


def seconds_of_process() -> float:
    """How long this process has run, imports and all."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK")


def start_facts(engine: AsyncLLMEngine, config: ServerConfig, sockets: list[socket.socket]) -> dict[str, str]:
    facts, num_blocks = engine.facts, engine.stats().num_blocks
    pids = [str(each.pid) for each in engine.replicas()]
    return {
        "model": ", ".join(config.model_names),
        "architecture": f"{facts.architecture}, {facts.runs}",
        **({"replicas": f"{len(pids)} (processes {', '.join(pids)})"} if len(pids) > 1 else {}),
        "device": facts.device,
        "dtype": facts.dtype,
        "cache": f"{num_blocks:,} blocks ({facts.num_tokens(num_blocks):,} tokens)",
        "limits": f"{facts.max_model_len:,} tokens and {config.max_body_size:,} bytes a request; "
        f"{facts.max_num_seqs:,} running, {config.max_waiting:,} waiting",
        "API key": f"asked for, any of {len(config.api_keys)}" if config.api_keys else "not asked for",
        "URL": url_of(config, sockets),
    }


def url_of(config: ServerConfig, sockets: list[socket.socket]) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{port_of(sockets[0])}"
