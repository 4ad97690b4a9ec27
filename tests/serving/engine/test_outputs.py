"""Outputs are the caller's own: whatever he does to one changes neither the engine nor another output. What each of
them holds is said by `SamplingParams.output_kind`."""

import copy
import dataclasses
import pickle
import tracemalloc
from collections import Counter
from typing import Any

import pytest
import torch
from checkpoints import BEGINNING, SMALL, Checkpoint
from engine_runs import run, speak

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.llm import LLM
from pagedattn_serve.outputs import CompletionOutput, Logprob, PackedLogprobs, RequestMetrics, RequestOutput, cosine
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams

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
    """Everything that can be written, in every depth, but the prompt, which the outputs of a request share."""
    [completion] = output.outputs
    assert completion.logprobs is not None
    completion.logprobs.clear()
    completion.token_ids.extend([10**9] * 200)
    completion.cumulative_logprob, completion.text, completion.finish_reason = 7.0, "spoiled", "spoiled"
    output.outputs.clear()


def test_nothing_that_a_caller_does_to_an_output_matters(llama: Checkpoint) -> None:
    """With few blocks, so that requests are computed anew from what the engine keeps."""
    expected, spoiled = (steps(LLMEngine(llama.path, **SMALL), llama.prompts, how) for how in (None, spoil))
    assert spoiled == expected and len(expected["0"]) == 12
    for outputs in spoiled.values():
        for output in outputs:
            assert 0 < output.metrics.arrival_time < (output.metrics.first_token_time or 0)
            assert (output.metrics.finished_time is not None) == output.finished


def test_the_prompt_of_an_output_is_not_the_engine_s(llama: Checkpoint) -> None:
    def spoil_prompt(output: RequestOutput) -> None:
        output.prompt_token_ids[:] = [0] * 200

    expected, spoiled = (steps(LLMEngine(llama.path, **SMALL), llama.prompts, how) for how in (None, spoil_prompt))
    assert [each[-1].outputs for each in spoiled.values()] == [each[-1].outputs for each in expected.values()]


def test_outputs_do_not_share_their_lists(llama: Checkpoint) -> None:
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


def test_what_outputs_share_is_read_only(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path)
    output: Any = steps(engine, llama.prompts[:1])["0"][-1]
    with pytest.raises(AttributeError):
        output.metrics.arrival_time = -1.0
    [token_id, *_] = entries = output.outputs[0].logprobs[0]
    with pytest.raises(TypeError):
        entries[token_id] = Logprob(0.0, 1)
    with pytest.raises(AttributeError):
        entries[token_id].rank = 3


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
            "request_id", "prompt", "prompt_token_ids", "outputs", "finished", "metrics", "error",
            "argument_error", "prompt_logprobs", "embedding",
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


def test_packed_logprobs_are_a_mapping() -> None:
    texts = {5: "five", 7: "seven", 9: "nine"}
    plain = {7: Logprob(-0.5, 1, "seven"), 5: Logprob(-2.25, 3, "five")}
    packed = PackedLogprobs(plain, texts)
    assert packed == plain and list(packed) == [7, 5] and len(packed) == 2
    assert (packed[7], packed.get(9), 5 in packed, 9 in packed) == (plain[7], None, True, False)
    assert list(packed.values()) == list(plain.values()) and dict(packed) == dict(packed.items()) == plain
    assert repr(packed) == repr(plain) and packed != {7: plain[7]}
    for other in (copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert isinstance(other, PackedLogprobs) and other == plain and other.texts == {7: "seven", 5: "five"}
    assert PackedLogprobs({7: Logprob(-0.5, 1)})[7] == Logprob(-0.5, 1, None)


def test_no_logprobs_stay_none(speaker: LLMEngine) -> None:
    assert {output.outputs[0].logprobs is None for output in speak(speaker)} == {True}
    assert {len(output.outputs[0].logprobs or []) for output in speak(speaker, logprobs=0, max_tokens=2)} == {1, 2}


# ---- kinds ----------------------------------------------------------------------------------------------------------

WANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "stop": ["on the mat", "mat. The"], "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0, "stop": "on the mat", "include_stop_str_in_output": True},
    {"temperature": 1, "n": 3, "seed": 1, "max_tokens": 9, "logprobs": 0},
    {"temperature": 0, "detokenize": False, "max_tokens": 3},
]


def all_of(engine: LLMEngine, kind: RequestOutputKind, **params: Any) -> list[RequestOutput]:
    """All outputs of a request."""
    made = SamplingParams(**{"max_tokens": None, **params}, output_kind=kind)
    engine.add_request("a", BEGINNING, made)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


