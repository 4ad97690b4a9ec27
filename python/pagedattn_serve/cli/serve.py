"""`pagedattn serve`: OpenAI's API over HTTP, until a signal."""

import logging
import os
import signal
import socket
import sys
from functools import partial

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.loading.directory import config_fields, model_directory
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.logs import set_up_logs
from pagedattn_serve.server.http.run import run_server
from pagedattn_serve.server.openai.app import make_app

logger = logging.getLogger(__name__)


def serve(engine_args: EngineArgs, config: ServerConfig, sockets: list[socket.socket]) -> int:
    """Returns the exit status once the server has ended. sockets: of `bind`.

    Raises what `LLMEngine` does.
    """
    # By default SIGTERM ends a process, but not the first process of a container.
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        set_up_logs(config.log_format, config.log_level)
        engine = make_engine(engine_args, config)
        return run_server(make_app, engine, config, sockets)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def make_engine(engine_args: EngineArgs, config: ServerConfig) -> AsyncLLMEngine:
    """An engine in processes of its own, whose log is like this one's."""
    say_start(engine_args, config.data_parallel_size)
    import_transformers_without_torch()
    initializer = partial(set_up_logs, config.log_format, config.log_level)
    return AsyncLLMEngine.from_engine_args(
        engine_args, config.max_waiting, initializer=initializer, data_parallel_size=config.data_parallel_size
    )


def say_start(engine_args: EngineArgs, num_replicas: int) -> None:
    """A line of the log, before anything is imported that takes long: what is loaded, from where, how many times.

    Raises FileNotFoundError if there is no model.
    """
    directory = model_directory(engine_args.model, engine_args.allow_download)
    fields = config_fields(directory)
    architectures, stored = fields.get("architectures"), fields.get("quantization_config")
    words = [f"{architectures[0]}" if isinstance(architectures, list) and architectures else "a model"]
    dtype = engine_args.dtype if engine_args.dtype != "auto" else fields.get("dtype") or fields.get("torch_dtype")
    if dtype is not None:
        words.append(f"in {dtype}")
    if isinstance(stored, dict):
        words.append(f"quantized by {stored.get('quant_method')}")
    if engine_args.quantization is not None:
        words.append(f"in {engine_args.quantization}")
    text = "loading %s from %s; replicas: %d, ranks of each: %d"
    logger.info(text, ", ".join(words), directory.resolve(), num_replicas, engine_args.num_ranks)


def import_transformers_without_torch() -> None:
    """This process needs only tokenizers. With torch, transformers takes 200 MiB more, and two seconds."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # one would say that torch is missing
    with_warnings = variable not in os.environ
    os.environ.setdefault(variable, "1")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import transformers  # noqa: F401
    finally:
        del sys.modules["torch"]
        if with_warnings:
            del os.environ[variable]
