"""The metrics in a real Prometheus, which scrapes a running server and is asked for what it has."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, wait_for

PATIENCE = 120  # seconds: the machine may have other work

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: server
  static_configs: [{{targets: ["{target}"]}}]
"""


@pytest.fixture
def ask_prometheus(server: ServerProcess, tmp_path: Path) -> Iterator[Callable[[str], list[Any]]]:
    """ask_prometheus(query) is what a Prometheus that scrapes the server has: labels and value of each series."""
    executable = shutil.which("prometheus")
    if executable is None:
        pytest.skip("no prometheus here")
    config, log = tmp_path / "prometheus.yml", tmp_path / "log"
    config.write_text(CONFIG.format(target=server.url.removeprefix("http://")))
    options = {"config.file": config, "storage.tsdb.path": tmp_path / "data", "web.listen-address": "127.0.0.1:0"}
    command = [executable, *(f"--{name}={value}" for name, value in options.items())]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path) as process:

        def address() -> str | None:
            assert process.poll() is None, log.read_text()
            said = re.search(r"Listening on.* address=(\S+)", log.read_text())
            return said and said[1]

        def ask(query: str) -> list[Any]:
            url = f"http://{address()}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
            with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                return [(each["metric"], float(each["value"][1])) for each in json.load(response)["data"]["result"]]

        wait_for(lambda: address() is not None, PATIENCE)
        yield ask
        process.kill()


def test_prometheus_has_the_metrics_under_the_names_of_the_docs(
    server: ServerProcess, ask_prometheus: Callable[[str], list[Any]]
) -> None:
    """Gauges, counters and histograms, each with its colon: what a dashboard asks for. Other names there are none."""
    body = json.dumps({"prompt": "A class definition", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=PATIENCE).read()
    own = {"job": "server", "instance": server.url.removeprefix("http://"), "model_name": server.model}
    for name, labels in [
        ("num_requests_running", {}),
        ("generation_tokens_total", {}),
        ("time_to_first_token_seconds_bucket", {"le": "+Inf"}),
        ("e2e_request_latency_seconds_count", {}),
        ("request_success_total", {"finished_reason": "length"}),
        ("kv_cache_blocks", {"state": "free"}),
    ]:
        name = f"pagedattn:{name}"
        query = f"{name}{{{','.join(f'{label}={value!r}' for label, value in labels.items())}}}"
        # Of all times: while the machine is busy, a scrape may fail.
        query = f"last_over_time({query}[1h])"
        wait_for(lambda query=query: bool(ask_prometheus(query)), PATIENCE)
        assert [metric for metric, _ in ask_prometheus(query)] == [{"__name__": name, **own, **labels}]
    ended = 'max_over_time(pagedattn:request_success_total{finished_reason="length"}[1h])'
    wait_for(lambda: ask_prometheus(ended)[0][1] > 0, PATIENCE)
    assert ask_prometheus('last_over_time({__name__=~"process_resident_.*"}[1h])')
    assert not ask_prometheus('last_over_time({__name__=~"pagedattn_.*"}[1h])')
