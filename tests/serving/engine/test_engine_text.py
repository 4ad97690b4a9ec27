"""The engine: how text streams and stops, and the logprobs of its tokens."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    BEGINNING,
    EOS,
    SMALL,
    SPEECH,
    TOKENIZER_SIZE,
    Checkpoint,
    make_model,
    make_speaking_model,
    make_tokenizer,
)
from engine_runs import completions, run, speak, speech_ids, words
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.requests.request import Completion, OutputRules, SampledToken
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus
from pagedattn_serve.text.detokenizer import REPLACEMENT, TokenNames
from pagedattn_serve.text.stop_strings import StopStrings

GREEDY = SamplingParams(temperature=0, max_tokens=24)


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


def test_a_stop_string_that_is_begun_before_a_fork(speaker: LLMEngine) -> None:
    """Wherever that comes in the output, it goes on as if nothing had; what came before min_tokens does not count."""
    params = SamplingParams(stop=["at on the m", "on the moon", " sat"], min_tokens=3, max_tokens=100)
    rules = OutputRules(
        params, frozenset(), frozenset(), 100, StopStrings(params.stop_strings), None, TokenNames(speaker.tokenizer)
    )
    tokens: list[SampledToken] = [(token_id, 0.0, None, None) for token_id in speech_ids(speaker)]

    def rest(completion: Completion, num_tokens: int) -> list[tuple[str, SequenceStatus | None]]:
        """The text after each token more, up to the one that ends it."""
        seen = []
        for token in tokens[num_tokens:]:
            status = completion.add_token(token)
            if status is not None:
                completion.sequence.status = status
            seen.append((completion.output(0, is_delta=False).text, status))
            if status is not None:
                break
        return seen

    def begun() -> Completion:
        assert speaker.tokenizer is not None
        return Completion(Sequence("a", speaker.tokenizer(BEGINNING).input_ids), rules)

    whole = rest(begun(), 0)
    assert whole[-1] == (SPEECH[: SPEECH.find("at on the m")], SequenceStatus.FINISHED_STOPPED)
    for num_tokens in range(len(whole)):
        completion = begun()
        for token in tokens[:num_tokens]:
            completion.add_token(token)
        fork = completion.fork(completion.sequence.fork(1))
        assert rest(completion, num_tokens) == rest(fork, num_tokens) == whole[num_tokens:]


def test_a_thousand_long_stop_strings_cost_next_to_nothing() -> None:
    """To compare each with the end of the text took 20 ms a step and more, the longer the text."""
    engine = LLMEngine(DEMO_MODEL, dtype="float32", num_blocks=32)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    seconds = []
    for stop in ([], [f"x{'y' * 995}{i:04}" for i in range(1000)]):
        started = time.thread_time()
        run(engine, ["The with statement"], replace(params, stop=stop))
        seconds.append(time.thread_time() - started)
    assert seconds[1] < 2 * seconds[0] + 0.2


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


def test_stop_reason(speaker: LLMEngine) -> None:
    """The string or the token that ended it, None for EOS, even as a stop token, and for other ends."""
    ids = speech_ids(speaker)
    assert speaker.tokenizer is not None
    eos = speaker.tokenizer.convert_tokens_to_ids(EOS)
    cases: list[tuple[dict[str, Any], int | str | None]] = [
        (dict(stop="on the hat"), "on the hat"),
        (dict(stop=["never", "mat", " on the mat"]), " on the mat"),  # it begins first
        (dict(stop=["mat", "mat 🙂"]), "mat"),
        (dict(stop=[" m", " mat"]), " m"),
        (dict(stop_token_ids=[ids[3], ids[9]]), ids[3]),
        (dict(stop_token_ids=[ids[3]], stop="the end", max_tokens=4), ids[3]),
        (dict(), None),
        (dict(stop_token_ids=[eos]), None),
        (dict(stop_token_ids=[eos], ignore_eos=True), eos),
        (dict(max_tokens=3), None),
    ]
    for params, expected in cases:
        *before, last = speak(speaker, **params)
        assert last.outputs[0].stop_reason == expected, params
        assert {step.outputs[0].stop_reason for step in before} <= {None}
    speaker.add_request("x", BEGINNING)
    aborted = speaker.abort_request("x")
    assert aborted is not None and aborted.outputs[0].stop_reason is None


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


def reference_logprobs(checkpoint: Checkpoint, output: RequestOutput, index: int = 0) -> torch.Tensor:
    """In the place of each token of an output, by Hugging Face in one go: [num_output_tokens, vocab_size]."""
    token_ids = output.prompt_token_ids + output.outputs[index].token_ids
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
    check_entries(expected, completion, count)


def check_entries(expected: torch.Tensor, completion: CompletionOutput, count: int) -> None:
    """The token that came, then the `count` most likely ones."""
    assert completion.logprobs is not None
    for row, token_id, entries in zip(expected, completion.token_ids, completion.logprobs, strict=True):
        for entry_id, entry in entries.items():
            assert entry.logprob == pytest.approx(row[entry_id].item(), abs=1e-4)
            # One rank, unless another token is as likely but for rounding.
            higher, not_lower = (row > entry.logprob + 2e-4).sum(), (row >= entry.logprob - 2e-4).sum()
            assert higher < entry.rank <= not_lower
        ranked = sorted(entries, key=lambda entry_id: entries[entry_id].rank)
        top = [entries[entry_id] for entry_id in ranked[:count]]
        assert [entry.logprob for entry in top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert [entry.rank for entry in top] == list(range(1, count + 1))
        assert next(iter(entries)) == token_id and ranked[count:] == ([] if token_id in ranked[:count] else [token_id])


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


@pytest.mark.parametrize("count", [0, 2, 5])
def test_logprobs_of_beams(llama: Checkpoint, count: int) -> None:
    """Of the most likely tokens, also where a bias makes others the candidates."""
    bias = {token_id: 30.0 - i for i, token_id in enumerate(range(4, 10))}
    params = dict(temperature=0, n=2, use_beam_search=True, max_tokens=6, logprobs=count)
    [plain, biased] = run(
        LLMEngine(llama.path),
        [llama.prompts[2]] * 2,
        [SamplingParams(**params), SamplingParams(**params, logit_bias=bias)],
    )
    for output in (plain, biased):
        for index, completion in enumerate(output.outputs):
            check_entries(reference_logprobs(llama, output, index), completion, count)
    assert {token_id for completion in biased.outputs for token_id in completion.token_ids} <= bias.keys()


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
    """Joined, they are the text, also where the model draws parts of characters and ends amid one."""
    assert engine.tokenizer is not None
    for params in (dict(temperature=0), dict(temperature=2.0, seed=3)):
        ignored = [0, 1]  # <s> and </s>, which the text leaves out
        params = SamplingParams(max_tokens=20, logprobs=20, logit_bias=dict.fromkeys(ignored, -100.0), **params)
        for output in run(engine, ["the cat", "🙂"], params):
            [completion] = output.outputs
            assert completion.logprobs is not None
            own = [
                entries[i].decoded_token for i, entries in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            assert "".join(map(str, own)) == completion.text
    [output] = run(LLMEngine(llama.path), [[1]], SamplingParams(max_tokens=2, logprobs=2))
    assert output.outputs[0].logprobs is not None
    assert {e.decoded_token for entries in output.outputs[0].logprobs for e in entries.values()} == {None}


def test_the_decoded_eos_token_is_shown(speaker: LLMEngine) -> None:
    assert speaker.tokenizer is not None
    final = speak(speaker, logprobs=0)[-1].outputs[0]
    assert final.logprobs is not None
    names = [entry.decoded_token for entries in final.logprobs for entry in entries.values()]
    assert "".join(map(str, names)) == final.text + EOS and names[-1] == EOS


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


# ---- special tokens in stop strings ---------------------------------------------------------------------------------

TURN_END = "<|im_end|>"
TURNS = f" sat.{TURN_END} the mat{TURN_END}"  # after BEGINNING; then EOS


@pytest.fixture(scope="module")
def turns_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that says TURNS, for which TURN_END is a special token like others."""
    directory = tmp_path_factory.mktemp("turns")
    make_speaking_model(directory, BEGINNING + TURNS, TURN_END)
    return str(directory)


