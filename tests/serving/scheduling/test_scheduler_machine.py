"""Random load on tiny caches: groups, beams, swaps, prefix hits, pins, priorities, drafts, aborts and interrupts at any
moment.

FakeEngine checks each step. A small vocabulary and few beginnings of prompts make equal tokens, and so hits, frequent.
"""

from collections import Counter
from random import Random
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedattn_serve.config import CacheConfig, SchedulerConfig

BLOCK_SIZE = 8
VOCAB_SIZE = 3


class RandomLoad:
    """What a run consists of; every choice is an argument."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_host_blocks: int,
        policy: str,
        preemption_mode: str,
        speculation: str | None,
        enable_prefix_caching: bool,
        watermark: float,
        stop_rate: float,
        seed: int,
    ) -> None:
        scheduler_config = SchedulerConfig(
            max_model_len=BLOCK_SIZE * num_blocks - 3,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            preemption_mode=preemption_mode,
            speculation=speculation,
        )
        cache_config = CacheConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            watermark=watermark,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.engine = FakeEngine(scheduler_config, cache_config, vocab_size=VOCAB_SIZE, stop_rate=stop_rate, seed=seed)
        self._beginnings = [self.engine.new_tokens(scheduler_config.max_model_len - 1) for _ in range(2)]

    def prompt(self, beginning: int, num_shared: int, num_own: int) -> list[int]:
        max_len = self.engine.scheduler.config.max_model_len - 1
        return (self._beginnings[beginning][:num_shared] + self.engine.new_tokens(num_own))[:max_len]

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        use_beam_search: bool,
        prompt_logprobs: int | None,
        priority: int,
        cache_salt: str,
    ) -> None:
        """Refused if it is too wide for this scheduler, with nothing changed."""
        scheduler = self.engine.scheduler
        config = scheduler.config
        options = {
            "use_beam_search": use_beam_search and n > 1,
            "prompt_logprobs": prompt_logprobs,
            "priority": priority if config.policy == "priority" else 0,
            "cache_salt": cache_salt,
        }
        num_shared = (len(prompt) - 1) // BLOCK_SIZE
        limit = min(config.max_num_seqs, config.max_num_batched_tokens, scheduler.block_manager.num_blocks - num_shared)
        if n > limit:
            with pytest.raises(ValueError, match=r"^n: expected at most"):
                self.engine.add(prompt, max_tokens, n, **options)
        else:
            self.engine.add(prompt, max_tokens, n, **options)

    def abort(self, index: int) -> None:
        for group in self.engine.unfinished[index : index + 1]:
            assert self.engine.scheduler.abort(group.request_id) is group
            assert not group.sequences

    def pin(self, beginning: int, num_tokens: int) -> None:
        manager, config = self.engine.manager, self.engine.scheduler.config
        tokens = self._beginnings[beginning][:num_tokens]
        before = manager._allocator.pinned
        try:
            assert self.engine.scheduler.pin_prefix(tokens) == len(tokens) // BLOCK_SIZE * BLOCK_SIZE
            self.engine.num_times["pinned"] += 1
        except ValueError:
            assert manager._allocator.pinned == before
        assert len(manager._allocator.pinned) + -(-config.max_model_len // BLOCK_SIZE) <= manager.num_blocks


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses, and shrinks what fails."""

    @initialize(
        num_blocks=st.integers(1, 10),
        max_num_seqs=st.integers(1, 8),
        max_num_batched_tokens=st.integers(1, 40),
        num_host_blocks=st.sampled_from([0, 3, 8, 20]),
        policy=st.sampled_from(["fcfs", "priority"]),
        preemption_mode=st.sampled_from(["auto", "recompute", "swap"]),
        speculation=st.sampled_from([None, "ngram"]),
        enable_prefix_caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        stop_rate=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 9999),
    )
    def start(self, **choices: Any) -> None:
        self.load = RandomLoad(**choices)

    @rule(
        beginning=st.integers(0, 1),
        num_shared=st.integers(1, 40),
        num_own=st.integers(0, 20),
        max_tokens=st.integers(1, 40),
        n=st.sampled_from([1, 1, 2, 3, 4, 6]),
        use_beam_search=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from(["", "", "a", "b"]),
    )
    def add(self, beginning: int, num_shared: int, num_own: int, **others: Any) -> None:
        self.load.add(self.load.prompt(beginning, num_shared, num_own), **others)

    @rule(num_steps=st.integers(1, 10))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.load.engine.step()

    @rule(index=st.integers(0, 9))
    def abort(self, index: int) -> None:
        self.load.abort(index)

    @rule(beginning=st.integers(0, 1), num_tokens=st.integers(0, 40))
    def pin(self, beginning: int, num_tokens: int) -> None:
        self.load.pin(beginning, num_tokens)

    @rule(num_lines=st.integers(0, 1000))
    def interrupt(self, num_lines: int) -> None:
        self.load.engine.interrupt(num_lines)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "load"):
            self.load.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "load"):
            self.load.engine.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(settings.default, stateful_step_count=30)


def run_at_random(seed: int, num_actions: int) -> Counter[str]:
    """The same by plain random numbers, many times as fast. Returns how often what happened."""
    random = Random(seed)
    load = RandomLoad(
        num_blocks=random.randint(1, 20),
        max_num_seqs=random.randint(1, 12),
        max_num_batched_tokens=random.choice([random.randint(1, 10), random.randint(1, 100)]),
        num_host_blocks=random.choice([0, 3, 8, 30]),
        policy=random.choice(["fcfs", "priority"]),
        preemption_mode=random.choice(["auto", "recompute", "swap"]),
        speculation=random.choice([None, "ngram"]),
        enable_prefix_caching=random.random() < 0.7,
        watermark=random.choice([0.0, 0.01, 0.3]),
        stop_rate=random.choice([0.0, 0.05]),
        seed=seed,
    )
    for _ in range(num_actions):
        [action] = random.choices(["step", "add", "abort", "pin", "interrupt"], [80, 15, 3, 1, 1])
        match action:
            case "step":
                load.engine.step()
            case "add" if len(load.engine.unfinished) < 12:
                num_own = random.choice([0, 0, 1, random.randint(1, 20)])
                prompt = load.prompt(random.randint(0, 1), random.randint(1, 30), num_own)
                n = random.choice([1, random.choice([1, 2, 3, 4, 6])])
                load.add(
                    prompt,
                    random.randint(1, 60),
                    n,
                    random.random() < 0.4,
                    random.choice([None] * 5 + [0]),
                    random.randint(-1, 1),
                    random.choice(["", "", "a", "b"]),
                )
            case "abort":
                load.abort(random.randint(0, 9))
            case "pin":
                load.pin(random.randint(0, 1), random.randint(0, 60))
            case "interrupt":
                load.engine.interrupt(random.choice([random.randint(0, 100), 1000]))
        if action != "step":  # which checks for itself
            load.engine.check()
    load.engine.drain()
    return load.engine.num_times


def test_random_load_meets_everything() -> None:
    num_times: Counter[str] = Counter()
    for seed in range(30):
        num_times += run_at_random(seed, num_actions=150)
    for what in (
        "forked",
        "forked and dropped",
        "copied on write",
        "merged",
        "recomputed",
        "preempted, several sequences",
        "swapped out",
        "swapped in",
        "outgrown",
        "pinned",
        "interrupted",
        "accepted",
        "rejected",
        "prompt logprobs",
    ):
        assert num_times[what] > 0, what
