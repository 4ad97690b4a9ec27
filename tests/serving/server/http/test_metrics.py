"""The metrics: what the engine counted and what clients met, under the names that dashboards of vLLM ask for."""

import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.testclient import TestClient

from pagedattn_serve import DEMO_MODEL, EngineStats, LLMEngine, ReplicaStatus, RequestOutput, SamplingParams
from pagedattn_serve.outputs import CompletionOutput, RequestMetrics
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.http.logs import RequestContext, current_request
from pagedattn_serve.server.http.metrics import COUNTERS, GAUGES, ServerMetrics, add_metrics_route

NO_STATS = EngineStats(**{name: 0 for name in EngineStats.__slots__} | {"num_blocks": 8})  # type: ignore[arg-type]


def status_of(stats: EngineStats) -> ReplicaStatus:
    return ReplicaStatus(None, True, None, 0, stats)


IDLE = [status_of(NO_STATS)]


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """Values by name and labels, as `name{a=b}`, without the label that all have."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("pagedattn:"):
                assert labels.pop("model_name") == "demo"
            shown = ",".join(f"{name}={value}" for name, value in labels.items())
            found[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return found


def output(
    *lengths: int, finish_reason: str | None = None, metrics: RequestMetrics | None = None, num_prompt_tokens: int = 3
) -> RequestOutput:
    completions = [
        CompletionOutput(i, "", list(range(length)), 0.0, None, finish_reason) for i, length in enumerate(lengths)
    ]
    times = metrics or RequestMetrics(100.0, 101.0, None if finish_reason is None else 103.0)
    return RequestOutput("a", None, [0] * num_prompt_tokens, completions, finish_reason is not None, times)


def watch_all(metrics: ServerMetrics, *outputs: RequestOutput) -> None:
    with metrics.watch() as see:
        for each in outputs:
            see(each)


def test_a_request() -> None:
    """Arrival at 100, first token at 101, end at 103 with 5 tokens."""
    metrics = ServerMetrics(lambda: IDLE, "demo")
    watch_all(metrics, output(1), output(1), output(3, finish_reason="length"))
    found = samples(metrics)
    for name, total, count in [
        ("time_to_first_token_seconds", 1, 1),
        ("request_time_per_output_token_seconds", 0.5, 1),
        ("e2e_request_latency_seconds", 3, 1),
        ("request_prompt_tokens", 3, 1),
        ("request_generation_tokens", 5, 1),
    ]:
        assert found[f"pagedattn:{name}_sum"] == pytest.approx(total)
        assert found[f"pagedattn:{name}_count"] == count
    assert found["pagedattn:inter_token_latency_seconds_count"] == 2
    assert 0 <= found["pagedattn:inter_token_latency_seconds_sum"] < 60  # by the real clock
    assert found["pagedattn:time_to_first_token_seconds_bucket{le=1.0}"] == 1
    assert found["pagedattn:time_to_first_token_seconds_bucket{le=0.5}"] == 0
    assert ended(metrics) == {"length": 1}


def ended(metrics: ServerMetrics) -> dict[str, float]:
    """How many requests ended how."""
    name = "pagedattn:request_success_total{finished_reason="
    counts = {key.removeprefix(name)[:-1]: value for key, value in samples(metrics).items() if key.startswith(name)}
    assert counts.keys() == {"stop", "length", "abort", "error"}
    return {reason: count for reason, count in counts.items() if count}


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_how_requests_end(reason: str) -> None:
    metrics = ServerMetrics(lambda: IDLE, "demo")
    watch_all(metrics, output(1), output(1, finish_reason=reason))
    watch_all(metrics, output(1, finish_reason=reason))  # one token alone has no time between tokens
    assert ended(metrics) == {reason: 2}
    assert samples(metrics)["pagedattn:request_time_per_output_token_seconds_count"] == 1


def test_several_outputs_are_one_request() -> None:
    """Its time a token is that of the longest, as they run side by side. The last deltas are of that one alone."""
    metrics = ServerMetrics(lambda: IDLE, "demo")
    last = output(3, finish_reason="length")
    last.outputs[0].index = 1
    watch_all(metrics, output(1, 1, 1), output(1, 1, 2), last)
    found = samples(metrics)
    assert ended(metrics) == {"length": 1} and found["pagedattn:request_generation_tokens_sum"] == 10
    assert found["pagedattn:request_time_per_output_token_seconds_sum"] == pytest.approx(0.5)


def test_a_request_that_ended_without_a_token() -> None:
    """As one that was aborted while it waited."""
    metrics = ServerMetrics(lambda: IDLE, "demo")
    watch_all(metrics, output(0, finish_reason="abort", metrics=RequestMetrics(100.0, None, 102.0)))
    found = samples(metrics)
    assert ended(metrics) == {"abort": 1} and found["pagedattn:time_to_first_token_seconds_count"] == 0
    assert found["pagedattn:e2e_request_latency_seconds_sum"] == 2


def test_a_request_that_is_refused_counts_for_nothing() -> None:
    metrics = ServerMetrics(lambda: IDLE, "demo")
    before = samples(metrics)
    with pytest.raises(ApiError, match="too long"), metrics.watch():
        raise ApiError(400, "too long")
    after = samples(metrics)
    assert all(name.startswith("process_") for name in before if before[name] != after[name])


@pytest.mark.parametrize("finish_reason", ["error", None])
def test_a_request_that_fails_counts_once(finish_reason: str | None) -> None:
    """Whether the engine says so in a last output, or has died."""
    metrics = ServerMetrics(lambda: IDLE, "demo")
    with pytest.raises(ApiError), metrics.watch() as see:
        see(output(1, finish_reason=finish_reason))
        raise ApiError(500, "the request could not go on")
    assert ended(metrics) == {"error": 1}


@pytest.mark.parametrize("num_outputs", [0, 2])
@pytest.mark.parametrize("how", [asyncio.CancelledError, OSError])
def test_a_reader_that_leaves_counts_as_abort(num_outputs: int, how: type[BaseException]) -> None:
    metrics = ServerMetrics(lambda: IDLE, "demo")
    with pytest.raises(how), metrics.watch() as see:
        for _ in range(num_outputs):
            see(output(1))
        raise how
    assert ended(metrics) == {"abort": 1}


def test_a_reader_that_leaves_with_the_last_output_is_no_abort() -> None:
    metrics = ServerMetrics(lambda: IDLE, "demo")
    with pytest.raises(asyncio.CancelledError), metrics.watch() as see:
        see(output(1, finish_reason="stop"))
        raise asyncio.CancelledError
    assert ended(metrics) == {"stop": 1}


def test_tokens_are_added_to_the_http_request() -> None:
    """Of which several may be to the engine, and one that was left counts with what it had."""
    metrics = ServerMetrics(lambda: IDLE, "demo")

    context = RequestContext("id")
    token = current_request.set(context)
    try:
        watch_all(metrics, output(1), output(3, finish_reason="stop"))
        watch_all(metrics, output(2, 3))
    finally:
        current_request.reset(token)
    assert (context.num_prompt_tokens, context.num_output_tokens) == (6, 9)


def test_what_the_engine_counts() -> None:
    engine = LLMEngine(DEMO_MODEL, num_blocks=8, max_num_seqs=4, preemption_mode="swap", speculation="ngram")
    metrics = ServerMetrics(lambda: [status_of(engine.stats())], "demo")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for i in range(6):
        engine.add_request(str(i), "The with statement. " * 4 + f"The {i}", params)
    engine.add_request("many", "A class", SamplingParams(n=4, max_tokens=40, ignore_eos=True, seed=1))
    seen: list[list[float]] = []
    while engine.has_unfinished_requests():
        engine.step()
        found, stats = samples(metrics), engine.stats()
        now = [found[f"pagedattn:num_requests_{name}"] for name in ("running", "waiting", "swapped")]
        assert now == [stats.num_running, stats.num_waiting, stats.num_swapped]
        assert found["pagedattn:kv_cache_usage_perc"] == stats.num_used_blocks / 8
        assert found["pagedattn:kv_cache_blocks{state=used}"] == stats.num_used_blocks
        assert sum(found[f"pagedattn:kv_cache_blocks{{state={each}}}"] for each in ("used", "cached", "free")) == 8
        seen.append(now)
    assert all(map(max, zip(*seen, strict=True)))  # there were some of each
    engine.add_request("alone", "The with statement. " * 4, params)  # with blocks to spare for drafts
    while engine.has_unfinished_requests():
        engine.step()
    found, stats = samples(metrics), engine.stats()
    assert found["pagedattn:prompt_tokens_total"] == stats.num_prompt_tokens > 0
    assert found["pagedattn:generation_tokens_total"] == stats.num_output_tokens > 0
    assert found["pagedattn:prefix_cache_queries_total"] >= found["pagedattn:prefix_cache_hits_total"] > 0
    assert found["pagedattn:num_preemptions_total{kind=recompute}"] == stats.num_recomputes
    assert found["pagedattn:num_preemptions_total{kind=swap}"] == stats.num_swaps > 0
    assert found["pagedattn:spec_decode_num_draft_tokens_total"] == stats.num_proposed_tokens > 0
    assert found["pagedattn:engine_steps_total"] == stats.num_steps
    assert found["pagedattn:kv_cache_usage_perc"] == 0


def test_every_metric_has_its_help_and_type() -> None:
    body = ServerMetrics(lambda: IDLE, "demo").render()
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert all(family.documentation and family.type != "unknown" for family in families.values())
    assert families.keys() >= {f"pagedattn:{name}" for name, _, _ in GAUGES + COUNTERS}
    assert "process_resident_memory_bytes" in families


OPENMETRICS = "application/openmetrics-text"
PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"


@pytest.mark.parametrize(
    "accept",
    [
        pytest.param(None, id="none"),
        "*/*",
        "text/plain",
        # Prometheus 2; the second with its feature native-histograms, the third with utf8-names
        f"{OPENMETRICS};version=1.0.0,{OPENMETRICS};version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        f"{PROTOBUF},{OPENMETRICS};version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
        # Prometheus 3, as it is and with metric_name_escaping_scheme: underscores
        f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8;q=0.6,{OPENMETRICS};version=0.0.1;q=0.5,"
        "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
        f"{OPENMETRICS};version=1.0.0;escaping=underscores;q=0.6,{OPENMETRICS};version=0.0.1;q=0.5,"
        "text/plain;version=1.0.0;escaping=underscores;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
        # each of the other forms alone
        f"{OPENMETRICS}",
        f"{OPENMETRICS}; version=1.0.0",
        f"{OPENMETRICS};version=1.0.0;escaping=dots",
        "text/plain;version=1.0.0;escaping=dots",
        "text/plain;version=1.0.0;escaping=values",
    ],
)
def test_every_scraper_gets_the_names_as_the_docs_have_them(accept: str | None) -> None:
    """In the one form that Prometheus 2 and 3 both read. prometheus_client's own choice by the header has names like
    pagedattn_num_requests_running, which no dashboard asks for."""
    app = Starlette()
    add_metrics_route(app, ServerMetrics(lambda: IDLE, "demo"))
    client = TestClient(app)
    if accept is None:
        del client.headers["accept"]
    response = client.get("/metrics", headers={} if accept is None else {"accept": accept})
    assert response.headers.get_list("content-type") == ["text/plain; version=0.0.4; charset=utf-8"]
    named = [line.removeprefix("# HELP ").removeprefix("# TYPE ") for line in response.text.splitlines()]
    own = [name for name in named if name.startswith("pagedattn")]
    assert all(name.startswith("pagedattn:") for name in own)
    names = {re.split("[ {]", name)[0] for name in own}
    assert names >= {f"pagedattn:{name}" for name, _, _ in GAUGES} | {
        f"pagedattn:{name}_total" for name, _, _ in COUNTERS
    }
    assert "pagedattn:time_to_first_token_seconds_bucket" in names


def test_two_servers_of_a_process_count_for_themselves() -> None:
    first, second = (ServerMetrics(lambda: IDLE, "demo") for _ in range(2))
    watch_all(first, output(1, finish_reason="stop"))
    assert ended(first) == {"stop": 1} and ended(second) == {}


def test_metrics_of_replicas_are_there_where_there_are_several() -> None:
    alone, two = samples(ServerMetrics(lambda: IDLE, "demo")), samples(ServerMetrics(lambda: IDLE * 2, "demo"))
    assert not any("replica" in name for name in alone)
    assert "pagedattn:replica_up{replica=1}" in two