@pytest.fixture(scope="module")
def turns(turns_path: str) -> LLMEngine:
    return LLMEngine(turns_path)


@pytest.mark.parametrize(
    ("params", "text", "stop_reason"),
    [
        (dict(stop=TURN_END), " sat.", TURN_END),
        (dict(stop=TURN_END, skip_special_tokens=False), " sat.", TURN_END),
        (dict(stop=TURN_END, include_stop_str_in_output=True), f" sat.{TURN_END}", TURN_END),
        (
            dict(stop=TURN_END, include_stop_str_in_output=True, skip_special_tokens=False),
            f" sat.{TURN_END}",
            TURN_END,
        ),
        (dict(stop=[f"at.{TURN_END}", "never"]), " s", f"at.{TURN_END}"),
        (dict(stop=f"{TURN_END} the m"), " sat.", f"{TURN_END} the m"),
        (
            dict(stop=f"{TURN_END} the m", include_stop_str_in_output=True),
            f" sat.{TURN_END} the m",
            f"{TURN_END} the m",
        ),
        (dict(stop=f"{TURN_END} the m", skip_special_tokens=False), " sat.", f"{TURN_END} the m"),
        (dict(stop=f"mat{TURN_END}"), " sat. the ", f"mat{TURN_END}"),
        (dict(stop=TURN_END, min_tokens=5), " sat. the mat", TURN_END),
        (dict(stop=f"mat{TURN_END}{EOS}"), " sat. the ", f"mat{TURN_END}{EOS}"),
        (dict(stop=EOS, skip_special_tokens=False), TURNS, EOS),
        (dict(stop=[f"{TURN_END} on", f"x{TURN_END}", "|im_end|", "<"]), " sat. the mat", None),
        (dict(stop=EOS, ignore_eos=True), " sat. the mat", EOS),
        (dict(stop_token_ids=[2]), " sat.", 2),
    ],
)
def test_a_stop_string_with_a_special_token(
    turns: LLMEngine, params: dict[str, Any], text: str, stop_reason: int | str | None
) -> None:
    """`speak` sees every output: the text only grows."""
    final = speak(turns, **params)[-1].outputs[0]
    assert (final.text, final.finish_reason, final.stop_reason) == (text, "stop", stop_reason)


