"""Outputs are the caller's own: whatever he does to one changes neither the engine nor another output."""

import copy
import dataclasses
import pickle
import tracemalloc
from typing import Any

import pytest
from checkpoints import BEGINNING, SMALL, Checkpoint, run, speak

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=2)


def steps(engine: LLMEngine, prompts: list[list[int]], spoil: Any = None) -> dict[str, list[RequestOutput]]:
    """All outputs of each request, the engine's last word for an aborted one among them."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), sampling_params=PARAMS, prompt_token_ids=prompt)
    outputs: dict[str, list[RequestOutput]] = {}

    def take(output: RequestOutput) -> None:
        outputs.setdefault(output.request_id, []).append(copy.deepcopy(output))
        if spoil is not None:
            spoil(output)

    while engine.has_unfinished_requests():
        for output in engine.step():
            take(output)
        if len(outputs.get("1", [])) == 5 and (aborted := engine.abort_request("1")) is not None:
            take(aborted)
    return outputs


def spoil(output: RequestOutput) -> None:
    """Everything that can be written, in every depth."""
    output.prompt_token_ids[:] = [10**9] * 200
    output.metrics.arrival_time = output.metrics.first_token_time = output.metrics.finished_time = -1.0
    [completion] = output.outputs
    assert completion.logprobs is not None
    for entries in completion.logprobs:
        for entry in entries.values():
            entry.logprob, entry.rank, entry.decoded_token = 5.0, -3, "spoiled"
        entries.clear()
    completion.logprobs.clear()
    completion.token_ids.extend([10**9] * 200)
    completion.cumulative_logprob, completion.text, completion.finish_reason = 7.0, "spoiled", "spoiled"
    output.outputs.clear()


def test_nothing_that_a_caller_does_to_an_output_matters(llama: Checkpoint) -> None:
    expected, spoiled = (steps(LLMEngine(llama.path, **SMALL), llama.prompts, how) for how in (None, spoil))
    assert spoiled == expected and len(expected["0"]) == 12
    for outputs in spoiled.values():
        for output in outputs:
            assert 0 < output.metrics.arrival_time < (output.metrics.first_token_time or 0)
            assert (output.metrics.finished_time is not None) == output.finished


def test_outputs_do_not_share_what_they_are_first_asked_for_later(llama: Checkpoint) -> None:
    """Kept, and looked at when all is over: each is as it was when it was given out."""
    engine = LLMEngine(llama.path)
    expected = steps(engine, llama.prompts[:1])["0"]
    engine.add_request("0", sampling_params=PARAMS, prompt_token_ids=llama.prompts[0])
    kept = [output for _ in range(12) for output in engine.step()]
    spoil(kept[-1])
    spoil(kept[3])
    del kept[-1], kept[3], expected[-1], expected[3]
    assert kept == expected
    assert [len(output.outputs[0].token_ids) for output in kept] == [1, 2, 3, *range(5, 12)]


def test_the_prompt_of_the_caller_is_copied(llama: Checkpoint) -> None:
    prompt = list(llama.prompts[2])
    engine = LLMEngine(llama.path)
    engine.add_request("0", sampling_params=PARAMS, prompt_token_ids=prompt)
    [output] = engine.step()
    prompt.append(3)
    assert output.prompt_token_ids == llama.prompts[2]


def test_an_output_is_a_plain_dataclass(llama: Checkpoint) -> None:
    """To be compared, printed, copied, pickled and made by hand, looked at before or not."""
    engine = LLMEngine(llama.path)
    outputs = [steps(engine, llama.prompts[:1])["0"][-1] for _ in range(2)]
    engine.add_request("0", sampling_params=PARAMS, prompt_token_ids=llama.prompts[0])
    fresh = [output for _ in range(12) for output in engine.step()][-1]
    for output in (*outputs, fresh):
        by_hand = RequestOutput(
            request_id="0",
            prompt=None,
            prompt_token_ids=llama.prompts[0],
            outputs=[
                CompletionOutput(
                    index=0,
                    text="",
                    token_ids=llama.expected[0][:12],
                    cumulative_logprob=output.outputs[0].cumulative_logprob,
                    logprobs=output.outputs[0].logprobs,
                    finish_reason="length",
                )
            ],
            finished=True,
            metrics=RequestMetrics(0.0),
        )
        assert pickle.loads(pickle.dumps(output)) == copy.copy(output) == copy.deepcopy(output) == output == by_hand
        assert pickle.loads(pickle.dumps(by_hand)) == by_hand
        assert dataclasses.replace(output, finished=False) != output
        assert dataclasses.asdict(output)["outputs"][0]["token_ids"] == llama.expected[0][:12]
        assert repr(output).startswith("RequestOutput(request_id='0', prompt=None, prompt_token_ids=[")
        assert [field.name for field in dataclasses.fields(output)] == [
            "request_id", "prompt", "prompt_token_ids", "outputs", "finished", "metrics", "error", "prompt_logprobs",
        ]  # fmt: skip
        with pytest.raises(AttributeError, match="'RequestOutput' object has no attribute 'text'"):
            output.text  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(AttributeError):
            output.outputs[0].anything = 1  # type: ignore[attr-defined]
    assert Logprob(-1.0, 2) == Logprob(-1.0, 2, None)


def test_logprobs_that_nobody_reads_take_little_memory(speaker: LLMEngine) -> None:
    """20 bytes for each token that is reported; as objects, 64 outputs of 430 tokens were 700 MB."""
    params = SamplingParams(temperature=0, n=4, max_tokens=30, logprobs=20, prompt_logprobs=20, ignore_eos=True)
    run(speaker, [BEGINNING], params)  # once before, for what is kept for all requests
    tracemalloc.start()
    try:
        [output] = run(speaker, [BEGINNING], params)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert output.prompt_logprobs is not None
    entries = [each for completion in output.outputs for each in completion.logprobs or ()]
    entries += [each for each in output.prompt_logprobs if each is not None]
    assert num_bytes < 60 * sum(map(len, entries))


def test_no_logprobs_stay_none(speaker: LLMEngine) -> None:
    assert {output.outputs[0].logprobs is None for output in speak(speaker)} == {True}
    assert {len(output.outputs[0].logprobs or []) for output in speak(speaker, logprobs=0, max_tokens=2)} == {1, 2}
