"""The real engine over a fake runner: every step, call, interrupt and failure goes through `LLMEngine`, and what holds
for each batch and at each moment (engine_invariants.py) is checked where the runner is given the batch, and after each
call.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from engine_invariants import Invariants
from expected_outputs import expected_outputs, expected_prompt_logprobs
from fake_cache import FakeStore
from fake_runner import ROW_ERROR, FakeModel, FakeRunner

import pagedattn_serve
from pagedattn_serve.config import DEFAULT_WATERMARK, CacheConfig, SchedulerConfig
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.generation_config import GenerationDefaults
from pagedattn_serve.pooling_params import Pooling
from pagedattn_serve.requests.inputs import InputProcessor, RequestArgs
from pagedattn_serve.requests.request import Request
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.block_manager import Tables
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import ScheduledBatch, Sequence, SequenceGroup, SequenceStatus

PACKAGE = os.path.dirname(pagedattn_serve.__file__)
# Where an interrupt may come: in all that the engine consists of above the runner.
TRACED = tuple(os.path.join(PACKAGE, name) for name in ("engine.py", "requests/", "scheduling/"))


class EngineWithoutModel(LLMEngine):
    """The engine itself, of parts that are made already. on_restart: is called when the engine makes all anew."""

    system_fingerprint = "fp_none"

    def __init__(
        self,
        model_runner: Any,
        scheduler: Scheduler,
        inputs: InputProcessor,
        on_restart: Callable[[], None],
        store: Any = None,
    ) -> None:
        self._on_restart = on_restart
        self._join(model_runner, model_runner, scheduler, inputs, store)

    def _restart(self, requests: dict[str, Request]) -> None:
        super()._restart(requests)
        self._on_restart()


class FakeEngine:
    """An `LLMEngine` with a runner that keeps hashes, and the checks.

    vocab_size, stop_rate, error_rate: as in `FakeModel`.
    store: blocks beside the cache.
    num_times: how often things happened that a random run should meet.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        vocab_size: int | None = None,
        stop_rate: float = 0.0,
        error_rate: float = 0.0,
        seed: int = 0,
        store: FakeStore | None = None,
    ) -> None:
        self.model = FakeModel(vocab_size, stop_rate, error_rate, seed)
        self.scheduler = Scheduler(scheduler_config, cache_config)
        self.manager = self.scheduler.block_manager
        self.runner = FakeRunner(self.model, scheduler_config, cache_config, self.manager, self._take_batch)
        end_token_id = self.model.eos_token_id
        defaults = GenerationDefaults(SamplingParams())
        max_model_len = scheduler_config.max_model_len
        inputs = InputProcessor(
            None, end_token_id + 1, max_model_len, frozenset({end_token_id}), defaults, Pooling(), 0
        )
        self.engine = EngineWithoutModel(self.runner, self.scheduler, inputs, self._begin_anew, store)
        self.cache = self.runner.cache
        self.groups: list[SequenceGroup] = []  # all that were ever added, in the order of their arrival
        self.requests: list[Request] = []  # the same
        self.num_times: Counter[str] = Counter()
        self.invariants = Invariants(self.engine, self.runner, self.groups, self.num_times)
        self._params: dict[SequenceGroup, SamplingParams] = {}
        self._salts: dict[SequenceGroup, str] = {}
        self._interrupted: set[str] = set()  # requests that ended with an interrupt: nobody gets what they had
        self._ran_before: set[SequenceGroup] = set()
        self._taken: ScheduledBatch | None = None  # what the runner was given last
        self._batch = ScheduledBatch()  # the same as it was then, copies and all
        self._tables: dict[Sequence, Tables] = {}  # as they were then

    @property
    def unfinished(self) -> list[SequenceGroup]:
        return [group for group in self.groups if group.sequences and group.request_id in self.engine._requests.by_id]

    def new_tokens(self, num_tokens: int) -> list[int]:
        return [self.model.new_token() for _ in range(num_tokens)]

    def add(
        self,
        prompt: int | list[int],
        max_tokens: int = 1000,
        n: int = 1,
        *,
        priority: int = 0,
        cache_salt: str = "",
        num_lines: int | None = None,
        **params: Any,
    ) -> SequenceGroup:
        """A request of a prompt, or of one of so many tokens. num_lines: until an interrupt."""
        token_ids = self.new_tokens(prompt) if isinstance(prompt, int) else prompt
        params.setdefault("temperature", 0.0 if params.get("use_beam_search") else 1.0)
        sampling = SamplingParams(max_tokens=max_tokens, n=n, **params)
        arrival = len(self.groups)
        request = self.engine.make_request(
            RequestArgs(f"request {arrival}", None, sampling, token_ids, float(arrival), priority, cache_salt)
        )
        self._call(lambda: self.engine.queue_request(request), num_lines)
        if request.group.request_id in self.engine._requests.by_id:
            self.groups.append(request.group)
            self.requests.append(request)
            self._params[request.group] = sampling
            self._salts[request.group] = cache_salt
        return request.group

    def step(self, num_lines: int | None = None, fail_at: int | None = None) -> ScheduledBatch:
        """Run a step; returns its batch. num_lines: until an interrupt. fail_at: the place where the runner fails."""
        if self.engine._batch is None:
            self._ran_before = set(self.scheduler.running)
            self._batch = ScheduledBatch()
        self.runner.fail_at = fail_at
        try:
            self._call(self.engine.step, num_lines)
        except RuntimeError:
            if fail_at is None:
                raise
            self.num_times["failed"] += 1
        self.runner.fail_at = None
        if self.engine._batch is None:
            self._count_what_happened()
        self.check()
        return self._batch

    def schedule(self) -> ScheduledBatch:
        """The beginning of a step: the rest is left to the test."""
        self._ran_before = set(self.scheduler.running)
        return self.scheduler.schedule()

    def schedule_and_run(self) -> ScheduledBatch:
        """The first half of a step: what is sampled is left to the test."""
        batch = self.schedule()
        self.runner.execute(batch)
        self.scheduler.mark_computed(batch)
        return self._batch

    def fail_batch(self) -> None:
        """What a server does after a step that failed."""
        self.engine.fail_batch("as it happens")
        self.check()

    def abort(self, request_id: str, num_lines: int | None = None) -> None:
        batch = self.engine._batch
        if batch is not None and any(each.sequence.request_id == request_id for each in batch.sequences):
            self.num_times["aborted amid a step"] += 1
        self._call(lambda: self.engine.abort_request(request_id), num_lines)
        self.check()

    def interrupt(self) -> None:
        """A step that ends amid scheduling. After it the engine begins anew."""
        self.step(num_lines=10)

    def restart(self, groups: list[SequenceGroup]) -> None:
        self.scheduler.restart(groups)
        self._begin_anew()

    def drain(self) -> None:
        """Step until all is finished.

        In each step the first group computes a token, or another group decodes while the first is in prefill. Neither
        the first group's prefill nor any decoded token is ever lost, which bounds the number of steps.
        """
        num_tokens = sum(group.rules.num_sequences for group in self.unfinished)
        bound = 2 * num_tokens * self.scheduler.config.max_model_len + len(self.unfinished)
        for _ in range(bound):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        assert not self.engine.has_unfinished_requests()
        assert (self.manager.num_used_blocks, self.manager.num_used_host_blocks) == (0, 0)
        assert self.manager.states.num_used_slots == 0
        assert self.manager.num_free_blocks + self.num_pinned_blocks() == self.manager.num_blocks
        batch = self.scheduler.schedule()
        batch.table_writes.clear()  # of sequences that have ended since, and of blocks merged in their last step
        assert batch == ScheduledBatch()
        if self.model.vocab_size is not None:
            self.check_outputs()
        self.num_times["accepted"] = self.scheduler.num_accepted_tokens
        self.num_times["rejected"] = self.scheduler.num_proposed_tokens - self.scheduler.num_accepted_tokens

    def num_pinned_blocks(self) -> int:
        """Blocks that nobody owns and that are kept all the same."""
        allocator = self.manager._allocator
        unowned = [block for block in allocator.published if allocator.ref_count(block) == 0]
        return sum(allocator.key_of(block) in allocator.pinned for block in unowned)

    def values(self, sequence: Sequence) -> list[int]:
        return self.runner.values(sequence)

    def _call(self, function: Callable[[], Any], num_lines: int | None) -> None:
        """Call the function; or, with num_lines, only a part of it until an interrupt, which ends all requests."""
        if num_lines is None:
            function()
            return
        unfinished = set(self.engine._requests.by_id)
        try:
            with interrupted_after(num_lines):
                function()
        except KeyboardInterrupt:
            self.num_times["interrupted"] += 1
            self._interrupted |= unfinished
            if self.engine.has_unfinished_requests():  # the interrupt came before the call began
                self._interrupted -= set(self.engine._requests.by_id)
                assert self.engine._requests.by_id.keys() == unfinished

    def _take_batch(self, batch: ScheduledBatch) -> None:
        """Called before the runner does anything to a batch. A batch may come again after the runner failed."""
        if batch is self._taken and self.engine._batch is batch:
            self.num_times["came again"] += 1
            return
        self._taken = batch
        copies = (batch.blocks_to_swap_out, batch.blocks_to_swap_in, batch.blocks_to_copy)
        self._batch = ScheduledBatch(batch.sequences, *map(list, copies), batch.preempted, batch.outgrown)
        plain = [scheduled.sequence for scheduled in batch.sequences[: batch.num_plain]]
        self.num_times["plain decodes that go on"] += sum(sequence in self._tables for sequence in plain)
        self._tables = {each.sequence: list(map(list, self.manager.tables[each.sequence])) for each in batch.sequences}
        for name in ("to_swap_out", "to_swap_in", "to_copy"):
            self.num_times[f"states {name}"] += bool(getattr(batch.state_copies, name))
        self.num_times["states kept"] += len(batch.state_checkpoints)
        let_in = [group for group in self.scheduler.running if group not in self._ran_before]
        for group in let_in:
            begins = group.sequences[0].num_computed_tokens > 0
            self.num_times["states found"] += begins and bool(self.cache.states) and not batch.state_copies.to_swap_in
        self.invariants.check_batch(batch, let_in)

    def _begin_anew(self) -> None:
        self._ran_before = set()
        self.invariants.begin_anew()

    def _count_what_happened(self) -> None:
        for scheduled in self._batch.sequences:
            before, now = self._tables[scheduled.sequence], self.manager.tables.get(scheduled.sequence, [])
            self.num_times["merged"] += any(
                block != other
                for table, later in zip(before, now, strict=False)
                for block, other in zip(table, later, strict=False)
            )
            self.num_times["prompt logprobs"] += scheduled.sequence.sampling.sampling_params.prompt_logprobs is not None
        ran = [scheduled.sequence for scheduled in self._batch.sequences]
        for group in self.scheduler.running:
            if len(group.sequences) > 1 and not group.in_prefill:
                before = {each for each in ran if each.request_id == group.request_id}
                forked = bool(before) and not before.issuperset(group.sequences)
                self.num_times["forked"] += forked
                self.num_times["forked and dropped"] += forked and not before.issubset(group.sequences)

    def check(self) -> None:
        """All that holds at each moment."""
        self.invariants.check(self.unfinished)

    def check_outputs(self) -> None:
        """All requests got what they get alone, whoever ran beside them and whatever came in between. Requests that
        were ended from outside got the beginning of it."""
        for request in self.requests:
            group = request.group
            if group.request_id in self._interrupted:
                continue
            params, prompt, salt = self._params[group], group.prompt_token_ids, self._salts[group]
            statuses = {completion.sequence.status for completion in request.completions}
            assert all(status.is_finished for status in statuses)
            is_whole = request.error in (None, ROW_ERROR) and SequenceStatus.FINISHED_ABORTED not in statuses
            if is_whole and request.error is None and params.prompt_logprobs is not None:
                assert request.output().prompt_logprobs == expected_prompt_logprobs(prompt, salt)
            outputs = [(each.sequence.output_token_ids, each.sequence.status) for each in request.completions]
            if params.use_beam_search:
                assert not is_whole or outputs == self._alone(group)
                self.num_times["beams as alone"] += is_whole
                continue
            expected = expected_outputs(self.model, prompt, salt, params, self.scheduler.config.max_model_len)
            if is_whole:
                assert outputs == expected
                self.num_times.update(f"ended by {status.value}" for _, status in outputs)
            else:
                for (token_ids, _), (all_token_ids, _) in zip(outputs, expected, strict=False):
                    assert token_ids == all_token_ids[: len(token_ids)]
            for each in request.completions if params.logprobs is not None else ():
                reported = [token for entries in each.logprobs for token in entries]
                assert reported == each.sequence.output_token_ids

    def _alone(self, group: SequenceGroup) -> list[tuple[list[int], SequenceStatus]]:
        """What a request gets from an engine with room for all of it and nobody beside it."""
        width, max_model_len = self._params[group].num_sequences, self.scheduler.config.max_model_len
        num_blocks = (width + 1) * -(-max_model_len // self.manager.block_size)
        alone = FakeEngine(
            SchedulerConfig(max_model_len=max_model_len, max_num_seqs=width),
            CacheConfig(num_blocks=num_blocks, block_size=self.manager.block_size, watermark=0.0),
        )
        alone.model = alone.runner.model = self.model
        alone.engine.inputs = self.engine.inputs
        params, salt = self._params[group], self._salts[group]
        alone.engine.add_request("alone", None, params, group.prompt_token_ids, cache_salt=salt)
        [request] = alone.engine._requests.by_id.values()
        while alone.engine.has_unfinished_requests():
            alone.engine.step()
        return [(each.sequence.output_token_ids, each.sequence.status) for each in request.completions]


@contextmanager
def interrupted_after(num_lines: int) -> Iterator[None]:
    """Ctrl-C after so many lines of the engine's."""
    num_left = num_lines

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_left
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        if event == "line":
            num_left -= 1
            if num_left < 0:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


def make_engine(
    num_blocks: int = 8,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    *,
    num_host_blocks: int = 0,
    preemption_mode: str = "auto",
    policy: str = "fcfs",
    enable_prefix_caching: bool = True,
    watermark: float = DEFAULT_WATERMARK,
) -> FakeEngine:
    """One with blocks of 8 and tokens each of which is unique."""
    scheduler_config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        preemption_mode=preemption_mode,
        policy=policy,
    )
    cache_config = CacheConfig(
        num_blocks=num_blocks,
        block_size=8,
        watermark=watermark,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=enable_prefix_caching,
    )
    return FakeEngine(scheduler_config, cache_config)


def ran(batch: ScheduledBatch) -> list[tuple[Sequence, int]]:
    """What a batch runs: sequences, each with its number of new tokens."""
    return [(scheduled.sequence, scheduled.num_new_tokens) for scheduled in batch.sequences]
