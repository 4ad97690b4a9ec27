"""What requests share: the tokenizer, which is for one at a time."""

import asyncio
import threading
from typing import Any

import pytest

from pagedattn_serve.server.service import LONG_TEXT, Service


def test_the_event_loop_never_waits_for_the_tokenizer(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text has it; a short one waits for its turn, and meanwhile the loop turns."""
    service: Service = client.http.app.state.service
    has_begun, may_end, lock = threading.Event(), threading.Event(), threading.Lock()

    def tokenize(text: str, add_special_tokens: bool = True) -> list[int]:
        with lock:
            if len(text) >= LONG_TEXT:
                has_begun.set()
                assert may_end.wait(60)
            return [len(text)]

    async def run() -> list[list[list[int]]]:
        long = asyncio.create_task(service.tokenize(["x" * LONG_TEXT], True))
        await asyncio.to_thread(has_begun.wait, 60)
        short = asyncio.create_task(service.tokenize(["x"], True))
        await asyncio.sleep(0.05)  # would never come back if the loop waited for the lock
        assert not short.done()
        may_end.set()
        results = await asyncio.gather(long, short)
        return [*results, await service.tokenize(["xy"], True)]

    monkeypatch.setattr(client.engine.engine, "tokenize", tokenize)
    assert client.http.portal.call(run) == [[[LONG_TEXT]], [[1]], [[2]]]
