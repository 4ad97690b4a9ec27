"""What requests share: the tokenizer, which is for one at a time."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import BEGINNING, SPEECH

from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.text.detokenizer import IncrementalDetokenizer


def test_the_event_loop_does_not_wait_for_the_tokenizer(client: Any) -> None:
    """Whoever has it: another request's long text, or the thread that prepares requests."""
    with ThreadPoolExecutor(2) as pool:
        with client.engine.texts.lock:
            short = pool.submit(client.answer, "/tokenize", prompt=BEGINNING)
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                assert pool.submit(client.http.get, "/health").result(timeout=60).status_code == 200
            assert not short.done()
        assert short.result(timeout=60)["count"] > 0


def test_tokens_of_thoughts_are_counted_with_what_is_known_of_tokens(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that has the tokens of the answer before decodes no more than its first token."""
    service, num_decoded = client.http.app.state.service, 0
    pending_text = IncrementalDetokenizer._pending_text

    def counted(detokenizer: IncrementalDetokenizer) -> str:
        nonlocal num_decoded
        num_decoded += 1
        return pending_text(detokenizer)

    monkeypatch.setattr(IncrementalDetokenizer, "_pending_text", counted)
    text = SPEECH.replace("🙂", "").replace("é", "e") * 3
    token_ids = service.tokenizer(text).input_ids
    job = SimpleNamespace(params=SamplingParams(), prompts=[SimpleNamespace(token_ids=token_ids[-1:])])
    parser = SimpleNamespace(thoughts=[(0, len(text))])
    for _ in range(2):
        num_decoded = 0
        assert service.num_thought_tokens(job, parser, token_ids) == len(token_ids)
    assert num_decoded == 1
