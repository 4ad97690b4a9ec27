"""schemathesis, as its command: what /openapi.json allows and what it forbids is sent, and is answered as it says."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from server_process import ServerProcess

OPTIONS = [
    *("--checks", "all"),
    *("--exclude-checks", "positive_data_acceptance"),  # a schema cannot say that best_of is at least n
    *("--max-examples", "8"),
    "--generation-deterministic",
    "--continue-on-failure",
    "--no-color",
]


@pytest.mark.timeout(900)  # thousands of requests
def test_the_server_is_as_it_says(server: ServerProcess) -> None:
    before = answers(server)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json", *OPTIONS],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "SCHEMATHESIS_HOOKS": "schemathesis_hooks"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert (answers(server) - before)[path, "200"] >= 50, "too few were answered to say anything"
    server.wait_until_idle()


def answers(server: ServerProcess) -> Counter[tuple[str, str]]:
    """How many answers there were of each path and status, from the server's log."""
    return Counter(re.findall(r" method=POST path=(\S+) status=(\d+) ", server.stderr))
