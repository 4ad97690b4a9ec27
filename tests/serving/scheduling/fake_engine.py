"""The real engine over a fake runner: every step, call, interrupt and failure goes through `LLMEngine`, and what holds
for each batch and at each moment is checked where the runner is given the batch, and after each call.
"""

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fake_cache import FakeStore
from fake_runner import ROW_ERROR, FakeModel, FakeRunner, first_visible, in_group, prompt_logprob

import pagedattn_serve
from pagedattn_serve.config import DEFAULT_WATERMARK, CacheConfig, SchedulerConfig
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.generation_config import GenerationDefaults
from pagedattn_serve.pooling_params import Pooling
from pagedattn_serve.requests.inputs import InputProcessor, RequestArgs
from pagedattn_serve.requests.request import Request
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.block_manager import RELEASED, Tables, held
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
        self._params: dict[SequenceGroup, SamplingParams] = {}
        self._salts: dict[SequenceGroup, str] = {}
        self._interrupted: set[str] = set()  # requests that ended with an interrupt: nobody gets what they had
        self._num_miscounted = 0
        self._left_out_before: SequenceGroup | None = None  # the long prompt that the last step left out
        self._sealed: dict[int, bytes] = {}  # blocks in use, and the keys that they were published under before a step
        self._content_of: dict[bytes, list[int]] = {}  # by the key that a block is published under
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
        return self.manager.num_blocks - self.manager.num_used_blocks - self.manager.num_free_blocks

    def values(self, sequence: Sequence) -> list[int]:
        return self.runner.values(sequence)

    def _num_preemptions(self) -> int:
        return sum(group.num_preemptions for group in self.groups)

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
        for group in self.scheduler.running:
            begins = group not in self._ran_before and group.sequences[0].num_computed_tokens > 0
            self.num_times["states found"] += begins and bool(self.cache.states) and not batch.state_copies.to_swap_in
        self.check_batch(batch)
        self._check_let_in([group for group in self.scheduler.running if group not in self._ran_before], batch)

    def _begin_anew(self) -> None:
        """The engine has dropped all blocks, which may hold anything now."""
        self.cache.poison(range(len(self.cache.blocks)), range(len(self.cache.host_blocks)))
        self._sealed = {}
        self._ran_before = set()
        # An interrupt may come between the two counts of one preemption.
        self._num_miscounted = self._num_preemptions() - self.scheduler.num_recomputes - self.scheduler.num_swaps

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

    # ---- what a request gets -----------------------------------------------------------------------------------------

    def check_outputs(self) -> None:
        """All requests got what they get alone, whoever ran beside them and whatever came in between. Requests that
        were ended from outside got the beginning of it."""
        for request in self.requests:
            group = request.group
            if group.request_id in self._interrupted:
                continue
            statuses = {completion.sequence.status for completion in request.completions}
            assert all(status.is_finished for status in statuses)
            is_whole = request.error in (None, ROW_ERROR) and SequenceStatus.FINISHED_ABORTED not in statuses
            if is_whole and request.error is None and self._params[group].prompt_logprobs is not None:
                prompt = group.prompt_token_ids
                values = self._history(self._salts[group], prompt)
                pairs = zip(prompt[1:], values, strict=False)
                expected_logprobs = [None, *({token: prompt_logprob(value)} for token, value in pairs)]
                assert request.output().prompt_logprobs == expected_logprobs
            outputs = [(each.sequence.output_token_ids, each.sequence.status) for each in request.completions]
            if self._params[group].use_beam_search:
                assert not is_whole or outputs == self._alone(group)
                self.num_times["beams as alone"] += is_whole
                continue
            expected = self._expected(group)
            if is_whole:
                assert outputs == expected
                self.num_times.update(f"ended by {status.value}" for _, status in outputs)
            else:
                for (token_ids, _), (all_token_ids, _) in zip(outputs, expected, strict=False):
                    assert token_ids == all_token_ids[: len(token_ids)]
            for each in request.completions if self._params[group].logprobs is not None else ():
                reported = [token for entries in each.logprobs for token in entries]
                assert reported == each.sequence.output_token_ids

    def _history(self, salt: str, token_ids: list[int]) -> list[int]:
        values = [int.from_bytes(salt.encode())]
        for token in token_ids:
            values.append(hash((values[-1], token)))
        return values[1:]

    def _expected(self, group: SequenceGroup) -> list[tuple[list[int], SequenceStatus]]:
        """What a request without beam search gets, token by token."""
        params, prompt = self._params[group], group.prompt_token_ids
        rows = [SamplingState(params, prompt, [], index) for index in range(params.num_sequences)]
        ends = {*params.stop_ids, *(() if params.ignore_eos else (self.model.eos_token_id,))}
        max_tokens = min(params.max_tokens or 0, self.scheduler.config.max_model_len - len(prompt))
        values = [self._history(self._salts[group], prompt)[-1]] * len(rows)
        statuses = dict.fromkeys(range(len(rows)), SequenceStatus.RUNNING)
        while unfinished := [i for i, status in statuses.items() if status is SequenceStatus.RUNNING]:
            tokens = {i: self.model.next_token(values[i], rows[i]) for i in unfinished}
            for i, token in tokens.items():
                if None in tokens.values():
                    statuses[i] = SequenceStatus.FINISHED_ERROR
                    continue
                rows[i].output_token_ids.append(token)
                values[i] = hash((values[i], token))
                if token in ends:
                    statuses[i] = SequenceStatus.FINISHED_STOPPED
                elif len(rows[i].output_token_ids) == max_tokens:
                    statuses[i] = SequenceStatus.FINISHED_LENGTH
        outputs = [(row.output_token_ids, statuses[i]) for i, row in enumerate(rows)]
        return outputs if outputs[0][0] else outputs[:1]  # an error at the first token comes before the fork

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

    # ---- what holds for each batch, and at each moment --------------------------------------------------------------

    def check_batch(self, batch: ScheduledBatch) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        assert batch.num_tokens <= config.max_num_batched_tokens
        assert bool(batch.sequences) or (bool(batch.outgrown) or not scheduler.has_unfinished)
        group_of = {sequence: group for group in scheduler.running for sequence in group.sequences}
        sequences = [scheduled.sequence for scheduled in batch.sequences]
        assert len(set(sequences)) == len(sequences) <= config.max_num_seqs
        for scheduled in batch.sequences:
            num_tokens = scheduled.sequence.num_tokens + len(scheduled.draft_token_ids)
            num_run = scheduled.sequence.num_computed_tokens + scheduled.num_new_tokens
            for table, window in zip(self._tables[scheduled.sequence], self.manager.windows, strict=True):
                num_slots = len(table) * self.manager.block_size
                assert num_slots < num_tokens + self.manager.block_size
                assert num_slots >= (num_tokens if window is None else num_run + len(scheduled.draft_token_ids))
            assert not scheduled.draft_token_ids or (
                group_of[scheduled.sequence].max_num_sequences == 1 == scheduled.num_samples
            )
            assert 0 < scheduled.num_new_tokens <= scheduled.sequence.num_uncomputed_tokens
        for group, members in itertools.groupby(batch.sequences, lambda scheduled: group_of[scheduled.sequence]):
            # Sequences of a group follow each other, and either all of them come to their ends or none.
            scheduled_members = list(members)
            assert sum(group_of[sequence] is group for sequence in sequences) == len(scheduled_members)
            at_end = [each for each in scheduled_members if each.num_new_tokens == each.sequence.num_uncomputed_tokens]
            num_samples = 1
            if not group.has_forked and not group.rules.uses_beams:
                num_samples = group.rules.num_sequences
            assert [each.num_samples for each in scheduled_members] == [
                num_samples * (each in at_end) for each in scheduled_members
            ]
            assert not at_end or [each.sequence for each in at_end] == group.sequences
        for scheduled in batch.sequences[: batch.num_plain]:
            group = group_of[scheduled.sequence]
            assert group.sequences == [scheduled.sequence] and not group.rules.uses_beams
            assert scheduled.sequence.output_token_ids and not scheduled.draft_token_ids
            assert scheduled.num_new_tokens == scheduled.num_samples == 1 == scheduled.sequence.num_uncomputed_tokens
        self._check_order_of_service(batch)
        self._check_copies(batch)
        for scheduled in batch.sequences:
            begin = scheduled.sequence.num_computed_tokens
            end = begin + scheduled.num_new_tokens + len(scheduled.draft_token_ids)
            for table in self._tables[scheduled.sequence]:
                for block in table[begin // self.cache.block_size : -(-end // self.cache.block_size)]:
                    key = self.manager._allocator._key_of.get(block)
                    assert key is None or key != self._sealed.get(block), f"block {block} is computed and written again"
        for group in batch.preempted:
            # A group that made way for a better one may fit beside it after all: computed again, equal blocks are
            # shared.
            readmitted = group in scheduler.running and config.policy == "priority"
            host_tables = self.manager._host_tables
            holds_none = not any(held(host_tables.get(sequence, [])) for sequence in group.sequences)
            is_swapped = group in scheduler.swapped and (batch.blocks_to_swap_out or holds_none)
            assert readmitted or group in scheduler.waiting or is_swapped
            self.num_times["swapped out" if group in scheduler.swapped else "recomputed"] += 1
            self.num_times["preempted, several sequences"] += len(group.sequences) > 1
        for group in batch.outgrown:
            # A single sequence always fits, and several do not although no other group has a block.
            assert len(group.sequences) > 1 and scheduler.running in ([], [group])
            self.num_times["outgrown"] += 1
        self.num_times["swapped in"] += bool(batch.blocks_to_swap_in)
        self.num_times["copied on write"] += len(batch.blocks_to_copy)

    def _check_order_of_service(self, batch: ScheduledBatch) -> None:
        """No group is left out while there is budget, a place and room, except long prompts. A long prompt waits for
        another long prompt before it. The first long prompt stays out of a step with decodes now and then, never of two
        in a row."""
        scheduler, config = self.scheduler, self.scheduler.config
        ran = {scheduled.sequence for scheduled in batch.sequences}
        left_out = [group for group in scheduler.running if not ran.intersection(group.sequences)]
        budget = config.max_num_batched_tokens - batch.num_tokens
        long = self._long_prompts()
        left_out_before, self._left_out_before = self._left_out_before, None
        if long and long[0] in left_out and batch.num_decodes and len(long[0].sequences) <= budget:
            assert long[0] is not left_out_before
            self._left_out_before = long[0]
            self.num_times["measured without a long prompt"] += 1
        left_out = [group for group in left_out if group not in long[1:] and group is not self._left_out_before]
        assert not left_out or left_out[0] in batch.outgrown or len(left_out[0].sequences) > budget
        num_places = config.max_num_seqs - sum(group.max_num_sequences for group in scheduler.running)
        queue = sorted([*scheduler.waiting, *scheduler.swapped], key=lambda group: group.order)
        queue = [group for group in queue if not (group in scheduler.waiting and self._may_be_passed(group))]
        # Long prompts are scheduled after newcomers are let in, who cannot yet share the blocks that the prompts fill.
        fills_later = self.manager.prefixes.is_on and any(
            scheduled.sequence.num_computed_tokens % self.manager.block_size + scheduled.num_new_tokens
            >= self.manager.block_size
            for group in long
            for scheduled in batch.sequences
            if scheduled.sequence in group.sequences
        )
        settled = not (batch.preempted or batch.outgrown or left_out or fills_later)
        if queue and queue[0] in scheduler.waiting and budget and settled:
            has_place = queue[0].max_num_sequences <= num_places
            assert not (has_place and self.manager.can_allocate(queue[0].sequences, keep_watermark=True))

    def _is_long(self, group: SequenceGroup) -> bool:
        return sum(sequence.num_tokens for sequence in group.sequences) > self.scheduler.config.max_num_batched_tokens

    def _long_prompts(self) -> list[SequenceGroup]:
        """The long prompts in prefill, in order."""
        return [group for group in self.scheduler.running if group.in_prefill and self._is_long(group)]

    def _may_be_passed(self, group: SequenceGroup) -> bool:
        """Whether the group is a long prompt that waits for another long prompt."""
        return self._is_long(group) and any(other.order < group.order for other in self._long_prompts())

    def _check_let_in(self, groups: list[SequenceGroup], batch: ScheduledBatch) -> None:
        """Blocks are given only to groups that can use them at once. Several last tokens may have to wait, though;
        until they run, no group is let in. A long prompt that comes back from the host may have to wait for another
        long prompt. Beside other groups, the reserve stays free for them to grow.

        In order of arrival, no group passes a group that waits, except a long prompt that waits for another.
        """
        scheduler = self.scheduler
        if groups and len(scheduler.running) > 1 and not any(each.draft_token_ids for each in batch.sequences):
            assert self.manager.num_free_blocks >= self.manager._watermark_blocks
        ran = {scheduled.sequence for scheduled in batch.sequences}
        waits = {group for group in scheduler.running if not ran.intersection(group.sequences)}
        assert all(
            len(group.sequences) > 1 or group in self._long_prompts()[1:] for group in waits.intersection(groups)
        )
        assert not groups or not any(group not in groups and not group.in_prefill for group in waits)
        if scheduler.config.policy == "fcfs":
            passed = [waiting for waiting in scheduler.waiting if any(waiting.order < group.order for group in groups)]
            assert all(map(self._may_be_passed, passed))
            self.num_times["passed a long prompt"] += bool(passed)

    def _check_copies(self, batch: ScheduledBatch) -> None:
        """Each target is written once, and is no source of what is copied at the same time or later."""
        targets = [block for _, block in (*batch.blocks_to_swap_in, *batch.blocks_to_copy)]
        host_targets = [block for _, block in batch.blocks_to_swap_out]
        assert len(set(targets)) == len(targets) and len(set(host_targets)) == len(host_targets)
        assert not {src for src, _ in batch.blocks_to_copy} & {dst for _, dst in batch.blocks_to_copy}
        assert not {src for src, _ in batch.blocks_to_swap_in} & set(host_targets)

    def check(self) -> None:
        """All that holds at each moment. What a batch is to copy and to compute is not there before the batch has
        run."""
        has_run = self.engine._batch is None
        self._check_queues()
        self._check_blocks(has_run)
        self._check_map()
        if not has_run:
            return
        allocator = self.manager._allocator
        self.cache.poison(allocator._free, self.manager._host_allocator._free)
        self._sealed = {block: key for block, key in allocator._key_of.items() if allocator.ref_count(block)}

    def _check_queues(self) -> None:
        scheduler = self.scheduler
        queues = {
            SequenceStatus.RUNNING: scheduler.running,
            SequenceStatus.WAITING: scheduler.waiting,
            SequenceStatus.SWAPPED: scheduler.swapped,
        }
        for status, queue in queues.items():
            assert all(sequence.status is status for group in queue for sequence in group.sequences)
            assert sorted(queue, key=lambda group: group.order) == queue
        everyone = [group for queue in queues.values() for group in queue]
        assert sorted(everyone, key=lambda group: group.arrival_time) == self.unfinished
        assert scheduler.has_unfinished == bool(everyone)
        # No group runs before a group that was swapped out, nor, in order of arrival, before a group that waits, unless
        # it was let in while the other waited for a long prompt (`_check_let_in`).
        waiting = [group for group in scheduler.waiting if not self._is_long(group)]
        later = [*scheduler.swapped, *(waiting if scheduler.config.policy == "fcfs" else [])]
        assert all(group.order < other.order for group in scheduler.running[-1:] for other in later)
        assert sum(group.max_num_sequences for group in scheduler.running) <= scheduler.config.max_num_seqs
        num_preemptions = scheduler.num_recomputes + scheduler.num_swaps + self._num_miscounted
        assert num_preemptions == self._num_preemptions()
        assert all(
            0 <= sequence.num_computed_tokens < sequence.num_tokens for g in everyone for sequence in g.sequences
        )
        assert all(not sequence.num_computed_tokens for group in scheduler.waiting for sequence in group.sequences)

    def _check_blocks(self, has_run: bool) -> None:
        scheduler, manager = self.scheduler, self.manager
        manager.check_integrity()
        assert manager.tables.keys() == {sequence for group in scheduler.running for sequence in group.sequences}
        assert manager._host_tables.keys() == {sequence for group in scheduler.swapped for sequence in group.sequences}
        assert manager.num_used_blocks == len({block for tables in manager.tables.values() for block in held(tables)})
        if not has_run:
            return
        for read, tables in ((self.cache.read, manager.tables), (self.cache.read_host, manager._host_tables)):
            queue = scheduler.running if tables is manager.tables else scheduler.swapped
            for group in queue:
                # Amid a prefill, a sequence may share blocks that another sequence has not computed yet.
                for sequence in group.sequences[: 1 if group.in_prefill else None]:
                    num_computed = sequence.num_computed_tokens
                    for index, (table, window) in enumerate(zip(tables[sequence], manager.windows, strict=True)):
                        first = first_visible(window, sequence)
                        values = in_group(index, self.values(sequence)[first:num_computed])
                        assert read(table, num_computed)[first:] == values
                        self.num_times["gave blocks back"] += RELEASED in table
                        self.num_times["held by one group only"] += RELEASED in table and None in manager.windows
                        assert table.count(RELEASED) == first // manager.block_size or len(group.sequences) > 1
        self._check_published()
        self._check_states()

    def _check_states(self) -> None:
        """Each state has seen what its sequence has computed, and each checkpoint the tokens that it is found by. Other
        slots may hold anything."""
        manager = self.manager.states
        for states, slot_of in (
            (self.cache.states, manager.slot_of),
            (self.cache.host_states, manager._host_slot_of),
        ):
            for sequence, slot in slot_of.items():
                num_computed = sequence.num_computed_tokens
                if num_computed and sequence not in manager._waiting:
                    assert states[slot] == self.values(sequence)[num_computed - 1]
        for key, slot in manager._allocator._block_of.items():
            if key in self._content_of:
                assert self.cache.states[slot] == self._content_of[key][-1]
        for slot in manager._allocator._free:
            self.cache.states[slot] = None
        for slot in manager._host_allocator._free:
            self.cache.host_states[slot] = None

    def _check_map(self) -> None:
        """The cache map says what the tables say."""
        scheduler, manager = self.scheduler, self.manager
        cache_map = self.engine.cache_map()
        groups = [*scheduler.running, *scheduler.swapped, *scheduler.waiting]
        expected = [(group.request_id, group.sequences[0].status.value) for group in groups]
        assert [(each.request_id, each.state) for each in cache_map.requests] == expected
        for owners, tables in ((cache_map.owners, manager.tables), (cache_map.host_owners, manager._host_tables)):
            holders: dict[int, list[int]] = {}
            for index, group in enumerate(groups):
                for sequence in group.sequences:
                    for block in held(tables.get(sequence, [])):
                        holders.setdefault(block, []).append(index)
            assert all(owner in holders.get(block, [-1]) for block, owner in enumerate(owners))
            if tables is manager.tables:
                names = ["free", "used", "shared"]
                states = [names[min(len(holders.get(block, ())), 2)] for block in range(manager.num_blocks)]
                assert [state.replace("cached", "free") for state in cache_map.blocks] == states
        assert cache_map.blocks.count("cached") == manager.num_cached_blocks
        assert cache_map.host_blocks.count("swapped") == manager.num_used_host_blocks

    def _check_published(self) -> None:
        """A published block holds what it is found by, whether anybody owns the block or not."""
        block_size, published = self.manager.block_size, self.manager._allocator._block_of
        if not published:
            return
        for sequence in self.manager.tables:
            for i, block_hash in enumerate(sequence.block_hashes):
                values = self.values(sequence)[i * block_size : (i + 1) * block_size]
                for group, mark in enumerate(self.manager.prefixes.marks):
                    content = in_group(group, values)
                    assert self._content_of.setdefault(block_hash + mark, content) == content
        for key, block in published.items():
            if key in self._content_of:
                assert self.cache.blocks[block] == self._content_of[key]


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
