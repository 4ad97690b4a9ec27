"""The engine: what it lets in, ends, times, aborts, errors in the middle of a step, and counts."""

import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import BEGINNING, SMALL, TOKENIZER_SIZE, Checkpoint, make_model
from engine_runs import completions, finish_all, run, token_ids, words
from transformers import PreTrainedTokenizerBase

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import RequestMetrics, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.text.detokenizer import IncrementalDetokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24)


# --- add_request ---


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (dict(), ValueError, "either prompt or prompt_token_ids, got none"),
        (dict(prompt="a", prompt_token_ids=[1]), ValueError, "either prompt or prompt_token_ids, got both"),
        (dict(prompt=""), ValueError, "expected 1 to 127 tokens .* got 0"),
        (dict(prompt_token_ids=[]), ValueError, "expected 1 to 127 tokens .* got 0"),
        (dict(prompt="x" * 128), ValueError, "expected 1 to 127 tokens .* got 128"),
        (dict(prompt_token_ids=[3] * 128), ValueError, "expected 1 to 127 tokens .* got 128"),
        (dict(prompt="a\ud800"), ValueError, "prompt: expected text that UTF-8 can write, .*surrogates"),
        (dict(prompt=5), TypeError, "prompt: expected a string, token ids or a dict, got int"),
        (dict(prompt=b"a"), TypeError, "prompt: expected a string, token ids or a dict, got bytes"),
        (dict(prompt=["a"]), TypeError, "prompt_token_ids: expected an int, got 'a' of type str"),
        (dict(prompt={}), ValueError, "prompt: expected a dict with prompt, .*, got none"),
        (dict(prompt={"text": "a"}), ValueError, "prompt: expected a dict with prompt, .*, got text"),
        (
            dict(prompt={"prompt": [1], "prompt_token_ids": [1]}),
            TypeError,
            "a string beside prompt_token_ids, got list",
        ),
        (dict(prompt={"prompt": None, "prompt_token_ids": [1]}), TypeError, "beside prompt_token_ids, got NoneType"),
        (dict(prompt={"prompt": "a", "prompt_token_ids": []}), ValueError, "expected 1 to 127 tokens .* got 0"),
        (dict(prompt={"prompt": "a", "multi_modal_data": {"image": 1}}), ValueError, "multi_modal_data: expected None"),
        (dict(prompt={"prompt": "a", "picture": {}}), ValueError, "got prompt, picture"),
        (dict(prompt={"prompt": None}), TypeError, "prompt: expected a string, token ids or a dict, got NoneType"),
        (dict(prompt={"prompt_token_ids": "a"}), TypeError, "prompt_token_ids: expected a list of token ids, got str"),
        (dict(prompt=np.array([1.5])), TypeError, "prompt_token_ids: expected an int, got 1.5"),
        (dict(prompt=np.array([[1], [2]])), TypeError, r"prompt_token_ids: expected an int, got \[1\]"),
        (dict(prompt=torch.tensor(3)), TypeError, "prompt: expected a string, token ids or a dict, got Tensor"),
        (dict(prompt=[1, np.float32(2)]), TypeError, "prompt_token_ids: expected an int, got .*2.0"),
        (dict(prompt_token_ids=[1, 2.0]), TypeError, "prompt_token_ids: expected an int, got 2.0"),
        (dict(prompt_token_ids=[True]), TypeError, "prompt_token_ids: expected an int, got True"),
        (dict(prompt="a", cache_salt=None), TypeError, "cache_salt: expected a string, got NoneType"),
        (dict(prompt="a", cache_salt=b"a"), TypeError, "cache_salt: expected a string, got bytes"),
        (dict(prompt="a", cache_salt="\ud800"), ValueError, "cache_salt: expected text that UTF-8 can write"),
        (dict(prompt_token_ids="the"), TypeError, "prompt_token_ids"),
        (dict(prompt_token_ids=5), TypeError, "prompt_token_ids"),
        (dict(prompt_token_ids=[1, -1]), ValueError, rf"prompt_token_ids: .*{TOKENIZER_SIZE - 1}\], got -1"),
        (dict(prompt_token_ids=[TOKENIZER_SIZE]), ValueError, f"prompt_token_ids: .*got {TOKENIZER_SIZE}"),
        (
            dict(prompt="a", sampling_params={"top_k": 3}),
            TypeError,
            "sampling_params: expected SamplingParams, got dict",
        ),
        (dict(prompt="a", request_id="taken"), ValueError, "'taken' is taken"),
        (dict(prompt="a", request_id=7), TypeError, "request_id"),
        (dict(prompt="a", request_id=["x"]), TypeError, "request_id"),
    ],
)
def test_a_wrong_request_is_not_queued(
    engine: LLMEngine, args: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine.add_request("taken", "the")
    before = engine.stats()
    with pytest.raises(error, match=message):
        engine.add_request(**{"request_id": "x", **args})
    assert engine.stats() == before and before.num_waiting == 1
    assert list(finish_all(engine)) == ["taken"]


def test_a_request_id_is_free_again_when_finished_or_aborted(engine: LLMEngine) -> None:
    for _ in range(2):
        engine.add_request("x", "the", GREEDY)
        assert list(finish_all(engine)) == ["x"]
        engine.add_request("x", "the", GREEDY)
        engine.abort_request("x")


def test_prompt_and_its_token_ids_are_the_same(engine: LLMEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("the 🙂").input_ids
    by_text, by_ids = run(engine, ["the 🙂", ids], GREEDY)
    assert completions([by_text]) == completions([by_ids])
    assert (by_text.prompt, by_ids.prompt) == ("the 🙂", None)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
    ids.append(0)  # the caller's list is his own
    assert by_ids.prompt_token_ids != ids


def test_every_form_of_a_prompt(engine: LLMEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("the 🙂").input_ids
    forms: list[Any] = [
        {"prompt": "the 🙂"},
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, dtype=np.uint16),
        [*map(np.int32, ids)],
        torch.tensor(ids),
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids)},
        {"prompt": ids},
    ]
    [expected] = run(engine, ["the 🙂"], GREEDY)
    for i, form in enumerate(forms):
        engine.add_request("x", form, GREEDY)
        output = finish_all(engine)["x"][-1]
        assert completions([output]) == completions([expected]) and output.prompt_token_ids == ids
        assert {type(token_id) for token_id in output.prompt_token_ids} == {int}
        assert output.prompt == ("the 🙂" if i == 0 else None)


