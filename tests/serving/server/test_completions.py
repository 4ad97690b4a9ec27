"""/v1/completions: the forms of a prompt, the fields of a request, OpenAI's format of the answer."""

from typing import Any

from checkpoints import BEGINNING, SPEECH
from starlette.testclient import TestClient

GREEDY = {"temperature": 0, "max_tokens": 100}


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"model": "tiny", **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_is_continued(client: TestClient) -> None:
    answer = complete(client, prompt=BEGINNING)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice == {"index": 0, "text": SPEECH, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_max_tokens_is_16_by_default(client: TestClient) -> None:
    answer = complete(client, prompt=BEGINNING, max_tokens=None)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
