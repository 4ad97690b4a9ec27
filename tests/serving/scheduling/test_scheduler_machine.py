"""Random load on an engine with a tiny cache: groups, beams, swaps, prefix hits, pins, priorities, drafts, aborts,
steps that fail, and interrupts at any moment. With and without states beside the blocks, and a store of blocks.

FakeEngine checks each step of the real engine, and in the end that every request got what it gets alone. A small
vocabulary and few beginnings of prompts make equal tokens, and so hits, frequent.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from fake_cache import FakeStore
from fake_engine import FakeEngine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.scheduling import state_slots
from pagedattn_serve.scheduling.held_blocks import max_num_tokens, num_behind

BLOCK_SIZE = 8
VOCAB_SIZE = 3
WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (1,), (20,), (5, None), (None, 20, 5), (9, 9, 30)]


@pytest.fixture(autouse=True, scope="module")
def near_checkpoints() -> Iterator[None]:
    """Of states: the prompts are shorter than CHECKPOINT_TOKENS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_slots, "CHECKPOINT_TOKENS", 2 * BLOCK_SIZE)
        yield


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
        keeps_states: bool,
        has_store: bool,
        watermark: float,
        windows: tuple[int | None, ...],
        stop_rate: float,
        error_rate: float,
        seed: int,
    ) -> None:
        num_blocks *= len(windows)
        scheduler_config = SchedulerConfig(
            max_model_len=2,
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
            num_state_slots=(max_num_seqs + seed % 5) * keeps_states,
            num_host_state_slots=num_host_blocks // 4 * keeps_states,
            windows=windows,
        )
        # Groups of layers with windows leave others more blocks than they would have if all were alike.
        num_tokens = BLOCK_SIZE * num_blocks // min(len(windows), 2)
        num_tokens = min(max_num_tokens(cache_config, max_num_batched_tokens), num_tokens) - 3
        scheduler_config = replace(scheduler_config, max_model_len=num_tokens)
        self.engine = FakeEngine(
            scheduler_config,
            cache_config,
            vocab_size=VOCAB_SIZE,
            stop_rate=stop_rate,
            error_rate=error_rate,
            seed=seed,
            store=FakeStore() if has_store and not keeps_states else None,
        )
        # A batch takes so long, and not what the clock says: a run is to be the same again.
        mark_computed, token_seconds = self.engine.scheduler.mark_computed, (0.0, 0.1, 1.0)[seed % 3]
        self.engine.scheduler.mark_computed = lambda batch, _: mark_computed(
            batch, 1 + token_seconds * batch.num_tokens
        )
        self._beginnings = [self.engine.new_tokens(scheduler_config.max_model_len - 1) for _ in range(2)]

    def prompt(self, beginning: int, num_shared: int, num_own: int) -> list[int]:
        max_len = self.engine.scheduler.config.max_model_len - 1
        return (self._beginnings[beginning][:num_shared] + self.engine.new_tokens(num_own))[:max_len]

    def add(self, prompt: list[int], max_tokens: int, n: int, num_lines: int | None = None, **options: Any) -> None:
        """Refused if it is too wide for this scheduler, with nothing changed."""
        scheduler = self.engine.scheduler
        config = scheduler.config
        options["use_beam_search"] &= n > 1
        options["min_tokens"] = min(options["min_tokens"], max_tokens)
        if options["use_beam_search"]:
            options["seed"] = None
        if config.policy != "priority":
            options["priority"] = 0
        manager, num_tokens = scheduler.block_manager, len(prompt) - 1
        num_shared = [
            num_tokens // BLOCK_SIZE - num_behind(window, num_tokens, BLOCK_SIZE) for window in manager.windows
        ]
        num_left = (manager.num_blocks - sum(num_shared)) // len(num_shared)
        limit = min(config.max_num_seqs, config.max_num_batched_tokens, num_left)
        if n > limit:
            with pytest.raises(ValueError, match=r"^n: expected at most"):
                self.engine.add(prompt, max_tokens, n, **options)
        else:
            self.engine.add(prompt, max_tokens, n, num_lines=num_lines, **options)

    def step(self, num_lines: int | None = None, fail_at: int | None = None) -> None:
        self.engine.step(num_lines, fail_at)

    def fail_batch(self) -> None:
        batch = self.engine.engine._batch
        unfinished = self.engine.unfinished
        self.engine.fail_batch()
        blamed = set() if batch is None else {scheduled.sequence.request_id for scheduled in batch.sequences}
        blamed |= set() if batch is None else {group.request_id for group in batch.outgrown}
        assert self.engine.unfinished == [group for group in unfinished if group.request_id not in blamed]

    def abort(self, index: int, num_lines: int | None = None) -> None:
        for group in self.engine.unfinished[index : index + 1]:
            self.engine.abort(group.request_id, num_lines)
            assert num_lines is not None or not group.sequences

    def pin(self, beginning: int, num_tokens: int) -> None:
        manager = self.engine.manager
        tokens = self._beginnings[beginning][:num_tokens]
        before = manager._allocator.pinned
        try:
            assert self.engine.engine.register_prefix(tokens) == len(tokens) // BLOCK_SIZE * BLOCK_SIZE
            self.engine.num_times["pinned"] += 1
        except ValueError:
            assert manager._allocator.pinned == before
        assert len(manager._allocator.pinned) + self.engine.scheduler._num_held_at_end <= manager.num_blocks


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
        keeps_states=st.booleans(),
        has_store=st.booleans(),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        windows=st.sampled_from(WINDOWS),
        stop_rate=st.sampled_from([0.0, 0.05]),
        error_rate=st.sampled_from([0.0, 0.02]),
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
        seed=st.sampled_from([None, 1]),
        min_tokens=st.sampled_from([0, 0, 5]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([[], [], [], [2]]),
        logprobs=st.sampled_from([None, 0]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from(["", "", "a", "b"]),
    )
    def add(self, beginning: int, num_shared: int, num_own: int, **others: Any) -> None:
        self.load.add(self.load.prompt(beginning, num_shared, num_own), **others)

    @rule(num_steps=st.integers(1, 10))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.load.step()

    @rule(fail_at=st.integers(0, 9))
    def fail(self, fail_at: int) -> None:
        """The next step runs the batch again, if nothing comes in between."""
        self.load.step(fail_at=fail_at)

    @rule()
    def fail_batch(self) -> None:
        self.load.fail_batch()

    @rule(index=st.integers(0, 9), num_lines=st.none() | st.integers(0, 50))
    def abort(self, index: int, num_lines: int | None) -> None:
        self.load.abort(index, num_lines)

    @rule(beginning=st.integers(0, 1), num_tokens=st.integers(0, 40))
    def pin(self, beginning: int, num_tokens: int) -> None:
        self.load.pin(beginning, num_tokens)

    @rule(num_lines=st.integers(0, 1000))
    def interrupt(self, num_lines: int) -> None:
        self.load.step(num_lines)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "load"):
            self.load.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "load"):
            self.load.engine.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=max(100, settings.default.max_examples), stateful_step_count=30)


