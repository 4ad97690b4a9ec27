"""Which sequences run in the next step, and with how many tokens.

Decided anew at each step (iteration-level scheduling: Orca, Yu et al., OSDI 2022), with the preemption of
PagedAttention (Kwon et al., SOSP 2023, section 4.5): the sequences of a request run, wait and are preempted together,
and when blocks run out, the last group in order loses its blocks. The blocks are swapped out to host memory, or
dropped and computed again later. Prompts run in chunks that fill what the decodes leave of the step's token budget.

A long prompt, one that does not fit in a step, would stall everybody: the decodes, as its chunks make long steps, and
newcomers, as it takes the whole budget step after step. So it gets a share (`PromptPace`): beside other sequences few
tokens, with which the step takes 2.25 to 2.75 times as long; alone, all tokens that a second has room for. Other
sequences get the rest of the budget. These are the bounds:
- the long prompt gets a token at least in 15 of 16 steps, unless sequences before it need the whole budget;
- when prompts after it have run as many tokens as a step holds, it gets one chunk as if it were alone;
- long prompts run one after the other. While a long prompt waits for another, shorter prompts pass it;
  afterwards nobody does.

With speculation, guesses at a sequence's next tokens run behind its last token (Leviathan et al., ICML 2023). They get
the budget and the blocks that are left at the end, so they take nothing from anybody. A model whose layers keep a state
gets no guesses, because a state cannot be taken back to the token before a wrong guess.

All groups stand in one order: of their arrival, or with the policy "priority" of arrival shifted by priority. Each of
`running`, `swapped` and `waiting` is sorted by it. From this follows what keeps the rest short:
- a victim of preemption comes at or after the group that needs its blocks, so it is never in the batch yet;
- the first group is never preempted for another, so each step brings it nearer to its end, and nobody starves;
- whoever waits is let in only if nobody before it is swapped out.

None of this holds back a prompt that fits in a step: all of it runs at once, as far as there is budget.
"""

from dataclasses import dataclass, field

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.scheduling.block_allocator import OutOfBlocksError
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.group_queues import GroupQueues, place_of
from pagedattn_serve.scheduling.held_blocks import max_held_blocks, max_num_tokens, num_behind
from pagedattn_serve.scheduling.prompt_lookup import PromptLookup
from pagedattn_serve.scheduling.prompt_pace import PromptPace
from pagedattn_serve.scheduling.sequence import (
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    TableArray,
)


@dataclass(slots=True)
class _LongPrompts:
    """The long prompts that are in prefill in one step. They run last, when all other sequences of the step are known.

    num_tokens: how many tokens they are to have beside other sequences.
    num_kept: how many of these tokens were taken out of the budget for other sequences.
    """

    groups: list[SequenceGroup] = field(default_factory=list)
    num_tokens: int = 0
    num_kept: int = 0


