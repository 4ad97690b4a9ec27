"""/v1/completions: the forms of a prompt, what the fields of a request do, OpenAI's form of the answer."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import BEGINNING, SPEECH, make_metaspace_tokenizer, make_model, make_speaking_model
from pydantic import TypeAdapter

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.server.http.errors import JSONResponse
from pagedattn_serve.server.openai import logprobs
from pagedattn_serve.server.openai.answers import response_of
from pagedattn_serve.server.openai.completions import CompletionResponse
from pagedattn_serve.text.detokenizer import TokenNames

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 100}


def test_a_text_is_continued(client: Any) -> None:
    answer = client.answer(PATH, prompt=BEGINNING, **GREEDY)
    TypeAdapter(CompletionResponse).validate_python(answer, strict=True)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    [choice] = answer["choices"]
    said = {key: value for key, value in choice.items() if value is not None}
    assert said == {"index": 0, "text": SPEECH, "finish_reason": "stop"}


def test_usage_counts_the_tokens(client: Any) -> None:
    tokenizer = client.engine.texts.tokenizer
    num_prompt, num_output = len(tokenizer(BEGINNING).input_ids), len(tokenizer(SPEECH).input_ids) + 1  # EOS
    usage = client.answer(PATH, prompt=[BEGINNING, BEGINNING], n=2, **GREEDY)["usage"]
    assert usage == {
        "prompt_tokens": 2 * num_prompt,
        "completion_tokens": 4 * num_output,
        "total_tokens": 2 * num_prompt + 4 * num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


CHAT_PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PATH, CHAT_PATH])
def test_usage_counts_what_was_cached(demo: Any, path: str, stream: bool) -> None:
    """Whole blocks of 16 tokens, without the last token, which has to be computed."""
    text = f"{path} {stream}: " + 40 * "word "
    fields = {"prompt": text} if path == PATH else {"messages": [{"role": "user", "content": text}]}
    usages = []
    for _ in range(2):
        if stream:
            options = {"stream_options": {"include_usage": True}}
            usages.append(demo.events(path, **fields, max_tokens=2, **options)[-1]["usage"])
        else:
            usages.append(demo.answer(path, **fields, max_tokens=2)["usage"])
    num_found = (usages[0]["prompt_tokens"] - 1) // 16 * 16
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, num_found]


def test_token_ids_beside_texts(client: Any) -> None:
    tokenizer = client.engine.texts.tokenizer
    prompt, output = tokenizer(BEGINNING).input_ids, tokenizer(SPEECH).input_ids
    [choice] = client.answer(PATH, prompt=BEGINNING, return_token_ids=True, **GREEDY)["choices"]
    assert choice["prompt_token_ids"] == prompt and choice["token_ids"][:-1] == output  # and the end
    messages = [{"role": "user", "content": BEGINNING}]
    answer = client.answer(CHAT_PATH, messages=messages, return_token_ids=True, **GREEDY)
    assert answer["prompt_token_ids"] == prompt and answer["choices"][0]["token_ids"] == choice["token_ids"]


def test_what_is_not_asked_for_is_null(client: Any) -> None:
    """Not left out: the official client has no attribute then."""
    [choice] = client.answer(PATH, prompt=BEGINNING, **GREEDY)["choices"]
    assert choice["prompt_logprobs"] is choice["prompt_token_ids"] is choice["token_ids"] is None
    answer = client.answer(CHAT_PATH, messages=[{"role": "user", "content": BEGINNING}], **GREEDY)
    [choice] = answer["choices"]
    assert answer["prompt_logprobs"] is answer["prompt_token_ids"] is choice["token_ids"] is None
    assert choice["message"]["reasoning"] is choice["message"]["reasoning_content"] is None


@pytest.mark.parametrize("given", [3, -1])
def test_the_last_tokens_of_a_prompt(client: Any, given: int) -> None:
    """-1: as many as fit before the output."""
    kept = 3 if given == 3 else client.engine.facts.max_model_len - 5
    prompt = [5 + i % 40 for i in range(client.engine.facts.max_model_len + 7)]
    fields = {"truncate_prompt_tokens": given, "max_tokens": 5, "return_token_ids": True}
    [choice] = client.answer(PATH, prompt=prompt, **fields)["choices"]
    assert choice["prompt_token_ids"] == prompt[-kept:]
    [choice] = client.answer(PATH, prompt=prompt, truncation_side="right", **fields)["choices"]
    assert choice["prompt_token_ids"] == prompt[:kept]
    too_many = {"truncate_prompt_tokens": client.engine.facts.max_model_len + 1}
    for wrong in ({"truncate_prompt_tokens": 0}, too_many, {**fields, "echo": True}, {**fields, "prompt_logprobs": 1}):
        status, param, _ = client.error(PATH, prompt=prompt, **wrong)
        assert (status, param) == (400, "truncate_prompt_tokens")


def test_the_model_need_not_be_named(client: Any) -> None:
    assert client.answer(PATH, prompt=BEGINNING, model=None, **GREEDY)["model"] == "tiny"


def test_max_tokens_is_16_if_nothing_is_said(client: Any) -> None:
    answer = client.answer(PATH, prompt=BEGINNING, temperature=0)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_ids_are_not_told_twice(client: Any) -> None:
    ids = {client.answer(PATH, prompt=BEGINNING, max_tokens=1)["id"] for _ in range(5)}
    assert len(ids) == 5
    assert all(len(each) >= 32 for each in ids)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_the_four_forms_of_a_prompt(client: Any, as_ids: bool, as_list: bool) -> None:
    tokenizer = client.engine.texts.tokenizer
    prompt = tokenizer(BEGINNING).input_ids if as_ids else BEGINNING
    answer = client.answer(PATH, prompt=[prompt, prompt] if as_list else prompt, **GREEDY)
    assert [choice["text"] for choice in answer["choices"]] == [SPEECH] * (1 + as_list)
    assert [choice["index"] for choice in answer["choices"]] == list(range(1 + as_list))


def test_choices_are_numbered_prompt_by_prompt(demo: Any) -> None:
    prompts = ["A class", "The for statement", "Lists"]
    answer = demo.answer(PATH, prompt=prompts, n=2, seed=7, max_tokens=8)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    for place, prompt in enumerate(prompts):
        alone = demo.answer(PATH, prompt=prompt, n=2, seed=7, max_tokens=8)["choices"]
        assert [choice["text"] for choice in alone] == texts[2 * place : 2 * place + 2]


def test_best_of_returns_the_likeliest(demo: Any) -> None:
    body = dict(prompt="A class", seed=3, max_tokens=6, logprobs=0)
    every = demo.answer(PATH, n=4, **body)["choices"]
    best = demo.answer(PATH, n=2, best_of=4, **body)["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]


def test_beam_search_needs_no_temperature(demo: Any) -> None:
    answer = demo.answer(PATH, prompt="A class", use_beam_search=True, n=2, best_of=4, max_tokens=8)
    assert [choice["text"] for choice in answer["choices"]] == [" can be overridden by  ", " can be overridden by\n"]


@pytest.mark.parametrize(
    ("fields", "text", "stop_reason"),
    [
        ({"stop": " mat"}, " sat on the", " mat"),
        ({"stop": ["nowhere", " hat"]}, " sat on the mat 🙂🙂 on the", " hat"),
        ({"stop": [" mat"], "include_stop_str_in_output": True}, " sat on the mat", " mat"),
        ({"stop": []}, SPEECH, None),
        ({"stop": ["z"] * 9}, SPEECH, None),
    ],
)
def test_stop(client: Any, fields: dict[str, Any], text: str, stop_reason: str | None) -> None:
    [choice] = client.answer(PATH, prompt=BEGINNING, **GREEDY, **fields)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", stop_reason)


def test_a_stop_token(client: Any) -> None:
    [token_id] = client.engine.texts.tokenizer(" on").input_ids[-1:]
    [choice] = client.answer(PATH, prompt=BEGINNING, stop_token_ids=[token_id], **GREEDY)["choices"]
    assert choice["stop_reason"] == token_id
    assert SPEECH.startswith(choice["text"])


def test_logit_bias_keys_are_strings(demo: Any) -> None:
    [first] = demo.answer("/tokenize", prompt=" lists")["tokens"][:1]
    answer = demo.answer(PATH, prompt="A class", logit_bias={str(first): 100}, temperature=0, max_tokens=3, logprobs=0)
    [text] = demo.answer("/detokenize", tokens=[first] * 3).values()
    assert answer["choices"][0]["text"] == text


def test_a_seed_gives_the_same_again(demo: Any) -> None:
    texts = {demo.answer(PATH, prompt="A class", seed=5, max_tokens=12)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1


def test_what_the_model_says_of_sampling_is_the_default(speaker_path: str, tmp_path: Path, serve: Any) -> None:
    directory = tmp_path / "model"
    shutil.copytree(speaker_path, directory)
    (directory / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 100.0, "top_k": 1, "max_new_tokens": 3, "eos_token_id": 1})
    )
    with serve(LLMEngine(directory)) as client:
        [choice] = client.answer(PATH, prompt=BEGINNING)["choices"]
        assert SPEECH.startswith(choice["text"])  # by top_k, whatever the temperature
        assert choice["finish_reason"] == "length"
        assert client.answer(PATH, prompt=BEGINNING)["usage"]["completion_tokens"] == 16  # OpenAI's, not the model's
        other = client.answer(PATH, prompt=BEGINNING, top_k=0, seed=1)["choices"][0]["text"]
        assert not SPEECH.startswith(other)


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo(client: Any, as_ids: bool) -> None:
    prompt = client.engine.texts.tokenizer(BEGINNING).input_ids if as_ids else BEGINNING
    [choice] = client.answer(PATH, prompt=prompt, echo=True, **GREEDY)["choices"]
    assert choice["text"] == BEGINNING + SPEECH


def test_logprobs(demo: Any) -> None:
    [choice] = demo.answer(PATH, prompt="A class", temperature=0, max_tokens=8, logprobs=3)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert all(
        choice["text"][at:].startswith(t) for at, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    )
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == logprobs["token_logprobs"]  # greedy
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob


@pytest.mark.parametrize("num_top", [0, 1, 2, 3])
def test_as_many_logprobs_as_were_asked_for(client: Any, num_top: int) -> None:
    """Of tokens that are equally likely, too, and so of one rank."""
    entries = {
        7: Logprob(-3.0, 5, "came"),
        1: Logprob(-1.0, 1, "a"),
        2: Logprob(-2.0, 2, "b"),
        3: Logprob(-2.0, 2, "c"),
        4: Logprob(-2.0, 2, "d"),
    }
    form = logprobs.CompletionLogprobsFormat(
        TokenNames(client.engine.texts.tokenizer), SamplingParams(logprobs=num_top)
    )
    [top] = form.add(CompletionOutput(0, "came", [7], 0.0, [entries], None))["top_logprobs"]
    assert top is not None and list(top) == ["came", "a", "b", "c"][: num_top + 1]
    output = RequestOutput("id", None, [5, 7], [], True, RequestMetrics(0.0), prompt_logprobs=[None, entries])
    [_, found] = logprobs.prompt_logprobs(output, num_top)
    assert found is not None and list(found) == ["7", "1", "2", "3"][: num_top + 1]


def test_logprobs_of_named_tokens(client: Any) -> None:
    """Of these and of the token that came, as vLLM has them; the prompt's are of the likeliest nevertheless."""
    as_ids = {"return_tokens_as_token_ids": True, "temperature": 0, "max_tokens": 2}
    [plain] = client.answer(PATH, prompt="a", logprobs=20, **as_ids)["choices"]
    likeliest = [list(top.items()) for top in plain["logprobs"]["top_logprobs"]]
    (first, _), (second, logprob) = likeliest[0][:2]
    asked = [int(second.removeprefix("token_id:")), 7, 7]
    [choice] = client.answer(PATH, prompt="a", logprobs=3, logprob_token_ids=asked, echo=True, **as_ids)["choices"]
    *of_prompt, top, other = choice["logprobs"]["top_logprobs"]
    assert list(top) == list(dict.fromkeys([first, second, "token_id:7"])) and top[second] == logprob
    assert set(other) == {likeliest[1][0][0], second, "token_id:7"}
    assert all(3 <= len(each) <= 4 for each in of_prompt[1:])
    chunks = client.events(PATH, prompt="a", logprobs=0, logprob_token_ids=asked, **as_ids)
    streamed = [top for chunk in chunks for top in (chunk["choices"][0]["logprobs"] or {}).get("top_logprobs", [])]
    assert streamed == [top, other]
    for fields in ({"logprob_token_ids": [5], "use_beam_search": True, "n": 2}, {"logprob_token_ids": [10**6]}):
        status, blamed, _ = client.error(PATH, prompt="a", logprobs=1, **fields)
        assert (status, blamed) == (400, "logprob_token_ids")