def summed(deltas: list[RequestOutput]) -> RequestOutput:
    first, *others = copy.deepcopy(deltas)
    for other in others:
        first.add(other)
    return first


@pytest.mark.parametrize("wants", WANTS, ids=lambda wants: " ".join(wants))
def test_each_kind_tells_the_same(speaker: LLMEngine, wants: dict[str, Any]) -> None:
    cumulative, deltas, final = (all_of(speaker, kind, **wants) for kind in RequestOutputKind)
    assert final == cumulative[-1:]
    assert len(deltas) == len(cumulative) > 2
    for i, so_far in enumerate(cumulative):
        assert summed(deltas[: i + 1]) == so_far
    num_tokens: Counter[int] = Counter()
    for delta in deltas:
        for completion in delta.outputs:
            num_tokens[completion.index] += len(completion.token_ids)
            assert len(completion.token_ids) == 1
    assert num_tokens == {each.index: len(each.token_ids) for each in final[0].outputs}


def test_a_delta_tells_an_end_once(speaker: LLMEngine) -> None:
    """And nothing of an output that has ended."""
    deltas = all_of(speaker, RequestOutputKind.DELTA, n=4, seed=3, temperature=100, stop=["a", "e"], max_tokens=20)
    lasts: dict[int, int] = {}
    for i, delta in enumerate(deltas):
        for completion in delta.outputs:
            assert completion.index not in lasts
            if completion.finish_reason is not None:
                lasts[completion.index] = i
    assert len(lasts) == 4 and len(set(lasts.values())) > 1


def test_prompt_logprobs_come_with_the_first_delta(speaker: LLMEngine) -> None:
    first, *others = all_of(speaker, RequestOutputKind.DELTA, max_tokens=4, prompt_logprobs=1)
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(first.prompt_token_ids)
    assert [other.prompt_logprobs for other in others] == [None] * 3
    assert {id(output.prompt_token_ids) for output in others} == {id(first.prompt_token_ids)}


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_what_an_abort_and_a_failure_tell(speaker: LLMEngine, kind: RequestOutputKind) -> None:
    """The rest of the deltas, else all that there is."""
    for how in ("abort", "error"):
        speaker.add_request("a", BEGINNING, SamplingParams(temperature=0, max_tokens=None, output_kind=kind))
        told = [output for _ in range(5) for output in speaker.step()]
        if how == "abort":
            last = speaker.abort_request("a")
        else:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError):
                patch.setattr(speaker.model_runner, "execute", fail)
                speaker.step()
            [last] = speaker.fail_batch("broken")
        assert last is not None and last.finished
        assert len(told) == (0 if kind is RequestOutputKind.FINAL_ONLY else 5)
        if kind is RequestOutputKind.DELTA:
            assert last.outputs[0].token_ids == []
            last = summed([*told, last])
        assert (len(last.outputs[0].token_ids), last.outputs[0].finish_reason) == (5, how)
        assert last.error == (None if how == "abort" else "broken")


def fail(*_: Any) -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize(
    "params",
    [{"n": 2, "best_of": 3, "seed": 1}, {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0}],
    ids=["best_of", "beams"],
)
def test_what_is_chosen_at_the_end_is_told_at_the_end(
    speaker: LLMEngine, kind: RequestOutputKind, params: dict[str, Any]
) -> None:
    [output] = all_of(speaker, kind, max_tokens=6, **params)
    assert [len(each.token_ids) for each in output.outputs] == [6, 6]
    speaker.add_request("a", BEGINNING, SamplingParams(max_tokens=6, output_kind=kind, **params))
    assert [speaker.step() for _ in range(3)] == [[]] * 3
    aborted = speaker.abort_request("a")
    assert aborted is not None and [len(each.token_ids) for each in aborted.outputs] == [3, 3]


def test_generate_gives_final_outputs_whatever_kind_is_asked_for(llama: Checkpoint) -> None:
    llm = LLM(llama.path)
    prompts = [{"prompt_token_ids": prompt} for prompt in llama.prompts[:2]]
    for kind in RequestOutputKind:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, output_kind=kind), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [each[:5] for each in llama.expected[:2]]


@pytest.mark.parametrize("kind", [1, "DELTA", None])
def test_a_kind_that_is_none(kind: Any) -> None:
    with pytest.raises(TypeError, match="output_kind: expected a RequestOutputKind, got"):
        SamplingParams(output_kind=kind)


def test_a_cosine_is_1_at_most() -> None:
    """Clients take the arc cosine."""
    cosines = [cosine(each, each) for each in torch.randn(500, 7, dtype=torch.float64).tolist()]
    assert max(cosines) == 1.0 and min(cosines) > 1 - 1e-12
