"""Prompts that do not fit in a step: what others feel of them, how they get on, and who passes whom.

Steps and tokens are counted. Where time matters, a machine's speed says how long each batch takes.
"""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from statistics import median

import pytest
from fake_engine import FakeEngine, make_engine, ran

from pagedattn_serve.scheduling.prompt_pace import MEASURE_EVERY, MIN_LONE_TOKENS, PromptPace
from pagedattn_serve.scheduling.sequence import ScheduledBatch, SequenceGroup

DECODE_SECONDS = 0.01
BUDGET = 64  # tokens of a step
# Seconds for a token of a prompt, and the tokens before it that cost as much again: a CPU as measured, one a tenth as
# fast beside its decodes (int4 weights), and a GPU, for which all of the budget is next to nothing.
MACHINES = {"CPU": (0.001, 150), "slow": (0.01, 150), "GPU": (0.00001, 10_000)}
LENGTHS = {"CPU": 350, "slow": 80, "GPU": 500}  # of a prompt that takes some dozens of steps, or just a few


def set_clock(engine: FakeEngine, seconds_of: Callable[[ScheduledBatch], float]) -> None:
    """Batches take as long as this says, whatever they take."""
    mark_computed = engine.scheduler.mark_computed
    engine.scheduler.mark_computed = lambda batch, seconds=None: mark_computed(batch, seconds_of(batch))


def seconds_on(machine: str) -> Callable[[ScheduledBatch], float]:
    seconds, num_as_costly = MACHINES[machine]

    def seconds_of(batch: ScheduledBatch) -> float:
        prefill = sum(
            each.num_new_tokens * seconds * (1 + each.sequence.num_computed_tokens / num_as_costly)
            for each in batch.sequences
            if each.sequence.num_uncomputed_tokens > 1 or not each.sequence.output_token_ids
        )
        return DECODE_SECONDS + prefill

    return seconds_of


def make_busy(machine: str = "CPU", num_decodes: int = 8) -> FakeEngine:
    engine = make_engine(num_blocks=300, max_model_len=600, max_num_seqs=16, max_num_batched_tokens=BUDGET)
    set_clock(engine, seconds_on(machine))
    for _ in range(num_decodes):
        engine.add(4)
    for _ in range(4):
        engine.step()
    return engine


def num_of(batch: ScheduledBatch, group: SequenceGroup) -> int:
    return sum(num_tokens for sequence, num_tokens in ran(batch) if sequence in group.sequences)


def num_steps_to_first_token(engine: FakeEngine, group: SequenceGroup) -> int:
    for num_steps in range(1, 1000):
        engine.step()
        if group.has_forked:
            return num_steps
    raise AssertionError("it never started")


@pytest.mark.parametrize("machine", MACHINES)
def test_steps_beside_a_long_prompt_take_three_times_as_long_at_most(machine: str) -> None:
    engine = make_busy(machine)
    decodes = [group.sequences[0] for group in engine.groups]
    long = engine.add(LENGTHS[machine])
    seconds, chunks = [], []
    seconds_of = seconds_on(machine)
    set_clock(engine, lambda batch: seconds.append(seconds_of(batch)) or seconds[-1])
    while not long.has_forked:
        batch = engine.step()
        assert {sequence for sequence, num_tokens in ran(batch) if num_tokens == 1} >= set(decodes)
        chunks.append(num_of(batch, long))
    # The first chunk is a guess that is seen twice, a single token may take longer, and a second is tried now and then.
    too_long = [
        num_tokens
        for each, num_tokens in zip(seconds[2:], chunks[2:], strict=True)
        if each > 3 * DECODE_SECONDS and num_tokens > 1
    ]
    assert set(too_long) <= {2} and len(too_long) <= 2 * len(chunks) / MEASURE_EVERY
    assert machine != "CPU" or median(seconds) >= 2 * DECODE_SECONDS  # and the prompt gets most of the time
    assert machine != "GPU" or max(chunks) == BUDGET - len(decodes)
    # It never stays out of two steps in a row, and seldom of one.
    stays_out = [i for i, num_tokens in enumerate(chunks) if num_tokens == 0]
    assert len(stays_out) == len(chunks) // MEASURE_EVERY
    assert all(later - earlier == MEASURE_EVERY for earlier, later in pairwise(stays_out))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("num_decodes", [0, 8])
def test_a_newcomer_starts_within_two_steps(machine: str, num_decodes: int) -> None:
    engine = make_busy(machine, num_decodes)
    long = engine.add(500)
    for _ in range(4):
        engine.step()
    for _ in range(3):
        assert num_steps_to_first_token(engine, engine.add(20)) <= 2
    assert long.in_prefill


def test_alone_it_takes_the_whole_budget() -> None:
    engine = make_engine(num_blocks=50, max_model_len=300, max_num_batched_tokens=BUDGET)
    long = engine.add(250)
    assert [num_of(engine.step(), long) for _ in range(4)] == [BUDGET, BUDGET, BUDGET, 250 - 3 * BUDGET]
    assert long.has_forked