def test_a_tokenizer_with_more_tokens_than_the_model(text_model: str, tmp_path: Path) -> None:
    """The prompt has a token that the model does not know: an error of that request, not of a later step."""
    shutil.copytree(text_model, tmp_path, dirs_exist_ok=True)
    make_model("llama-gqa", vocab_size=TOKENIZER_SIZE - 1).save_pretrained(tmp_path)
    engine = LLMEngine(str(tmp_path))
    assert engine.tokenizer is not None
    beyond = engine.tokenizer.decode([TOKENIZER_SIZE - 1])
    with pytest.raises(ValueError, match=str(TOKENIZER_SIZE - 1)):
        engine.add_request("x", beyond)
    assert not engine.has_unfinished_requests()


def test_a_model_without_a_tokenizer(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path)
    assert engine.tokenizer is None
    with pytest.raises(ValueError, match=r"prompt: expected prompt_token_ids, .* no tokenizer"):
        engine.add_request("x", "the")
    with pytest.raises(ValueError, match=r"stop: expected none, .* no tokenizer"):
        engine.add_request("x", sampling_params=SamplingParams(stop="a"), prompt_token_ids=[1])
    assert not engine.has_unfinished_requests()
    outputs = run(engine, llama.prompts, GREEDY)
    assert token_ids(outputs) == llama.expected
    assert {output.outputs[0].text for output in outputs} == {""}


# --- ends ---


def test_max_tokens_and_max_model_len(text_model: str) -> None:
    engine = LLMEngine(text_model, max_model_len=20)
    assert engine.max_model_len == 20
    for prompt_len, max_tokens, expected in [(5, 7, 7), (5, 15, 15), (5, 16, 15), (5, None, 15), (19, 5, 1), (1, 1, 1)]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        [output] = run(engine, [[7] * prompt_len], params)
        assert len(output.outputs[0].token_ids) == expected
        assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="expected 1 to 19 tokens"):
        engine.add_request("x", prompt_token_ids=[7] * 20)


def test_one_token_and_more_than_there_is_room_for(llama: Checkpoint) -> None:
    """With few blocks too: what does not fit is preempted until it does."""
    lengths = [1, 10**9, None, 24, 1, 2**63, 25, 1]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    large, small = LLMEngine(llama.path, max_model_len=64), LLMEngine(llama.path, num_blocks=8, block_size=8)
    outputs = run(large, llama.prompts, params)
    assert completions(run(small, llama.prompts, params)) == completions(outputs)
    assert small.stats().num_preemptions > 0
    for output, prompt, expected, n in zip(outputs, llama.prompts, llama.expected, lengths, strict=True):
        ids = output.outputs[0].token_ids
        assert len(ids) == min(n or 64, 64 - len(prompt)) and output.outputs[0].finish_reason == "length"
        assert ids[:24] == expected[: len(ids)]


