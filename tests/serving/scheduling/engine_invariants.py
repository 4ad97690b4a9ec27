"""What holds for each batch of an engine over a `FakeRunner`, and at each moment."""

import itertools
from collections import Counter

from fake_runner import FakeRunner, first_visible, in_group

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.scheduling.block_manager import RELEASED, held
from pagedattn_serve.scheduling.sequence import ScheduledBatch, SequenceGroup, SequenceStatus


class Invariants:
    """The checks of one engine.

    groups: all that were ever added; whoever adds a group to the engine adds it here.
    num_times: as in `FakeEngine`.
    """

    def __init__(
        self, engine: LLMEngine, runner: FakeRunner, groups: list[SequenceGroup], num_times: Counter[str]
    ) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.manager = engine.scheduler.block_manager
        self.runner = runner
        self.cache = runner.cache
        self.groups = groups
        self.num_times = num_times
        self._num_miscounted = 0
        self._left_out_before: SequenceGroup | None = None  # the long prompt that the last step left out
        self._sealed: dict[int, bytes] = {}  # blocks in use, and the keys that they were published under before a step
        self._content_of: dict[bytes, list[int]] = {}  # by the key that a block is published under

    def begin_anew(self) -> None:
        """The engine has dropped all blocks, which may hold anything now."""
        self.cache.poison(range(len(self.cache.blocks)), range(len(self.cache.host_blocks)))
        self._sealed = {}
        # An interrupt may come between the two counts of one preemption.
        self._num_miscounted = self._num_preemptions() - self.scheduler.num_recomputes - self.scheduler.num_swaps

    def _num_preemptions(self) -> int:
        return sum(group.num_preemptions for group in self.groups)

    def check_batch(self, batch: ScheduledBatch, let_in: list[SequenceGroup]) -> None:
        """All that holds when the runner is given a batch. let_in: groups that began to run with this batch."""
        scheduler, config = self.scheduler, self.scheduler.config
        assert batch.num_tokens <= config.max_num_batched_tokens
        assert bool(batch.sequences) or (bool(batch.outgrown) or not scheduler.has_unfinished)
        group_of = {sequence: group for group in scheduler.running for sequence in group.sequences}
        sequences = [scheduled.sequence for scheduled in batch.sequences]
        assert len(set(sequences)) == len(sequences) <= config.max_num_seqs
        for scheduled in batch.sequences:
            num_tokens = scheduled.sequence.num_tokens + len(scheduled.draft_token_ids)
            num_run = scheduled.sequence.num_computed_tokens + scheduled.num_new_tokens
            for table, window in zip(self.manager.tables[scheduled.sequence], self.manager.windows, strict=True):
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
            for table in self.manager.tables[scheduled.sequence]:
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
        self._check_let_in(let_in, batch)

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

    def check(self, unfinished: list[SequenceGroup]) -> None:
        """All that holds at each moment. What a batch is to copy and to compute is not there before the batch has
        run. unfinished: groups, in the order of their arrival."""
        has_run = self.engine._batch is None
        self._check_queues(unfinished)
        self._check_blocks(has_run)
        self._check_map()
        if not has_run:
            return
        allocator = self.manager._allocator
        self.cache.poison(allocator._free, self.manager._host_allocator._free)
        self._sealed = {block: key for block, key in allocator._key_of.items() if allocator.ref_count(block)}

    def _check_queues(self, unfinished: list[SequenceGroup]) -> None:
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
        assert sorted(everyone, key=lambda group: group.arrival_time) == unfinished
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
                        values = in_group(index, self.runner.values(sequence)[first:num_computed])
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
                    assert states[slot] == self.runner.values(sequence)[num_computed - 1]
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
                values = self.runner.values(sequence)[i * block_size : (i + 1) * block_size]
                for group, mark in enumerate(self.manager.prefixes.marks):
                    content = in_group(group, values)
                    assert self._content_of.setdefault(block_hash + mark, content) == content
        for key, block in published.items():
            if key in self._content_of:
                assert self.cache.blocks[block] == self._content_of[key]