@pytest.mark.parametrize(
    "params",
    [dict(n=3), dict(best_of=2, use_beam_search=True), dict(n=2, output_kind=RequestOutputKind.DELTA)],
    ids=["n", "beams", "deltas"],
)
def test_a_special_stop_string_ends_each_output(turns: LLMEngine, params: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 30, "stop": f"at.{TURN_END}", **params})
    turns.add_request("a", BEGINNING, params)
    [told, *outputs] = step_to_end(turns)
    for output in outputs:
        if params.output_kind is RequestOutputKind.DELTA:
            told.add(output)
        else:
            told = output
    assert [each.finish_reason for each in told.outputs] == ["stop"] * params.n
    assert (told.outputs[0].text, told.outputs[0].stop_reason) == (" s", f"at.{TURN_END}")


def step_to_end(engine: LLMEngine) -> Iterator[RequestOutput]:
    while engine.has_unfinished_requests():
        yield from engine.step()


def test_a_special_stop_string_amid_drafts(tmp_path: Path) -> None:
    """The model repeats itself, so that the stop string lies amid the tokens that are guessed."""
    period = f" the cat sat.{TURN_END}"
    make_speaking_model(tmp_path, period * 8, TURN_END)
    engine = LLMEngine(str(tmp_path), speculation="ngram", num_speculative_tokens=12)
    params = SamplingParams(temperature=0, max_tokens=60, stop=f"{TURN_END} the", min_tokens=20)
    [output] = run(engine, [period], params)
    assert engine.stats().num_accepted_tokens > 0
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (" the cat sat." * 4, f"{TURN_END} the")


@pytest.mark.parametrize("has_template", [False, True])
def test_the_tokenizer_s_end_of_a_turn(turns_path: str, tmp_path: Path, has_template: bool) -> None:
    """A model for chats whose config.json still has the end-of-sequence token of the model it came from."""
    directory = tmp_path / "model"
    shutil.copytree(turns_path, directory)
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": TURN_END}
    if has_template:
        fields["chat_template"] = "{{ messages[0].content }}"
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    final = speak(LLMEngine(str(directory)))[-1].outputs[0]
    assert (final.text, final.finish_reason, final.stop_reason) == (
        " sat." if has_template else " sat. the mat",
        "stop",
        None,
    )