@pytest.mark.parametrize(
    "options", [dict(num_blocks=4, block_size=8), dict(max_model_len=32), dict(num_blocks=8, max_model_len=32)]
)
def test_a_request_that_can_never_fit(llama: Checkpoint, options: dict[str, Any]) -> None:
    """Refused at once, whether the cache or max_model_len is too small; those before and after do not notice."""
    engine = LLMEngine(llama.path, **options)
    prompts = {"a": llama.prompts[0], "b": llama.prompts[3], "c": llama.prompts[4], "d": llama.prompts[2]}
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    def add(request_id: str) -> None:
        engine.add_request(request_id, sampling_params=params, prompt_token_ids=prompts[request_id])

    def refuse(length: int) -> None:
        before = engine.stats()
        with pytest.raises(ValueError, match=rf"^prompt: expected 1 to 31 tokens \(max_model_len 32.*got {length}$"):
            engine.add_request("x", sampling_params=params, prompt_token_ids=[7] * length)
        assert engine.stats() == before

    outputs = []
    refuse(32)
    add("a")
    refuse(33)
    add("b")
    for _ in range(3):
        outputs += engine.step()
    refuse(10_000)
    add("c")
    refuse(32)
    outputs += engine.step()
    add("d")
    outputs += [steps[-1] for steps in finish_all(engine).values()]
    finished = {output.request_id: output for output in outputs if output.finished}
    assert finished.keys() == prompts.keys()
    for request_id, prompt in prompts.items():
        alone = run(LLMEngine(llama.path, **options), [prompt], params)
        assert completions([finished[request_id]]) == completions(alone)
        assert len(alone[0].outputs[0].token_ids) == 32 - len(prompt)


def test_a_long_prompt_gives_no_output_before_its_last_chunk(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, max_num_batched_tokens=7)
    engine.add_request("x", sampling_params=GREEDY, prompt_token_ids=llama.prompts[-1])  # 40 tokens
    assert [len(engine.step()) for _ in range(6)] == [0, 0, 0, 0, 0, 1]
    assert finish_all(engine)["x"][-1].outputs[0].token_ids == llama.expected[-1]