def test_alone_it_takes_about_a_second() -> None:
    """Who comes meanwhile waits for the end of the step."""
    pace = PromptPace(2560)
    assert pace.alone == 2560
    for num_tokens, seconds, expected in (
        (2560, 4.0, 640),
        (640, 10.0, MIN_LONE_TOKENS),
        (256, 0.2, 1280),
        (9, 0.02, 1280),  # a prompt's last tokens tell nothing of larger chunks
        (1280, 0, 2560),
    ):
        pace.observe_alone(num_tokens, seconds)
        assert pace.alone == expected
    small = PromptPace(100)
    small.observe_alone(100, 60.0)
    assert (small.alone, small.beside) == (100, 16)


def test_one_disturbed_step_does_not_lengthen_all_others() -> None:
    pace = PromptPace(2560)
    for seconds in (0.01, 0.5, 0.4):
        pace.observe_decodes(seconds)
    pace.observe_beside(16, 0.2)  # disturbed itself
    pace.observe_beside(16, 0.026)
    pace.observe_beside(16, 0.2)
    assert pace.beside == 16
    pace.observe_beside(16, 0.9)  # so it was not disturbed
    assert pace.beside == 1
    chunks = []
    for _ in range(6):
        pace.observe_beside(pace.beside, 0.01 + 0.001 * pace.beside)
        chunks.append(pace.beside)
    assert chunks == [2, 4, 8, 8, 8, 8]  # near the aim it is raised only once decodes were measured again
    pace.observe_decodes(0.01)
    pace.observe_beside(8, 0.018)
    assert pace.beside == 12
    pace.observe_beside(3, 0.011)  # a prompt's last tokens tell nothing of larger chunks
    assert pace.beside == 12


def test_what_fits_in_a_step_runs_at_once() -> None:
    engine = make_busy("slow")
    short = engine.add(BUDGET - 8)
    assert num_of(engine.step(), short) == BUDGET - 8 and short.has_forked


def test_steps_with_prompts_that_fit_do_not_tell_the_pace() -> None:
    engine = make_busy("slow")
    engine.add(BUDGET - 8)
    before = deepcopy(vars(engine.scheduler._pace))
    engine.step()
    assert vars(engine.scheduler._pace) == before


def test_long_prompts_run_one_after_the_other_and_short_ones_pass_who_waits() -> None:
    engine = make_busy()
    first, second = engine.add(100), engine.add(80)
    engine.step()
    assert engine.scheduler.waiting == [second]
    short = engine.add(20)
    batch = engine.step()
    assert num_of(batch, first) and num_of(batch, short) == 20 and engine.scheduler.waiting == [second]
    while first.in_prefill:
        engine.step()
        assert engine.scheduler.waiting == [second]
    batch = engine.step()
    assert num_of(batch, second) and not engine.scheduler.waiting


def test_the_second_of_two_long_prompts_that_begin_alike_finds_the_blocks_of_the_first() -> None:
    engine = make_busy()
    tokens = engine.new_tokens(104)
    first, second = engine.add(tokens), engine.add([*tokens, *engine.new_tokens(10)])
    while first.in_prefill:
        engine.step()
    engine.step()
    assert engine.scheduler.num_found_tokens == 104 and second.sequences[0].num_computed_tokens > 104


def test_once_the_first_is_through_nobody_passes_the_second() -> None:
    engine = make_engine(num_blocks=8, max_num_batched_tokens=16, max_model_len=64)
    first, second = engine.add(20, max_tokens=20), engine.add(44)
    engine.step()
    passing = engine.add(1, max_tokens=2)
    engine.step()
    late = engine.add(1, max_tokens=2)
    assert passing.has_forked and first.has_forked
    num_steps = 0
    while second in engine.scheduler.waiting:
        assert engine.scheduler.waiting == [second, late]
        engine.step()
        num_steps += 1
    assert num_steps > 5, "it had room at once"
    engine.drain()


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """Its share alone would be a token a step: 200 steps."""
    engine = make_busy("slow", num_decodes=1)
    engine.scheduler._pace.beside = 1
    long = engine.add(200)
    num_steps = 0
    while not long.has_forked:
        engine.add(BUDGET - 10, max_tokens=1)
        engine.step()
        num_steps += 1
    assert num_steps <= 20


def test_a_better_long_prompt_comes_before_a_worse_one() -> None:
    engine = make_engine(num_blocks=60, max_model_len=300, max_num_batched_tokens=BUDGET, policy="priority")
    engine.add(4, max_tokens=40)
    worse = engine.add(200, max_tokens=2)
    engine.step()
    engine.step()
    better = engine.add(100, max_tokens=2, priority=-1)
    while not better.has_forked:
        num_before = worse.num_uncomputed_tokens
        engine.step()
        assert worse.num_uncomputed_tokens == num_before or better.has_forked
    engine.drain()


def test_several_sequences_come_to_their_ends_where_a_share_is_a_single_token() -> None:
    engine = make_engine(num_blocks=60, max_num_seqs=9, max_num_batched_tokens=40, enable_prefix_caching=False)
    engine.scheduler._pace.beside = 1  # and stays, as nobody says what steps take
    other = engine.add(1, max_tokens=62)
    group = engine.add(9, max_tokens=6, n=6)
    while not group.has_forked:
        engine.step()
    engine.scheduler._preempt_last(ScheduledBatch())
    assert group.in_prefill and group.num_uncomputed_tokens > 40
    while group.sequences:
        engine.step()
    assert other.sequences, "it ended only when it was alone"
