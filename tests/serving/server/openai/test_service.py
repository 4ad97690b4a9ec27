"""What requests share: the tokenizer, which is for one at a time."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from checkpoints import BEGINNING


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
