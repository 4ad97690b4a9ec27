"""Replicas of the server on a Ray cluster: `serve run pagedattn_serve.ray_serve:app model=...` (extra `ray`).

Ray Serve takes the connections; it places, counts, watches and replaces the replicas. A replica is what `pagedattn
serve` is: OpenAI's app, and an engine that has a process of its own.
"""

import argparse
import asyncio
import json
import logging
import os
from contextlib import suppress
from dataclasses import replace
from operator import methodcaller
from typing import Any, get_args

from starlette.types import ASGIApp

from pagedattn_serve import engine_args as engine_options
from pagedattn_serve.async_engine import EngineDeadError
from pagedattn_serve.async_engine.replicas import seed_of_replica
from pagedattn_serve.cli.commands import config_for, keys_in_environment
from pagedattn_serve.cli.serve import make_engine
from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import ArgumentError, how_to_install
from pagedattn_serve.server.http import config as server_config
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.logs import make_handler
from pagedattn_serve.server.openai.app import make_app

try:
    from ray import serve
    from ray.serve import Application
except ImportError as error:
    raise ImportError(f"pagedattn_serve: expected ray: {how_to_install('ray')}") from error

logger = logging.getLogger(__name__)

OPTIONS = engine_options.OPTIONS | server_config.OPTIONS
# Ray Serve listens, and has reserved the CPUs of a replica: `http_options` and `ray_actor_options` of its config.
for name in ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "root_path", "distributed_executor_backend"):
    del OPTIONS[name]
FLUSH_SECONDS = 1.0  # after an engine's end, for the errors of its requests to reach their clients


class Replica:
    """A replica. Ray Serve makes it, asks for its health, and ends it when its requests are done.

    If the engine breaks, its requests get errors, and the process of the replica ends, so that Ray Serve starts another
    one. If the replica lived on, it would refuse requests at once; Ray Serve would send it most of the requests,
    because its queue would be the shortest.
    """

    async def __init__(self, engine_args: EngineArgs, config: ServerConfig) -> None:  # type: ignore[misc]
        set_up_log(config)
        if not config.api_keys:  # `app` has read them from its environment, which may be that of another machine
            config = replace(config, api_keys=tuple(keys_in_environment()))
        self._config = config
        seed = seed_of_replica(engine_args.seed, serve.get_replica_context().replica_tag)
        engine_args = replace(engine_args, seed=seed)
        self._engine = await asyncio.to_thread(make_engine, engine_args, config)
        self._engine.on_death = self._end_soon
        await self._engine.start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(self._engine, self._config)

    async def check_health(self) -> None:
        """Wait until each core that runs and does not hang answers between two steps; Ray Serve limits the time. Raises
        EngineDeadError if there is none."""
        running = [i for i, core in enumerate(self._engine.replicas()) if core.is_well]
        if not running:
            raise EngineDeadError("no core of the engine runs, or all hang")
        ask = methodcaller("get_num_unfinished_requests")
        await asyncio.gather(*(self._engine.call(ask, i) for i in running))

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):  # else the model could not be loaded
            await self._engine.shutdown()

    def _end_soon(self) -> None:
        logger.error("the engine broke: %s", self._engine.error)
        asyncio.get_running_loop().call_later(FLUSH_SECONDS, os._exit, 1)


Engine = serve.deployment(serve.ingress()(Replica), name="Engine")


def set_up_log(config: ServerConfig) -> None:
    """Our log goes to standard error, whose lines Ray collects. All other loggers of the process are Ray's."""
    ours = logging.getLogger("pagedattn_serve")
    ours.handlers = [make_handler(config.log_format)]
    ours.propagate = False
    ours.setLevel(config.log_level.upper())


def app(args: dict[str, Any]) -> Application:
    """The application, for `serve run` and for import_path in a config of Ray Serve.

    args: options of EngineArgs and ServerConfig, by name; also as texts, which is what `serve run` makes of them.

    Raises ValueError, TypeError and OSError for what is wrong with the options.
    """
    engine_args, config = read_args(args)
    num_engines = config.data_parallel_size
    return Engine.options(
        ray_actor_options={"num_cpus": num_engines * engine_args.num_ranks},
        # Further requests wait in front of the replicas, for any of them.
        max_ongoing_requests=num_engines * engine_args.max_num_seqs,
        max_queued_requests=config.max_waiting,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
    ).bind(engine_args, config)


def read_args(args: dict[str, Any]) -> tuple[EngineArgs, ServerConfig]:
    for name in args:
        if name not in OPTIONS:
            raise ArgumentError("args", "options of EngineArgs and ServerConfig that Ray Serve has not", name)
    values: dict[str, Any] = {"model": DEMO_MODEL, "api_keys": tuple(keys_in_environment())}
    values |= {name: read_value(name, value) for name, value in args.items()}
    engine_args = EngineArgs(**{name: value for name, value in values.items() if name in engine_options.OPTIONS})
    options = {name: value for name, value in values.items() if name in server_config.OPTIONS}
    return engine_args, config_for(engine_args.model, options)


def read_value(name: str, value: Any) -> Any:
    """An option from a text or from YAML, as the dataclass wants it, which checks it."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        return value
    if name == "api_keys":
        return tuple(value.split(","))
    kind, _, _, flag = OPTIONS[name]
    if flag is not None and flag.convert is not None:
        try:
            return flag.convert(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name}: {error}") from None
    if str not in (kind, *get_args(kind)):
        with suppress(ValueError):
            return json.loads(value)  # a number, true, false or null
    return value
