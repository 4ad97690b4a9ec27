"""The engine: what the parameters of a request make of its tokens and its text, and the logprobs of its prompt."""

import dataclasses
from typing import Any

import pytest
import torch
from checkpoints import SMALL, SPEECH, VOCAB_SIZE, Checkpoint, greedy_reference
from engine_runs import run, speak, speech_ids, token_ids, words
from torch import Tensor

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import Logprob, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams


@pytest.mark.parametrize("options", [dict(), SMALL], ids=["large", "small"])
def test_each_request_has_its_own_parameters(llama: Checkpoint, options: dict[str, Any]) -> None:
    """Beside each other in a batch, and whatever is preempted."""
    bias = {llama.expected[3][2]: -5.0, 7: 1.5}
    each = [
        (dict(), dict()),
        (dict(repetition_penalty=1.4), dict(repetition_penalty=1.4)),
        (dict(logit_bias=bias), dict(sequence_bias=[[[token_id], value] for token_id, value in bias.items()])),
        (
            dict(allowed_token_ids=range_of(9)),
            dict(suppress_tokens=[i for i in range(VOCAB_SIZE) if i not in range_of(9)]),
        ),
    ] * 2
    engine = LLMEngine(llama.path, **options)
    params = [SamplingParams(temperature=0, max_tokens=24, **own) for own, _ in each]
    expected = [
        greedy_reference(llama.model, prompt, 24, **theirs)
        for prompt, (_, theirs) in zip(llama.prompts, each, strict=True)
    ]
    assert token_ids(run(engine, llama.prompts, params)) == expected
    assert [a == b for a, b in zip(expected, llama.expected, strict=True)] == [own == {} for own, _ in each]
    assert (engine.stats().num_preemptions > 0) == bool(options)


def range_of(step: int) -> list[int]:
    return list(range(0, VOCAB_SIZE, step))


def test_penalties_of_counts_keep_tokens_from_coming_again(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path)
    for name in ("presence_penalty", "frequency_penalty"):
        # With logits of few units, a bias makes a token come always, and the penalty stops it at some time.
        counts = []
        for penalty in (0.0, 2.0):
            params = SamplingParams(temperature=0, max_tokens=24, logit_bias={5: 20.0}, **{name: penalty})
            [output] = run(engine, [llama.prompts[2]], params)
            counts.append(output.outputs[0].token_ids.count(5))
        assert counts[0] == 24 and (counts[1] < 24) == (name == "frequency_penalty")


def test_logits_processors_see_the_request_s_tokens(llama: Checkpoint) -> None:
    seen = []

    def watch(prompt_token_ids: list[int], output_token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt_token_ids, output_token_ids, logits.dtype, logits.shape))
        return logits.index_fill(0, torch.tensor([len(output_token_ids)]), 1e4)

    engine = LLMEngine(llama.path)
    params = SamplingParams(temperature=0, max_tokens=3, logits_processors=[watch])
    plain = SamplingParams(temperature=0, max_tokens=3)
    outputs = run(engine, llama.prompts[2:4], [params, plain])
    assert token_ids(outputs) == [[0, 1, 2], llama.expected[3][:3]]
    prompt = llama.prompts[2]
    assert seen == [(prompt, list(range(count)), torch.float32, (VOCAB_SIZE,)) for count in range(3)]


@pytest.mark.parametrize("call", ["abort_request", "step", "fail_batch", "register_prefix"])
def test_calls_from_within_a_step(call: str, llama: Checkpoint) -> None:
    """They are refused: all requests would begin anew, and the step would not find its own."""
    arguments = {"abort_request": ["0"], "step": [], "fail_batch": ["x"], "register_prefix": [[1, 2]]}[call]

    def meddle(output_token_ids: list[int], logits: Tensor) -> Tensor:
        if len(output_token_ids) == 2:
            getattr(engine, call)(*arguments)
        return logits

    engine = LLMEngine(llama.path, enable_prefix_caching=True)
    params = [SamplingParams(temperature=0, max_tokens=5, logits_processors=each) for each in (None, [meddle])]
    good, failed = run(engine, llama.prompts[:2], params)
    assert good.outputs[0].token_ids == llama.expected[0][:5]
    assert failed.error is not None and "got one from within a call" in failed.error
    assert not engine.has_unfinished_requests() and engine.stats().num_used_blocks == 0


