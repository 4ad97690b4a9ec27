"""The systems that the engine is compared with, on schedules made by hand; and the engine's own beside them."""

import pytest
from simulated import request, run, scheduler_config

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_simulate.cost_model import StepWork
from pagedattn_simulate.systems.faster_transformer import FasterTransformerSystem
from pagedattn_simulate.systems.orca import OrcaSystem
from pagedattn_simulate.systems.paged import PagedSystem
from pagedattn_simulate.systems.system import Memory, System


@pytest.mark.parametrize(
    ("reservation", "asked", "taken"),
    [("oracle", 3 + 5, 8), ("pow2", 3 + 8, 16), ("max", 64, 64)],
)
def test_what_orca_reserves(reservation: str, asked: int, taken: int) -> None:
    """A prompt of 3 tokens with 5 of output. The buddy allocator rounds up what is asked for."""
    system = OrcaSystem(scheduler_config(), 128, reservation)
    system.add(request(3, 5))
    assert system.num_reserved(request(3, 5)) == asked
    system.begin_step()
    assert system.memory() == Memory(used=3, reserved=5, internal=taken - 8, free=128 - taken, saved=0)
    system.end_step(0.01)
    assert system.memory().used == 4 and system.memory().reserved == 4


def test_orca_never_reserves_more_than_the_longest_sequence() -> None:
    assert OrcaSystem(scheduler_config(), 128, "pow2").num_reserved(request(30, 33)) == 64


def test_orca_lets_in_when_a_reservation_fits() -> None:
    """Two of three have room. When the shorter one is done, the third comes into the next step: batches change at each
    step, and nobody waits for the longest."""
    system = OrcaSystem(scheduler_config(), 128, "max")
    for num_output in (6, 2, 3):
        system.add(request(4, num_output))
    assert run(system, 6) == [2, 2, 2, 2, 2, 1]
    assert system.begin_step() is None


def test_orca_is_first_come_first_served() -> None:
    """A short request does not pass a long one that has no room yet."""
    system = OrcaSystem(scheduler_config(), 64, "oracle")
    for num_prompt, num_output in ((20, 4), (30, 30), (2, 2)):
        system.add(request(num_prompt, num_output))
    assert run(system, 4) == [1, 1, 1, 1]
    assert system.num_waiting == 2


def test_orca_computes_prompts_whole_beside_decodes() -> None:
    """As many prompts as a step has room for, beside the decodes. The first comes in any case."""
    system = OrcaSystem(scheduler_config(max_num_batched_tokens=12), 256, "oracle")
    for num_prompt in (10, 5, 7):
        system.add(request(num_prompt, 4))
    works = []
    for _ in range(3):
        works.append(system.begin_step())
        system.end_step(0.01)
    assert works[0] == prompt_work(10)
    assert works[1] is not None and works[1].num_tokens == 1 + 5 and works[1].num_decode_keys == 11
    assert works[2] is not None and works[2].num_tokens == 2 + 7 and works[2].num_decode_keys == 12 + 6


def prompt_work(*lengths: int) -> StepWork:
    work = StepWork()
    for length in lengths:
        work.add_prompt(0, length, 1)
    return work


def test_outputs_of_a_request_share_nothing_in_orca() -> None:
    system = OrcaSystem(scheduler_config(), 32, "oracle")
    system.add(request(4, 4, num_sequences=3))
    system.add(request(4, 12))
    assert system.begin_step() == prompt_work(4, 4, 4)
    assert system.memory() == Memory(used=12, reserved=12, internal=0, free=8, saved=0)
    assert len(system.end_step(0.01).got_tokens) == 3


@pytest.mark.parametrize("reservation", ["oracle", "max"])
def test_a_request_that_orca_can_never_serve_is_an_error(reservation: str) -> None:
    """Two ranges of 32 or more are not in 48 slots, which are ranges of 32 and 16. It would wait for ever."""
    system = OrcaSystem(scheduler_config(), 48, reservation)
    with pytest.raises(ArgumentError, match="request: expected what 48 slots and 256 sequences have room for, got 2 x"):
        system.add(request(20, 10, num_sequences=2))


def test_fastertransformer_waits_for_the_longest() -> None:
    """Two rows have room. The first batch runs 6 steps, for its longest output; then the third request has its turn."""
    system = FasterTransformerSystem(scheduler_config(), 128 + 63)
    requests = [request(4, 6), request(9, 2), request(4, 3)]
    for each in requests:
        system.add(each)
    assert system.begin_step() == prompt_work(9, 9)  # padded
    assert system.memory() == Memory(used=13, reserved=8, internal=128 - 21, free=63, saved=0)
    assert system.end_step(0.01).got_tokens == requests[:2]
    work = system.begin_step()
    assert work is not None and work.num_decode_keys == 2 * 10
    assert system.end_step(0.01).finished == []  # the second request has all of its tokens, and waits
    assert run(system, 3) == [2, 2, 2]
    system.begin_step()
    assert system.end_step(0.01)[:2] == ([requests[0]], requests[:2])
    assert run(system, 3) == [1, 1, 1]
    assert system.begin_step() is None


