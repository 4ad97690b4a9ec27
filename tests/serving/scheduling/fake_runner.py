"""What runs below the engine in these tests, in the place of ModelRunner: a batch in, sampled tokens out, no tensors.

In the place of keys and values the cache holds, for each slot, a hash of all tokens up to there, which is what they
depend on, and of the request's salt. So a slot with another history is seen even if its token is the same by chance,
and a slot of a request with another salt even if its history is the same. The tokens that are drawn follow from that
hash, so a request gets the same ones whoever runs beside it.
"""

import itertools
import pickle
from collections.abc import Callable, Iterable
from random import Random

from fake_cache import FakeCache

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.execution.model_runner import _reported, sampling_rows
from pagedattn_serve.execution.sampler import SamplerOutput
from pagedattn_serve.outputs import Logprob
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.scheduling.block_manager import RELEASED, BlockManager, Tables
from pagedattn_serve.scheduling.sequence import ScheduledBatch, ScheduledSequence, Sequence, TableArray

ROW_ERROR = "logits_processors: as it happens"


class FakeModel:
    """Which token follows a history.

    vocab_size: how many tokens there are to draw from, beside end-of-sequence, which is the next; None makes every
        token unique, so that nothing is shared by chance, and no history tells the next.
    stop_rate, error_rate: how likely a token ends its sequence, and how likely a row has an error in its place.
    """

    def __init__(self, vocab_size: int | None, stop_rate: float, error_rate: float, seed: int) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = vocab_size or 2**40
        self._stop_rate = stop_rate
        self._error_rate = error_rate
        self._random = Random(seed)
        self._unique_token = itertools.count()

    def new_token(self) -> int:
        return next(self._unique_token) if self.vocab_size is None else self._random.randrange(self.vocab_size)

    def next_token(self, value: int, row: SamplingState) -> int | None:
        """Most often the same after the same tokens, as of a greedy request. None for an error."""
        if self.vocab_size is None:
            return self.new_token()
        own = hash((value, row.index, row.sampling_params.seed))  # another one in each sequence of a request
        if own // 1000 % 1000 < 1000 * self._error_rate:
            return None
        if own % 1000 < 1000 * self._stop_rate and len(row.output_token_ids) >= row.sampling_params.min_tokens:
            return self.eos_token_id
        token = (own // 10**7 if own // 10**6 % 10 == 0 else value) % self.vocab_size
        is_end = token in row.sampling_params.stop_ids and len(row.output_token_ids) < row.sampling_params.min_tokens
        return (token + 1) % self.vocab_size if is_end else token

    def candidates(self, value: int, row: SamplingState) -> list[tuple[int, float]]:
        """Tokens with their log probabilities, most likely first."""
        if self.vocab_size is None:
            scored = [(self.new_token(), -self._random.random()) for _ in range(row.num_candidates)]
        else:
            scored = [(token, -1 - hash((value, token)) % 4099 / 1000) for token in range(self.vocab_size)]
            if len(row.output_token_ids) >= row.sampling_params.min_tokens:
                rare = 0 if hash((value, self.eos_token_id)) % 1000 < 1000 * self._stop_rate else 9
                scored.append((self.eos_token_id, -1.0 - rare))
        return sorted(scored, key=lambda each: -each[1])[: row.num_candidates]


def value_of_salt(salt: str) -> int:
    """What the first token of a request comes after."""
    return int.from_bytes(salt.encode())


def values_after(value: int, token_ids: Iterable[int]) -> list[int]:
    """What the cache is to hold for each of these tokens, which come after the token of this value."""
    values = []
    for token in token_ids:
        value = hash((value, token))
        values.append(value)
    return values


def prompt_logprob(value: int) -> Logprob:
    """What a row with this hash says of the prompt's next token: a number that fp32 holds."""
    return Logprob(float(value % 2**24), 1)


def first_visible(window: int | None, sequence: Sequence) -> int:
    """The first token that the next one to compute sees."""
    return 0 if window is None else max(0, sequence.num_computed_tokens + 1 - window)


def in_group(group: int, values: list[int]) -> list[int]:
    """What the blocks of a group of layers hold for tokens of these values: each group holds something else."""
    return [value ^ group for value in values]


class FakeRunner:
    """Runs exactly the batch that it is given. The blocks of its sequences are looked up in the manager's array.

    on_batch: is shown each batch before anything is done to it.
    other_rank: an array that gets nothing but what batches say was written, as that of another rank.
    fail_at: if set, `execute` raises RuntimeError at this one of the places where it can be cut off.
    """

    def __init__(
        self,
        model: FakeModel,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        manager: BlockManager,
        on_batch: Callable[[ScheduledBatch], None],
    ) -> None:
        self.model = model
        self.cache = self.cache_engine = FakeCache(cache_config)
        self.manager = manager
        self.other_rank = TableArray(scheduler_config, cache_config)
        self.fail_at: int | None = None
        self.values_of: dict[Sequence, list[int]] = {}
        self._on_batch = on_batch
        self._num_places = 0

    @property
    def can_run_again(self) -> bool:
        return not self.cache.states

    def values(self, sequence: Sequence) -> list[int]:
        """What the cache is to hold for each of its tokens."""
        values = self.values_of.setdefault(sequence, [])
        if len(values) < sequence.num_tokens:
            before = values[-1] if values else value_of_salt(sequence.cache_salt)
            values += values_after(before, sequence.tokens(len(values), sequence.num_tokens))
        return values

    def execute(self, batch: ScheduledBatch) -> SamplerOutput:
        self._on_batch(batch)
        self._num_places = 0
        for copy, blocks in (
            (self.cache.swap_out, batch.blocks_to_swap_out),
            (self.cache.swap_in, batch.blocks_to_swap_in),
            (self.cache.copy, batch.blocks_to_copy),
        ):
            self._may_fail()
            if blocks:
                copy(blocks)
                self._may_fail()
                blocks.clear()
        self.cache.copy_states(batch.state_copies)
        self._may_fail()
        if not batch.sequences:
            return SamplerOutput()
        tables = self._tables(batch)
        histories = [self._history(scheduled) for scheduled in batch.sequences]
        for scheduled, of_sequence, history in zip(batch.sequences, tables, histories, strict=True):
            start = scheduled.sequence.num_computed_tokens
            for group, table in enumerate(of_sequence):
                self.cache.write(table, start, in_group(group, history[start:]))
            self._may_fail()
        for scheduled, of_sequence, history in zip(batch.sequences, tables, histories, strict=True):
            for group, (table, window) in enumerate(zip(of_sequence, self.manager.windows, strict=True)):
                first = first_visible(window, scheduled.sequence)  # after all writes, as in each layer
                assert self.cache.read(table, len(history))[first:] == in_group(group, history[first:])
        self._advance_states(batch, histories)
        output = self._sample(batch, histories)
        self._report_prompts(batch, output)
        return output

    def _tables(self, batch: ScheduledBatch) -> list[Tables]:
        """The first rows of the array, which are to have the tables of their sequences, here and on another rank."""
        for write in pickle.loads(pickle.dumps(batch.table_writes)):
            self.other_rank.write(*write)
        tables = [list(map(list, self.manager.block_tables(scheduled.sequence))) for scheduled in batch.sequences]
        for array in (self.manager.table_array, self.other_rank):
            for row, of_sequence in enumerate(tables):
                for group, table in enumerate(of_sequence):
                    begin = table.count(RELEASED)
                    assert array.row(group, row, len(table))[begin:] == table[begin:]
        return tables

    def _advance_states(self, batch: ScheduledBatch, histories: list[list[int]]) -> None:
        """A state has seen what its sequence has computed, and sees the step's tokens."""
        states = self.cache.states
        assert len(batch.state_slots) == (len(batch.sequences) if states else 0)
        assert len(set(batch.state_slots)) == len(batch.state_slots)
        for scheduled, slot, history in zip(batch.sequences, batch.state_slots, histories, strict=False):
            begin = scheduled.sequence.num_computed_tokens
            assert begin == 0 or states[slot] == history[begin - 1]
            assert not scheduled.draft_token_ids
            states[slot] = history[-1]
            self._may_fail()
        for index, num_new_tokens, slot in batch.state_checkpoints:
            assert slot not in batch.state_slots
            states[slot] = histories[index][batch.sequences[index].sequence.num_computed_tokens + num_new_tokens - 1]

    def _may_fail(self) -> None:
        if self._num_places == self.fail_at:
            self.fail_at = None
            raise RuntimeError("as it happens")
        self._num_places += 1

    def _history(self, scheduled: ScheduledSequence) -> list[int]:
        """What the cache is to hold for a sequence when its rows of the step are written, drafts included."""
        history = self.values(scheduled.sequence)[: scheduled.sequence.num_computed_tokens + scheduled.num_new_tokens]
        return history + values_after(history[-1], scheduled.draft_token_ids)

    def _report_prompts(self, batch: ScheduledBatch, output: SamplerOutput) -> None:
        """Each row says how likely the prompt's next token was."""
        for i, (begin, end) in _reported(batch):
            sequence = batch.sequences[i].sequence
            entries = [
                {sequence.prompt_token_ids[at + 1]: prompt_logprob(self.values(sequence)[at])}
                for at in range(begin, end)
            ]
            output.prompt_logprobs[i] = begin + 1, entries

    def _sample(self, batch: ScheduledBatch, histories: list[list[int]]) -> SamplerOutput:
        output = SamplerOutput()
        values: list[int] = []
        for scheduled, history in zip(batch.sequences, histories, strict=True):
            end = len(history) - len(scheduled.draft_token_ids)
            values += [history[end - 1]] * scheduled.num_samples + history[end:]
        for i, (row, value) in enumerate(zip(sampling_rows(batch), values, strict=True)):
            candidates = self.model.candidates(value, row) if row.num_candidates else None
            token = candidates[0][0] if candidates else self.model.next_token(value, row)
            if token is None:
                output.errors[i] = ROW_ERROR
            output.token_ids.append(-1 if token is None else token)
            output.logprobs.append(-1.0)
            output.candidates.append(candidates)
            output.top_logprobs.append(None)
            if row.sampling_params.logprobs is not None:
                reported = candidates or [(output.token_ids[-1], -1.0)]
                output.top_logprobs[-1] = {each: Logprob(logprob, 1) for each, logprob in reported}
        return output
