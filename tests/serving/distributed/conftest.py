"""Ranks that start fast, for all tests here."""

from collections.abc import Iterator

import pytest
from warm_ranks import StartedRanks

from pagedattn_serve.distributed import executor


@pytest.fixture(scope="module")
def ranks() -> Iterator[StartedRanks]:
    started = StartedRanks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "start_process", started.start)
        yield started
