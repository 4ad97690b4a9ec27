"""What is not generation: models, health, version, tokens, paths that there are not, the description of all this."""

import re
from typing import Any

import pytest
from checkpoints import BEGINNING

import pagedattn_ext
from pagedattn_serve.engine import LLMEngine


def test_the_model_is_listed(client: Any) -> None:
    listed = client.http.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 128)
    assert (model["root"], model["parent"]) == ("tiny", None)
    assert client.http.get("/v1/models/tiny").json() == model
    assert client.http.get("/v1/models/").json() == listed
    assert client.error_of(client.http.get("/v1/models/a/b"))[0] == 404


def test_a_name_with_a_slash(speaker_path: str, serve: Any) -> None:
    with serve(LLMEngine(speaker_path), served_model_name="org/model") as client:
        assert client.http.get("/v1/models/org/model").json()["id"] == "org/model"


def test_a_model_of_several_names(speaker_path: str, serve: Any) -> None:
    """As in vLLM: requests may have any of them, answers and metrics have the first."""
    with serve(LLMEngine(speaker_path), served_model_name=("org/first", "second")) as client:
        first, second = client.http.get("/v1/models").json()["data"]
        assert (first["id"], first["root"]) == ("org/first", "org/first")
        assert second == {**first, "id": "second"}
        assert client.http.get("/v1/models/second").json() == second
        for name in ("second", "org/first", None):
            assert client.answer("/v1/completions", model=name, prompt=BEGINNING)["model"] == "org/first"
        status, param, message = client.error("/v1/completions", model="tiny", prompt=BEGINNING)
        assert (status, param) == (404, "model") and "expected org/first or second, got tiny" in message
        assert set(re.findall('model_name="([^"]*)"', client.http.get("/metrics").text)) == {"org/first"}
        assert client.http.get("/state").json()["model"] == "org/first"


def test_version(client: Any) -> None:
    assert client.http.get("/version").json() == {"version": pagedattn_ext.__version__}


def test_health(speaker_path: str, serve: Any) -> None:
    with serve(LLMEngine(speaker_path)) as client:
        assert client.http.get("/health").status_code == 200
        client.http.portal.call(client.engine.shutdown)
        assert client.error_of(client.http.get("/health"))[0] == 503
        assert client.error("/v1/completions", prompt=BEGINNING)[0] == 503
        assert client.error("/v1/completions", prompt=BEGINNING, stream=True)[0] == 503


def test_tokens_and_back(client: Any) -> None:
    answer = client.answer("/tokenize", prompt=BEGINNING, return_token_strs=True)
    token_ids = client.engine.texts.tokenizer(BEGINNING).input_ids
    assert answer["tokens"] == token_ids
    assert (answer["count"], answer["max_model_len"]) == (len(token_ids), 128)
    assert answer["token_strs"] == client.engine.texts.tokenizer.convert_ids_to_tokens(token_ids)
    assert client.answer("/detokenize", tokens=token_ids) == {"prompt": BEGINNING}


def test_tokens_of_a_chat(client: Any) -> None:
    messages = [{"role": "user", "content": BEGINNING}]
    assert client.answer("/tokenize", messages=messages) == client.answer("/tokenize", prompt=BEGINNING)


def test_a_long_text_is_tokenized_as_a_short_one_is(demo: Any) -> None:
    """Also beyond what the model takes."""
    text = "A class\n"
    short, long = (demo.answer("/tokenize", prompt=text * count)["tokens"] for count in (1, 2000))
    assert long == short * 2000
    assert demo.answer("/detokenize", tokens=long) == {"prompt": text * 2000}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
    ids=str,
)
def test_tokens_that_are_refused(client: Any, path: str, fields: dict[str, Any], param: str) -> None:
    status, blamed, message = client.error(path, **fields)
    assert (status, blamed) == (400, param), message


def test_an_unknown_path(client: Any) -> None:
    assert client.error_of(client.http.get("/v1/nothing"))[0] == 404
    assert client.error_of(client.http.get("/docs"))[0] == 404  # its page would load scripts from elsewhere


def test_a_wrong_method(client: Any) -> None:
    response = client.http.get("/v1/completions")
    assert client.error_of(response)[0] == 405
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/page/page.js",
        "/health",
        "/version",
        "/v1/models",
        "/v1/models/tiny",
        "/metrics",
        "/state",
        "/openapi.json",
    ],
)
def test_head_is_get_without_a_body(client: Any, path: str) -> None:
    got, head = client.http.get(path), client.http.head(path)
    assert head.status_code == got.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]


def test_head_of_what_cannot_be_got(client: Any) -> None:
    assert client.http.head("/v1/nothing").status_code == 404
    assert client.http.head("/v1/completions").status_code == 405


def test_what_every_server_asks_for_is_on(speaker_path: str, serve: Any) -> None:
    with serve(LLMEngine(speaker_path), api_keys=("secret",), max_body_size=1000) as client:
        assert client.error("/v1/completions", prompt=BEGINNING)[0] == 401
        assert client.http.get("/health").status_code == client.http.get("/metrics").status_code == 200
        client.http.headers["Authorization"] = "Bearer secret"
        assert client.answer("/v1/completions", prompt=BEGINNING)["choices"]
        assert client.error("/v1/completions", prompt="a" * 1001)[0] == 413
        assert 'pagedattn:request_success_total{finished_reason="length"' in client.http.get("/metrics").text


def test_the_description(client: Any) -> None:
    described = client.http.get("/openapi.json").json()
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    assert len(operations) == 19
    for operation in operations:
        assert "422" not in operation["responses"]
        schema = operation["responses"]["400"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith(("/ErrorResponse", "/ErrorMessage"))
    schema = described["components"]["schemas"]["CompletionRequest"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["prompt"]
    assert {"spaces_between_special_tokens", "request_id"} <= set(schema["properties"])
    assert "vllm_xargs" not in schema["properties"]  # which are refused, whatever they are
    answer = described["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(answer) == {"application/json", "text/event-stream"}
