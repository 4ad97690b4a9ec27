"""The engine: what it lets in, how text streams and stops, logprobs, times, aborts, errors in the middle of a step,
counts, random load, and how large its cache is."""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    EOS,
    TOKENIZER_SIZE,
    Checkpoint,
    finish_all,
    make_model,
    make_speaking_model,
    make_tokenizer,
    run,
    token_ids,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

import pagedattn_ext
from pagedattn_serve.detokenizer import REPLACEMENT
from pagedattn_serve.engine import LLMEngine, choose_device
from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
BEGINNING, SPEECH = "the cat", " sat on the mat 🙂🙂 on the hat é, and on the end."


@pytest.fixture(scope="module")
def speaker_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that says SPEECH and then EOS after BEGINNING."""
    directory = tmp_path_factory.mktemp("speaker")
    make_speaking_model(directory, BEGINNING + SPEECH)
    return str(directory)


@pytest.fixture(scope="module")
def speaker(speaker_path: str) -> LLMEngine:
    return LLMEngine(speaker_path)


@pytest.fixture
def engine(text_model: str) -> LLMEngine:
    return LLMEngine(text_model, num_blocks=40)


def speak(engine: LLMEngine, **params: Any) -> list[RequestOutput]:
    """Every output of one request for SPEECH."""
    engine.add_request("speech", BEGINNING, SamplingParams(**{**dict(temperature=0, max_tokens=None), **params}))
    return finish_all(engine)["speech"]


def speech_ids(engine: LLMEngine) -> list[int]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    return tokenizer(BEGINNING + SPEECH).input_ids[len(tokenizer(BEGINNING).input_ids) :]


def words(engine: LLMEngine) -> list[str]:
    """The text of SPEECH after each of its tokens, with broken characters at the end left out."""
    tokenizer, ids = engine.tokenizer, speech_ids(engine)
    assert tokenizer is not None
    return [tokenizer.decode(ids[: n + 1]).rstrip(REPLACEMENT) for n in range(len(ids))]


def completions(outputs: list[RequestOutput]) -> list[tuple[str, list[int], str | None]]:
    """What no batch may change. A logprob may: its last bits hang on how the batch was summed."""
    return [(c.text, c.token_ids, c.finish_reason) for output in outputs for c in output.outputs]


# --- add_request ---


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (dict(), ValueError, "either prompt or prompt_token_ids"),
        (dict(prompt="a", prompt_token_ids=[1]), ValueError, "either prompt or prompt_token_ids"),
        (dict(prompt=""), ValueError, "expected 1 to 127 tokens .* got 0"),
        (dict(prompt_token_ids=[]), ValueError, "expected 1 to 127 tokens .* got 0"),
        (dict(prompt="x" * 128), ValueError, "expected 1 to 127 tokens .* got 128"),
        (dict(prompt_token_ids=[3] * 128), ValueError, "expected 1 to 127 tokens .* got 128"),
        (dict(prompt=5), TypeError, "prompt: expected a string, got int"),
        (dict(prompt=b"a"), TypeError, "prompt: expected a string, got bytes"),
        (dict(prompt=["a"]), TypeError, "prompt: expected a string, got list"),
        (dict(prompt_token_ids=[1, 2.0]), TypeError, "prompt_token_ids: expected an int, got 2.0"),
        (dict(prompt_token_ids=[True]), TypeError, "prompt_token_ids: expected an int, got True"),
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


# --- text ---


def test_text_streams_by_whole_characters(speaker: LLMEngine) -> None:
    steps = speak(speaker)
    assert [step.outputs[0].text for step in steps] == [*words(speaker), SPEECH]
    assert steps[-1].outputs[0].finish_reason == "stop"
    assert speaker.tokenizer is not None
    assert steps[-1].outputs[0].token_ids[-1] == speaker.tokenizer.convert_tokens_to_ids(EOS)  # counted, not shown


def test_max_tokens_within_a_character(speaker: LLMEngine) -> None:
    num_tokens = next(n for n, text in enumerate(words(speaker), 1) if words(speaker)[n] == text)
    [*_, last] = speak(speaker, max_tokens=num_tokens + 1)
    assert last.outputs[0].text == words(speaker)[num_tokens] + REPLACEMENT
    assert last.outputs[0].finish_reason == "length"
    assert len(last.outputs[0].token_ids) == num_tokens + 1


@pytest.mark.parametrize(
    "stop",
    [
        " sat",  # one token, the first
        "at on the m",  # over several, from within one
        "mat 🙂🙂",  # ends with a character of four tokens
        "🙂",
        "é",
        ".",  # the last
        ["on the hat", "on the end"],  # "on the mat" begins like both
        ["never", "hat", "on the hat"],
    ],
)
def test_stop_strings(speaker: LLMEngine, stop: str | list[str]) -> None:
    steps = speak(speaker, stop=stop)
    final = steps[-1].outputs[0]
    strings = [stop] if isinstance(stop, str) else stop
    assert final.text == SPEECH[: min(SPEECH.find(s) for s in strings if s in SPEECH)]
    assert final.finish_reason == "stop"
    # It ends with the token that completes the stop string.
    num_tokens = next(n for n, text in enumerate(words(speaker), 1) if any(s in text for s in strings))
    assert len(final.token_ids) == len(steps) == num_tokens


def test_a_stop_string_that_never_comes_costs_no_text(speaker: LLMEngine) -> None:
    steps = speak(speaker, stop=[" on the hat ö", "end. "])
    assert steps[-1].outputs[0].text == SPEECH
    shown = [step.outputs[0].text for step in steps]
    assert " sat" in shown and " sat on the" not in shown and " sat on the mat" in shown  # held back, then shown
    assert speak(speaker, stop="xyz")[-1].outputs[0].text == SPEECH


@settings(max_examples=100)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, len(SPEECH) - 1), st.integers(1, 9), st.sampled_from(["", "x", "t"])), max_size=4
    )
)
def test_any_stop_strings(speaker: LLMEngine, spans: list[tuple[int, int, str]]) -> None:
    """Pieces of the text, some with another ending. Nothing is shown that does not stay; `finish_all` checks it."""
    strings = [SPEECH[begin : begin + length] + ending for begin, length, ending in spans]
    steps = speak(speaker, stop=strings)
    stopped = next((text for text in words(speaker) if any(s in text for s in strings)), None)
    end = None if stopped is None else min(stopped.find(s) for s in strings if s in stopped)
    assert steps[-1].outputs[0].text == SPEECH[:end]
    for step, text in zip(steps, words(speaker), strict=False):  # and no more is held back than may be needed
        possible = [s[:n] for s in strings for n in range(1, len(s)) if text.endswith(s[:n])]
        if not step.finished:
            assert step.outputs[0].text == text[: len(text) - max(map(len, possible), default=0)]


def test_stop_strings_are_not_looked_for_in_the_prompt(speaker: LLMEngine) -> None:
    assert speak(speaker, stop="cat")[-1].outputs[0].text == SPEECH
    assert speak(speaker, stop="cat sat")[-1].outputs[0].text == SPEECH


def test_a_stop_string_in_the_last_token(speaker: LLMEngine) -> None:
    """Both ends at once: it is a stop."""
    num_tokens = next(n for n, text in enumerate(words(speaker), 1) if "mat" in text)
    final = speak(speaker, stop="mat", max_tokens=num_tokens)[-1].outputs[0]
    assert (final.text, final.finish_reason) == (" sat on the ", "stop")


def test_what_was_held_back_comes_at_the_end(speaker: LLMEngine) -> None:
    num_tokens = next(n for n, text in enumerate(words(speaker), 1) if text == " sat on the")
    steps = speak(speaker, stop="on the moon", max_tokens=num_tokens)
    assert steps[-2].outputs[0].text == " sat "
    assert (steps[-1].outputs[0].text, steps[-1].outputs[0].finish_reason) == (" sat on the", "length")


def test_text_and_stops_with_preemption(text_model: str) -> None:
    """Random output, mostly broken bytes, and stop strings taken from it: the same with few blocks as with many."""
    prompts = ["the cat", "e", "🙂 and", "on the mat", "é", "the other story"]
    full = run(LLMEngine(text_model), prompts, GREEDY)
    params = [SamplingParams(temperature=0, max_tokens=24, stop=output.outputs[0].text[9:11]) for output in full]
    large, small = LLMEngine(text_model), LLMEngine(text_model, num_blocks=7, block_size=8, max_num_batched_tokens=9)
    for each in (GREEDY, params):
        assert completions(run(small, prompts, each)) == completions(run(large, prompts, each))
    assert small.stats().num_preemptions > 0
    for output, stopped in zip(full, run(large, prompts, params), strict=True):
        text = output.outputs[0].text
        assert text == large.tokenizer.decode(output.outputs[0].token_ids)
        assert stopped.outputs[0].text == text[: text.find(text[9:11])]


# --- stop tokens ---


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_ids(speaker: LLMEngine, ignore_eos: bool) -> None:
    """Each token of SPEECH in turn, those within a character too."""
    assert speaker.tokenizer is not None
    ids = speech_ids(speaker)
    for token_id in set(ids):
        steps = speak(speaker, stop_token_ids=[token_id], ignore_eos=ignore_eos)
        final = steps[-1].outputs[0]
        num_before = ids.index(token_id)
        assert final.token_ids == ids[: num_before + 1] and len(steps) == num_before + 1
        assert final.text == speaker.tokenizer.decode(ids[:num_before])
        assert final.finish_reason == "stop"


def test_several_stop_token_ids(speaker: LLMEngine) -> None:
    """The first that comes ends it, wherever it stands in the list; the others, and one of no token, do nothing."""
    ids = speech_ids(speaker)
    for stop_token_ids in ([10**6, ids[9], ids[3]], (ids[3], ids[9]), [ids[3]] * 2):
        final = speak(speaker, stop_token_ids=stop_token_ids)[-1].outputs[0]
        assert (final.text, final.token_ids, final.finish_reason) == (words(speaker)[2], ids[:4], "stop")
    assert speak(speaker, stop_token_ids=[10**6])[-1].outputs[0].text == SPEECH


def test_a_stop_token_at_once(speaker: LLMEngine) -> None:
    ids = speech_ids(speaker)
    [output] = speak(speaker, stop_token_ids=ids)
    assert completions([output]) == [("", ids[:1], "stop")]


def test_a_stop_token_is_not_looked_for_in_the_prompt(speaker: LLMEngine) -> None:
    assert speaker.tokenizer is not None
    [*_, last_of_prompt] = speaker.tokenizer(BEGINNING).input_ids
    assert last_of_prompt not in speech_ids(speaker)
    assert speak(speaker, stop_token_ids=[last_of_prompt])[-1].outputs[0].text == SPEECH


def test_a_stop_token_that_is_the_last_or_ends_a_stop_string(speaker: LLMEngine) -> None:
    """It is a stop; and its text is not there to be searched."""
    ids = speech_ids(speaker)
    expected = [(words(speaker)[2], ids[:4], "stop")]
    assert completions(speak(speaker, stop_token_ids=[ids[3]], max_tokens=4)[-1:]) == expected
    stop = words(speaker)[3][-2:]
    assert stop not in words(speaker)[2]
    assert completions(speak(speaker, stop_token_ids=[ids[3]], stop=stop)[-1:]) == expected


def test_eos_as_a_stop_token(speaker: LLMEngine) -> None:
    assert speaker.tokenizer is not None
    ids, eos = speech_ids(speaker), speaker.tokenizer.convert_tokens_to_ids(EOS)
    on = speak(speaker, ignore_eos=True, max_tokens=len(ids) + 3)[-1:]
    assert completions(on) == [(SPEECH, [*ids, eos, eos, eos], "length")]
    stopped = speak(speaker, ignore_eos=True, stop_token_ids=[eos])[-1:]
    assert completions(stopped) == completions(speak(speaker)[-1:]) == [(SPEECH, [*ids, eos], "stop")]


def test_an_eos_token_that_the_tokenizer_does_not_call_special(speaker_path: str, tmp_path: Path) -> None:
    shutil.copytree(speaker_path, tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    fields["added_tokens"] = [{**token, "special": False} for token in fields["added_tokens"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    engine = LLMEngine(str(tmp_path))
    assert engine.tokenizer is not None
    ids, eos = speech_ids(engine), engine.tokenizer.convert_tokens_to_ids(EOS)
    assert engine.tokenizer.decode([eos], skip_special_tokens=True) == EOS
    assert completions(speak(engine)[-1:]) == [(SPEECH, [*ids, eos], "stop")]
    going_on = speak(engine, ignore_eos=True, max_tokens=len(ids) + 2)[-1:]
    assert completions(going_on) == [(SPEECH + 2 * EOS, [*ids, eos, eos], "length")]


def test_a_word_as_eos_token(speaker_path: str, tmp_path: Path) -> None:
    """generation_config.json names it, as one of several."""
    shutil.copytree(speaker_path, tmp_path, dirs_exist_ok=True)
    engine = LLMEngine(speaker_path)
    ids = speech_ids(engine)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, ids[4]]}))
    engine = LLMEngine(str(tmp_path))
    assert completions(speak(engine)[-1:]) == [(words(engine)[3], ids[:5], "stop")]
    assert completions(speak(engine, ignore_eos=True, max_tokens=6)[-1:]) == [(words(engine)[5], ids[:6], "length")]


# --- logprobs ---

SMALL: dict[str, Any] = dict(num_blocks=8, block_size=8, max_num_seqs=3, max_num_batched_tokens=9)  # preempts


def reference_logprobs(checkpoint: Checkpoint, output: RequestOutput) -> torch.Tensor:
    """In the place of each output token, by Hugging Face in one go: [num_output_tokens, vocab_size]."""
    token_ids = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.no_grad():
        logits = checkpoint.model(torch.tensor([token_ids])).logits[0]
    return logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(dim=-1)


def check_logprobs(expected: torch.Tensor, completion: CompletionOutput, count: int | None) -> None:
    """expected: as `reference_logprobs` gives it. count: what the request asks for."""
    own = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert completion.cumulative_logprob == pytest.approx(own.sum().item(), abs=1e-3)
    assert (completion.logprobs is None) == (count is None)
    if count is None or completion.logprobs is None:
        return
    sampled = [entries[token_id] for entries, token_id in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in sampled), abs=1e-4)
    for row, token_id, entries in zip(expected, completion.token_ids, completion.logprobs, strict=True):
        for entry_id, entry in entries.items():
            assert entry.logprob == pytest.approx(row[entry_id].item(), abs=1e-4)
            # One rank, unless another token is as likely but for rounding.
            higher, not_lower = (row > entry.logprob + 2e-4).sum(), (row >= entry.logprob - 2e-4).sum()
            assert higher < entry.rank <= not_lower
        top = list(entries.values())[:count]
        assert [entry.logprob for entry in top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert [entry.rank for entry in top] == list(range(1, count + 1))
        assert list(entries)[count:] == ([] if token_id in list(entries)[:count] else [token_id])


@pytest.mark.parametrize("options", [dict(), SMALL], ids=["large", "small"])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_logprobs_equal_hugging_face(
    get_checkpoint: Callable[[str], Checkpoint], name: str, options: dict[str, Any]
) -> None:
    """Of the model's own distribution, whatever temperature and restrictions make of it."""
    checkpoint = get_checkpoint(name)
    engine = LLMEngine(checkpoint.path, **options)
    restrictions: list[dict[str, Any]] = [
        dict(temperature=0),
        dict(temperature=0.7, seed=1),
        dict(temperature=3.0, seed=2, top_k=40, min_p=0.001),
        dict(temperature=1.5, seed=3, top_p=0.9),
    ]
    for counts in ([0, 3, None, 20, 1, None, 3, 5], [None, 0, 3, 2, 20, 3, 0, None], [None] * 8):
        params = [
            SamplingParams(max_tokens=20, logprobs=count, **restrictions[i // 2]) for i, count in enumerate(counts)
        ]
        outputs = run(engine, checkpoint.prompts, params)
        for output, count in zip(outputs, counts, strict=True):
            assert len(output.outputs[0].token_ids) == 20
            check_logprobs(reference_logprobs(checkpoint, output), output.outputs[0], count)
    assert (engine.stats().num_preemptions > 0) == bool(options)


def test_logprobs_do_not_change_the_tokens(llama: Checkpoint) -> None:
    for params in (dict(temperature=0), dict(temperature=1.0, seed=5)):
        plain, reporting = (
            run(LLMEngine(llama.path), llama.prompts, SamplingParams(max_tokens=8, logprobs=count, **params))
            for count in (None, 4)
        )
        assert completions(plain) == completions(reporting)


def test_logprobs_while_it_runs_and_when_aborted(llama: Checkpoint) -> None:
    """One entry a token at any time, and no list that changes after it was given out."""
    engine = LLMEngine(llama.path, **SMALL)
    for i, prompt in enumerate(llama.prompts):
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
        engine.add_request(str(i), sampling_params=params, prompt_token_ids=prompt)
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(30):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.stats().num_preemptions > 0
    running = {sequence.request_id for sequence in engine.scheduler.running}
    for i in range(len(llama.prompts)):
        aborted = engine.abort_request(str(i))
        if aborted is not None and aborted.outputs[0].token_ids:
            assert outputs[str(i)][-1].outputs[0].token_ids == aborted.outputs[0].token_ids
            outputs[str(i)].append(aborted)
    assert running and running & outputs.keys()
    for steps in outputs.values():
        expected = reference_logprobs(llama, steps[-1])
        for step in steps:
            check_logprobs(expected[: len(step.outputs[0].token_ids)], step.outputs[0], 2)


def test_logprobs_of_a_vocabulary_smaller_than_asked_for(tmp_path: Path) -> None:
    make_model("llama-gqa", vocab_size=5).save_pretrained(tmp_path)
    [output] = run(LLMEngine(str(tmp_path)), [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, logprobs=20))
    assert output.outputs[0].logprobs is not None
    for entries in output.outputs[0].logprobs:
        assert sorted(entries) == [0, 1, 2, 3, 4]
        assert math.fsum(math.exp(entry.logprob) for entry in entries.values()) == pytest.approx(1, abs=1e-5)


def test_decoded_tokens(engine: LLMEngine, llama: Checkpoint) -> None:
    assert engine.tokenizer is not None
    for params in (dict(temperature=0), dict(temperature=2.0, seed=3)):
        outputs = run(engine, ["the cat", "🙂"], SamplingParams(max_tokens=20, logprobs=20, **params))
        for output in outputs:
            assert output.outputs[0].logprobs is not None
            for entries in output.outputs[0].logprobs:
                for token_id, entry in entries.items():
                    assert entry.decoded_token == engine.tokenizer.decode([token_id])
    [output] = run(LLMEngine(llama.path), [[1]], SamplingParams(max_tokens=2, logprobs=2))
    assert output.outputs[0].logprobs is not None
    assert {e.decoded_token for entries in output.outputs[0].logprobs for e in entries.values()} == {None}


def test_the_decoded_eos_token_is_shown(speaker: LLMEngine) -> None:
    assert speaker.tokenizer is not None
    final = speak(speaker, logprobs=0)[-1].outputs[0]
    assert final.logprobs is not None
    assert [[entry.decoded_token for entry in entries.values()] for entries in final.logprobs] == [
        [speaker.tokenizer.decode([token_id])] for token_id in final.token_ids
    ]
    assert [entry.decoded_token for entry in final.logprobs[-1].values()] == [EOS] and EOS not in final.text


def test_a_model_with_more_tokens_than_the_tokenizer(tmp_path: Path) -> None:
    """As where a vocabulary is padded to a round number: such a token has no text."""
    make_tokenizer(tmp_path)
    make_model("llama-gqa", vocab_size=10 * TOKENIZER_SIZE).save_pretrained(tmp_path)
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=20, logprobs=3, stop="never")
    [output] = run(LLMEngine(str(tmp_path)), ["the cat"], params)
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.token_ids) == 20
    beyond = [(t, e) for entries in completion.logprobs for t, e in entries.items() if t >= TOKENIZER_SIZE]
    assert {entry.decoded_token for _, entry in beyond} == {""}
    assert max(completion.token_ids) >= TOKENIZER_SIZE


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
        with pytest.raises(ValueError, match=rf"'x': expected 1 to 31 tokens \(max_model_len 32.*got {length}$"):
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


