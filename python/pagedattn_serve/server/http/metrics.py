"""What Prometheus scrapes at /metrics. Names are vLLM's, with `pagedattn:` in place of `vllm:`; docs/operations.md says
which are our own.

A scrape reads the counts of the engine's last step, or of some steps before. The times of a request are observed as its
outputs pass to the client.
"""

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from pagedattn_serve.outputs import EngineStats, ReplicaStatus, RequestOutput
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.http.logs import current_request

Replicas = Callable[[], list[ReplicaStatus]]

# The answer to every scraper, whatever its header Accept asks for. Every Prometheus reads this form, with the names as
# they are. In its other forms prometheus_client puts "_" for the ":" of a name, or escapes more, as the header says.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds, from a small model on a GPU to a large model on a CPU. Each bucket is at most 2.5 times the one before.
FIRST_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960, 1920, 3600)
LENGTH_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))

GAUGES: list[tuple[str, str, Callable[[EngineStats], float]]] = [
    ("num_requests_running", "Requests in the batches of the engine.", lambda s: s.num_running),
    ("num_requests_waiting", "Requests that wait to be let in.", lambda s: s.num_waiting),
    ("num_requests_swapped", "Requests whose blocks are in host memory.", lambda s: s.num_swapped),
    ("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.", lambda s: s.num_used_blocks / s.num_blocks),
    (
        "cpu_cache_usage_perc",
        "Share of the blocks for swapping in use, 0 to 1.",
        lambda s: s.num_used_host_blocks / max(s.num_host_blocks, 1),
    ),
    (
        "state_slots_usage_perc",
        "Share of the slots for states of layers in use, 0 to 1.",
        lambda s: s.num_used_state_slots / max(s.num_state_slots, 1),
    ),
]
COUNTERS: list[tuple[str, str, Callable[[EngineStats], float]]] = [
    ("prompt_tokens", "Tokens of prompts.", lambda s: s.num_prompt_tokens),
    ("generation_tokens", "Tokens that were generated.", lambda s: s.num_output_tokens),
    ("prefix_cache_queries", "Tokens of prompts that were looked up in the cache.", lambda s: s.num_looked_up_tokens),
    ("prefix_cache_hits", "Tokens of prompts that were found in the cache.", lambda s: s.num_found_tokens),
    ("prefix_cache_dir_blocks_read", "Blocks that were read from prefix_cache_dir.", lambda s: s.num_read_blocks),
    ("prefix_cache_dir_blocks_written", "Blocks that were written there.", lambda s: s.num_written_blocks),
    ("spec_decode_num_draft_tokens", "Tokens guessed by speculation.", lambda s: s.num_proposed_tokens),
    ("spec_decode_num_accepted_tokens", "Guessed tokens that saved a step.", lambda s: s.num_accepted_tokens),
    ("engine_steps", "Steps of the engine.", lambda s: s.num_steps),
    ("engine_step_seconds", "Seconds that the steps took.", lambda s: s.step_seconds),
    ("engine_execute_seconds", "Of these, seconds in model and sampler.", lambda s: s.execute_seconds),
]


