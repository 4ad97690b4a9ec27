"""`pagedattn verify`: it passes where bits are the same, and names layer and op where they are not."""

import dataclasses
import json
import re
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config

from pagedattn_ext import ops
from pagedattn_serve import EngineArgs, LLMEngine
from pagedattn_serve.cli import main
from pagedattn_serve.execution.cache_engine import CacheEngine
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.verification.conditions import conditions_of
from pagedattn_serve.verification.local import Verified, max_num_sequences, verify
from pagedattn_serve.verification.workload import make_cases


def results(model: str | Path, **options: Any) -> dict[str, Verified]:
    return {each.condition.name: each for each in verify(EngineArgs(model, **options))}


def first_different(model: str | Path, **options: Any) -> Verified:
    return next(each for each in verify(EngineArgs(model, **options)) if each.difference)


def assert_same(done: dict[str, Verified], num_conditions: int) -> None:
    assert len(done) == num_conditions
    assert [name for name, each in done.items() if each.difference or not each.happened] == []


def test_the_demo_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """All that is tried happens: chunks, prefix hits, both ways of preemption, guesses that come true."""
    assert main(["verify"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert last == "the same, bit for bit, under all 13 conditions that were tried"
    assert [row.split()[-1] for row in rows[2:]] == ["yes"] * 13
    found = re.search(r" (\d+) of \d+ guesses right", rows[-1])
    assert found is not None and int(found[1]) > 0


FORMATS: list[dict[str, Any]] = [
    dict(dtype="float16"),
    dict(dtype="bfloat16", kv_cache_dtype="fp8"),
    dict(quantization="int8", kv_cache_dtype="int8", block_size=8),
    dict(quantization="int4", dtype="bfloat16", kv_cache_dtype="fp8_e5m2", kv_scales=(0.5, 2.0)),
]


@pytest.mark.parametrize("options", FORMATS, ids=lambda options: "-".join(map(str, options.values())))
def test_formats_pass(llama: Checkpoint, options: dict[str, Any]) -> None:
    assert_same(results(llama.path, **options), 14)


def test_a_model_of_transformers_passes(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=11,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    done = results(tmp_path)
    assert_same(done, 13)  # there are no graphs of such a model


@torch.library.custom_op("planted::linear", mutates_args=())
def planted_linear(input: Tensor, packed_weight: Tensor, out_features: int) -> Tensor:
    """As a kernel that adds up in another order where there are many rows."""
    out = torch.ops.pagedattn_ext.linear_packed(input, packed_weight, out_features, None)
    return torch.nextafter(out, out + 1) if len(input) > 7 else out


@torch.library.custom_op("planted::attention", mutates_args=())
def planted_attention(out: Tensor, block_tables: Tensor) -> Tensor:
    """As a kernel in which the third sequence of a batch is another than alone."""
    out = out.clone()
    if len(block_tables) > 2:
        out[2] = torch.nextafter(out[2], out[2] + 1)
    return out


def test_a_kernel_that_hangs_on_the_batch_is_named(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted in the second layer's MLP alone. It is found by the last bit, and nothing behind it is blamed."""
    weight = load_model(llama.path).get_submodule("model.layers.1.mlp.down_proj").packed_weight

    def linear_packed(input: Tensor, packed_weight: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
        if packed_weight.shape == weight.shape and torch.equal(packed_weight, weight):
            return planted_linear(input, packed_weight, out_features)
        return linear(input, packed_weight, out_features, bias)

    linear = ops.linear_packed
    monkeypatch.setattr(ops, "linear_packed", linear_packed)
    assert main(["verify", str(llama.path), "--enforce-eager"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("yes"), "alone again"
    assert lines[3].endswith("no"), "in one batch"
    assert "alone, " in lines[4] and lines[4].startswith("    prompt ")
    assert lines[5].startswith("    arose in model.layers.1.mlp.down_proj: planted::linear, in the row of position ")
    assert lines[-1].startswith("different under ")


def test_attention_that_hangs_on_the_batch_is_named(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is another for decodes than for prompts, and no module ends with it."""

    def paged_attention(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(query, *args, **kwargs)
        return (planted_attention(out, args[2]), lse) if kwargs["query_start_loc"] is None else (out, lse)

    attend = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", paged_attention)
    done = first_different(llama.path, enforce_eager=True)
    origin = done.origin
    assert origin is not None and done.condition.name == "in one batch"
    assert (origin.module, origin.op) == ("model.layers.0.self_attn", "planted::attention")


def test_blocks_that_come_back_changed_are_found(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first op that reads them."""

    def swap_in(cache_engine: CacheEngine, blocks: list[tuple[int, int]]) -> None:
        real(cache_engine, blocks)
        for _, block in blocks:
            cache_engine.kv_caches[1].key_cache[block] += 0.5

    real = CacheEngine.swap_in
    monkeypatch.setattr(CacheEngine, "swap_in", swap_in)
    done = first_different(llama.path)
    origin = done.origin
    assert origin is not None and done.condition.name == "swapped out and in"
    assert (origin.module, origin.op) == ("model.layers.1.self_attn", "pagedattn_ext::paged_attention")


def test_what_no_engine_does_is_not_called_verified(llama: Checkpoint) -> None:
    """Without room on the host nothing is swapped out: the table says so. A prefix is not looked for, either."""
    done = results(llama.path, swap_space=0, enable_prefix_caching=False)
    assert [name for name, each in done.items() if not each.happened] == ["swapped out and in"]
    assert "after prefix hits" not in done


@pytest.mark.parametrize(
    ("options", "num_sequences"),
    [
        ({"cpu_memory_utilization": 1e-3}, 3),
        ({"max_num_seqs": 2}, 2),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 1}, 1),
        ({"block_size": 256, "num_blocks": 2}, 1),
    ],
    ids=str,
)
def test_an_engine_takes_all_its_requests_and_conditions(
    llama: Checkpoint, options: dict[str, Any], num_sequences: int
) -> None:
    """Whatever its limits, and whatever says how large its cache is."""
    args = EngineArgs(llama.path, **options)
    engine = LLMEngine.from_engine_args(args)
    cases = make_cases(97, engine.max_model_len, max_num_sequences(engine))
    assert max(case.params.n for case in cases) == num_sequences
    for i, case in enumerate(cases):
        engine.add_request(str(i), case.prompt_token_ids, case.params)
    for condition in conditions_of(engine, args, cases):
        dataclasses.replace(args, **condition.options or {})


# ---- a server --------------------------------------------------------------------------------------------------------


class FakeServer:
    """Answers completions. change: what becomes of the n-th answer."""

    def __init__(self, change: Callable[[int, dict[str, Any]], None] = lambda number, choice: None) -> None:
        self.bodies: list[dict[str, Any]] = []
        lock = Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say({"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    fake.bodies.append(body)
                    number = len(fake.bodies)
                choice = {"text": " a b", "logprobs": {"tokens": [" a", " b"], "token_logprobs": [-0.5, -0.25]}}
                change(number, choice)
                self._say({"choices": [choice], "system_fingerprint": "fp_1"})

            def _say(self, answer: dict[str, Any]) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeServer":
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_server_that_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert main(["verify", "--url", server.url]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("the same, bit for bit, under all 2 ways")
    assert {(body["model"], body["temperature"]) for body in server.bodies} == {("tiny", 0)}


@pytest.mark.parametrize(
    ("place", "change", "reason"),
    [
        (
            30,
            {"logprobs": {"tokens": [" a", " b"], "token_logprobs": [-0.5, -0.25000001]}},
            "output token 1 is ' b' of",
        ),
        (20, {"text": " a c"}, "the text is ' a b' alone, ' a c' here"),
        (20, {"logprobs": {"content": [{"token": " a", "logprob": -0.5}]}}, "the text is"),
    ],
)
def test_a_server_that_does_not(
    place: int, change: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among requests at once, or asked again; a logprob by its last digits."""
    with FakeServer(lambda number, choice: choice.update(change) if number == place else None) as server:
        assert main(["verify", "model", "--url", f"{server.url}/v1/"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("    the prompt of ") and reason in line for line in lines)
    assert lines[-1] == "different under 1 of 2 ways of asking"
    assert server.bodies[0]["model"] == "model"


SAID = "an answer from "
LISTED = "a list of models from "
CHOICES = "choices as OpenAI's API has them, got "


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    ("model", "answer", "expected", "got"),
    [
        ("", b"hello\r\n\r\n", SAID, "BadStatusLine: hello"),
        ("", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", SAID, "IncompleteRead: "),
        ("", b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nshort", SAID, "500:"),
        ("", whole(b"[" * 10**5), SAID, "RecursionError: "),
        ("", whole(b"[1]"), LISTED, "[1]"),
        ("", whole(b"3"), LISTED, "3"),
        ("", whole(b'{"data": ["a"]}'), LISTED, '{"data": ["a"]}'),
        ("", whole(b'{"data": [{"id": null}]}'), LISTED, '{"data": [{"id": null}]}'),
        ("m", whole(b'{"choices": [{"text": "a", "logprobs": [1]}]}'), CHOICES, '{"choices": [{"text": "a", '),
        ("m", whole(b'{"choices": [{"text": null}]}'), CHOICES, '{"choices": [{"text": null}]}'),
        ("m", whole(b'{"choices": [[1]]}'), CHOICES, '{"choices": [[1]]}'),
    ],
)
def test_what_is_no_answer(
    model: str, answer: bytes, expected: str, got: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a server that is none of OpenAI's API: one line, which names the option and has what came."""

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)
        listening.close()  # whoever asks again gets no answer

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = Thread(target=serve, args=(listening,))
        serving.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert main(["verify", *([model] if model else []), "--url", url]) == 1
        serving.join()
    line = capsys.readouterr().err
    assert line.startswith(f"pagedattn: error: --url: expected {expected}") and line.count("\n") == 1
    assert f", got {got}" in line


def test_a_key_that_no_header_carries_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\nkey")
    assert main(["verify", "--url", "http://127.0.0.1:1"]) == 1
    line = "pagedattn: error: OPENAI_API_KEY: expected printable ASCII without spaces, got another character\n"
    assert capsys.readouterr().err == line


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        url = server.url
    assert main(["verify", "--url", url]) == 1
    assert capsys.readouterr().err.startswith(f"pagedattn: error: --url: expected an answer from {url}/v1/models, got ")