def test_echoed_logprobs_score_a_text(demo: Any) -> None:
    """What evaluation harnesses ask for: the logprobs of a text, and whether its end is what greedy search says."""
    [made] = demo.answer(PATH, prompt="A class", temperature=0, max_tokens=6, logprobs=1)["choices"]
    whole = "A class" + made["text"]
    for num_new in (0, 1):
        [scored] = demo.answer(PATH, prompt=whole, temperature=0, max_tokens=num_new, logprobs=1, echo=True)["choices"]
        logprobs = scored["logprobs"]
        assert scored["text"].startswith(whole)
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["tokens"][1:] == [next(iter(top)) for top in logprobs["top_logprobs"][1:]]
        lengths = {len(each) for each in logprobs.values()}
        assert lengths == {len(demo.answer("/tokenize", prompt=whole)["tokens"]) + num_new}
        begin = next(i for i, at in enumerate(logprobs["text_offset"]) if at >= len("A class"))
        end = len(logprobs["tokens"]) - num_new
        assert logprobs["token_logprobs"][begin:end] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)
        for logprob, top in zip(
            logprobs["token_logprobs"][begin:end], logprobs["top_logprobs"][begin:end], strict=True
        ):
            assert logprob == max(top.values())


def test_nothing_but_the_prompt_is_shown_with_max_tokens_0(demo: Any) -> None:
    answer = demo.answer(PATH, prompt="A class", max_tokens=0, echo=True)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("A class", "length", None)
    assert answer["usage"]["completion_tokens"] == 0