class ServerMetrics:
    """The metrics of one server, in a registry of their own.

    replicas: says what each core of the engine has done so far.
    """

    def __init__(self, replicas: Replicas, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(replicas, model_name))
        ProcessCollector(registry=self._registry)
        self._registry.register(CoreProcessCollector(replicas))
        self._model_name = model_name
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of a request, as clients get them.", TOKEN_BUCKETS
        )
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean, without its first token.", TOKEN_BUCKETS
        )
        self._e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token.", REQUEST_BUCKETS
        )
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a request's prompt.", LENGTH_BUCKETS)
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens that a request generated, all of its outputs.", LENGTH_BUCKETS
        )
        self._finished = Counter(
            "pagedattn:request_success",
            "Requests that ended, by how: stop, length, abort, error.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model_name, reason)  # so that each reason is shown, as 0

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"pagedattn:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
        return made.labels(self._model_name)

    def render(self) -> bytes:
        """The page, as CONTENT_TYPE has it."""
        return generate_latest(self._registry)

    @contextmanager
    def watch(self) -> Iterator["_Seen"]:
        """Gives what is to be called with each output (a delta) of one request of the engine. At the end, the request's
        tokens are added to the current HTTP request's.

        An ApiError in the context says that the request was refused or failed; a failure after the first output counts
        as "error". Any other exception says that the reader has left, which counts as "abort" unless the request was
        finished. A request that is refused before its first output is not counted.
        """
        seen = _Seen(self._time_to_first_token, self._inter_token_latency)
        try:
            yield seen
        except ApiError:
            if seen.last is not None and not seen.last.finished:
                self._count_end("error")  # the engine of the request has died
            raise
        except BaseException:
            if seen.last is None or not seen.last.finished:
                self._count_end("abort")
            raise
        finally:
            if seen.last is not None:
                self._observe_end(seen.last, seen)

    def _observe_end(self, last: RequestOutput, seen: "_Seen") -> None:
        num_prompt_tokens, num_output_tokens = len(last.prompt_token_ids), seen.lengths.total()
        if context := current_request.get():
            context.num_prompt_tokens += num_prompt_tokens
            context.num_output_tokens += num_output_tokens
        if not last.finished:
            return
        self._count_end(next(reason for reason in ("error", "abort", "length", "stop") if reason in seen.reasons))
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generation_tokens.observe(num_output_tokens)
        times = last.metrics
        if times.finished_time is None:
            return
        self._e2e_latency.observe(times.finished_time - times.arrival_time)
        longest = max(seen.lengths.values())
        if times.first_token_time is not None and longest > 1:
            self._time_per_output_token.observe((times.finished_time - times.first_token_time) / (longest - 1))

    def _count_end(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()


@dataclass(slots=True)
class _Seen:
    """What was seen of one request: its last output and when that came; lengths and ends of all outputs."""

    time_to_first_token: Histogram
    inter_token_latency: Histogram
    last: RequestOutput | None = None
    time: float = 0.0
    lengths: Counts[int] = field(default_factory=Counts)
    reasons: set[str | None] = field(default_factory=set)

    def __call__(self, output: RequestOutput) -> None:
        now = time.monotonic()
        if self.last is not None:
            self.inter_token_latency.observe(now - self.time)
        elif output.metrics.first_token_time is not None:
            self.time_to_first_token.observe(output.metrics.first_token_time - output.metrics.arrival_time)
        self.last, self.time = output, now
        for completion in output.outputs:
            self.lengths[completion.index] += len(completion.token_ids)
            self.reasons.add(completion.finish_reason)

    def forget(self) -> None:
        """All outputs come again, from the beginning."""
        self.lengths.clear()
        self.reasons.clear()


class EngineCollector(Collector):
    """The counts of the engine after its last step. Only of several replicas have the metrics a label `replica`."""

    def __init__(self, replicas: Replicas, model_name: str) -> None:
        self._replicas = replicas
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        replicas = self._replicas()
        names = ["model_name", "replica"] if len(replicas) > 1 else ["model_name"]
        labelled = [([self._model_name, str(i)][: len(names)], each) for i, each in enumerate(replicas)]
        for family, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, value in table:
                metric = family(f"pagedattn:{name}", text, labels=names)
                for labels, replica in labelled:
                    metric.add_metric(labels, value(replica.stats))
                yield metric
        preemptions = CounterMetricFamily(
            "pagedattn:num_preemptions", "Times that a request lost its blocks.", labels=[*names, "kind"]
        )
        blocks = GaugeMetricFamily(
            "pagedattn:kv_cache_blocks", "Blocks of the cache, by state.", labels=[*names, "state"]
        )
        for labels, replica in labelled:
            stats = replica.stats
            preemptions.add_metric([*labels, "recompute"], stats.num_recomputes)
            preemptions.add_metric([*labels, "swap"], stats.num_swaps)
            num_free = stats.num_blocks - stats.num_used_blocks - stats.num_cached_blocks
            blocks.add_metric([*labels, "used"], stats.num_used_blocks)
            blocks.add_metric([*labels, "cached"], stats.num_cached_blocks)
            blocks.add_metric([*labels, "free"], num_free)
        yield preemptions
        yield blocks
        if len(replicas) > 1:
            up = GaugeMetricFamily("pagedattn:replica_up", "1 if the replica runs and does not hang.", labels=names)
            restarts = CounterMetricFamily(
                "pagedattn:replica_restarts", "Times that the replica was started anew.", labels=names
            )
            for labels, replica in labelled:
                up.add_metric(labels, replica.is_well)
                restarts.add_metric(labels, replica.num_restarts)
            yield up
            yield restarts


class CoreProcessCollector(Collector):
    """Memory, CPU time and open files of the engine's processes. Several have a label `replica`."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        replicas = self._replicas()
        for i, replica in enumerate(replicas):
            if replica.pid is None:
                continue
            for metric in ProcessCollector("engine_core", partial(str, replica.pid), registry=None).collect():
                merged = metrics.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    labels = {"replica": str(i)} if len(replicas) > 1 else {}
                    merged.add_sample(sample.name, {**sample.labels, **labels}, sample.value)
        yield from metrics.values()


def add_metrics_route(app: Starlette, metrics: ServerMetrics) -> None:
    async def show(request: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    app.add_route("/metrics", show, include_in_schema=False)