def test_what_goes_wrong_with_parameters_ends_one_request(llama: Checkpoint) -> None:
    def fail(output_token_ids: list[int], logits: Tensor) -> Tensor:
        if len(output_token_ids) == 2:
            raise RuntimeError("enough")
        return logits

    engine = LLMEngine(llama.path)
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=9, logits_processors=[fail]),
        SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2),
    ]
    good, failed, masked = run(engine, llama.prompts[:3], params)
    assert good.outputs[0].token_ids == llama.expected[0][:9] and good.error is None
    assert failed.outputs[0].token_ids == llama.expected[1][:2]
    assert failed.error is not None and failed.error.startswith("logits_processors: expected callables that return")
    assert failed.error.endswith(", got RuntimeError: enough")
    assert masked.error == "sampling_params: expected a token to choose, got masks that leave none"
    assert [each.outputs[0].finish_reason for each in (failed, masked)] == ["error", "error"]


def test_wrong_parameters_for_this_model(llama: Checkpoint) -> None:
    without_tokenizer = LLMEngine(llama.path)
    for name, value in [("logit_bias", {VOCAB_SIZE: 1.0}), ("allowed_token_ids", [VOCAB_SIZE])]:
        with pytest.raises(ValueError, match=rf"^{name}: expected an int in \[0, {VOCAB_SIZE - 1}\], got {VOCAB_SIZE}"):
            without_tokenizer.add_request("a", [1], SamplingParams(**{name: value}))
    with pytest.raises(ValueError, match=r"^bad_words: expected none, as the model's directory has no tokenizer"):
        without_tokenizer.add_request("a", [1], SamplingParams(bad_words=["a"]))
    assert not without_tokenizer.has_unfinished_requests()


# --- ends and text ---


def test_min_tokens(speaker: LLMEngine) -> None:
    """So many come before an end-of-sequence or stop token can."""
    num_tokens = len(speak(speaker)[-1].outputs[0].token_ids)
    for min_tokens in (num_tokens - 1, num_tokens + 3):
        final = speak(speaker, min_tokens=min_tokens)[-1].outputs[0]
        assert final.finish_reason == "stop" and len(final.token_ids) == min_tokens + 1
    [first, second, *_] = speak(speaker)[-1].outputs[0].token_ids
    for min_tokens, expected in ((0, [first]), (1, [first, second])):
        final = speak(speaker, min_tokens=min_tokens, stop_token_ids=[first, second])[-1].outputs[0]
        assert (final.token_ids == expected) == (min_tokens == 0)
        assert not set(final.token_ids[:min_tokens]) & {first, second}


def test_a_stop_string_before_min_tokens_is_text_like_any_other(speaker: LLMEngine) -> None:
    num_tokens = len(speech_ids(speaker)) + 1
    assert [text.split(" ")[1:] for text in words(speaker)[:3]] == [["s"], ["sat"], ["sat", "on"]]
    for min_tokens, stop, expected in [
        (2, " sat", ("", 2)),
        (3, " sat", (SPEECH, num_tokens)),
        (4, [" sat", " on"], (SPEECH[: SPEECH.index(" on the hat")], 15)),
        (3, " sat on", ("", 3)),  # begins before, ends after
    ]:
        steps = speak(speaker, min_tokens=min_tokens, stop=stop)
        assert (steps[-1].outputs[0].text, len(steps[-1].outputs[0].token_ids)) == expected


def test_bad_words(speaker: LLMEngine) -> None:
    assert " sat" in SPEECH
    text = speak(speaker)[-1].outputs[0].text
    without = speak(speaker, bad_words=["sat"], max_tokens=20)[-1].outputs[0].text
    assert " sat" in text and "sat" not in without


def test_special_tokens_are_shown_if_asked_for(speaker: LLMEngine) -> None:
    special = 0  # "<s>"
    for skip in (True, False):
        params = SamplingParams(temperature=0, max_tokens=2, allowed_token_ids=[special], skip_special_tokens=skip)
        [output] = run(speaker, ["the"], params)
        assert output.outputs[0].text == ("" if skip else "<s><s>")


def test_without_text(speaker: LLMEngine) -> None:
    [*_, last] = speak(speaker, detokenize=False, logprobs=1)
    [*_, with_text] = speak(speaker, logprobs=1)
    assert last.outputs[0].text == "" and last.outputs[0].token_ids == with_text.outputs[0].token_ids
    assert last.outputs[0].finish_reason == "stop"


# --- logprobs of the prompt ---


def check_prompt_logprobs(checkpoint: Checkpoint, output: RequestOutput, count: int) -> None:
    with torch.no_grad():
        logits = checkpoint.model(torch.tensor([output.prompt_token_ids])).logits[0]
    expected = logits.log_softmax(dim=-1)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for row, token_id, entries in zip(expected, output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=False):
        assert entries is not None and token_id in entries
        assert len(entries) in (count, count + 1)
        for entry_id, entry in entries.items():
            assert entry.logprob == pytest.approx(row[entry_id].item(), abs=1e-4)
            higher, not_lower = (row > entry.logprob + 2e-4).sum(), (row >= entry.logprob - 2e-4).sum()
            assert higher < entry.rank <= not_lower


