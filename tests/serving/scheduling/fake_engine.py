"""A fake runner and sampler around the scheduler: it does to the scheduler what the engine does, and checks each step.

In the place of keys and values the cache holds, for each slot, a hash of all tokens up to there, which is what they
depend on, and of the request's salt. So a slot with another history is seen even if its token is the same by chance,
and a slot of a request with another salt even if its history is the same.
"""

import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import Any

from fake_cache import FakeCache

from pagedattn_serve import scheduling
from pagedattn_serve.config import DEFAULT_WATERMARK, CacheConfig, SchedulerConfig
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.batch import ScheduledBatch, ScheduledSequence
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus
from pagedattn_serve.scheduling.sequence_group import SequenceGroup

SCHEDULING = os.path.dirname(scheduling.__file__)


class FakeEngine:
    """A scheduler with a cache of hashes for a model.

    vocab_size: how many tokens there are to draw from; None makes every token unique.
    stop_rate: how likely a token ends its sequence before max_tokens.
    num_times: how often things happened that a random run should meet.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        vocab_size: int | None = None,
        stop_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.scheduler = Scheduler(scheduler_config, cache_config)
        self.manager = self.scheduler.block_manager
        self.cache = FakeCache(cache_config)
        self.groups: list[SequenceGroup] = []  # all that were ever added, in the order of their arrival
        self.num_times: Counter[str] = Counter()
        self._num_miscounted = 0
        self._random = Random(seed)
        self._vocab_size = vocab_size
        self._stop_rate = stop_rate
        self._unique_token = itertools.count()
        self._values: dict[Sequence, list[int]] = {}
        self._content_of: dict[bytes, list[int]] = {}  # by the key that a block is published under
        self._sealed: dict[int, bytes] = {}  # blocks in use, and the keys that they were published under before a step

    @property
    def unfinished(self) -> list[SequenceGroup]:
        return [group for group in self.groups if group.sequences]

    def new_tokens(self, num_tokens: int) -> list[int]:
        return [self._new_token() for _ in range(num_tokens)]

    def add(
        self,
        prompt: int | list[int],
        max_tokens: int = 1000,
        n: int = 1,
        *,
        use_beam_search: bool = False,
        prompt_logprobs: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> SequenceGroup:
        """A request of a prompt, or of one of so many tokens."""
        token_ids = self.new_tokens(prompt) if isinstance(prompt, int) else prompt
        params = SamplingParams(
            max_tokens=max_tokens,
            n=n,
            use_beam_search=use_beam_search,
            temperature=0.0 if use_beam_search else 1.0,
            prompt_logprobs=prompt_logprobs,
        )
        arrival = len(self.groups)
        group = SequenceGroup(f"request {arrival}", token_ids, params, float(arrival), priority)
        group.sequences[0].cache_salt = cache_salt
        self.scheduler.add(group)
        self.groups.append(group)
        return group

    def step(self) -> ScheduledBatch:
        ran_before = set(self.scheduler.running)
        batch = self.scheduler.schedule()
        self.check_batch(batch)
        self._check_let_in([group for group in self.scheduler.running if group not in ran_before], batch)
        self._run(batch)
        num_used_blocks = self.manager.num_used_blocks
        self.scheduler.mark_computed(batch)
        self.num_times["merged"] += self.manager.num_used_blocks < num_used_blocks
        self._sample(batch)
        self.check()
        return batch

    def interrupt(self, num_lines: int) -> None:
        """A step that ends after so many lines of the scheduler's, or before its tokens are sampled if that is earlier.
        After it the engine makes all anew."""
        try:
            with interrupted_after(num_lines):
                batch = self.scheduler.schedule()
                self._run(batch)
                self.scheduler.mark_computed(batch)
        except KeyboardInterrupt:
            self.num_times["interrupted"] += 1
        self.restart(self.unfinished)
        # An interrupt may come between the two counts of one preemption.
        self._num_miscounted = self._num_preemptions() - self.scheduler.num_recomputes - self.scheduler.num_swaps

    def restart(self, groups: list[SequenceGroup]) -> None:
        self.scheduler.restart(groups)
        self.cache.poison(range(len(self.cache.blocks)), range(len(self.cache.host_blocks)))
        self._sealed = {}

    def drain(self) -> None:
        """Until all is finished.

        In each step the first group computes a token, or another one decodes while that is in prefill. Neither the
        first group's prefill nor any decoded token is ever lost, which bounds the number of steps.
        """
        num_tokens = sum(group.sampling_params.num_sequences for group in self.unfinished)
        bound = 2 * num_tokens * self.scheduler.config.max_model_len + len(self.unfinished)
        for _ in range(bound):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished
        assert (self.manager.num_used_blocks, self.manager.num_used_host_blocks) == (0, 0)
        assert self.manager.num_free_blocks + self.num_pinned_blocks() == self.manager.num_blocks
        assert self.scheduler.schedule() == ScheduledBatch()

    def num_pinned_blocks(self) -> int:
        """Blocks that nobody owns and that are kept all the same."""
        return self.manager.num_blocks - self.manager.num_used_blocks - self.manager.num_free_blocks

    def _num_preemptions(self) -> int:
        return sum(group.num_preemptions for group in self.groups)

    # ---- what the runner and the sampler do -------------------------------------------------------------------------

    def _new_token(self) -> int:
        return next(self._unique_token) if self._vocab_size is None else self._random.randrange(self._vocab_size)

    def _next_token(self, sequence: Sequence) -> int:
        """Most often the same after the same tokens, as of a greedy request."""
        if self._vocab_size is None or self._random.random() < 0.1:
            return self._new_token()
        return self.values(sequence)[-1] % self._vocab_size

    def values(self, sequence: Sequence) -> list[int]:
        """What the cache is to hold for each of its tokens."""
        values = self._values.setdefault(sequence, [])
        if len(values) < sequence.num_tokens:
            for token in sequence.tokens(len(values), sequence.num_tokens):
                before = values[-1] if values else int.from_bytes(sequence.cache_salt.encode())
                values.append(hash((before, token)))
        return values

    def _run(self, batch: ScheduledBatch) -> None:
        self.cache.swap_out(batch.blocks_to_swap_out)
        self.cache.swap_in(batch.blocks_to_swap_in)
        self.cache.copy(batch.blocks_to_copy)
        histories = [self._history(scheduled) for scheduled in batch.sequences]
        for scheduled, history in zip(batch.sequences, histories, strict=True):
            start = scheduled.sequence.num_computed_tokens
            for block in scheduled.block_table[
                start // self.cache.block_size : -(-len(history) // self.cache.block_size)
            ]:
                key = self.manager._allocator._key_of.get(block)
                assert key is None or key != self._sealed.get(block), f"block {block} is computed and written again"
            self.cache.write(scheduled.block_table, start, history[start:])
        for scheduled, history in zip(batch.sequences, histories, strict=True):  # after all writes, as in each layer
            assert self.cache.read(scheduled.block_table, len(history)) == history
            self._add_prompt_logprobs(scheduled.sequence, len(history))

    def _history(self, scheduled: ScheduledSequence) -> list[int]:
        """What the cache is to hold for a sequence when its rows of the step are written, drafts included."""
        history = self.values(scheduled.sequence)[: scheduled.sequence.num_computed_tokens + scheduled.num_new_tokens]
        for token in scheduled.draft_token_ids:
            history.append(hash((history[-1], token)))
        return history

    def _add_prompt_logprobs(self, sequence: Sequence, end: int) -> None:
        """Each row says how likely the prompt's next token was; no row may be left out where that is asked for."""
        if sequence.needs_prompt_logits:
            logprobs = sequence.prompt_logprobs
            assert sequence.num_computed_tokens < len(logprobs)
            logprobs += [{}] * (min(end + 1, len(sequence.prompt_token_ids)) - len(logprobs))
            self.num_times["prompt logprobs"] += 1

    def _sample(self, batch: ScheduledBatch) -> None:
        num_samples: Counter[str] = Counter()
        drafts: dict[Sequence, list[int]] = {}
        for scheduled in batch.sequences:
            num_samples[scheduled.sequence.request_id] += scheduled.num_samples
            if scheduled.draft_token_ids:
                drafts[scheduled.sequence] = scheduled.draft_token_ids
        for group in self.unfinished:
            if group in batch.outgrown:
                self._finish(group, group.sequences, SequenceStatus.FINISHED_ERROR)
            elif num_samples[group.request_id]:
                if group.sequences[0] in drafts:
                    self._verify(group.sequences[0], drafts[group.sequences[0]])
                elif group.sampling_params.use_beam_search:
                    self._continue_beams(group)
                else:
                    parent = group.sequences[0]
                    for index in range(len(group.sequences), num_samples[group.request_id]):
                        self._fork(group, parent, index)
                    for sequence in group.sequences:
                        sequence.output_token_ids.append(self._next_token(sequence))
                self._finish_those_at_their_end(group)

    def _verify(self, sequence: Sequence, drafts: list[int]) -> None:
        """Tokens are drawn as without drafts, and as long as these are right."""
        num_accepted = 0
        for draft in [*drafts, None]:
            sequence.output_token_ids.append(self._next_token(sequence))
            if sequence.output_token_ids[-1] != draft:
                break
            num_accepted += 1
        self.scheduler.mark_verified(sequence, num_accepted)
        self.num_times["accepted"] += num_accepted
        self.num_times["rejected"] += len(drafts) - num_accepted

    def _continue_beams(self, group: SequenceGroup) -> None:
        """Some beams are forked, some dropped, some go on, in any order of these and of the beams."""
        width = group.sampling_params.beam_width
        tokens = range(self._vocab_size) if self._vocab_size else self.new_tokens(width)
        candidates = [(parent, token) for parent in group.sequences for token in tokens]
        num_beams = min(width, len(candidates)) - (self._random.random() < 0.1)
        tokens_of: dict[Sequence, list[int]] = {}
        for parent, token in self._random.sample(candidates, max(num_beams, 1)):
            tokens_of.setdefault(parent, []).append(token)
        dropped = [sequence for sequence in group.sequences if sequence not in tokens_of]
        drop_first = self._random.random() < 0.5
        if drop_first:
            self._finish(group, dropped, SequenceStatus.FINISHED_STOPPED)
        beams = []
        for parent, first_and_others in tokens_of.items():
            beams.append((parent, first_and_others[0]))
            beams += [(self._fork(group, parent, 0), token) for token in first_and_others[1:]]
        if not drop_first:
            self._finish(group, dropped, SequenceStatus.FINISHED_STOPPED)
        for beam, token in beams:
            beam.output_token_ids.append(token)
        group.sequences = [beam for beam, _ in beams]
        self.num_times["forked and dropped"] += bool(dropped) and len(beams) > len(tokens_of)

    def _fork(self, group: SequenceGroup, parent: Sequence, index: int) -> Sequence:
        child = self.scheduler.fork(group, parent, index)
        self._values[child] = list(self.values(parent))
        self.num_times["forked"] += 1
        return child

    def _finish_those_at_their_end(self, group: SequenceGroup) -> None:
        max_tokens, max_model_len = group.sampling_params.max_tokens, self.scheduler.config.max_model_len
        for sequence in list(group.sequences):
            if len(sequence.output_token_ids) == max_tokens or sequence.num_tokens == max_model_len:
                self._finish(group, [sequence], SequenceStatus.FINISHED_LENGTH)
            elif self._random.random() < self._stop_rate:
                self._finish(group, [sequence], SequenceStatus.FINISHED_STOPPED)

    def _finish(self, group: SequenceGroup, sequences: list[Sequence], status: SequenceStatus) -> None:
        for sequence in list(sequences):
            self.scheduler.finish(group, sequence, status)
            self._values.pop(sequence, None)

    # ---- what holds for each batch, and at each moment --------------------------------------------------------------

    def check_batch(self, batch: ScheduledBatch) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        assert batch.num_tokens <= config.max_num_batched_tokens
        assert batch.is_empty <= (bool(batch.outgrown) or not scheduler.has_unfinished)
        group_of = {sequence: group for group in scheduler.running for sequence in group.sequences}
        sequences = [scheduled.sequence for scheduled in batch.sequences]
        assert len(set(sequences)) == len(sequences) <= config.max_num_seqs
        for scheduled in batch.sequences:
            assert scheduled.block_table is self.manager.block_table(scheduled.sequence)
            num_slots = len(scheduled.block_table) * self.manager.block_size
            num_tokens = scheduled.sequence.num_tokens + len(scheduled.draft_token_ids)
            assert num_tokens <= num_slots < num_tokens + self.manager.block_size
            assert not scheduled.draft_token_ids or (
                group_of[scheduled.sequence].max_num_sequences == 1 == scheduled.num_samples
            )
            assert 0 < scheduled.num_new_tokens <= scheduled.sequence.num_uncomputed_tokens
        for group, members in itertools.groupby(batch.sequences, lambda scheduled: group_of[scheduled.sequence]):
            # One after the other, and either all of them come to their ends or none.
            scheduled_members = list(members)
            assert sum(group_of[sequence] is group for sequence in sequences) == len(scheduled_members)
            at_end = [each for each in scheduled_members if each.num_new_tokens == each.sequence.num_uncomputed_tokens]
            num_samples = 1
            if not group.has_forked and not group.sampling_params.use_beam_search:
                num_samples = group.sampling_params.num_sequences
            assert [each.num_samples for each in scheduled_members] == [
                num_samples * (each in at_end) for each in scheduled_members
            ]
            assert not at_end or [each.sequence for each in at_end] == group.sequences
        self._check_order_of_service(batch)
        self._check_copies(batch)
        for group in batch.preempted:
            # Who made way for a better one may fit beside it after all: computed again, equal blocks are shared.
            readmitted = group in scheduler.running and config.policy == "priority"
            assert readmitted or group in scheduler.waiting or (group in scheduler.swapped and batch.blocks_to_swap_out)
            self.num_times["swapped out" if group in scheduler.swapped else "recomputed"] += 1
            self.num_times["preempted, several sequences"] += len(group.sequences) > 1
        for group in batch.outgrown:
            # A single sequence always fits, and several do not although no other group has a block.
            assert len(group.sequences) > 1 and scheduler.running in ([], [group])
            self.num_times["outgrown"] += 1
        self.num_times["swapped in"] += bool(batch.blocks_to_swap_in)
        self.num_times["copied on write"] += len(batch.blocks_to_copy)

    def _check_order_of_service(self, batch: ScheduledBatch) -> None:
        """Nobody is left out while there is budget, a place and room."""
        scheduler, config = self.scheduler, self.scheduler.config
        ran = {scheduled.sequence for scheduled in batch.sequences}
        left_out = [group for group in scheduler.running if not ran.intersection(group.sequences)]
        budget = config.max_num_batched_tokens - batch.num_tokens
        assert not left_out or left_out[0] in batch.outgrown or len(left_out[0].sequences) > budget
        num_places = config.max_num_seqs - sum(group.max_num_sequences for group in scheduler.running)
        queue = sorted([*scheduler.waiting, *scheduler.swapped], key=lambda group: group.order)
        if queue and queue[0] in scheduler.waiting and budget and not (batch.preempted or batch.outgrown or left_out):
            has_place = queue[0].max_num_sequences <= num_places
            assert not (has_place and self.manager.can_allocate(queue[0].sequences, keep_watermark=True))

    def _check_let_in(self, groups: list[SequenceGroup], batch: ScheduledBatch) -> None:
        """Blocks are given only to those who can use them at once. Several last tokens may have to wait, though; until
        they run, nobody is let in."""
        ran = {scheduled.sequence for scheduled in batch.sequences}
        waits = {group for group in self.scheduler.running if not ran.intersection(group.sequences)}
        assert all(len(group.sequences) > 1 for group in waits.intersection(groups))
        assert not groups or not any(group not in groups and not group.in_prefill for group in waits)

    def _check_copies(self, batch: ScheduledBatch) -> None:
        """Each target is written once, and is no source of what is copied at the same time or later."""
        targets = [block for _, block in (*batch.blocks_to_swap_in, *batch.blocks_to_copy)]
        host_targets = [block for _, block in batch.blocks_to_swap_out]
        assert len(set(targets)) == len(targets) and len(set(host_targets)) == len(host_targets)
        assert not {src for src, _ in batch.blocks_to_copy} & {dst for _, dst in batch.blocks_to_copy}
        assert not {src for src, _ in batch.blocks_to_swap_in} & set(host_targets)

    def check(self) -> None:
        self._check_queues()
        self._check_blocks()
        self._check_map()
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
        # Nobody runs before one that was swapped out, nor, where the order is that of arrival, before one that waits.
        later = [*scheduler.swapped, *(scheduler.waiting if scheduler.config.policy == "fcfs" else [])]
        assert all(group.order < other.order for group in scheduler.running[-1:] for other in later)
        assert sum(group.max_num_sequences for group in scheduler.running) <= scheduler.config.max_num_seqs
        num_preemptions = scheduler.num_recomputes + scheduler.num_swaps + self._num_miscounted
        assert num_preemptions == self._num_preemptions()
        assert all(
            0 <= sequence.num_computed_tokens < sequence.num_tokens for g in everyone for sequence in g.sequences
        )
        assert all(not sequence.num_computed_tokens for group in scheduler.waiting for sequence in group.sequences)

    def _check_blocks(self) -> None:
        scheduler, manager = self.scheduler, self.manager
        manager.check_integrity()
        assert manager._tables.keys() == {sequence for group in scheduler.running for sequence in group.sequences}
        assert manager._host_tables.keys() == {sequence for group in scheduler.swapped for sequence in group.sequences}
        for read, tables in ((self.cache.read, manager._tables), (self.cache.read_host, manager._host_tables)):
            queue = scheduler.running if tables is manager._tables else scheduler.swapped
            for group in queue:
                # Amid a prefill, one may share blocks that another has not computed yet.
                for sequence in group.sequences[: 1 if group.in_prefill else None]:
                    num_computed = sequence.num_computed_tokens
                    assert read(tables[sequence], num_computed) == self.values(sequence)[:num_computed]
        assert manager.num_used_blocks == len({block for table in manager._tables.values() for block in table})
        self._check_published()

    def _check_map(self) -> None:
        """It says what the tables say."""
        scheduler, manager = self.scheduler, self.manager
        cache_map = scheduler.cache_map()
        groups = [*scheduler.running, *scheduler.swapped, *scheduler.waiting]
        expected = [(group.request_id, group.sequences[0].status.value) for group in groups]
        assert [(each.request_id, each.state) for each in cache_map.requests] == expected
        for owners, tables in ((cache_map.owners, manager._tables), (cache_map.host_owners, manager._host_tables)):
            holders: dict[int, list[int]] = {}
            for index, group in enumerate(groups):
                for sequence in group.sequences:
                    for block in tables.get(sequence, ()):
                        holders.setdefault(block, []).append(index)
            assert all(owner in holders.get(block, [-1]) for block, owner in enumerate(owners))
            if tables is manager._tables:
                names = ["free", "used", "shared"]
                states = [names[min(len(holders.get(block, ())), 2)] for block in range(manager.num_blocks)]
                assert [state.replace("cached", "free") for state in cache_map.blocks] == states
        assert cache_map.blocks.count("cached") == manager.num_cached_blocks
        assert cache_map.host_blocks.count("swapped") == manager.num_used_host_blocks

    def _check_published(self) -> None:
        """A block holds what it is found by, whether anybody owns it or not."""
        block_size, published = self.manager.block_size, self.manager._allocator._block_of
        if not published:
            return
        for sequence in self.manager._tables:
            for i, key in enumerate(sequence.block_hashes):
                content = self.values(sequence)[i * block_size : (i + 1) * block_size]
                assert self._content_of.setdefault(key, content) == content
        for key, block in published.items():
            if key in self._content_of:
                assert self.cache.blocks[block] == self._content_of[key]


@contextmanager
def interrupted_after(num_lines: int) -> Iterator[None]:
    """Ctrl-C after so many lines of the scheduling modules."""
    num_left = num_lines

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_left
        if not frame.f_code.co_filename.startswith(SCHEDULING):
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
