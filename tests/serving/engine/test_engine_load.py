"""The engine under random load: requests of many kinds that come, run beside others, are aborted and preempted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from engine_runs import completions, run
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams

STRESS_LEN = 48
NUM_REQUESTS = 38


@dataclass(slots=True)
class Request:
    """alone: what comes out in an engine of its own."""

    prompt: str
    params: SamplingParams
    alone: CompletionOutput


@pytest.fixture(scope="module")
def get_request(text_model: str) -> Callable[[int], Request]:
    """get_request(i) for i < NUM_REQUESTS, of all kinds. The last three have no seed, so any tokens may come."""

    def alone(prompt: str, **params: Any) -> Request:
        sampling_params = SamplingParams(**params)
        [output] = run(LLMEngine(text_model, max_model_len=STRESS_LEN), [prompt], sampling_params)
        return Request(prompt, sampling_params, output.outputs[0])

    made = []
    prompts = ["e", "the cat", "🙂 and", "on the mat", "é" * 12, "the other story on the mat", "a hat; the end of it"]
    for i, prompt in enumerate(prompts):
        made.append(alone(prompt, temperature=0, max_tokens=20, logprobs=3 if i % 3 == 0 else None))
        text, ids = made[-1].alone.text, made[-1].alone.token_ids
        made.append(alone(prompt, temperature=0, max_tokens=None, stop=[text[7:9], "never"]))
        made.append(alone(prompt, temperature=0, max_tokens=20, stop_token_ids=[ids[11]], stop=["never"]))
        made.append(alone(prompt, temperature=0.9, seed=i, max_tokens=4 + 5 * i, top_p=0.8, logprobs=i))
        made.append(alone(prompt, temperature=1.5, seed=-i, max_tokens=12, min_p=0.01, top_k=50))
    made += [alone("the", temperature=1.0, max_tokens=n, logprobs=2) for n in (1, 7, 15)]
    assert len(made) == NUM_REQUESTS

    def get(number: int) -> Request:  # Hypothesis would print the whole list
        return made[number]

    return get


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, NUM_REQUESTS - 1)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
)


@given(
    max_num_seqs=st.integers(1, 5),
    num_blocks=st.integers(6, 12),
    max_num_batched_tokens=st.integers(2, 40),
    events=st.lists(EVENTS, min_size=15, max_size=60),
)
def test_random_load(
    text_model: str,
    get_request: Callable[[int], Request],
    max_num_seqs: int,
    num_blocks: int,
    max_num_batched_tokens: int,
    events: list[tuple[str, int]],
) -> None:
    """Whatever else comes, goes, is preempted or aborted: each request gives what it gives alone."""
    engine = LLMEngine(
        text_model,
        block_size=8,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=STRESS_LEN,
    )
    manager = engine.scheduler.block_manager
    unfinished: dict[str, Request] = {}  # by request id, in the order of arrival
    num_added = 0

    def check(output: RequestOutput) -> None:
        request, completion = unfinished[output.request_id], output.outputs[0]
        params, expected = request.params, request.alone
        if not params.greedy and params.seed is None:
            assert params.max_tokens is not None and len(completion.token_ids) <= params.max_tokens
        elif completion.finish_reason in ("stop", "length"):
            assert completions([output]) == [(expected.text, expected.token_ids, expected.finish_reason)]
            assert completion.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
        else:
            assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
            # When aborted, it has the beginning of a stop string as well.
            full = expected.text + "".join(params.stop_strings) if output.finished else expected.text
            assert full.startswith(completion.text)
        if params.logprobs is None:
            assert completion.logprobs is None
        else:
            assert completion.logprobs is not None
            own = [entries[t].logprob for entries, t in zip(completion.logprobs, completion.token_ids, strict=True)]
            assert completion.cumulative_logprob == pytest.approx(sum(own), abs=1e-4)
        if output.finished:
            del unfinished[output.request_id]

    def step() -> None:
        for output in engine.step():
            check(output)
        manager.check_integrity()
        assert engine.stats().num_running <= max_num_seqs

    for event, number in events:
        if event == "add":
            request = unfinished[str(num_added)] = get_request(number)
            engine.add_request(str(num_added), request.prompt, request.params)
            num_added += 1
        elif event == "abort" and unfinished:
            aborted = engine.abort_request(list(unfinished)[number % len(unfinished)])
            assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
            check(aborted)
        elif event == "step":
            for _ in range(number):
                step()
    while engine.has_unfinished_requests():
        step()
    assert not unfinished and manager.num_used_blocks == 0