def test_a_step_without_requests_does_nothing(engine: LLMEngine) -> None:
    assert engine.step() == [] and not engine.has_unfinished_requests()


# --- times ---


def test_times(engine: LLMEngine) -> None:
    before = time.monotonic()
    engine.add_request("x", "the cat", GREEDY)
    steps = []
    while engine.has_unfinished_requests():
        steps += engine.step()
        metrics = steps[0].metrics
        assert (metrics.finished_time is None) == (not steps[-1].finished)
        if len(steps) == 1:
            first_token_time = metrics.first_token_time
    assert len(steps) == 24 and all(step.metrics is metrics for step in steps)
    assert first_token_time is not None and metrics.finished_time is not None
    assert before <= metrics.arrival_time <= first_token_time < metrics.finished_time <= time.monotonic()
    assert metrics.first_token_time == first_token_time


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
    engine = LLMEngine(llama.path, num_blocks=7, block_size=8, max_num_batched_tokens=10)
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
    so_far = list(young.output_token_ids)
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


@pytest.mark.parametrize("where", ["prepare_inputs", "forward", "compute_logits", "sample"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_engine_goes_on_after_an_error(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
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
            raise error("here")
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
        except error:
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


# --- random load ---

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


@settings(max_examples=60)
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


# --- device, tokenizer, memory ---

NO_CUDA = not (torch.cuda.is_available() and pagedattn_ext.build_info()["cuda_arches"])


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_device_cpu(llama: Checkpoint, device: str) -> None:
    if device == "auto" and not NO_CUDA:
        pytest.skip("auto is CUDA here")
    engine = LLMEngine(llama.path, device=device)
    assert token_ids(run(engine, llama.prompts[:2], GREEDY)) == llama.expected[:2]
    assert engine.model_runner.device == "cpu"


@pytest.mark.parametrize(
    "device", ["tpu", "", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:1.0", "cuda 0", "0", "5", 5, None]
)
def test_a_device_that_is_none(llama: Checkpoint, device: Any) -> None:
    with pytest.raises(ValueError) as error:
        LLMEngine(llama.path, device=device)
    assert str(error.value) == f"device: expected auto, cpu, cuda or cuda:N, got {device!r}"


@pytest.mark.skipif(not NO_CUDA, reason="CUDA works here")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_cuda_where_there_is_none(llama: Checkpoint, device: str) -> None:
    with pytest.raises(ValueError, match=rf"device: expected cpu \(.*CUDA.*\), got {device}$"):
        LLMEngine(llama.path, device=device)


@pytest.mark.parametrize(
    ("arches", "cuda_of_torch", "reason"),
    [
        ([], None, "this build of pagedattn_ext has no CUDA kernels"),
        ([], "13.0", "this build of pagedattn_ext has no CUDA kernels"),
        (["90"], None, "this torch is built without CUDA"),
        (["90"], "13.0", "torch finds no CUDA device"),
    ],
)
def test_why_there_is_no_cuda(
    monkeypatch: pytest.MonkeyPatch, arches: list[str], cuda_of_torch: str | None, reason: str
) -> None:
    monkeypatch.setattr(pagedattn_ext, "build_info", lambda: {"cuda_arches": arches})
    monkeypatch.setattr(torch.version, "cuda", cuda_of_torch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ValueError) as error:
        choose_device("cuda")
    assert str(error.value) == f"device: expected cpu ({reason}), got cuda"


def test_device_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagedattn_ext, "build_info", lambda: {"cuda_arches": ["90"]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [choose_device(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]


def test_a_model_without_a_tokenizer_and_one_from_elsewhere(llama: Checkpoint, text_model: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(text_model) / name, tmp_path)
    assert LLMEngine(str(tmp_path)).tokenizer is None
    engine = LLMEngine(str(tmp_path), tokenizer=text_model)
    params = SamplingParams(temperature=0, max_tokens=24, stop="never", logprobs=1)
    prompts = ["the cat", "🙂"]
    assert completions(run(engine, prompts, params)) == completions(run(LLMEngine(text_model), prompts, params))


def test_another_tokenizer_than_the_model_s(speaker_path: str, tmp_path: Path) -> None:
    """With tokens in each other's place: the model says the same ones, the texts of prompt and output are others."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(speaker_path) / name, tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    for first, second in [("n", "m"), ("Ġmat", "Ġhat")]:
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    params = SamplingParams(temperature=0, max_tokens=None, logprobs=0)
    [own] = run(LLMEngine(speaker_path), ["nn"], params)
    [other] = run(LLMEngine(speaker_path, tokenizer=str(tmp_path)), ["mm"], params)
    assert (own.prompt_token_ids, token_ids([own])) == (other.prompt_token_ids, token_ids([other]))
    assert own.outputs[0].text == SPEECH
    exchanged = SPEECH.replace(" mat", " ?").replace(" hat", " mat").replace(" ?", " hat")
    assert other.outputs[0].text == exchanged
    assert other.outputs[0].logprobs is not None
    decoded = [entry.decoded_token for entries in other.outputs[0].logprobs for entry in entries.values()]
    assert decoded.index(" hat") < decoded.index(" mat")


def test_a_directory_without_the_tokenizer(llama: Checkpoint, text_model: str, tmp_path: Path) -> None:
    """It is asked for, so the model's own is no answer."""
    for directory in (llama.path, str(tmp_path), str(tmp_path / "nowhere"), "gpt2"):
        with pytest.raises(FileNotFoundError, match=f"tokenizer: expected a directory with .*, got {directory}$"):
            LLMEngine(text_model, tokenizer=directory)


def test_swap_space_and_gpu_memory_utilization_change_nothing_on_the_cpu(llama: Checkpoint) -> None:
    for swap_space, share in [(0, 1), (4, 0.01), (0.5, 1.0), (10**6, 0.9)]:
        engine = LLMEngine(llama.path, swap_space=swap_space, gpu_memory_utilization=share)
        assert engine.stats().num_blocks == 256 * 8


# --- size of the cache ---

# llama-gqa in fp32: keys and values of 2 layers, 2 KV heads, 20 numbers a head, 16 tokens.
BLOCK_BYTES = 2 * 2 * 2 * 20 * 16 * 4


def num_blocks(path: str, **options: Any) -> int:
    return LLMEngine(path, **options).stats().num_blocks


def test_cache_size(llama: Checkpoint) -> None:
    assert num_blocks(llama.path, num_blocks=33) == 33
    assert num_blocks(llama.path, kv_cache_memory=10 * BLOCK_BYTES) == 10
    assert num_blocks(llama.path, kv_cache_memory=11 * BLOCK_BYTES - 1) == 10
    assert num_blocks(llama.path, kv_cache_memory=10 * BLOCK_BYTES, block_size=32) == 5
    # 128 positions are 8 blocks a sequence: no more than can be used, by default too.
    assert num_blocks(llama.path) == 256 * 8
    assert num_blocks(llama.path, max_num_seqs=3) == 24
    assert num_blocks(llama.path, max_num_seqs=3, max_model_len=17) == 4  # 51 slots
    assert num_blocks(llama.path, max_num_seqs=3, kv_cache_memory=10 * BLOCK_BYTES) == 10


def test_a_small_cache_limits_the_length(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, num_blocks=2)
    assert engine.max_model_len == 32
    [output] = run(engine, [llama.prompts[3]], SamplingParams(temperature=0, max_tokens=None))  # 16 tokens
    assert output.outputs[0].token_ids == llama.expected[3][:16]
    assert output.outputs[0].finish_reason == "length"
    assert LLMEngine(llama.path, num_blocks=2, max_model_len=20).max_model_len == 20


def test_a_max_model_len_that_the_cache_cuts(llama: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    """Asked for or the model's own: one warning that says so; none where nothing is cut."""
    cases: list[tuple[dict[str, Any], str | None]] = [
        (dict(num_blocks=2, max_model_len=40), "max_model_len: 32 of 40 tokens, all that the cache holds"),
        (dict(num_blocks=3), "max_model_len: 48 of 128 tokens, all that the cache holds"),
        (
            dict(kv_cache_memory=BLOCK_BYTES, max_model_len=17),
            "max_model_len: 16 of 17 tokens, all that the cache holds",
        ),
        (dict(num_blocks=2, max_model_len=32), None),
        (dict(num_blocks=8), None),
        (dict(), None),
    ]
    for options, warning in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="pagedattn_serve"):
            engine = LLMEngine(llama.path, **options)
        assert [record.getMessage() for record in caplog.records] == ([] if warning is None else [warning])
        assert warning is None or f": {engine.max_model_len} of" in warning
    engine = LLMEngine(llama.path, num_blocks=2, max_model_len=40)
    with pytest.raises(ValueError, match="expected 1 to 31 tokens"):
        engine.add_request("x", prompt_token_ids=[7] * 32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(num_blocks=4, kv_cache_memory=10**6), ValueError, "kv_cache_memory: expected None beside num_blocks"),
        (dict(kv_cache_memory=BLOCK_BYTES - 1), ValueError, f"kv_cache_memory: .*one block, {BLOCK_BYTES} bytes"),
        (dict(kv_cache_memory=0), ValueError, "kv_cache_memory"),
        (dict(kv_cache_memory=1e9), TypeError, "kv_cache_memory"),
        (dict(num_blocks=0), ValueError, "num_blocks"),
        (dict(num_blocks="4"), TypeError, "num_blocks"),
        (dict(block_size=0), ValueError, "block_size"),
        (dict(block_size=-16), ValueError, "block_size"),
        (dict(block_size=24), ValueError, "block_size"),
        (dict(block_size="16"), TypeError, "block_size"),
        (dict(max_num_seqs=0), ValueError, "max_num_seqs"),
        (dict(max_num_seqs="4"), TypeError, "max_num_seqs"),
        (dict(max_num_batched_tokens=0), ValueError, "max_num_batched_tokens"),
        (dict(max_model_len=129), ValueError, "max_model_len: expected an int in .2, 128., got 129"),
        (dict(max_model_len=1), ValueError, "max_model_len"),
        (dict(max_model_len=20.0), TypeError, "max_model_len"),
        (dict(dtype="float64"), ValueError, "dtype"),
        (dict(seed="x"), TypeError, "seed"),
        (dict(seed=-1), ValueError, "seed"),
        (dict(swap_space=-1), ValueError, "swap_space: expected a number >= 0, got -1"),
        (dict(swap_space=-0.5), ValueError, "swap_space: expected a number >= 0, got -0.5"),
        (dict(swap_space=math.nan), ValueError, "swap_space: expected a finite number, got nan"),
        (dict(swap_space=math.inf), ValueError, "swap_space: expected a finite number, got inf"),
        (dict(swap_space="4"), TypeError, "swap_space: expected a number, got '4'"),
        (dict(swap_space=None), TypeError, "swap_space: expected a number, got None"),
        (dict(gpu_memory_utilization=0), ValueError, r"gpu_memory_utilization: expected a share in \(0, 1\], got 0"),
        (dict(gpu_memory_utilization=1.01), ValueError, r"gpu_memory_utilization: .* \(0, 1\], got 1.01"),
        (dict(gpu_memory_utilization=90), ValueError, r"gpu_memory_utilization: .* \(0, 1\], got 90"),
        (dict(gpu_memory_utilization=-0.9), ValueError, r"gpu_memory_utilization: .* \(0, 1\], got -0.9"),
        (dict(gpu_memory_utilization=math.nan), ValueError, "gpu_memory_utilization: expected a finite number"),
        (dict(gpu_memory_utilization="90%"), TypeError, "gpu_memory_utilization: expected a number, got '90%'"),
        (dict(gpu_memory_utilization=True), TypeError, "gpu_memory_utilization: expected a number, got True"),
    ],
)
def test_wrong_options(llama: Checkpoint, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMEngine(llama.path, **options)


def test_a_head_size_without_a_kernel(tmp_path: Path) -> None:
    """An error of the model, when it is loaded, not of the first request."""
    make_model("llama-gqa", head_dim=260).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="head_size: expected at most 256, got 260"):
        LLMEngine(str(tmp_path))


def test_seed_of_the_engine(llama: Checkpoint) -> None:
    def sampled(seed: int) -> list[list[int]]:
        return token_ids(run(LLMEngine(llama.path, seed=seed), llama.prompts, SamplingParams(max_tokens=8)))

    assert sampled(1) == sampled(1) != sampled(2)