class Scheduler:
    """The queues, and the blocks of the groups that run.

    Each step: `schedule()`, run the batch, `mark_computed(batch)`, `fork` where a group gets more sequences, append one
    token to each sequence that samples, and `finish` the sequences that are done, at the latest when they hold
    max_model_len tokens. A sequence with drafts gets the drafts that were right and one token more; then call
    `mark_verified`. Not thread-safe.

    table_array: where the block tables of each step are written (`BlockManager`); None makes one.

    Raises ValueError if max_model_len tokens do not fit in the cache: such a sequence could never end; and if there are
    states, for fewer than max_num_seqs of them.
    """

    def __init__(
        self, scheduler_config: SchedulerConfig, cache_config: CacheConfig, table_array: TableArray | None = None
    ) -> None:
        num_tokens = max_num_tokens(cache_config, scheduler_config.max_num_batched_tokens)
        if scheduler_config.max_model_len > num_tokens:
            raise ArgumentError(
                "max_model_len",
                f"at most {num_tokens} tokens, what {cache_config.num_blocks} blocks of {cache_config.block_size} hold",
                scheduler_config.max_model_len,
            )
        num_states = cache_config.num_state_slots
        if 0 < num_states < scheduler_config.max_num_seqs:
            expected = f"at most {num_states}, the sequences whose states the cache holds"
            raise ArgumentError("max_num_seqs", expected, scheduler_config.max_num_seqs)
        self.config = scheduler_config
        self._num_held_at_end = max_held_blocks(
            scheduler_config.max_model_len, cache_config, scheduler_config.max_num_batched_tokens
        )
        table_array = table_array or TableArray(scheduler_config, cache_config)
        self.block_manager = BlockManager(cache_config, table_array, scheduler_config.max_num_batched_tokens)
        self._queues = GroupQueues(scheduler_config.max_num_batched_tokens)
        self.waiting, self.running, self.swapped = self._queues.waiting, self._queues.running, self._queues.swapped
        self.num_recomputes = 0
        self.num_swaps = 0
        self.num_looked_up_tokens = 0  # of prompts that were let in
        self.num_found_tokens = 0  # of these, how many were in the cache
        self.num_proposed_tokens = 0
        self.num_accepted_tokens = 0
        has_drafts = scheduler_config.speculation == "ngram" and not num_states
        self._proposer = PromptLookup() if has_drafts else None
        self._pace = PromptPace(scheduler_config.max_num_batched_tokens)

    @property
    def has_unfinished(self) -> bool:
        """Whether any group is waiting, running or swapped out."""
        return bool(self._queues.by_id)

    def add(self, group: SequenceGroup) -> None:
        """Put a new group into the queue, at its place in the order.

        Raises ValueError if the group is not new, if its request id is taken, if its prompt is empty or leaves no room
        for output, if it has more sequences than can run, or a priority that the policy would not look at.
        """
        if group.request_id in self._queues.by_id:
            raise ValueError(f"request_id: {group.request_id!r} is taken by an unfinished request")
        statuses = {sequence.status for sequence in group.sequences}
        if statuses != {SequenceStatus.WAITING}:
            raise ArgumentError("status", "a new sequence", f"{statuses} for {group.request_id!r}")
        # With the constructor's check this also means that one sequence fits in the cache.
        num_tokens, longest, left = len(group.prompt_token_ids), self.config.max_model_len, ""
        if group.rules.generates:
            longest, left = longest - 1, ", one left to generate"
        if not 0 < num_tokens <= longest:
            expected = f"1 to {longest} tokens (max_model_len {self.config.max_model_len}{left})"
            raise ArgumentError("prompt", expected, num_tokens)
        self._check_width(group)
        if group.priority and self.config.policy != "priority":
            raise ArgumentError("priority", f'0, as the scheduling policy is "{self.config.policy}"', group.priority)
        self._queues.add(group)

    def has(self, group: SequenceGroup) -> bool:
        """Whether this group was added, and is unfinished."""
        return self._queues.has(group)

    def schedule(self) -> ScheduledBatch:
        """Choose what runs next. Preempts, swaps in and admits as needed. The batch is empty only if nothing is
        unfinished, or if all groups that are left are `outgrown`."""
        batch = ScheduledBatch()
        if self.config.policy == "priority":
            self._make_way(batch)
        num_preempted = len(batch.preempted)
        long = _LongPrompts()
        budget = self._schedule_running(batch, long, self.running, self.config.max_num_batched_tokens)
        if len(batch.preempted) == num_preempted and not batch.outgrown:
            budget = self._swap_in(batch, long, budget)
            self._admit(batch, long, budget)
        self._run_long_prompts(batch, long)
        if self._proposer is not None:
            self._add_drafts(batch, self._proposer)
        self._place(batch)
        return batch

    def mark_computed(self, batch: ScheduledBatch, seconds: float | None = None) -> None:
        """Record that the batch ran: the keys and values of its tokens are in the cache. Drafts do not count yet.

        seconds: the time that the batch took, from which follows how many tokens of long prompts run; None if unknown.
        Raises RuntimeError if the batch has copies left: blocks of one request would hold the tokens of another.
        """
        if batch.has_copies:
            raise RuntimeError("batch: expected one that has run, got blocks that were not copied")
        if seconds is not None:
            self.observe(batch, seconds)
        manager = self.block_manager
        manager.states.publish_checkpoints()
        for scheduled in batch.sequences:
            scheduled.sequence.num_computed_tokens += scheduled.num_new_tokens
        for sequence, first, last in batch.to_merge:
            manager.merge(sequence, first, last)
        if manager.gives_back:
            for scheduled in batch.sequences:
                manager.release(scheduled.sequence)

    def mark_verified(self, sequence: Sequence, num_accepted: int) -> None:
        """After `mark_computed` and with the new tokens appended: `num_accepted` of them were its first drafts."""
        manager = self.block_manager
        self.num_accepted_tokens += num_accepted
        first = sequence.num_computed_tokens // manager.block_size
        sequence.num_computed_tokens += num_accepted
        last = sequence.num_computed_tokens // manager.block_size
        manager.trim(sequence)
        if first < last and manager.prefixes.is_on:
            manager.publish(sequence, first, last)
            manager.merge(sequence, first, last)
        if manager.gives_back:
            manager.release(sequence)

    def fork(self, group: SequenceGroup, parent: Sequence, index: int) -> Sequence:
        """A new sequence of a running group, with the tokens and the blocks of `parent`, at the end of the group."""
        child = parent.fork(index)
        group.decode = None  # it is no single sequence any more
        self.block_manager.fork(parent, child)
        group.sequences.append(child)
        return child

    def finish(self, group: SequenceGroup, sequence: Sequence, status: SequenceStatus) -> None:
        """Take a sequence out of its group, wherever that is, and free its blocks at once. Raises ValueError if
        `status` is not a finished one or the sequence is not unfinished here."""
        if not status.is_finished:
            raise ArgumentError("status", "a finished one", status)
        if not self.has(group) or sequence not in group.sequences:
            raise ValueError(f"{sequence.request_id!r} is not an unfinished sequence of this scheduler")
        group.sequences.remove(sequence)
        if self._proposer is not None:
            self._proposer.forget(sequence)
        if sequence.status is not SequenceStatus.WAITING:
            self.block_manager.free(sequence)
        if not group.sequences:
            self._queues.remove(group, sequence.status)
        sequence.status = status

    def abort(self, request_id: str) -> SequenceGroup | None:
        """Finish the sequences of a request as aborted. Returns None if the request is unknown or finished already."""
        group = self._queues.by_id.get(request_id)
        if group is not None:
            for sequence in list(group.sequences):
                self.finish(group, sequence, SequenceStatus.FINISHED_ABORTED)
        return group

    def restart(self, groups: list[SequenceGroup]) -> None:
        """Forget all groups but these. These wait without blocks afterwards, whatever state they were in."""
        for group in groups:
            group.decode = None
            for sequence in group.sequences:
                sequence.num_computed_tokens = 0
        self.block_manager.clear()
        if self._proposer is not None:
            self._proposer.clear()
        self._pace = PromptPace(self.config.max_num_batched_tokens)
        self._queues.restart(groups)

    def pin_prefix(self, token_ids: list[int]) -> int:
        """`PrefixCache.pin`. A sequence of max_model_len tokens must still have room beside the prefixes, and
        max_num_seqs states."""
        manager = self.block_manager
        max_num_states = manager.states.num_slots - self.config.max_num_seqs
        return manager.prefixes.pin(token_ids, manager.num_blocks - self._num_held_at_end, max_num_states)

    # ---- the parts of a step: `SteadyScheduler` of pagedattn_simulate overrides some of them ------------------------

    def _place(self, batch: ScheduledBatch) -> None:
        self.block_manager.place(batch)

    def _make_way(self, batch: ScheduledBatch) -> None:
        """Preempt the last running group while a group that comes before it waits for its place, for its blocks, or for
        a step that decodes do not fill."""
        while self.running and (group := self._queues.next_waiting()) and group.order < self.running[-1].order:
            num_decodes = sum(len(each.sequences) for each in self.running if not each.in_prefill)
            has_place = group.max_num_sequences <= self._num_places()
            has_place &= num_decodes < self.config.max_num_batched_tokens
            if has_place and self.block_manager.can_allocate(group.sequences, keep_watermark=True):
                break
            self._preempt_last(batch)

    def _schedule_running(
        self, batch: ScheduledBatch, long: _LongPrompts, running: list[SequenceGroup], budget: int
    ) -> int:
        """Decodes first, in order, so that no decode waits for a prompt. Returns what is left of the budget: nothing if
        a group has no room in the budget, because newcomers shall not pass it."""
        prefilling = []
        is_left_out = False
        num_plain = -1
        block_size, add = self.block_manager.block_size, batch.sequences.append
        last_place, publishes = block_size - 1, self.block_manager.prefixes.is_on
        for group in running:  # victims of preemption leave the list at its end
            # The common case first: a decode that begins no block.
            decode = group.decode
            if decode is not None and budget:
                begin = decode.sequence.num_computed_tokens
                if place := begin % block_size:
                    add(decode)
                    budget -= 1
                    if place == last_place and publishes:
                        self._publish(batch, decode.sequence, begin, begin + 1)
                    continue
            num_before = len(batch.sequences)
            in_prefill = group.in_prefill
            if not in_prefill and len(group.sequences) > budget:
                is_left_out = True
            elif self._take_or_preempt(batch, group, in_prefill):
                if in_prefill:
                    prefilling.append(group)
                    continue
                budget -= len(group.sequences)
                if num_plain < 0 and group.decode is None:
                    num_plain = num_before
        batch.num_decodes += len(batch.sequences)
        batch.num_plain = len(batch.sequences) if num_plain < 0 else num_plain
        for group in prefilling:  # none of them was preempted: victims come after the group that is looked at
            if not self._queues.is_long(group):
                budget = self._add_prefill(batch, group, budget)
            elif not long.groups and batch.num_decodes and self._pace.is_due_to_measure():
                long.groups.append(group)
            else:
                budget = self._keep_share(long, group, budget)
        return 0 if is_left_out else budget

    def _swap_in(self, batch: ScheduledBatch, long: _LongPrompts, budget: int) -> int:
        num_places = self._num_places() if self.swapped else 0
        while self.swapped and budget > 0 and not (self.waiting and self.waiting[0].order < self.swapped[0].order):
            group = self.swapped[0]
            if group.max_num_sequences > num_places or (not group.in_prefill and len(group.sequences) > budget):
                break
            pairs = self.block_manager.swap_in(group.sequences, keep_watermark=bool(self.running))
            if pairs is None:
                if not self.running:
                    batch.outgrown.append(group)
                break
            batch.blocks_to_swap_in += pairs
            self._queues.move(group, SequenceStatus.RUNNING)
            num_places -= group.max_num_sequences
            has_room = (
                self.block_manager.extend(group.sequences) if group.in_prefill else self._add_decodes(batch, group)
            )
            assert has_room, f"{group.request_id} was swapped in without room for its next tokens"
            if group.in_prefill:
                budget = self._begin_prefill(batch, long, group, budget)
            else:
                batch.num_decodes += len(group.sequences)
                budget -= len(group.sequences)
        return budget

    def _admit(self, batch: ScheduledBatch, long: _LongPrompts, budget: int) -> None:
        num_places = self._num_places() if self.waiting else 0
        while budget > 0 and (group := self._queues.next_waiting()):
            if group.max_num_sequences > num_places or (self.swapped and self.swapped[0].order < group.order):
                break
            # A group that runs alone may use the reserve as well: no other running group could need it.
            if not self.block_manager.allocate(group.sequences, keep_watermark=bool(self.running)):
                if not self.running:
                    batch.outgrown.append(group)
                break
            if group.num_preemptions == 0:
                group.num_cached_tokens = group.sequences[0].num_computed_tokens
                if self.block_manager.prefixes.is_on:
                    self.num_looked_up_tokens += group.sequences[0].num_tokens
                    self.num_found_tokens += group.num_cached_tokens
            self._queues.move(group, SequenceStatus.RUNNING)
            num_places -= group.max_num_sequences
            budget = self._begin_prefill(batch, long, group, budget)

    def _begin_prefill(self, batch: ScheduledBatch, long: _LongPrompts, group: SequenceGroup, budget: int) -> int:
        # Not in prefill: all but the last tokens were in the cache.
        if self._queues.is_long(group) and group.in_prefill:
            return self._keep_share(long, group, budget)
        return self._add_prefill(batch, group, budget)

    def _keep_share(self, long: _LongPrompts, group: SequenceGroup, budget: int) -> int:
        """Count the group among the step's long prompts. For the first that can run, a share of the budget is kept, at
        most half a step's tokens. Returns what is left of the budget."""
        long.groups.append(group)
        if long.num_kept:
            return budget
        long.num_tokens = self._pace.next_chunk()
        share = max(min(long.num_tokens, self.config.max_num_batched_tokens // 2), 1)
        long.num_kept = sum(self._chunks(group, min(share, budget)))
        long.num_tokens = max(long.num_tokens, long.num_kept)
        return budget - long.num_kept

    def _run_long_prompts(self, batch: ScheduledBatch, long: _LongPrompts) -> None:
        """Beside other sequences, long prompts run with their share; alone, with all that a second has room for."""
        if not long.groups:
            return
        long.groups.sort(key=place_of)
        num_others = batch.num_tokens
        self._pace.observe_passing(num_others - batch.num_decodes)
        num_tokens = long.num_tokens if num_others else self._pace.alone
        budget = min(num_tokens, self.config.max_num_batched_tokens - num_others)
        for group in long.groups:
            budget = self._add_prefill(batch, group, budget)
        batch.num_long_tokens = batch.num_tokens - num_others

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """Tell the pace what the step took. Steps with prompts that are not long tell nothing."""
        num_decodes, num_long_tokens = batch.num_decodes, batch.num_long_tokens
        if num_decodes == len(batch.sequences):
            if num_decodes:
                self._pace.observe_decodes(seconds)
        elif num_long_tokens and sum(each.num_new_tokens for each in batch.sequences) == num_decodes + num_long_tokens:
            if num_decodes:
                self._pace.observe_beside(num_long_tokens, seconds)
            else:
                self._pace.observe_alone(num_long_tokens, seconds)

    def _take_or_preempt(self, batch: ScheduledBatch, group: SequenceGroup, in_prefill: bool) -> bool:
        """Add a running group's decodes, or take the blocks that its prompt needs next. While there is no room, preempt
        the last group, at last `group` itself. Returns whether there was room."""
        while not (self.block_manager.extend(group.sequences) if in_prefill else self._add_decodes(batch, group)):
            if len(self.running) == 1:
                batch.outgrown.append(group)
                return False
            self._preempt_last(batch)
            if group is batch.preempted[-1]:
                return False
        return True

    def _add_decodes(self, batch: ScheduledBatch, group: SequenceGroup) -> bool:
        """Add the last token of each sequence. Returns False, with nothing changed, if there is no room for all."""
        manager, sequences = self.block_manager, group.sequences
        if len(sequences) == 1:  # the common case: its last block is its own, and is filled first
            sequence = sequences[0]
            begin, block_size = sequence.num_computed_tokens, manager.block_size
            if begin % block_size == 0:
                try:
                    manager.append(sequence)
                except OutOfBlocksError:
                    return False
            if not sequence.output_token_ids or group.rules.uses_beams:
                self._add_to_batch(batch, sequence, 1)
                return True
            if group.decode is None:
                group.decode = ScheduledSequence(sequence, 1, num_samples=1)
            batch.sequences.append(group.decode)
            if (begin + 1) % block_size == 0 and manager.prefixes.is_on:
                self._publish(batch, sequence, begin, begin + 1)
            return True
        # Counted only if blocks are short: each sequence takes one block at most, for each group of layers.
        num_free_blocks, most = manager.num_free_blocks, len(sequences) * len(manager.windows)
        if num_free_blocks < most and manager.num_blocks_to_append(sequences) > num_free_blocks:
            return False
        manager.states.hand_on(sequences)
        for sequence in sequences:
            batch.blocks_to_copy += manager.append(sequence)
            self._add_to_batch(batch, sequence, 1)
        return True

    def _add_prefill(self, batch: ScheduledBatch, group: SequenceGroup, budget: int) -> int:
        """Add what the budget allows of a group in prefill. Returns what is left of the budget."""
        for sequence, num_new_tokens in zip(group.sequences, self._chunks(group, budget), strict=True):
            if num_new_tokens > 0:
                self._add_to_batch(batch, sequence, num_new_tokens)
                budget -= num_new_tokens
        return budget

    def _chunks(self, group: SequenceGroup, budget: int) -> list[int]:
        """How many tokens of each sequence the budget allows.

        No sequence gets its last token computed before all sequences of the group can: they go on together.
        """
        num_left = [sequence.num_uncomputed_tokens for sequence in group.sequences]
        states = self.block_manager.states
        states.hand_on(group.sequences)
        limits = states.limits(group.sequences)
        if sum(num_left) <= budget and limits == num_left:
            return num_left
        chunks = []
        for num_tokens, limit in zip(num_left, limits, strict=True):
            chunks.append(min(num_tokens - (len(num_left) > 1), limit, budget))
            budget -= chunks[-1]
        return chunks

    def _add_to_batch(self, batch: ScheduledBatch, sequence: Sequence, num_new_tokens: int) -> None:
        manager = self.block_manager
        begin = sequence.num_computed_tokens
        num_tokens = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        end = begin + num_new_tokens
        assert begin < num_tokens, f"{sequence.request_id} has no token to run: was the sampled one not appended?"
        num_samples = 1 if end == num_tokens and sequence.rules.generates else 0
        if num_samples and not sequence.output_token_ids and not sequence.rules.uses_beams:
            num_samples = sequence.rules.num_sequences
        batch.sequences.append(ScheduledSequence(sequence, num_new_tokens, num_samples))
        if end % manager.block_size < num_new_tokens and manager.prefixes.is_on:  # it fills a block
            self._publish(batch, sequence, begin, end)

    def _publish(self, batch: ScheduledBatch, sequence: Sequence, begin: int, end: int) -> None:
        """Let the blocks be found that the tokens [begin, end) fill."""
        first, last = begin // self.block_manager.block_size, end // self.block_manager.block_size
        if not self.block_manager.publish(sequence, first, last):
            batch.to_merge.append((sequence, first, last))

    def _add_drafts(self, batch: ScheduledBatch, proposer: PromptLookup) -> None:
        """Add guesses behind the last tokens of decoding sequences, in order, with what is left of the budget."""
        budget = self.config.max_num_batched_tokens - batch.num_tokens
        for i, scheduled in enumerate(batch.sequences):
            sequence = scheduled.sequence
            num_tokens = min(budget, self._max_num_drafts(sequence)) if scheduled.num_samples == 1 else 0
            drafts = proposer.propose(sequence, num_tokens) if num_tokens > 0 else []
            if drafts:
                num_tokens = self.block_manager.append_drafts(sequence, len(drafts))
                given = tuple(drafts[:num_tokens])
                batch.sequences[i] = ScheduledSequence(sequence, scheduled.num_new_tokens, 1, given)
                batch.num_plain = min(batch.num_plain, i)
                self.num_proposed_tokens += num_tokens
                budget -= num_tokens

    def _max_num_drafts(self, sequence: Sequence) -> int:
        """How many guesses at the next tokens of a sequence, whose last token runs, may be worth while."""
        rules, num_output = sequence.rules, len(sequence.output_token_ids)
        if not num_output or not rules.takes_drafts:
            return 0
        num_left = self.config.max_model_len - sequence.num_tokens
        if rules.max_tokens is not None:
            num_left = min(num_left, rules.max_tokens - num_output)
        return min(self.config.num_speculative_tokens, num_left - 1)  # a step gives one token beside the drafts

    def _num_places(self) -> int:
        """How many more sequences may run."""
        limit = self.config.max_num_seqs
        if len(self.running) >= limit:
            return 0
        return limit - sum([1 if group.decode else group.max_num_sequences for group in self.running])

    def _preempt_last(self, batch: ScheduledBatch) -> None:
        """Take the last running group's blocks. Its output stays."""
        group = self.running[-1]
        mode = self.config.preemption_mode
        pairs = None
        if mode == "swap" or (mode == "auto" and len(group.sequences) > 1):
            pairs = self.block_manager.swap_out(group.sequences)  # None if the host has no room for them
        if pairs is None:
            group.decode = None
            for sequence in group.sequences:
                self.block_manager.free(sequence)
                sequence.num_computed_tokens = 0
            self.num_recomputes += 1
        else:
            batch.blocks_to_swap_out += pairs
            self.num_swaps += 1
        self._queues.move(group, SequenceStatus.WAITING if pairs is None else SequenceStatus.SWAPPED)
        group.num_preemptions += 1
        batch.preempted.append(group)

    def _check_width(self, group: SequenceGroup) -> None:
        """Raise ValueError unless all sequences of the group can run at once, in a step of one token each."""
        num_sequences, manager = group.max_num_sequences, self.block_manager
        num_tokens = len(group.prompt_token_ids) - 1
        num_shared = sum(
            num_tokens // manager.block_size - num_behind(window, num_tokens, manager.block_size)
            for window in manager.windows
        )
        limits = {
            "max_num_seqs": self.config.max_num_seqs,
            "max_num_batched_tokens": self.config.max_num_batched_tokens,
            "blocks of the cache beside the prompt's": (manager.num_blocks - num_shared) // len(manager.windows),
        }
        if group.rules.uses_beams:
            limits["max_beam_width"] = self.config.max_beam_width
        for limit, value in limits.items():
            if num_sequences > value:
                raise ArgumentError(group.rules.width_argument, f"at most {value} ({limit})", num_sequences)
