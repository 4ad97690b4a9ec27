"""`allow_download`: a repository of Hugging Face, from an endpoint of the test's own."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from checkpoints import Checkpoint
from engine_runs import run, token_ids
from huggingface_hub import constants

from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.sampling_params import SamplingParams

REPO = "some/model"
COMMIT = "0123456789" * 4


class Hub:
    """As much of Hugging Face as a download needs. files: of the one repository. asked: the paths of all requests."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(with_body=True)

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def _answer(self, with_body: bool) -> None:
                hub.asked.append(self.path)
                path = self.path.partition("?")[0]
                body, headers = b"", {}
                if path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
                    siblings = [{"rfilename": name} for name in files]
                    body = json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode()
                elif path.startswith(f"/api/models/{REPO}/tree/"):
                    tree = [{"type": "file", "oid": "0", "size": len(files[name]), "path": name} for name in files]
                    body = json.dumps(tree).encode()
                elif path.startswith(f"/{REPO}/resolve/") and (name := path.split("/", 5)[5]) in files:
                    body = files[name]
                    headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
                else:
                    headers = {"X-Error-Code": "RepoNotFound"}
                self.send_response(200 if body else 404)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def served(model: str, others: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub({file.name: file.read_bytes() for file in Path(model).iterdir() if file.is_file()} | others)
    Thread(target=hub.server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()


@pytest.fixture
def hub(llama: Checkpoint) -> Iterator[Hub]:
    others = {"pytorch_model.bin": b"twice", "onnx/model.onnx": b"other", "original/model.safetensors": b"other"}
    with served(llama.path, others | {"README.md": b"text"}) as hub:
        yield hub


def python(hub: Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter: huggingface_hub reads these variables when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def info(hub: Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(hub, home, "-m", "pagedattn_serve", "info", *arguments)


def test_a_model_is_downloaded_into_the_cache(
    hub: Hub, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that are needed, if that is allowed. From then on the model is found there, and nobody is asked."""
    refused = info(hub, tmp_path, REPO)
    assert refused.returncode == 2
    assert "is downloaded with `hf download some/model`, or with allow_download)" in refused.stderr
    assert hub.asked == []

    done = info(hub, tmp_path, REPO, "--allow-download")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout
    got = {path.split("/", 5)[5] for path in hub.asked if "/resolve/" in path}
    assert {"config.json", "model.safetensors"} <= got
    assert not got & {"pytorch_model.bin", "onnx/model.onnx", "original/model.safetensors", "README.md"}

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = run(LLMEngine(REPO, num_blocks=8), llama.prompts[:1], params)
    assert token_ids(outputs) == [llama.expected[0][:8]]


SERVER = f"""
from asyncio import run
from pagedattn_serve import AsyncLLMEngine, EngineArgs
if __name__ == "__main__":
    args = EngineArgs({REPO!r}, allow_download=True, num_blocks=8)
    engine = AsyncLLMEngine.from_engine_args(args)
    print(len(engine.texts.tokenizer))
    run(engine.shutdown())
"""


def test_the_process_beside_the_engine_downloads_too(tmp_path: Path) -> None:
    """Catches one that looks into the cache alone, and has no tokenizer."""
    file = tmp_path / "program.py"
    file.write_text(SERVER)
    with served(str(DEMO_MODEL), {}) as hub:
        done = python(hub, tmp_path, str(file))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 256


def test_what_is_loaded_is_downloaded_to_be_named(hub: Hub, tmp_path: Path) -> None:
    """As by a replica on Ray, where no command has looked at the files before."""
    code = f"""
from pagedattn_serve import EngineArgs
from pagedattn_serve.cli.serve import logger, say_start
logger.info = lambda text, *args: print(text % args)
say_start(EngineArgs({REPO!r}, allow_download=True), num_replicas=1)
"""
    done = python(hub, tmp_path, "-c", code)
    assert done.stdout.startswith("loading LlamaForCausalLM"), done.stderr


def test_what_cannot_be_downloaded(hub: Hub, tmp_path: Path) -> None:
    refused = info(hub, tmp_path, "some/other", "--allow-download")
    assert refused.returncode == 2
    said = refused.stderr
    assert said.startswith(
        "python -m pagedattn_serve: error: MODEL: expected a repository that can be downloaded, got some/other ("
    )
    assert said.count("\n") == 1
