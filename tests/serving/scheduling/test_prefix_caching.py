"""Scheduler, found prefixes: by later requests, within one step, after a preemption, of groups; pins.

The fake engine checks at each step that a block holds what it is found by.
"""

from typing import Any

import pytest
from fake_engine import FakeEngine, make_engine, ran

from pagedattn_serve.scheduling.sequence import Sequence


def add(engine: FakeEngine, prompt: list[int], max_tokens: int = 1000, **options: Any) -> Sequence:
    """A request's first sequence."""
    return engine.add(prompt, max_tokens, **options).sequences[0]


def test_a_later_request_computes_only_what_is_new() -> None:
    engine = make_engine()
    prefix = engine.new_tokens(16)
    a = add(engine, [*prefix, *engine.new_tokens(4)])
    engine.step()
    b = add(engine, [*prefix, *engine.new_tokens(6)])
    batch = engine.step()
    assert ran(batch) == [(a, 1), (b, 6)]
    assert engine.manager.block_table(a)[:2] == engine.manager.block_table(b)[:2]
    assert (engine.scheduler.num_looked_up_tokens, engine.scheduler.num_found_tokens) == (42, 16)
    engine.drain()


def test_blocks_are_found_when_nobody_uses_them() -> None:
    engine = make_engine()
    prompt = engine.new_tokens(20)
    add(engine, prompt, max_tokens=1)
    engine.drain()
    assert (engine.manager.num_used_blocks, engine.manager.num_cached_blocks) == (0, 2)
    b = add(engine, prompt)
    assert ran(engine.step()) == [(b, 4)]


def test_outputs_are_found_too() -> None:
    """As of a chat, whose next prompt begins with the last prompt and its answer."""
    engine = make_engine()
    prompt = engine.new_tokens(10)
    a = add(engine, prompt, max_tokens=10)
    engine.drain()
    b = add(engine, [*prompt, *a.output_token_ids, *engine.new_tokens(3)], max_tokens=1)
    assert ran(engine.step()) == [(b, 7)]  # two blocks are full: the last token of an output is never computed


