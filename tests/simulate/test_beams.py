"""Beam search without logits: which beams survive, and what that means for the slots of each system."""

from typing import Any

import pytest
from simulated import request, scheduler_config

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_simulate.systems.faster_transformer import FasterTransformerSystem
from pagedattn_simulate.systems.orca import OrcaSystem
from pagedattn_simulate.systems.paged import PagedSystem
from pagedattn_simulate.systems.system import System
from pagedattn_simulate.workload import RequestForm, SimulatedBeams, SimulatedRequest, TraceEntry, requests_of


class ScriptedBeams(SimulatedBeams):
    """parents: of the beams after each step."""

    def __init__(self, *parents: list[int]) -> None:
        self._parents = [*parents]

    def step(self) -> list[int]:
        return self._parents.pop(0)


def beam_request(num_prompt: int, *parents: list[int]) -> SimulatedRequest:
    """As long as the script, and a last token."""
    made = request(num_prompt, len(parents) + 1, len(parents[0]))
    made.beams = ScriptedBeams(*parents)
    return made


def make_paged(num_blocks: int) -> PagedSystem:
    return PagedSystem(
        scheduler_config(), CacheConfig(num_blocks=num_blocks, block_size=8, enable_prefix_caching=False)
    )


def test_beams_share_what_their_parents_had() -> None:
    """A prompt of 9 tokens, and 2 beams. Both come from the prompt, and its second block is copied for one of them.
    Then each goes on, with blocks of its own; then both come from the second one, and its last block is copied."""
    system = make_paged(8)
    system.add(beam_request(9, [0, 0], [1, 0], [1, 1]))
    copied, saved = [], []
    while (work := system.begin_step()) is not None:
        copied.append(work.num_copied_tokens)
        saved.append(system.memory().saved)
        result = system.end_step(0.01)
        assert len(result.got_tokens) == 1
    assert copied == [0, 8, 0, 8]
    assert saved == [0, 8, 8, 8]
    assert len(result.finished) == 1 and len(result.finished[0].output_token_ids) == 4
    assert system.memory().free == 64


def test_beams_are_copied_whole_where_slots_are_adjacent() -> None:
    """After the prompt nothing is copied, as each beam has computed it. Then two beams of three come from others: the
    prompt of 9 and two tokens of output, for each."""
    systems: list[System] = [
        OrcaSystem(scheduler_config(), 256, "oracle"),
        FasterTransformerSystem(scheduler_config(), 256),
    ]
    for system in systems:
        system.add(beam_request(9, [0, 0, 0], [2, 2, 2], [0, 1, 2]))
        copied = []
        while (work := system.begin_step()) is not None:
            copied.append(work.num_copied_tokens)
            assert len(system.end_step(0.01).got_tokens) == 1
        assert copied == [0, 0, 2 * 10, 0]


def test_beams_of_one_token_take_no_step() -> None:
    system = make_paged(8)
    system.add(next(requests_of([TraceEntry(0.0, 5, 1)], RequestForm(beam_width=4))))
    system.begin_step()
    assert len(system.end_step(0.01).finished) == 1


def test_the_beams_of_a_seed() -> None:
    def steps(seed: int) -> list[list[int]]:
        beams = SimulatedBeams(4, 50, seed)
        return [beams.step() for _ in range(49)]

    assert steps(1) == steps(1) != steps(2)
    assert steps(1)[0] == [0] * 4  # from the prompt
    parents = steps(1)[1:]
    assert all(len(step) == 4 and set(step) <= set(range(4)) for step in parents)
    num_survivors = [len(set(step)) for step in parents]
    assert min(num_survivors) < 4 and max(num_survivors) > 1


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_beams_survive_preemption(preemption_mode: str) -> None:
    """Three searches in a cache for one or two of them."""
    limits: dict[str, Any] = {"preemption_mode": preemption_mode}
    cache = CacheConfig(num_blocks=12, block_size=8, num_host_blocks=12, enable_prefix_caching=False)
    system = PagedSystem(scheduler_config(**limits), cache)
    made = list(requests_of([TraceEntry(0.0, 20, 25)] * 3, RequestForm(beam_width=2)))
    for each in made:
        system.add(each)
    counts = dict.fromkeys(made, 0)
    while system.begin_step() is not None:
        assert min(system.memory()) >= 0
        for each in system.end_step(0.01).got_tokens:
            counts[each] += 1
    assert counts == dict.fromkeys(made, 25) and system.num_preemptions > 0
    assert not any(each.has_failed for each in made)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"beam_width": -1}, "beam_width: expected an int >= 0, got -1"),
        (
            {"beam_width": 2, "num_outputs": 2},
            "n: expected 1 with beam_width, as a beam search has one output here, got 2",
        ),
    ],
)
def test_wrong_forms(form: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        RequestForm(**form)
    assert str(raised.value) == message


def test_a_beam_that_is_too_wide() -> None:
    with pytest.raises(ArgumentError, match=r"beam_width: expected at most 32 \(max_beam_width\), got 33"):
        make_paged(64).add(next(requests_of([TraceEntry(0.0, 5, 5)], RequestForm(beam_width=33))))