def test_rows_of_fastertransformer_are_outputs() -> None:
    system = FasterTransformerSystem(scheduler_config(), 3 * 64)
    for _ in range(2):
        system.add(request(4, 2, num_sequences=2))
    assert run(system, 4) == [1, 1, 1, 1]
    with pytest.raises(ArgumentError, match="request: expected at most 3 sequences, each with 64 of 192 slots, got 4"):
        system.add(request(4, 2, num_sequences=4))


def make_paged(num_blocks: int, num_host_blocks: int = 0, **limits: object) -> PagedSystem:
    """limits: of the scheduler."""
    blocks = {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks}
    config = CacheConfig(**blocks, block_size=8, enable_prefix_caching=False)
    return PagedSystem(scheduler_config(**limits), config)


def test_the_engine_takes_blocks_as_tokens_come() -> None:
    """A prompt of 5 has one block; the block's other slots are for tokens to come, as far as any will."""
    system = make_paged(9)
    system.add(request(5, 2))
    assert system.begin_step() == prompt_work(5)
    system.end_step(0.01)
    work = system.begin_step()
    assert work is not None and work.num_decode_keys == 6
    assert system.memory() == Memory(used=5, reserved=2, internal=1, free=64, saved=0)
    assert len(system.end_step(0.01).finished) == 1
    assert system.begin_step() is None
    assert system.memory().free == 72


def test_outputs_of_a_request_share_blocks_in_the_engine() -> None:
    """The prompt's full block is kept once, by 3; the block with the end of the prompt is copied for two of them."""
    system = make_paged(10)
    system.add(request(12, 3, num_sequences=3))
    assert system.begin_step() == prompt_work_of_group(12, 3)
    assert len(system.end_step(0.01).got_tokens) == 3
    work = system.begin_step()
    assert work is not None and work.num_tokens == 3 and work.num_copied_tokens == 2 * 8
    assert system.memory().saved == 2 * 8
    system.end_step(0.01)
    system.begin_step()
    assert len(system.end_step(0.01).finished) == 1


def prompt_work_of_group(length: int, num_samples: int) -> StepWork:
    work = StepWork()
    work.add_prompt(0, length, num_samples)
    return work


def test_the_engine_preempts_and_all_outputs_come() -> None:
    """Two requests outgrow the cache together. The later one waits, and its tokens so far are computed again."""
    system = make_paged(8)
    for _ in range(2):
        system.add(request(20, 30))
    num_tokens = 0
    while system.begin_step() is not None:
        result = system.end_step(0.01)
        num_tokens += len(result.got_tokens) + result.num_going_on
    assert num_tokens == 60
    assert system.num_preemptions > 0


def test_swapped_blocks_are_moved_twice() -> None:
    """What is swapped out comes back, and nothing is computed again: each prompt token runs once."""
    system = make_paged(8, num_host_blocks=8, preemption_mode="swap")
    for _ in range(2):
        system.add(request(20, 30))
    num_swapped = num_tokens = 0
    while (work := system.begin_step()) is not None:
        num_swapped += work.num_swapped_tokens
        num_tokens += work.num_tokens
        system.end_step(0.01)
    assert num_swapped > 0 and num_swapped % (2 * 8) == 0
    assert num_tokens == 2 * (20 + 29)


def test_priorities() -> None:
    """With room for one, the request with the better priority makes the other one wait."""
    system = make_paged(9, max_num_seqs=1, policy="priority")
    late, early = request(4, 3), request(4, 3)
    late.priority = 1
    system.add(late)
    system.add(early)
    finished = []
    while system.begin_step() is not None:
        finished += system.end_step(0.01).finished
    assert finished == [early, late]


def test_a_group_that_outgrows_the_cache_fails_alone() -> None:
    system = make_paged(8)
    wide, narrow = request(30, 30, num_sequences=3), request(4, 4)
    system.add(wide)
    system.add(narrow)
    finished = []
    while system.begin_step() is not None:
        finished += system.end_step(0.01).finished
    assert finished == [wide, narrow] or finished == [narrow, wide]
    assert wide.has_failed and not narrow.has_failed


@pytest.mark.parametrize("name", ["paged", "orca", "fastertransformer"])
def test_every_output_gets_all_of_its_tokens(name: str) -> None:
    systems: dict[str, System] = {
        "paged": make_paged(24),
        "orca": OrcaSystem(scheduler_config(), 192, "pow2"),
        "fastertransformer": FasterTransformerSystem(scheduler_config(), 192),
    }
    system = systems[name]
    requests = [request(1 + 7 * i % 40, 1 + 5 * i % 23, 1 + i % 3) for i in range(30)]
    for each in requests:
        system.add(each)
    counts = dict.fromkeys(requests, 0)
    num_going_on = 0  # of the paged system, beside these
    finished = []
    while system.begin_step() is not None:
        memory = system.memory()
        assert min(memory) >= 0 and memory.used + memory.reserved + memory.internal + memory.free == 192
        result = system.end_step(0.01)
        for each in result.got_tokens:
            counts[each] += 1
        num_going_on += result.num_going_on
        finished += result.finished
    wanted = {each: each.num_output_tokens * each.num_sequences for each in requests}
    assert sum(counts.values()) + num_going_on == sum(wanted.values())
    if name == "paged":
        assert all(len(each.output_token_ids) == each.num_output_tokens for each in requests)
    else:
        assert counts == wanted
    assert sorted(map(id, finished)) == sorted(map(id, requests))