def run_at_random(seed: int, num_actions: int) -> Counter[str]:
    """The same by plain random numbers, many times as fast. Returns how often what happened."""
    random = Random(seed)
    load = RandomLoad(
        num_blocks=random.randint(1, 20),
        max_num_seqs=random.randint(2, 12),
        max_num_batched_tokens=random.choice([random.randint(1, 12), random.randint(12, 100)]),
        num_host_blocks=random.choice([0, 8, 30, 30]),
        policy=random.choice(["fcfs", "priority"]),
        preemption_mode=random.choice(["auto", "recompute", "swap", "swap"]),
        speculation=random.choice([None, "ngram"]),
        enable_prefix_caching=random.random() < 0.7,
        keeps_states=seed % 4 == 3,
        has_store=seed % 2 == 0,
        watermark=random.choice([0.0, 0.01, 0.3]),
        windows=WINDOWS[(seed + 2) % len(WINDOWS)],
        stop_rate=random.choice([0.0, 0.05]),
        error_rate=random.choice([0.0, 0.0, 0.02]),
        seed=seed,
    )
    trouble = random.choice([0, 1, 10])
    actions = {"step": 80, "add": 15, "abort": 3, "pin": 1, "interrupt": trouble, "fail": trouble}
    after_failure = {"step": 3, "add": 1, "abort": 2, "pin": 1, "interrupt": 1, "fail": 1, "fail_batch": 2}
    for _ in range(num_actions):
        chances = actions if load.engine.engine._batch is None else after_failure
        [action] = random.choices(list(chances), list(chances.values()))
        num_lines = random.choice([None, None, random.randint(0, 50)])
        match action:
            case "step":
                load.step()
            case "add" if len(load.engine.unfinished) < 12:
                num_own = random.choice([0, 0, 1, random.randint(1, 20)])
                load.add(
                    load.prompt(random.randint(0, 1), random.randint(1, 30), num_own),
                    random.randint(1, 60),
                    random.choice([1, random.choice([1, 2, 3, 4, 6])]),
                    num_lines if random.random() < 0.2 else None,
                    use_beam_search=random.random() < 0.4,
                    seed=random.choice([None, 1]),
                    min_tokens=random.choice([0, 0, 5]),
                    ignore_eos=random.random() < 0.2,
                    stop_token_ids=random.choice([[]] * 6 + [[2]]),
                    logprobs=random.choice([None, 0]),
                    prompt_logprobs=random.choice([None] * 5 + [0]),
                    priority=random.randint(-1, 1),
                    cache_salt=random.choice(["", "", "a", "b"]),
                )
            case "abort":
                load.abort(random.randint(0, 4), num_lines)
            case "pin":
                load.pin(random.randint(0, 1), random.randint(0, 60))
            case "interrupt":
                load.step(int(10 ** random.uniform(0, 3.3)))
            case "fail":
                load.step(fail_at=random.randint(0, 5))
            case "fail_batch":
                load.fail_batch()
        if action in ("add", "pin"):  # the others check for themselves
            load.engine.check()
    load.engine.drain()
    stats = load.engine.engine.stats()
    load.engine.num_times.update(stored=stats.num_written_blocks, restored=stats.num_read_blocks)
    return load.engine.num_times


def test_random_load_meets_everything() -> None:
    num_times: Counter[str] = Counter()
    for seed in range(10, 40):
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
        "failed",
        "came again",
        "aborted amid a step",
        "accepted",
        "rejected",
        "prompt logprobs",
        "plain decodes that go on",
        "ended by stop",
        "ended by length",
        "ended by error",
        "beams as alone",
        "measured without a long prompt",
        "passed a long prompt",
        "states to_swap_out",
        "states to_swap_in",
        "states to_copy",
        "states kept",
        "states found",
        "gave blocks back",
        "held by one group only",
        "stored",
        "restored",
    ):
        assert num_times[what] > 0, what
