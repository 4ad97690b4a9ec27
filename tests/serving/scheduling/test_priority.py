"""Scheduler, order of service: by priority, and that nobody starves, with either policy."""

import pytest
from fake_engine import FakeEngine, make_engine, ran

from pagedattn_serve.scheduling import group_queues
from pagedattn_serve.scheduling.sequence import SequenceGroup


def running(engine: FakeEngine) -> list[SequenceGroup]:
    return engine.scheduler.running


def test_the_lower_priority_is_served_first_and_equals_in_order_of_arrival() -> None:
    engine = make_engine(policy="priority", max_num_seqs=1)
    groups = [engine.add(4, max_tokens=1, priority=priority) for priority in (1, 0, -1, 0, -1)]
    served = []
    while engine.scheduler.has_unfinished:
        [(sequence, _)] = ran(engine.step())
        served.append(int(sequence.request_id.split()[1]))
    assert served == [2, 4, 1, 3, 0] and len(groups) == 5


def test_a_better_one_takes_the_place_of_the_worst() -> None:
    engine = make_engine(policy="priority", max_num_seqs=2)
    a, b = engine.add(4, priority=0), engine.add(4, priority=5)
    engine.step()
    better = engine.add(4, priority=1)
    batch = engine.step()
    assert batch.preempted == [b] and running(engine) == [a, better] and engine.scheduler.waiting == [b]
    worse = engine.add(4, priority=9)
    assert not engine.step().preempted and engine.scheduler.waiting == [b, worse]
    engine.drain()


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_better_one_takes_the_tokens_of_the_worst(preemption_mode: str) -> None:
    """Where decodes fill the whole step. The worst comes back when the better one has ended."""
    engine = make_engine(
        policy="priority", preemption_mode=preemption_mode, num_host_blocks=8, max_num_seqs=4, max_num_batched_tokens=2
    )
    a, b = engine.add(1, priority=0), engine.add(1, priority=5)
    engine.step()
    better = engine.add(3, max_tokens=2, priority=1)
    batch = engine.step()
    assert batch.preempted == [b] and running(engine) == [a, better]
    for _ in range(3):
        assert not engine.step().preempted
    assert not better.sequences
    engine.step()
    assert running(engine) == [a, b]
    engine.drain()


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_better_one_takes_the_blocks_of_the_worst(preemption_mode: str) -> None:
    engine = make_engine(policy="priority", preemption_mode=preemption_mode, num_host_blocks=8)
    groups = [engine.add(15, priority=priority) for priority in (0, 3, 2)]
    engine.step()
    assert running(engine) == [groups[0], groups[2], groups[1]]
    better = engine.add(15, priority=1)
    batch = engine.step()
    assert batch.preempted == [groups[1]] and running(engine) == [groups[0], better, groups[2]]
    assert engine.scheduler.num_swaps == (preemption_mode == "swap")
    engine.drain()


def test_one_that_is_best_may_take_all_blocks() -> None:
    engine = make_engine(policy="priority")
    groups = [engine.add(15, max_tokens=30) for _ in range(3)]
    engine.step()
    best = engine.add(60, max_tokens=2, priority=-1)
    batch = engine.step()
    assert batch.preempted == groups[::-1] and running(engine) == [best]
    engine.drain()


def test_nobody_is_preempted_for_one_of_the_same_priority() -> None:
    engine = make_engine(policy="priority", max_num_seqs=1)
    first = engine.add(4, max_tokens=5, priority=1)
    engine.add(4, max_tokens=5, priority=1)
    for _ in range(5):
        assert not engine.step().preempted
    assert not first.sequences
    engine.drain()


def test_a_group_makes_place_as_a_whole() -> None:
    engine = make_engine(policy="priority", max_num_seqs=4, num_host_blocks=8)
    group = engine.add(4, n=3, priority=1)
    engine.step()
    engine.add(4, n=2)
    assert engine.step().preempted == [group]
    assert engine.scheduler.swapped == [group] and len(group.sequences) == 3
    engine.drain()


def num_served_before(engine: FakeEngine, waiting: SequenceGroup, priority: int) -> int:
    """How many of an endless stream of requests are served before one that waits."""
    for num_served in range(1000):
        engine.add(1, max_tokens=2, priority=priority)
        engine.step()
        if waiting in running(engine):
            return num_served
        engine.step()
    raise AssertionError("it starves")


@pytest.mark.parametrize("levels", [1, 3])
def test_a_stream_of_better_ones_passes_only_so_often(monkeypatch: pytest.MonkeyPatch, levels: int) -> None:
    monkeypatch.setattr(group_queues, "PLACES_PER_PRIORITY", 20)
    engine = make_engine(policy="priority", max_num_seqs=1)
    worse = engine.add(1, priority=0)
    num_served = num_served_before(engine, worse, -levels)
    assert num_served == 20 * levels - 1 or num_served == 20 * levels
    engine.drain()


def test_nobody_passes_with_fcfs() -> None:
    """A large request waits for its turn, and a stream of small ones behind it does not take its room."""
    engine = make_engine(max_num_seqs=8)
    engine.add(20, max_tokens=10)
    large = engine.add(62, max_tokens=1)
    small = []
    while large.sequences:
        small.append(engine.add(1, max_tokens=2))
        engine.step()
    assert all(group.sequences for group in small) and len(small) == 11
    engine.drain()


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_is_not_passed_by_a_stream(preemption_mode: str, policy: str) -> None:
    engine = make_engine(
        num_blocks=4, max_model_len=32, preemption_mode=preemption_mode, num_host_blocks=4, policy=policy
    )
    first, second = engine.add(8, max_tokens=14), engine.add(8)
    num_steps = 0
    while first.sequences or second not in running(engine):
        engine.add(1, max_tokens=1)
        engine.step()
        num_steps += 1
    assert second.num_preemptions == 1 and num_steps <= 16
    engine.drain()
