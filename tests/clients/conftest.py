"""Servers for clients that live in another environment than the server: no test here imports the project.

PAGEDATTN_PYTHON: the interpreter that has pagedattn_serve, torch and transformers; that of .venv here if unset.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, serving

pytest_plugins = ["hung_tests"]

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("PAGEDATTN_PYTHON", str(ROOT / ".venv/bin/python"))

# Clients of an evaluation ask their hubs and price lists for nothing here.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", LITELLM_LOCAL_MODEL_COST_MAP="True")

MAKE_CALLER = """
import sys
from pathlib import Path
from scripted_models import make_scripted_model
make_scripted_model(Path(sys.argv[1]))
"""
Serve = Callable[..., AbstractContextManager[ServerProcess]]


@pytest.fixture(scope="session")
def serve() -> Serve:
    """serve(*options) is a server of the demo model in fp32, as a context."""
    return partial(serving, "--dtype", "float32", python=PYTHON)


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[ServerProcess]:
    """A server for all tests that need no other options; when the tests are done, nothing is left in it."""
    with serve() as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="session")
def get_server(serve: Serve) -> Iterator[Callable[..., ServerProcess]]:
    """get_server(*options) is a server with these options, the same for all tests."""
    with ExitStack() as stack:
        yield cache(lambda *options: stack.enter_context(serve(*options)))


@pytest.fixture(scope="session")
def reference() -> Iterator[Callable[..., Any]]:
    """reference(name, *arguments) is what the function of reference.py returns, in the project's environment."""
    command = [PYTHON, str(Path(__file__).with_name("reference.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def call(name: str, *arguments: Any) -> Any:
            print(json.dumps([name, arguments]), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield call
        process.stdin.close()


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The directory of the demo model."""
    return str(ROOT / "python/pagedattn_serve/demo_model")


@pytest.fixture(scope="session")
def caller(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model that calls tools."""
    directory = str(tmp_path_factory.mktemp("caller"))
    paths = [str(ROOT / path) for path in ("tests/serving/helpers", "python", "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([PYTHON, "-c", MAKE_CALLER, directory], env=environment, check=True)
    with serve(directory, "--served-model-name", "caller") as server:
        yield server
        server.wait_until_idle()
