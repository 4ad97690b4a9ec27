"""Where the router sends requests."""

from random import Random
from typing import Any

import pytest
from chat_simulation import simulate

from pagedattn_serve.async_engine.router import COMPUTE_WEIGHT, PIECE_TOKENS, RUNNING_TOKENS, Router, split

LONG = [*range(10 * PIECE_TOKENS)]
CACHE = 100 * PIECE_TOKENS  # tokens


def router_of(num_replicas: int, num_cache_tokens: int = CACHE) -> Router:
    router = Router(Random(0))
    for replica in range(num_replicas):
        router.start(replica, num_cache_tokens)
    return router


def run(router: Router, key: int, prompt: Any, cache_salt: str = "") -> int:
    """The replica of a request that is over at once."""
    replica = router.add(key, prompt, cache_salt)
    router.end(key)
    return replica


@pytest.mark.parametrize("prompt", [LONG, {"prompt_token_ids": LONG}, "a text " * 400, {"prompt": "a text " * 400}])
def test_the_turns_of_a_session_stay_together(prompt: Any) -> None:
    router = router_of(8)
    first = run(router, 0, prompt)
    more = {"prompt_token_ids": [*LONG, 7]} if prompt == {"prompt_token_ids": LONG} else prompt
    assert [run(router, key, more) for key in range(1, 9)] == [first] * 8


def test_a_replica_that_is_busy_is_passed_by() -> None:
    """Once it has more to do than the others would have to compute again."""
    router = router_of(2)
    home = run(router, 0, LONG)
    other = 1 - home
    router._replicas[home].load = COMPUTE_WEIGHT * len(LONG) - 1
    assert run(router, 1, LONG) == home
    router._replicas[home].load = COMPUTE_WEIGHT * len(LONG) + 1
    assert run(router, 2, LONG) == other


def test_what_waits_and_what_runs_is_counted() -> None:
    router = router_of(1)
    router.add(0, LONG, "")
    load = lambda: router._replicas[0].load  # noqa: E731
    assert load() == len(LONG) + RUNNING_TOKENS
    router.add(1, [*LONG, 1, 2, 3], "")  # its beginning is on the way
    assert load() == len(LONG) + 3 + 2 * RUNNING_TOKENS
    router.begin(0)
    router.begin(0)
    assert load() == 3 + 2 * RUNNING_TOKENS
    router.end(1)
    assert load() == RUNNING_TOKENS
    router.end(0)
    router.end(0)
    router.begin(0)
    assert load() == 0 and router.keys_of(0) == []


def test_new_prompts_are_spread() -> None:
    """Evenly where requests are alike, because the one with less to do is taken of two."""
    router = router_of(4)
    counts = [0] * 4
    for key in range(400):
        counts[router.add(key, [key] * 100, "")] += 1
    assert all(95 < count < 105 for count in counts)
    idle = router_of(4)
    counts = [0] * 4
    for key in range(400):
        counts[run(idle, key, [key] * 100)] += 1
    assert all(60 < count < 140 for count in counts)


def test_prompts_of_another_salt_are_not_alike() -> None:
    assert split(LONG, "a").hashes != split(LONG, "b").hashes
    assert set(split(LONG, "a").hashes).isdisjoint(split(LONG, "b").hashes)
    assert split(LONG, "a") == split(tuple(LONG), "a")
    in_prompt = {"prompt_token_ids": LONG, "cache_salt": "a"}  # which an argument goes before, as in the engine
    assert (split(in_prompt, ""), split(in_prompt, "b")) == (split(LONG, "a"), split(LONG, "b"))


def test_pieces_are_known_with_all_before_them() -> None:
    other = [0, *LONG[1:]]
    changed = [1, *LONG[1:]]
    assert split(other, "").hashes == split(LONG, "").hashes
    assert set(split(changed, "").hashes).isdisjoint(split(LONG, "").hashes)
    assert split(LONG[: PIECE_TOKENS * 3 + 1], "").hashes == split(LONG, "").hashes[:3]


def test_the_memory_of_what_is_cached_is_that_of_the_cache() -> None:
    """What was used last is kept, and the beginning of a prompt is kept longer than its end."""
    router = router_of(1, num_cache_tokens=15 * PIECE_TOKENS)
    run(router, 0, LONG)
    run(router, 1, [-1] * PIECE_TOKENS * 10)
    replica = router._replicas[0]
    assert len(replica.pieces) == 15
    assert replica.num_cached_tokens(split(LONG, "")) == 5 * PIECE_TOKENS
    run(router, 2, LONG)
    assert replica.num_cached_tokens(split(LONG, "")) == 10 * PIECE_TOKENS


def test_a_replica_that_is_new_has_cached_nothing() -> None:
    router = router_of(2)
    home = run(router, 0, LONG)
    router.add(1, LONG, "")
    router.forget(home)
    assert router.keys_of(home) == [] and {run(router, key, [5]) for key in range(2, 9)} == {1 - home}
    router.end(1)  # as its reader leaves
    router.start(home, CACHE)
    assert router._replicas[home].load == 0 and router._replicas[home].num_cached_tokens(split(LONG, "")) == 0


@pytest.mark.parametrize("prompt", [None, 3, {}, [], "", [[1] * 100] * 100, {"text": "x"}, {"prompt": 3}])
def test_a_prompt_that_is_none_is_for_the_engine_to_refuse(prompt: Any) -> None:
    assert run(router_of(2), 0, prompt) in (0, 1)
    assert run(router_of(2), 0, LONG, cache_salt=[prompt]) in (0, 1)  # type: ignore[arg-type]


def test_the_caches_of_a_chat_workload_work_as_one() -> None:
    """150 conversations with six system prompts, on four replicas, whose caches are too small for all of them."""
    results = simulate()
    one, routed, by_chance = (results[name] for name in ("one as large as four", "by prefix", "by chance"))
    assert routed.hit_share > 0.95 * one.hit_share
    assert by_chance.hit_share < 0.75 * one.hit_share
    assert sum(routed.waits) < 0.25 * sum(by_chance.waits)