def test_the_scheduler_hears_what_steps_take(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of long prompts follow from it."""
    engine = LLMEngine(llama.path, max_num_batched_tokens=7)
    heard: list[float] = []
    monkeypatch.setattr(engine.scheduler._pace, "observe_decodes", heard.append)
    engine.add_request("x", sampling_params=GREEDY, prompt_token_ids=[5])
    started = time.monotonic()
    finish_all(engine)
    assert len(heard) == engine.stats().num_steps - 1 > 0
    assert 0 < sum(heard) <= time.monotonic() - started and min(heard) > 0


def test_a_step_without_requests_does_nothing(engine: LLMEngine) -> None:
    assert engine.step() == [] and not engine.has_unfinished_requests()


# --- times ---


def test_times(engine: LLMEngine) -> None:
    before = time.monotonic()
    engine.add_request("x", "the cat", GREEDY)
    steps = finish_all(engine)["x"]
    assert len(steps) == 24
    metrics = steps[-1].metrics
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    assert before <= metrics.arrival_time <= metrics.first_token_time < metrics.finished_time <= time.monotonic()
    for step in steps[:-1]:
        assert step.metrics == RequestMetrics(metrics.arrival_time, metrics.first_token_time, num_cached_tokens=0)


def test_a_single_token_is_first_and_last(engine: LLMEngine) -> None:
    engine.add_request("x", "the cat", SamplingParams(max_tokens=1))
    [output] = engine.step()
    assert output.metrics.first_token_time == output.metrics.finished_time is not None


def test_times_with_preemption(llama: Checkpoint) -> None:
    """The first token is so once, however often it is computed; each request has times of its own."""
    engine = LLMEngine(llama.path, **SMALL)
    for i, prompt in enumerate(llama.prompts):
        engine.add_request(str(i), sampling_params=GREEDY, prompt_token_ids=prompt)
    first_times: dict[str, float | None] = {}
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.metrics.first_token_time is not None
            assert output.metrics.first_token_time == first_times.setdefault(
                output.request_id, output.metrics.first_token_time
            )
            last[output.request_id] = output
    assert engine.stats().num_preemptions > 0
    assert len({id(output.metrics) for output in last.values()}) == len(llama.prompts)
    for output in last.values():
        metrics = output.metrics
        assert metrics.first_token_time is not None and metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.first_token_time < metrics.finished_time


def test_a_given_arrival_time_is_told_and_no_more(llama: Checkpoint) -> None:
    """An earlier one does not come first."""
    engine = LLMEngine(llama.path, max_num_seqs=1)
    for request_id, arrival_time in [("a", 50.5), ("b", 7), ("c", -3.0)]:
        engine.add_request(
            request_id, sampling_params=GREEDY, prompt_token_ids=llama.prompts[0], arrival_time=arrival_time
        )
    outputs = finish_all(engine)
    assert list(outputs) == ["a", "b", "c"]
    assert [steps[-1].metrics.arrival_time for steps in outputs.values()] == [50.5, 7, -3.0]


@pytest.mark.parametrize(
    ("arrival_time", "error"), [("now", TypeError), (True, TypeError), (math.nan, ValueError), (math.inf, ValueError)]
)
def test_a_wrong_arrival_time(engine: LLMEngine, arrival_time: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="arrival_time: expected a"):
        engine.add_request("x", "the", arrival_time=arrival_time)
    assert not engine.has_unfinished_requests()


def test_times_of_aborted_requests(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, max_num_seqs=1)
    for request_id in ("running", "waiting"):
        engine.add_request(request_id, sampling_params=GREEDY, prompt_token_ids=llama.prompts[0])
    engine.step()
    waiting, running = engine.abort_request("waiting"), engine.abort_request("running")
    assert waiting is not None and running is not None
    assert waiting.metrics.first_token_time is None and waiting.metrics.finished_time is not None
    assert running.metrics.first_token_time is not None and running.metrics.finished_time is not None
    assert running.metrics.arrival_time <= running.metrics.first_token_time <= running.metrics.finished_time
    assert waiting.metrics.arrival_time <= waiting.metrics.finished_time


# --- abort ---


@pytest.mark.parametrize("num_blocks", [100, 10])
def test_abort_leaves_the_others_alone(llama: Checkpoint, num_blocks: int) -> None:
    engine = LLMEngine(llama.path, num_blocks=num_blocks, block_size=8, max_num_batched_tokens=60)
    for i, prompt in enumerate(llama.prompts):
        engine.add_request(str(i), sampling_params=GREEDY, prompt_token_ids=prompt)
    for _ in range(5):
        engine.step()
    manager = engine.scheduler.block_manager
    for i in (6, 1, 4):  # with few blocks two of them still wait
        used, is_running = manager.num_used_blocks, any(s.request_id == str(i) for s in engine.scheduler.running)
        output = engine.abort_request(str(i))
        assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == llama.expected[i][: len(output.outputs[0].token_ids)]
        assert (manager.num_used_blocks < used) == is_running
        manager.check_integrity()
        assert engine.abort_request(str(i)) is None
    outputs = finish_all(engine)
    assert sorted(outputs) == ["0", "2", "3", "5", "7"]
    for request_id, steps in outputs.items():
        assert steps[-1].outputs[0].token_ids == llama.expected[int(request_id)]
    assert engine.abort_request("0") is None and engine.abort_request("unknown") is None


def test_abort_of_several(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, max_num_seqs=2)
    for i, prompt in enumerate(llama.prompts[:4]):
        engine.add_request(str(i), prompt, GREEDY)
    assert engine.get_num_unfinished_requests() == 4
    engine.step()
    aborted = engine.abort_request(["0", "unknown", "3", "0"])
    assert completions(aborted) == [("", llama.expected[0][:1], "abort"), ("", [], "abort")]
    assert engine.get_num_unfinished_requests() == 2
    assert engine.abort_request([]) == [] and engine.abort_request(("0",)) == []
    for wrong in (5, None, [5]):
        with pytest.raises(TypeError, match="request_id: expected a string or a list of strings, got"):
            engine.abort_request(wrong)  # type: ignore[call-overload]
    assert sorted(finish_all(engine)) == ["1", "2"]
    assert engine.get_num_unfinished_requests() == 0


def test_abort_gives_what_is_there(speaker: LLMEngine) -> None:
    speaker.add_request("x", BEGINNING, SamplingParams(temperature=0, max_tokens=None))
    for text in words(speaker)[:5]:
        [output] = speaker.step()
        assert output.outputs[0].text == text
    aborted = speaker.abort_request("x")
    assert aborted is not None and aborted.outputs[0].text.startswith(text)
    assert aborted.outputs[0].token_ids == output.outputs[0].token_ids
    assert speaker.step() == [] and not speaker.has_unfinished_requests()


def test_abort_of_a_waiting_one_in_prefill_and_a_preempted_one(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, num_blocks=7, block_size=8, max_num_batched_tokens=10, enable_prefix_caching=False)
    short, long = llama.prompts[4], llama.prompts[5]  # 17 and 33 tokens
    for request_id, prompt in [("old", short), ("young", short), ("long", long), ("last", short)]:
        engine.add_request(request_id, sampling_params=GREEDY, prompt_token_ids=prompt)
    aborted = engine.abort_request("long")  # before the first step
    assert aborted is not None and completions([aborted]) == [("", [], "abort")]
    engine.step()
    assert engine.stats().num_used_slots == 10  # of the 17 of "old"
    while not engine.stats().num_preemptions:
        assert engine.step()
    [young, _] = engine.scheduler.waiting
    so_far = list(young.sequences[0].output_token_ids)
    assert young.request_id == "young" and 0 < len(so_far) < 24
    aborted = engine.abort_request("young")
    assert aborted is not None and completions([aborted]) == [("", so_far, "abort")]
    assert so_far == llama.expected[4][: len(so_far)]
    engine.add_request("young", sampling_params=GREEDY, prompt_token_ids=long)  # the name is free again
    outputs = finish_all(engine)
    assert {request_id: steps[-1].outputs[0].token_ids for request_id, steps in outputs.items()} == {
        "old": llama.expected[4],
        "last": llama.expected[4],
        "young": llama.expected[5][:23],  # up to the 56 tokens that the cache holds
    }


def test_abort_between_two_chunks_of_a_prompt(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, num_blocks=10, block_size=8, max_num_batched_tokens=9)
    engine.add_request("x", sampling_params=GREEDY, prompt_token_ids=llama.prompts[-1])
    assert engine.step() == engine.step() == [] and engine.stats().num_used_slots == 18
    aborted = engine.abort_request("x")
    assert aborted is not None and completions([aborted]) == [("", [], "abort")]
    engine.scheduler.block_manager.check_integrity()
    assert engine.stats().num_used_blocks == 0 and not engine.has_unfinished_requests()
    assert token_ids(run(engine, llama.prompts, GREEDY)) == llama.expected


# --- an error in the middle of a step ---


@pytest.mark.parametrize("where", ["prepare_inputs", "forward", "sample"])
def test_the_engine_goes_on_after_an_error(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Every third call fails. The step that failed is run again, and nobody can tell from the outputs."""
    seeded = SamplingParams(temperature=1.0, seed=4, max_tokens=20, logprobs=1)
    params = [GREEDY if i % 2 else seeded for i in range(len(llama.prompts))]
    expected = run(LLMEngine(llama.path, max_model_len=64), llama.prompts, params)
    engine = LLMEngine(llama.path, num_blocks=9, block_size=8, max_num_seqs=4, max_num_batched_tokens=13)
    runner = engine.model_runner
    owner = next(o for o in (runner, runner.model, runner.sampler) if hasattr(o, where))
    function, num_calls = getattr(owner, where), 0

    def flaky(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 0:
            raise RuntimeError("here")
        return function(*args)

    monkeypatch.setattr(owner, where, flaky)
    for i, (prompt, param) in enumerate(zip(llama.prompts, params, strict=True)):
        engine.add_request(str(i), sampling_params=param, prompt_token_ids=prompt)
    manager = engine.scheduler.block_manager
    outputs: dict[str, RequestOutput] = {}
    num_errors = 0
    while engine.has_unfinished_requests():
        try:
            outputs.update((output.request_id, output) for output in engine.step())
        except RuntimeError:
            num_errors += 1
        manager.check_integrity()
    assert num_errors == num_calls // 3
    assert num_errors > 5 and engine.stats().num_preemptions > 0
    assert manager.num_used_blocks == 0
    finished = [outputs[str(i)] for i in range(len(params))]
    assert completions(finished) == completions(expected)
    for one, other in zip(finished, expected, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
    assert engine.stats().num_output_tokens == sum(map(len, token_ids(finished)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [dict(temperature=0), dict(seed=1), dict(seed=1, top_p=0.9, logprobs=2)])
def test_broken_logits_end_their_request_alone(
    llama: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bad: float,
    params: dict[str, Any],
) -> None:
    """As after an overflow in half precision: the output ends before, and says why."""
    engine, each = LLMEngine(llama.path), SamplingParams(max_tokens=9, **params)
    expected = run(engine, llama.prompts[:3], each)
    sample, num_calls = engine.model_runner.sampler.sample, 0

    def broken(logits: Any, rows: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            logits[1, 7] = bad
        return sample(logits, rows)

    monkeypatch.setattr(engine.model_runner.sampler, "sample", broken)
    before = engine.stats().num_output_tokens
    outputs = run(engine, llama.prompts[:3], each)
    assert completions(outputs[::2]) == completions(expected[::2])
    assert [output.error for output in outputs[::2]] == [None, None]
    assert completions(outputs[1:2]) == [("", token_ids(expected)[1][:4], "error")]
    assert math.isfinite(outputs[1].outputs[0].cumulative_logprob)
    assert outputs[1].error is not None and "logits: expected numbers, got NaN or infinity" in outputs[1].error
    assert "request '1' ends: FloatingPointError" in caplog.text and "logits" in caplog.text
    assert engine.stats().num_output_tokens - before == 9 + 4 + 9


def test_a_text_that_cannot_be_decoded_ends_its_request_alone(
    text_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, prompts = LLMEngine(text_model), ["the cat", "on the mat", "é"]
    expected = run(engine, prompts, GREEDY)
    broken = expected[0].outputs[0].token_ids[5]
    assert all(broken not in output.outputs[0].token_ids for output in expected[1:])
    add = IncrementalDetokenizer.add

    def failing(self: IncrementalDetokenizer, token_id: int) -> None:
        if token_id == broken:
            raise OverflowError("here")
        add(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "add", failing)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    outputs = run(engine, prompts, [params, GREEDY, GREEDY])
    assert outputs[0].outputs[0].finish_reason == "error" and len(outputs[0].outputs[0].token_ids) == 6
    assert outputs[0].error == "OverflowError: here"
    assert "request '0' ends: " in caplog.text and "OverflowError" in caplog.text
    assert completions(outputs[1:]) == completions(expected[1:])


def test_abort_after_an_error(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine(llama.path, num_blocks=8, block_size=8)
    for i, prompt in enumerate(llama.prompts[:4]):
        engine.add_request(str(i), sampling_params=GREEDY, prompt_token_ids=prompt)
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="here"):
        patch.setattr(engine.model_runner.model, "forward", raise_here)
        engine.step()
    for i in (0, 2):
        aborted = engine.abort_request(str(i))
        assert aborted is not None and aborted.outputs[0].token_ids == llama.expected[i][:1]
        engine.scheduler.block_manager.check_integrity()
    outputs = finish_all(engine)
    assert {int(i): steps[-1].outputs[0].token_ids for i, steps in outputs.items()} == {
        1: llama.expected[1],
        3: llama.expected[3],
    }


def raise_here(*args: Any) -> None:
    raise RuntimeError("here")


# --- counts ---


def test_stats_add_up(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, num_blocks=12, block_size=8, max_num_seqs=5, max_num_batched_tokens=20)
    for i, prompt in enumerate(llama.prompts):
        engine.add_request(str(i), sampling_params=GREEDY, prompt_token_ids=prompt)
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_blocks, stats.num_used_blocks) == (8, 0, 12, 0)
    assert (stats.num_used_slots, stats.num_preemptions, stats.num_output_tokens) == (0, 0, 0)
    assert stats.num_prompt_tokens == sum(map(len, llama.prompts))
    num_outputs, num_finished = 0, 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        num_outputs += len(outputs)
        num_finished += sum(output.finished for output in outputs)
        stats = engine.stats()
        assert stats.num_waiting + stats.num_running == 8 - num_finished and stats.num_running <= 5
        assert stats.num_output_tokens == num_outputs
        # Each running sequence has slots for all its tokens, and those in prefill for more than are in use.
        assert stats.num_used_slots <= 8 * stats.num_used_blocks <= 8 * 12
        assert (stats.num_used_slots > 0) == (stats.num_running > 0)
    assert num_outputs == stats.num_output_tokens == 8 * 24
    assert stats.num_preemptions > 0 and stats.num_used_blocks == stats.num_used_slots == 0
    assert stats.num_prompt_tokens == sum(map(len, llama.prompts))  # recomputing them does not count