def test_offsets_of_characters_in_several_tokens(client: Any) -> None:
    [choice] = client.answer(PATH, prompt=BEGINNING, echo=True, logprobs=1, **GREEDY)["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    at = text.index("🙂")
    assert logprobs["text_offset"].count(at) == 4  # tokens of an emoji
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if "\ufffd" not in token and token != "</s>":
            assert text[offset:].startswith(token)


@pytest.fixture(scope="module")
def stripping(tmp_path_factory: pytest.TempPathFactory, serve: Any) -> Iterator[Any]:
    """A client of a random LLaMA whose tokenizer drops the first space of a text."""
    directory = tmp_path_factory.mktemp("stripping")
    tokenizer = make_metaspace_tokenizer()
    tokenizer.save_pretrained(directory)
    make_model("llama-gqa", vocab_size=len(tokenizer)).save_pretrained(directory)
    with serve(LLMEngine(directory)) as client:
        yield client


WORDS = ["the", " cat", " sat", " on", " the", " mat"]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("the cat sat on the mat", WORDS),
        ("the cat</s> sat on the mat", ["the", " cat", "</s>", " ", "sat", *WORDS[3:]]),
        ("é🙂 the", ["", "", "é", "", "", "", "🙂", " the"]),
    ],
)
def test_names_of_an_echoed_prompt_join_to_it(stripping: Any, prompt: str, tokens: list[str]) -> None:
    """Although the tokenizer drops the first space, and several tokens have one name: "a" and the byte of "a"."""
    answer = stripping.answer(PATH, prompt=prompt, echo=True, max_tokens=0, logprobs=20)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert (choice["text"], logprobs["tokens"]) == (prompt, tokens)
    assert logprobs["text_offset"] == [len("".join(tokens[:place])) for place in range(len(tokens))]
    for token, logprob, top in list(zip(tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]:
        assert top[token] == logprob
        assert len(top) == 20 + (logprob < sorted(top.values())[-20])


def test_names_where_the_tokenizer_puts_a_token_first(stripping: Any) -> None:
    """<s> has a name, and no place in the text if the prompt came as a text. Of ids, the text is that of all ids."""
    token_ids = [1, *stripping.answer("/tokenize", prompt="the cat")["tokens"]]
    [choice] = stripping.answer(PATH, prompt=token_ids, echo=True, max_tokens=1, logprobs=0)["choices"]
    assert choice["logprobs"]["tokens"][:3] == ["<s>", " the", " cat"]
    assert choice["logprobs"]["text_offset"] == [0, 3, 7, 11]
    [choice] = stripping.answer(PATH, prompt="the cat", max_tokens=1, logprobs=20)["choices"]
    assert choice["logprobs"]["tokens"] == [choice["text"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("says_model", [False, True])
def test_a_special_token_as_a_stop_string(serve: Any, tmp_path: Path, stream: bool, says_model: bool) -> None:
    """It is no end-of-sequence token, and the text leaves it out. The request says so, or generation_config.json."""
    make_speaking_model(tmp_path, f"{BEGINNING} sat.<|im_end|> on the mat", "<|im_end|>")
    fields: dict[str, Any] = {"stop": "<|im_end|>"}
    if says_model:
        (tmp_path / "generation_config.json").write_text(
            json.dumps({"stop_strings": ["<|im_end|>"], "eos_token_id": 1})
        )
        fields = {}
    with serve(LLMEngine(tmp_path), chat_template="{{ messages[0].content }}") as client:
        if stream:
            choices = [event["choices"][0] for event in client.events(PATH, prompt=BEGINNING, **GREEDY, **fields)]
        else:
            choices = client.answer(PATH, prompt=BEGINNING, **GREEDY, **fields)["choices"]
        assert "".join(choice["text"] for choice in choices) == " sat."
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "<|im_end|>")
        if says_model:
            [choice] = client.answer(PATH, prompt=BEGINNING, stop=[], **GREEDY)["choices"]
            assert choice["text"] == " sat. on the mat"


def test_no_other_token_where_none_are_asked_for(demo: Any) -> None:
    logprobs = demo.answer(PATH, prompt="A class", max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    named = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{name: logprob} for name, logprob in named]
    assert len(logprobs["token_logprobs"]) == 2


@pytest.mark.parametrize("echo", [False, True])
def test_ids_as_the_names_of_tokens(demo: Any, echo: bool) -> None:
    fields = {"prompt": "A class", "temperature": 0, "max_tokens": 3, "logprobs": 2, "echo": echo}
    [named] = demo.answer(PATH, **fields)["choices"]
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = demo.answer(PATH, **fields, **asked)["choices"]
    token_ids = (choice["prompt_token_ids"] if echo else []) + choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in token_ids]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top or [])
    assert choice["logprobs"]["text_offset"] == named["logprobs"]["text_offset"]
    assert choice["text"] == named["text"]


