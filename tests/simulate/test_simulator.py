"""The clock, and what a deployment does to a trace."""

from dataclasses import replace

import pytest
from simulated import HARDWARE, SHAPE, deployment, request, routing, scheduler_config, trace

from pagedattn_serve.config import UNBOUNDED, CacheConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_simulate.deployment import SYSTEMS, sustainable_rate
from pagedattn_simulate.metrics import Distribution, Summary, distribution
from pagedattn_simulate.simulator import Simulator
from pagedattn_simulate.systems.paged import PagedSystem
from pagedattn_simulate.workload import (
    GivenPairs,
    RequestForm,
    SimulatedRequest,
    WorkloadPairs,
    poisson_trace,
    requests_of,
)

MANY = [(5 + 3 * i % 17, 4 + 7 * i % 29) for i in range(40)]
CACHE = CacheConfig(num_blocks=20, block_size=8)


def test_times_by_hand() -> None:
    """Steps of one second. The first request comes at 0 and has its 3 tokens at 1, 2 and 3. The second comes amid the
    second step, waits for its end, and has its tokens at 3 and 4; the third comes when nothing has run for a while."""
    requests = [request(4, 3), request(4, 2, arrival=1.5), request(4, 1, arrival=10.0)]
    simulator = Simulator([PagedSystem(scheduler_config(), CACHE)], routing(), lambda work: 1.0)
    summary = simulator.run(requests)
    assert [(each.first_token, each.finished) for each in requests] == [(1.0, 3.0), (3.0, 4.0), (11.0, 11.0)]
    assert summary.time_to_first_token == Distribution(pytest.approx(3.5 / 3), 1.0, 1.5, 1.5)
    assert summary.inter_token_latency == Distribution(1.0, 1.0, 1.0, 1.0)
    assert summary.normalized_latency is not None
    assert summary.normalized_latency.mean == pytest.approx((3 / 3 + 2.5 / 2 + 1) / 3)
    assert (summary.num_requests, summary.num_steps, summary.seconds) == (3, 5, 11.0)
    assert summary.batch_size == pytest.approx((1 + 1 + 2 + 1 + 1) / 5)
    assert summary.tokens_per_second == pytest.approx(6 / 11)


def test_a_request_that_follows_another() -> None:
    """The next turn of a conversation comes two seconds after the answer, which its prompt begins with. Another request
    arrives in between."""
    first, other = request(20, 4), request(4, 1, arrival=5.0)
    turns: list[SimulatedRequest] = []

    def follow_up(done: SimulatedRequest) -> SimulatedRequest | None:
        if done is not first:
            return None
        prompt = [*done.prompt_token_ids, *done.output_token_ids, 99]
        assert done.finished is not None and len(prompt) == 25
        turns.append(SimulatedRequest(done.finished + 2, prompt, 2))
        return turns[0]

    system = PagedSystem(scheduler_config(), CACHE)
    summary = Simulator([system], routing(), lambda work: 1.0).run([first, other], follow_up)
    assert (first.finished, other.finished, turns[0].first_token, turns[0].finished) == (4.0, 6.0, 7.0, 8.0)
    assert summary.num_requests == 3
    assert system.num_found_tokens == 16  # the full blocks that the first turn has filled


def test_replicas_run_at_the_same_time() -> None:
    """Two long requests that come together take as long on two replicas as one takes on one."""
    alone = deployment().run("paged", trace((8, 40)), routing)
    both = deployment(num_replicas=2).run("paged", trace((8, 40), (8, 40)), lambda: routing(2))
    assert both.seconds == pytest.approx(alone.seconds)
    assert both.num_requests == 2 and both.batch_size == pytest.approx(1)


