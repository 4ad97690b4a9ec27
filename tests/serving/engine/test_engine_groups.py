"""Requests of several sequences, registered prefixes and priorities, as a caller of the engine meets them."""

import re
from dataclasses import replace
from typing import Any

import pytest
from checkpoints import Checkpoint
from engine_runs import finish_all, run

from pagedattn_serve import DEMO_MODEL, LLM
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def make_engine(llama: Checkpoint, **options: Any) -> LLMEngine:
    return LLMEngine(llama.path, block_size=8, max_model_len=64, **options)


def ids(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


# --- several sequences ---


def test_what_is_swapped_out_for_a_request_that_does_not_fit_comes_back() -> None:
    """In the step that swaps b out for a, a is found to need more than the whole cache: no sequence is left to run, and
    b's blocks have to be copied all the same. Else b goes on with what the host blocks held before: its text is wrong,
    and says something of a third request that was swapped out before."""
    engine = LLMEngine(DEMO_MODEL, dtype="float32", num_blocks=17, max_model_len=100, swap_space=0.1)
    prompts = {"a": [*range(5, 15)], "b": [*range(100, 105)]}
    params = {
        "a": SamplingParams(n=6, seed=1, max_tokens=60, ignore_eos=True),
        "b": SamplingParams(n=2, seed=5, max_tokens=40, ignore_eos=True),
    }

    def texts_of_b(*request_ids: str) -> list[str]:
        for each in request_ids:
            engine.add_request(each, None, params[each], prompts[each])
        outputs = finish_all(engine)
        if "a" in request_ids:
            assert outputs["a"][-1].error == "its sequences need more than all 17 blocks of the cache"
        return [completion.text for completion in outputs["b"][-1].outputs]

    alone = texts_of_b("b")
    assert texts_of_b("a", "b") == alone
    for third in ([*range(40, 45)], [*range(60, 70)]):
        prompts["b"], b = third, prompts["b"]
        texts_of_b("a", "b")
        prompts["b"] = b
        assert texts_of_b("a", "b") == alone
    assert engine.stats().num_swaps == 5


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_the_first_output_ends_first(llama: Checkpoint, first_to_end: int) -> None:
    """Its last token is its last one: the next tokens are those of the other output, which goes on to its end."""
    engine = make_engine(llama)
    params = SamplingParams(n=2, seed=3, max_tokens=12, ignore_eos=True)
    [free] = run(engine, llama.prompts[3:4], params)
    ends, goes_on = (ids(free)[i] for i in (first_to_end, 1 - first_to_end))
    place, stop = next((i, token) for i, token in enumerate(ends) if i > 1 and token not in [*ends[:i], *goes_on])
    [stopped] = run(engine, llama.prompts[3:4], replace(params, stop_token_ids=[stop]))
    expected = [ends[: place + 1], goes_on]
    assert ids(stopped) == [expected[i] for i in (first_to_end, 1 - first_to_end)]
    reasons = [completion.finish_reason for completion in stopped.outputs]
    assert [reasons[i] for i in (first_to_end, 1 - first_to_end)] == ["stop", "length"]


def test_best_of_returns_the_likeliest(llama: Checkpoint) -> None:
    engine = make_engine(llama)
    [every] = run(engine, llama.prompts[3:4], SamplingParams(n=6, seed=3, max_tokens=12))
    [best] = run(engine, llama.prompts[3:4], SamplingParams(n=2, best_of=6, seed=3, max_tokens=12))
    assert [completion.index for completion in every.outputs] == list(range(6))
    ranked = sorted(every.outputs, key=lambda completion: -completion.cumulative_logprob)
    assert ids(best) == [completion.token_ids for completion in ranked[:2]]
    assert [completion.index for completion in best.outputs] == [0, 1]


def test_the_sequences_of_a_request_end_one_by_one(llama: Checkpoint) -> None:
    """At a stop token; the others go on, and the blocks of those that are over are free."""
    engine = make_engine(llama)
    [free] = run(engine, llama.prompts[3:4], SamplingParams(n=4, seed=3, max_tokens=20, ignore_eos=True))
    stop = ids(free)[2][5]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in ids(free)]
    assert len({len(tokens) for tokens in expected}) > 1
    params = SamplingParams(n=4, seed=3, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    engine.add_request("a", sampling_params=params, prompt_token_ids=llama.prompts[3])
    num_sequences = []
    while engine.has_unfinished_requests():
        [output] = engine.step()
        num_sequences.append(engine.stats().num_running_sequences)
        unfinished = [completion for completion in output.outputs if completion.finish_reason is None]
        assert len(unfinished) == num_sequences[-1] and output.finished == (not unfinished)
    assert ids(output) == expected and num_sequences[0] == 4 and num_sequences == sorted(num_sequences, reverse=True)


def test_blocks_are_shared(llama: Checkpoint) -> None:
    engine = make_engine(llama)
    params = SamplingParams(n=4, seed=1, max_tokens=4, ignore_eos=True)
    engine.add_request("a", sampling_params=params, prompt_token_ids=llama.prompts[7])  # 40 tokens, 5 full blocks
    engine.step()
    assert (engine.stats().num_used_blocks, engine.stats().num_blocks_without_sharing) == (5, 20)
    engine.step()
    assert (engine.stats().num_used_blocks, engine.stats().num_blocks_without_sharing) == (5 + 4, 24)


@pytest.mark.parametrize("params", [dict(n=3, seed=1), dict(n=2, best_of=4, use_beam_search=True, temperature=0)])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_abort(llama: Checkpoint, params: dict[str, Any], num_steps: int) -> None:
    engine = make_engine(llama)
    engine.add_request("a", sampling_params=SamplingParams(**params), prompt_token_ids=llama.prompts[3])
    for _ in range(num_steps):
        engine.step()
    output = engine.abort_request("a")
    assert output is not None and output.finished
    assert {completion.finish_reason for completion in output.outputs} == {"abort"}
    assert {len(tokens) for tokens in ids(output)} == {num_steps}
    assert engine.stats().num_used_blocks == 0 and not engine.has_unfinished_requests()


def test_a_beam_ends_with_a_stop_token(llama: Checkpoint) -> None:
    engine = make_engine(llama)
    params: dict[str, Any] = dict(n=2, use_beam_search=True, temperature=0, max_tokens=6, ignore_eos=True)
    [output] = run(engine, [llama.prompts[3]], SamplingParams(**params))
    [first, second, *_] = ids(output)[0]
    short = SamplingParams(**params, stop_token_ids=[second], length_penalty=-1.0)  # short ones are better
    [output] = run(engine, [llama.prompts[3]], short)
    assert (ids(output)[0], output.outputs[0].finish_reason) == ([first, second], "stop")


def test_a_request_that_outgrows_what_registered_prefixes_leave(llama: Checkpoint) -> None:
    """It needs as many blocks as the cache has, so the error has to say where the others are."""
    engine = make_engine(llama, num_blocks=16)
    assert engine.register_prefix(llama.prompts[7]) == 40
    wide = SamplingParams(n=4, seed=1, max_tokens=30, ignore_eos=True)
    outputs: list[RequestOutput] = []
    for prompt, params in ((llama.prompts[7], GREEDY), ([3], wide)):
        engine.add_request("a", sampling_params=params, prompt_token_ids=prompt)
        while engine.has_unfinished_requests():
            outputs += engine.step()
    expected = "its sequences need more than all 16 blocks of the cache, 5 of which are for registered prefixes"
    assert outputs[-1].error == expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_request_that_outgrows_the_cache_ends_alone(llama: Checkpoint, mode: str) -> None:
    """Its four sequences need 4 * 6 blocks of their own; the other request is served, before and after."""
    engine = make_engine(llama, num_blocks=16, preemption_mode=mode)
    wide = SamplingParams(n=4, seed=1, max_tokens=None, ignore_eos=True)
    engine.add_request("wide", sampling_params=wide, prompt_token_ids=llama.prompts[3])
    for i in range(4):
        engine.add_request(str(i), sampling_params=GREEDY, prompt_token_ids=llama.prompts[i])
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
        engine.scheduler.block_manager.check_integrity()
    assert outputs["wide"].error == "its sequences need more than all 16 blocks of the cache"
    assert {completion.finish_reason for completion in outputs["wide"].outputs} == {"error"}
    assert min(len(tokens) for tokens in ids(outputs["wide"])) > 8  # kept
    assert [ids(outputs[str(i)]) for i in range(4)] == [[tokens] for tokens in llama.expected[:4]]
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize(
    ("options", "params", "message"),
    [
        (dict(max_num_seqs=3), dict(n=4), "n: expected at most 3 (max_num_seqs), got 4"),
        (
            dict(max_num_batched_tokens=3),
            dict(best_of=4),
            "best_of: expected at most 3 (max_num_batched_tokens), got 4",
        ),
        (
            dict(max_beam_width=3),
            dict(best_of=4, use_beam_search=True, temperature=0),
            "best_of: expected at most 3 (max_beam_width), got 4",
        ),
        (dict(num_blocks=8), dict(n=9), "n: expected at most 8 (blocks of the cache beside the prompt's), got 9"),
    ],
)
def test_too_many_sequences(llama: Checkpoint, options: dict[str, Any], params: dict[str, Any], message: str) -> None:
    engine = make_engine(llama, **options)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        engine.add_request("a", sampling_params=SamplingParams(**params), prompt_token_ids=[1, 2])
    assert not engine.has_unfinished_requests()


def test_a_beam_is_narrower_than_all_places(llama: Checkpoint) -> None:
    engine = make_engine(llama, num_blocks=64)
    beams: dict[str, Any] = dict(use_beam_search=True, temperature=0, max_tokens=1)
    with pytest.raises(ValueError, match=r"^n: expected at most 32 \(max_beam_width\), got 33$"):
        engine.add_request("a", sampling_params=SamplingParams(n=33, **beams), prompt_token_ids=[1, 2])
    engine.add_request("b", sampling_params=SamplingParams(n=32, **beams), prompt_token_ids=[1, 2])
    engine.add_request("c", sampling_params=SamplingParams(n=33, max_tokens=1), prompt_token_ids=[1, 2])  # no beam
    while engine.has_unfinished_requests():
        engine.step()


# --- prefixes ---


def test_registered_prefixes_are_kept(llama: Checkpoint) -> None:
    llm = LLM(llama.path, block_size=8, num_blocks=20, max_model_len=64)
    engine, prefix = llm.llm_engine, llama.prompts[5]  # 33 tokens
    assert llm.register_prefix(prefix) == 32
    llm.generate(llama.prompts * 2, GREEDY, use_tqdm=False)  # in which the other blocks are used again and again
    assert engine.stats().num_cached_blocks >= 4
    found = engine.stats().num_found_tokens
    [output] = llm.generate(prefix, GREEDY, use_tqdm=False)
    assert ids(output) == [llama.expected[5]] and engine.stats().num_found_tokens == found + 32
    engine.scheduler.block_manager.check_integrity()
    assert llm.register_prefix(prefix) == 32  # the same blocks
    assert llm.register_prefix([1, 2, 3]) == 0


def test_requests_share_with_those_of_their_salt(llama: Checkpoint) -> None:
    """And say the same, whomever they share with."""
    engine, prompt = make_engine(llama), llama.prompts[5]  # 33 tokens
    found = []
    for salt in ("", "a", "b", "a", ""):
        before = engine.stats().num_found_tokens
        engine.add_request("0", prompt_token_ids=prompt, sampling_params=GREEDY, cache_salt=salt)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert ids(outputs[0]) == [llama.expected[5]]
        found.append(engine.stats().num_found_tokens - before)
    assert found == [0, 0, 0, 32, 32]


def test_a_salt_has_no_registered_prefix(llama: Checkpoint) -> None:
    llm = LLM(llama.path, block_size=8, num_blocks=20, max_model_len=64)
    engine, prefix = llm.llm_engine, llama.prompts[5]
    assert llm.register_prefix(prefix) == 32
    engine.add_request("0", prompt_token_ids=prefix, sampling_params=GREEDY, cache_salt="a")
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats().num_found_tokens == 0


def test_a_prefix_that_cannot_be_kept(llama: Checkpoint) -> None:
    llm = LLM(llama.path, block_size=8, num_blocks=10, max_model_len=64)
    with pytest.raises(ValueError, match=r"^prefix: expected registered prefixes to take at most 2 blocks, .*, got 4$"):
        llm.register_prefix(llama.prompts[5])
    with pytest.raises(ValueError, match=r"^prefix: expected 1 to 63 tokens, got 64$"):
        llm.register_prefix([1] * 64)
    with pytest.raises(ValueError, match=r"^prefix: expected 1 to 63 tokens, got 0$"):
        llm.register_prefix([])
    llm = LLM(llama.path, enable_prefix_caching=False)
    with pytest.raises(ValueError, match=r"^enable_prefix_caching: expected True for prefixes to be kept, got False$"):
        llm.register_prefix([1] * 20)


def test_a_whole_prompt_in_the_cache(llama: Checkpoint) -> None:
    """Of a length that is a multiple of the block size: its last block is computed, so that there are logits."""
    engine = make_engine(llama)
    for _ in range(2):
        [output] = run(engine, llama.prompts[3:4], GREEDY)  # 16 tokens
        assert ids(output) == [llama.expected[3]]
    assert engine.stats().num_found_tokens == 8


# --- priorities ---


def test_priorities(llama: Checkpoint) -> None:
    engine = make_engine(llama, max_num_seqs=1, scheduling_policy="priority")
    for name, priority in [("first", 0), ("later", 1), ("soon", -1), ("sooner", -2)]:
        engine.add_request(name, sampling_params=GREEDY, prompt_token_ids=llama.prompts[3], priority=priority)
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == ["sooner", "soon", "first", "later"]


def test_a_better_request_takes_the_place_of_one_that_runs(llama: Checkpoint) -> None:
    engine = make_engine(llama, max_num_seqs=1, scheduling_policy="priority")
    engine.add_request("slow", sampling_params=GREEDY, prompt_token_ids=llama.prompts[3])
    engine.step()
    engine.add_request("urgent", sampling_params=GREEDY, prompt_token_ids=llama.prompts[4], priority=-1)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    assert [output.request_id for output in outputs] == ["urgent", "slow"]
    assert [ids(output) for output in outputs] == [[llama.expected[4]], [llama.expected[3]]]


def test_priorities_are_refused_where_nobody_looks_at_them(llama: Checkpoint) -> None:
    engine = make_engine(llama)
    with pytest.raises(ValueError, match=r'^priority: expected 0, as the scheduling policy is "fcfs", got -1$'):
        engine.add_request("a", prompt_token_ids=[1], priority=-1)
    with pytest.raises(ValueError, match=r"^scheduling_policy: expected one of fcfs, priority, got 'best'$"):
        make_engine(llama, scheduling_policy="best")
    with pytest.raises(ValueError, match=r"^preemption_mode: expected one of auto, recompute, swap, got 'none'$"):
        make_engine(llama, preemption_mode="none")
