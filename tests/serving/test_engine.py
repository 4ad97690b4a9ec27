"""The engine: what it lets in, how text streams and stops, aborts, counts, and how large its cache is."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import EOS, TOKENIZER_SIZE, Checkpoint, finish_all, make_model, make_speaking_model, run, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from pagedattn_serve.detokenizer import REPLACEMENT
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
BEGINNING, SPEECH = "the cat", " sat on the mat 🙂🙂 on the hat é, and on the end."


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    """Says SPEECH and then EOS after BEGINNING."""
    directory = tmp_path_factory.mktemp("speaker")
    make_speaking_model(directory, BEGINNING + SPEECH)
    return LLMEngine(str(directory))


@pytest.fixture
def engine(text_model: str) -> LLMEngine:
    return LLMEngine(text_model, num_blocks=40)


def speak(engine: LLMEngine, **params: Any) -> list[RequestOutput]:
    """Every output of one request for SPEECH."""
    engine.add_request("speech", BEGINNING, SamplingParams(**{**dict(temperature=0, max_tokens=None), **params}))
    return finish_all(engine)["speech"]


def words(engine: LLMEngine) -> list[str]:
    """The text of SPEECH after each of its tokens, with broken characters at the end left out."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer(BEGINNING + SPEECH).input_ids[len(tokenizer(BEGINNING).input_ids) :]
    return [tokenizer.decode(ids[: n + 1]).rstrip(REPLACEMENT) for n in range(len(ids))]


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
    assert by_text.outputs == by_ids.outputs
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
        assert run(small, prompts, each) == run(large, prompts, each)
    assert small.stats().num_preemptions > 0
    for output, stopped in zip(full, run(large, prompts, params), strict=True):
        text = output.outputs[0].text
        assert text == large.tokenizer.decode(output.outputs[0].token_ids)
        assert stopped.outputs[0].text == text[: text.find(text[9:11])]


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


def test_a_long_prompt_gives_no_output_before_its_last_chunk(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, max_num_batched_tokens=7)
    engine.add_request("x", sampling_params=GREEDY, prompt_token_ids=llama.prompts[-1])  # 40 tokens
    assert [len(engine.step()) for _ in range(6)] == [0, 0, 0, 0, 0, 1]
    assert finish_all(engine)["x"][-1].outputs[0].token_ids == llama.expected[-1]


def test_a_step_without_requests_does_nothing(engine: LLMEngine) -> None:
    assert engine.step() == [] and not engine.has_unfinished_requests()


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
        (
            dict(dtype="bfloat16"),
            ValueError,
            r"head_size: expected a multiple of 8 up to 256 for torch\.bfloat16, got 20",
        ),
        (dict(seed="x"), TypeError, "seed"),
    ],
)
def test_wrong_options(llama: Checkpoint, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMEngine(llama.path, **options)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "gpt2",
            dict(n_embd=54, n_head=3),
            r"head_size: expected a multiple of 4 up to 256 for torch\.float32, got 18",
        ),
        ("llama-gqa", dict(head_dim=260), "head.size.*260"),  # the ops end at 256
    ],
)
def test_a_head_size_without_a_kernel(tmp_path: Path, name: str, shape: dict[str, int], message: str) -> None:
    """An error of the model, when it is loaded, not of the first request."""
    make_model(name, **shape).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLMEngine(str(tmp_path))


def test_seed_of_the_engine(llama: Checkpoint) -> None:
    def sampled(seed: int) -> list[list[int]]:
        return token_ids(run(LLMEngine(llama.path, seed=seed), llama.prompts, SamplingParams(max_tokens=8)))

    assert sampled(1) == sampled(1) != sampled(2)