@pytest.mark.parametrize(
    "options",
    [dict(), SMALL, dict(max_num_batched_tokens=5), dict(enable_prefix_caching=False)],
    ids=["large", "small", "chunks", "no prefix caching"],
)
def test_prompt_logprobs_equal_hugging_face(llama: Checkpoint, options: dict[str, Any]) -> None:
    """Also of prompts whose blocks are in the cache, and of several sequences; tokens are those without them."""
    engine = LLMEngine(llama.path, **options)
    counts = [3, None, 0, 5, None, 20, 1, 2]
    params = [SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=count) for count in counts]
    for _ in range(2):
        outputs = run(engine, llama.prompts, params)
        assert token_ids(outputs) == llama.expected
        for output, count in zip(outputs, counts, strict=True):
            if count is None:
                assert output.prompt_logprobs is None
            else:
                check_prompt_logprobs(llama, output, count)
    assert (engine.stats().num_preemptions > 0) == (options == SMALL)
    several = SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=2)
    [output] = run(engine, [llama.prompts[5]], several)
    check_prompt_logprobs(llama, output, 2)


def test_no_row_of_a_prompt_is_looked_at_twice(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted amid its prompt or later, a request goes on from the logprobs that it has."""
    engine = LLMEngine(llama.path, **SMALL)
    num_rows = 0
    original = engine.model_runner.sampler.prompt_logprobs

    def count(logits: Tensor, token_ids: list[int], num_top: int) -> list[dict[int, Logprob] | None]:
        nonlocal num_rows
        num_rows += len(token_ids)
        assert len(logits) == len(token_ids)
        return original(logits, token_ids, num_top)

    monkeypatch.setattr(engine.model_runner.sampler, "prompt_logprobs", count)
    run(engine, llama.prompts, SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=1))
    assert engine.stats().num_preemptions > 0
    assert num_rows == sum(len(prompt) - 1 for prompt in llama.prompts)


def test_prompt_logprobs_are_the_caller_s_own_and_have_texts(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    engine.add_request("a", "the cat", params)
    [first] = engine.step()
    assert engine.tokenizer is not None and first.prompt_logprobs is not None
    for entries in first.prompt_logprobs[1:]:
        assert entries is not None
        for token_id, entry in entries.items():  # a part of a character adds nothing
            assert entry.decoded_token == engine.tokenizer.decode([token_id]).replace("\ufffd", "")
    first.prompt_logprobs.clear()
    [second] = engine.step()
    assert second.prompt_logprobs is not None and all(second.prompt_logprobs[1:])
    engine.abort_request("a")
    engine.add_request("b", "the cat", SamplingParams(temperature=0, n=2, use_beam_search=True, prompt_logprobs=0))
    assert engine.step() == []
    beams = engine.abort_request("b")
    assert beams is not None and beams.prompt_logprobs is not None
    for entries, token_id in zip(beams.prompt_logprobs[1:], beams.prompt_token_ids[1:], strict=True):
        assert entries is not None and entries[token_id].decoded_token == engine.tokenizer.decode([token_id])
    [one_token] = run(engine, [[5]], params)
    assert one_token.prompt_logprobs == [None]


# --- several sequences ---


PREEMPTING = SMALL | dict(max_num_seqs=6)


@pytest.mark.parametrize(
    "options", [dict(), PREEMPTING, PREEMPTING | dict(preemption_mode="swap")], ids=["large", "small", "swap"]
)
def test_sequences_of_a_seeded_request_repeat_and_differ(llama: Checkpoint, options: dict[str, Any]) -> None:
    """The first is what the request gives alone; whatever is in the batch and whatever is preempted."""
    params = SamplingParams(n=3, seed=7, max_tokens=9, repetition_penalty=1.1, frequency_penalty=0.1)
    alone = run(LLMEngine(llama.path), llama.prompts[2:3], dataclasses.replace(params, n=1))
    [first] = token_ids(alone)
    engine = LLMEngine(llama.path, **options)
    outputs = run(engine, llama.prompts[2:5] + llama.prompts[2:3], params)
    assert (engine.stats().num_preemptions > 0) == bool(options)
    sequences = [[completion.token_ids for completion in output.outputs] for output in outputs]
    assert sequences[0] == sequences[-1] and sequences[0][0] == first
    assert len({tuple(ids) for ids in sequences[0]}) == 3