@pytest.mark.parametrize("num_tokens", [8, 16, 17, 23])
def test_a_hit_on_the_whole_prompt_leaves_its_last_token_to_compute(num_tokens: int) -> None:
    """A trap: at a multiple of the block size nothing would be left to compute, and no logits to sample from."""
    engine = make_engine()
    prompt = engine.new_tokens(num_tokens)
    add(engine, prompt, max_tokens=2)
    engine.drain()
    again = add(engine, prompt, max_tokens=1)
    batch = engine.step()
    assert ran(batch) == [(again, num_tokens - (num_tokens - 1) // 8 * 8)]
    assert batch.sequences[0].num_samples == 1 and len(again.output_token_ids) == 1


def test_what_is_computed_in_a_step_is_found_in_the_same_step() -> None:
    engine = make_engine()
    prompt = engine.new_tokens(20)
    a, b = add(engine, prompt), add(engine, prompt)
    c = add(engine, [*prompt[:8], *engine.new_tokens(3)])
    batch = engine.step()
    assert ran(batch) == [(a, 20), (b, 4), (c, 3)]
    one, two, three = map(engine.manager.block_table, (a, b, c))
    assert two[:2] == one[:2] and three[:1] == one[:1]


def test_only_what_is_scheduled_is_found() -> None:
    """Of a prompt in chunks, those blocks that the chunks so far have filled."""
    engine = make_engine(max_num_batched_tokens=12)
    prompt = engine.new_tokens(30)
    a = add(engine, prompt)
    engine.step()
    [table] = engine.manager.prefixes.find(engine.manager.prefixes.hashes(a, 3))
    assert len(table) == 1  # 12 tokens
    engine.step()
    [table] = engine.manager.prefixes.find(a.block_hashes)
    assert len(table) == 3  # 24 tokens
    engine.drain()


def test_a_block_computed_twice_at_once_ends_as_one() -> None:
    """A trap: it is freed while it is in use, or twice."""
    engine = make_engine(num_blocks=8, max_num_batched_tokens=14)
    prompt = engine.new_tokens(8)
    a, b = add(engine, prompt[:7]), add(engine, prompt[:7])
    engine.step()
    assert engine.manager.num_used_blocks == 2  # neither was full, so nothing was found
    for sequence in (a, b):
        sequence.output_token_ids[:] = prompt[7:]
        engine.runner.values_of.pop(sequence)
    engine.step()
    assert engine.manager.num_used_blocks == 1 and engine.num_times["merged"] == 1
    engine.step()
    one, two = (list(engine.manager.block_table(sequence)) for sequence in (a, b))
    assert one[0] == two[0] and one[1] != two[1]
    engine.scheduler.abort(a.request_id)
    engine.check()
    assert engine.manager.block_table(b)[0] == one[0]
    engine.scheduler.abort(b.request_id)
    engine.check()
    assert engine.manager.num_free_blocks == 8


def test_the_block_that_another_was_to_be_merged_with_may_be_evicted_in_the_step() -> None:
    """a fills a block whose equal is cached; in the same step c takes that one, which was the last free."""
    engine = make_engine(num_blocks=5, max_model_len=24, watermark=0.0)
    prompt = engine.new_tokens(8)
    add(engine, prompt, max_tokens=1)
    engine.drain()
    a, c = add(engine, prompt[:7], max_tokens=3), add(engine, engine.new_tokens(16), max_tokens=3)
    add(engine, engine.new_tokens(8), max_tokens=1)
    engine.step()
    a.output_token_ids[:] = prompt[7:]
    engine.runner.values_of.pop(a)
    add(engine, engine.new_tokens(8), max_tokens=3)
    engine.step()
    assert engine.manager.block_table(c)[2:] and engine.manager.num_cached_blocks == 0
    engine.drain()
    assert ran_after(engine, [*prompt, 0]) == 1


def ran_after(engine: FakeEngine, prompt: list[int]) -> int:
    """How many tokens of a prompt are computed."""
    add(engine, prompt, max_tokens=1)
    return engine.step().num_tokens


def test_who_was_used_longest_ago_is_forgotten_first() -> None:
    engine = make_engine(num_blocks=6, max_model_len=40, watermark=0.0)
    prompts = [engine.new_tokens(9) for _ in range(3)]
    for prompt in (*prompts, prompts[0]):
        add(engine, prompt, max_tokens=1)
        engine.drain()
    assert engine.manager.num_cached_blocks == 3
    add(engine, engine.new_tokens(25), max_tokens=1)  # the three free blocks, and one more
    engine.drain()
    assert ran_after(engine, prompts[0]) == 1
    assert ran_after(engine, prompts[2]) == 1
    assert ran_after(engine, prompts[1]) == 9


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    """A trap: its output is found as well as its prompt, and its last token is computed all the same."""
    engine = make_engine(num_blocks=5, max_model_len=32)
    a, b = add(engine, engine.new_tokens(8)), add(engine, engine.new_tokens(8))
    for _ in range(9):
        engine.step()
    assert engine.step().preempted
    assert b.num_tokens == 17 and b.num_computed_tokens == 0
    engine.scheduler.abort(a.request_id)
    assert ran(engine.step()) == [(b, 1)] and len(b.output_token_ids) == 10
    # What a preempted request finds is not what prompts found.
    assert (engine.scheduler.num_looked_up_tokens, engine.scheduler.num_found_tokens) == (16, 0)
    engine.drain()


def test_a_preempted_request_finds_what_is_left_of_its_blocks() -> None:
    engine = make_engine(num_blocks=4, max_model_len=32)
    a, b = add(engine, engine.new_tokens(8), max_tokens=17), add(engine, engine.new_tokens(8))
    while a.output_token_ids[16:] == []:
        engine.step()
    assert b.num_tokens == 17  # a has taken one of its two blocks, the second
    assert ran(engine.step()) == [(b, 9)]
    engine.drain()


def test_a_swapped_out_group_finds_its_blocks_on_the_device_again() -> None:
    engine = make_engine(num_host_blocks=20)
    engine.add(31, max_tokens=3)
    group = engine.add(20, n=2)
    while not (batch := engine.step()).preempted:
        pass
    assert batch.preempted == [group] and len(batch.blocks_to_swap_out) == 4
    engine.step()
    batch = engine.step()
    assert ran(batch) == [(sequence, 1) for sequence in group.sequences]
    # Nobody took the prompt's two full blocks: only the two that are not full come back.
    assert [src for src, _ in batch.blocks_to_swap_in] == []
    engine.drain()


def test_groups_share_prefixes() -> None:
    engine = make_engine(num_blocks=16)
    prompt = engine.new_tokens(20)
    first, second = engine.add(prompt, n=3), engine.add(prompt, n=2)
    batch = engine.step()
    assert ran(batch) == [(first.sequences[0], 20), (second.sequences[0], 4)]
    engine.step()
    assert engine.manager.num_used_blocks == 2 + 3 + 2
    engine.drain()


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = make_engine(enable_prefix_caching=False)
    prompt = engine.new_tokens(20)
    a, b = add(engine, prompt, max_tokens=1), add(engine, prompt, max_tokens=1)
    assert ran(engine.step()) == [(a, 20), (b, 20)]
    assert (engine.scheduler.num_looked_up_tokens, engine.manager.num_cached_blocks) == (0, 0)


def test_nothing_is_found_for_a_prompt_whose_logprobs_are_asked_for() -> None:
    engine = make_engine()
    prompt = engine.new_tokens(12)
    add(engine, prompt, max_tokens=1)
    engine.drain()
    asking, other = add(engine, prompt, prompt_logprobs=0), add(engine, prompt)
    assert ran(engine.step()) == [(asking, 12), (other, 4)]
    engine.drain()


def test_an_abort_leaves_what_was_computed_and_a_restart_nothing() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    prompt = engine.new_tokens(30)
    add(engine, prompt)
    engine.step()
    engine.scheduler.abort("request 0")
    assert engine.manager.num_cached_blocks == 2
    assert ran_after(engine, prompt) == 14
    engine.interrupt()
    assert engine.manager.num_cached_blocks == 0
    engine.drain()


# ---- pins -----------------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_is_computed_once_and_kept() -> None:
    engine = make_engine(num_blocks=6, max_model_len=32)
    prefix = engine.new_tokens(19)
    assert engine.scheduler.pin_prefix(prefix) == 16
    add(engine, [*prefix, 0], max_tokens=1)
    engine.drain()
    add(engine, engine.new_tokens(31), max_tokens=1)  # all other blocks
    engine.drain()
    assert ran_after(engine, [*prefix, 1]) == 4


def test_a_pin_survives_an_interrupt() -> None:
    engine = make_engine(num_blocks=6, max_model_len=32)
    prefix = engine.new_tokens(16)
    engine.scheduler.pin_prefix(prefix)
    for _ in range(2):
        assert ran_after(engine, [*prefix, 1]) == 17
        assert ran_after(engine, [*prefix, 1]) == 1
        add(engine, engine.new_tokens(31), max_tokens=1)
        engine.drain()
        assert engine.num_pinned_blocks() == 2
        engine.interrupt()
        assert engine.num_pinned_blocks() == 0


def test_pins_leave_room_for_one_sequence() -> None:
    engine = make_engine(num_blocks=6, max_model_len=32)
    assert engine.scheduler.pin_prefix(engine.new_tokens(23)) == 16
    with pytest.raises(ValueError, match=r"prefix: expected registered prefixes to take at most 2 blocks, .* got 3"):
        engine.scheduler.pin_prefix(engine.new_tokens(8))