def test_prompt_logprobs(demo: Any) -> None:
    [choice] = demo.answer(PATH, prompt="A class", max_tokens=1, prompt_logprobs=2, echo=True, logprobs=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    token_ids = demo.answer("/tokenize", prompt="A class")["tokens"]
    logprobs = choice["logprobs"]["token_logprobs"][1 : len(token_ids)]
    for token_id, entries, logprob in zip(token_ids[1:], rest, logprobs, strict=True):
        assert entries[str(token_id)]["logprob"] == logprob
        assert sum(entry["rank"] <= 2 for entry in entries.values()) == 2
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])  # one, and the prompt's own


@pytest.mark.parametrize("stream", [False, True])
def test_a_short_prompt_waits_for_no_other_thread(client: Any, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something of the request was given to a thread")

    monkeypatch.setattr("anyio.to_thread.run_sync", refuse)
    response = client.post("/v1/completions", prompt=BEGINNING, max_tokens=2, stream=stream)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATH, {"prompt": "A class", "logprobs": 2, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A class"}], "logprobs": True}),
    ],
)
def test_logprobs_are_written_beside_the_event_loop(
    demo: Any, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 256 outputs of 430 tokens take seconds."""
    in_loop: list[bool] = []

    def watched(entry: Any) -> Any:
        in_loop.append(asyncio._get_running_loop() is not None)
        return real(entry)

    real = logprobs._finite
    monkeypatch.setattr(logprobs, "_finite", watched)
    answer = demo.answer(path, **fields, n=2, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert in_loop and not any(in_loop)


def test_an_answer_written_choice_by_choice() -> None:
    """Is that which is written at once, whatever its texts hold."""
    text = 'a "choices":[] \ud800 é'
    answer, choices = {"model": text, "choices": [], "usage": {"n": 1}}, [{"text": text, "index": i} for i in range(3)]
    written = response_of(answer, iter(choices))
    assert written.body == JSONResponse({**answer, "choices": choices}).body
    assert written.headers["content-type"] == "application/json"


def test_what_stands_between_two_texts(tmp_path: Path, serve: Any, client: Any) -> None:
    """The output ends with the model's token for that, or its place in the text."""
    tokens = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>")
    speech = "the cat and the hat and the mat<|endoftext|>"
    tokenizer = make_speaking_model(tmp_path, f"{speech}and more", *tokens)
    before, between, after, end = tokenizer.convert_tokens_to_ids(list(tokens))
    prefix, suffix = (tokenizer(text).input_ids for text in ("the", " hat"))
    with serve(LLMEngine(tmp_path, num_blocks=64)) as infilling:
        answer = infilling.answer(PATH, prompt="the", suffix=" hat", return_token_ids=True, **GREEDY)
        [choice] = answer["choices"]
        prompt = [before, *prefix, between, *suffix, after]
        assert choice["prompt_token_ids"] == prompt
        script = tokenizer(speech).input_ids
        assert choice["token_ids"] == script[len(prompt) :]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", end)
        stop = {"stop_token_ids": [script[len(prompt)]]}  # beside the model's
        answer = infilling.answer(PATH, prompt="the", suffix=" hat", return_token_ids=True, **stop, **GREEDY)
        assert answer["choices"][0]["token_ids"] == stop["stop_token_ids"]
        plain = infilling.answer(PATH, prompt=["the"], suffix="", return_token_ids=True, max_tokens=1)
        assert plain["choices"][0]["prompt_token_ids"] == prefix
        for fields in ({"prompt": [5]}, {"prompt": "the", "echo": True}, {"prompt": "the", "suffix": "\ud800"}):
            assert infilling.error(PATH, **{"suffix": " hat", **fields})[:2] == (400, "suffix")
    assert client.error(PATH, prompt="the", suffix=" hat")[:2] == (400, "suffix")