class Recorder:
    """A routing that takes turns, and notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def add(self, key: int, prompt: list[int], cache_salt: str) -> int:
        self.told.append(("add", key))
        return key % 2

    def begin(self, key: int) -> None:
        self.told.append(("begin", key))

    def end(self, key: int) -> None:
        self.told.append(("end", key))


def test_the_routing_is_told_what_happens() -> None:
    """Each request begins once, with its first token, and ends once."""
    recorder = Recorder()
    replicas = [PagedSystem(scheduler_config(), CACHE) for _ in range(2)]
    requests = [request(4, 2), request(4, 3, arrival=0.5), request(4, 1, arrival=1.2)]
    Simulator(replicas, recorder, lambda work: 1.0).run(requests)
    assert recorder.told == [
        *[("add", 0), ("add", 1), ("begin", 0), ("add", 2), ("begin", 1)],
        *[("end", 0), ("begin", 2), ("end", 2), ("end", 1)],
    ]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_seed_gives_the_same_run(system: str) -> None:
    def run(seed: int) -> Summary:
        requests = poisson_trace(WorkloadPairs("alpaca"), 20, 2, 64, seed)
        return deployment(num_replicas=2).run(system, requests, lambda: routing(2))

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize("system", SYSTEMS)
def test_shares_of_memory(system: str) -> None:
    """They sum to one. While requests wait, what is free counts as external, else as free."""
    of_many = deployment().run(system, trace(*MANY), routing)
    of_one = deployment().run(system, trace((10, 20)), routing)
    for summary in (of_many, of_one):
        assert sum(summary.memory.values()) == pytest.approx(1)
    assert of_one.memory["external"] == 0 < of_one.memory["free"]
    assert of_many.memory["external"] > 0


def test_the_order_of_waste_is_that_of_the_paper() -> None:
    """All slots are wanted. The more a system knows, the more of its slots hold tokens. FasterTransformer holds the
    tokens of outputs that are done until their batch is, so it may come before Orca (Max)."""
    used = [deployment().run(system, trace(*MANY), routing).memory["used"] for system in SYSTEMS]
    paged, oracle, pow2, most, fixed = used
    assert paged > oracle > pow2 > max(most, fixed) > 0


def test_a_shared_prefix_is_computed_once() -> None:
    def run(prefix_caching: bool) -> Summary:
        of = deployment(60, enable_prefix_caching=prefix_caching)
        return of.run("paged", trace(*[(3, 5)] * 6, interval=1.0), routing, form=RequestForm(num_shared_tokens=40))

    cached, computed = run(True), run(False)
    assert cached.found == 5 * 40 / (6 * 43) and computed.found == 0
    assert cached.time_to_first_token is not None and computed.time_to_first_token is not None
    assert cached.time_to_first_token.p50 < computed.time_to_first_token.p50 / 2


def test_what_a_request_cannot_be() -> None:
    with pytest.raises(ArgumentError) as raised:
        deployment().run("paged", trace((3, 5), (60, 5)), routing)
    expected = "request 2 of 2: expected at most 64 tokens of prompt and output (max_model_len 64), got 60 and 5"
    assert str(raised.value) == expected
    with pytest.raises(
        ArgumentError, match=r"at most 44 tokens of prompt and output \(max_model_len 64, 20 of a shared"
    ):
        deployment().run("paged", trace((40, 5)), routing, RequestForm(num_shared_tokens=20))


def test_what_fits() -> None:
    """10,000 bytes, of which 90% are to be used, less 2,000 bytes of weights: 7,000 for blocks of 8 tokens of 10 bytes.
    Two ranks have half of the weights each, and half of each block. max_model_len is cut to what the cache holds."""
    assert deployment(UNBOUNDED).cache_config.num_blocks == 87
    assert deployment(UNBOUNDED, num_ranks=2).cache_config.num_blocks == 200
    assert deployment(UNBOUNDED, kv_cache_memory=800).num_slots == 80
    assert deployment(3).max_model_len == 24
    hosts = [deployment(20, swap_space=800 / 2**30 * blocks / 10).cache_config.num_host_blocks for blocks in (0, 5, 30)]
    assert hosts == [0, 5, 20]  # no more than the cache has
    assert SHAPE.weight_bytes == 2000 and HARDWARE.memory == 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu_memory_utilization": 0.2},
            "hardware: expected memory for 0.0 GB of weights and 0.0 GB of cache on each",
        ),
        ({"num_blocks": 101}, "hardware: expected memory for "),
        ({"num_ranks": 3}, "tensor_parallel_size: expected a divisor of the model's 4 heads, got 3"),
        ({"num_replicas": 0}, "data_parallel_size: expected an int in [1, 4096], got 0"),
        ({"max_model_len": 65}, "max_model_len: expected an int in [2, 64], got 65"),
        ({"num_blocks": 2, "max_model_len": 17}, "max_model_len: expected an int in [2, 16], got 17"),
    ],
)
def test_what_does_not_fit(options: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        deployment(**({"num_blocks": UNBOUNDED} | options))
    assert str(raised.value).startswith(message)


def test_a_higher_rate_has_the_same_requests_sooner() -> None:
    slow = poisson_trace(WorkloadPairs("sharegpt"), 2, 100, 2048, seed=3)
    fast = poisson_trace(WorkloadPairs("sharegpt"), 4, 50, 2048, seed=3)
    assert len(slow) == len(fast) == pytest.approx(200, rel=0.25)
    for one, other in zip(slow, fast, strict=True):
        assert one.arrival == pytest.approx(2 * other.arrival)
        assert one.num_prompt_tokens == other.num_prompt_tokens and one.num_output_tokens == other.num_output_tokens


def test_prompts_share_the_prefix_alone() -> None:
    first, second = requests_of(trace((3, 1), (2, 1)), RequestForm(num_shared_tokens=4))
    assert first.prompt_token_ids[:4] == second.prompt_token_ids[:4]
    assert not set(first.prompt_token_ids[4:]) & set(second.prompt_token_ids[4:])
    assert (len(first.prompt_token_ids), len(second.prompt_token_ids)) == (7, 6)


def test_pairs_of_a_file_that_are_too_long_are_left_out() -> None:
    trace = poisson_trace(GivenPairs([(3, 5), (30, 50), (7, 9)]), 10, 10, 20, seed=0)
    assert {(each.num_prompt_tokens, each.num_output_tokens) for each in trace} == {(3, 5), (7, 9)}
    with pytest.raises(ArgumentError, match="lengths: expected a pair of at most 7 tokens, got longer pairs alone"):
        poisson_trace(GivenPairs([(3, 5)]), 10, 10, 7, seed=0)


def test_percentiles_count_each_value() -> None:
    assert distribution({}) is None
    assert distribution({1.0: 89, 2.0: 10, 3.0: 1}) == Distribution(pytest.approx(1.12), 1.0, 2.0, 2.0)
    assert distribution({1.0: 1, 5.0: 1}) == Distribution(3.0, 1.0, 5.0, 5.0)


@pytest.mark.parametrize("limit", [0.3, 3.0, 37.0, 1000.0])
def test_the_highest_rate_is_found(limit: float) -> None:
    """Of a system whose latency in seconds is its rate. Found within 1.2%, and within the limits."""
    base = deployment().run("paged", trace((3, 3)), routing)
    rates = []

    def run(rate: float) -> Summary:
        rates.append(rate)
        return replace(base, normalized_latency=Distribution(rate, rate, rate, rate))

    found = sustainable_rate(run, limit, 0.1, 100.0)
    assert found is not None and found[1].normalized_latency is not None
    assert found[0] == found[1].normalized_latency.mean
    assert min(limit, 100) / 1.012 <= found[0] <= min(limit, 100)
    assert len(rates) < 20 and max(rates) <= 100
    assert sustainable_rate(run, 0.05, 0.1, 100.0) is None
