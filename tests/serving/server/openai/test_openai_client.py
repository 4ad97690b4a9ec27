"""OpenAI's own client, against a server in a process of its own: what its users call, and the errors they catch."""

import asyncio
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from checkpoints import BEGINNING, SPEECH
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from server_process import SLOW_COMMAND, ServerProcess, in_pieces, serving, wait_for
from tool_models import make_tool_model
from transformers import AutoTokenizer

from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams

KEY = "sk-of-this-test"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT = "The with statement"
MESSAGES: Any = [{"role": "user", "content": BEGINNING}]
QUESTION: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def speaker_server(speaker_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its model says SPEECH after BEGINNING, so slowly that a stream comes in pieces, and then ends. A chat is the text
    of its messages."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    options = ("--chat-template", str(template), "--served-model-name", "org/speaker")
    with serving(speaker_path, *options, python=sys.executable, program=SLOW_COMMAND) as server:
        yield server


@pytest.fixture(scope="module")
def demo_server() -> Iterator[ServerProcess]:
    """Of the demo model, for those who have the key; four sequences run at a time, and two requests may wait. A long
    stream takes seconds, so that it still runs when a test has asked for more."""
    options = ("--dtype", "float32", "--num-blocks", "256", "--max-num-seqs", "4", "--max-waiting", "2")
    environment = {"PAGEDATTN_API_KEY": KEY}
    with serving(*options, python=sys.executable, environment=environment, program=SLOW_COMMAND) as server:
        yield server


@pytest.fixture(scope="module")
def speaker(speaker_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{speaker_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def demo(demo_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{demo_server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


SPEAK: dict[str, Any] = {"model": "org/speaker", "temperature": 0, "max_tokens": 100}
DEMO: dict[str, Any] = {"model": "demo_model", "max_tokens": 12}


def test_models(speaker: OpenAI) -> None:
    [model] = speaker.models.list()
    assert (model.id, model.object) == ("org/speaker", "model")
    assert speaker.models.retrieve("org/speaker") == model


def test_a_completion(speaker: OpenAI) -> None:
    completion = speaker.completions.create(prompt=BEGINNING, **SPEAK)
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (SPEECH, "stop", None)
    assert completion.object == "text_completion"
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


def test_embeddings(demo: OpenAI) -> None:
    """The client asks for base64, and gives numbers. More inputs than may wait go to the engine one part at a time."""
    texts = [PROMPT, "A class", "a", "b", "c"]
    response = demo.embeddings.create(input=texts, model="demo_model")
    assert [each.index for each in response.data] == list(range(5))
    expected = LLM(DEMO_MODEL, dtype="float32").embed(texts, use_tqdm=False)
    assert [each.embedding for each in response.data] == [output.outputs.embedding for output in expected]
    [short] = demo.embeddings.create(input=PROMPT, model="demo_model", encoding_format="float", dimensions=5).data
    assert len(short.embedding) == 5
    with pytest.raises(openai.BadRequestError, match=r"dimensions: expected an int in \[1, 256\], got 999") as refused:
        demo.embeddings.create(input=PROMPT, model="demo_model", dimensions=999)
    assert refused.value.param == "dimensions"


def test_a_chat(speaker: OpenAI) -> None:
    """The content as a string, or as a list of parts."""
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": BEGINNING}]}]
    for messages in (MESSAGES, parts):
        completion = speaker.chat.completions.create(messages=messages, **SPEAK)
        [choice] = completion.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SPEECH, "stop")


def test_streams(speaker: OpenAI) -> None:
    def texts() -> list[str]:
        return [chunk.choices[0].text for chunk in speaker.completions.create(prompt=BEGINNING, stream=True, **SPEAK)]

    assert "".join(in_pieces(texts)) == SPEECH
    deltas = [
        chunk.choices[0].delta for chunk in speaker.chat.completions.create(messages=MESSAGES, stream=True, **SPEAK)
    ]
    assert "".join(delta.content or "" for delta in deltas) == SPEECH
    assert deltas[0].role == "assistant"


@pytest.mark.parametrize("stop", [[" be", "e m"], "🙂 on", "é", ["nothing of it"]], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(speaker: OpenAI, stop: Any, stream: bool) -> None:
    """They are over several tokens, and never shown in part."""
    expected = min((SPEECH.partition(each)[0] for each in ([stop] if isinstance(stop, str) else stop)), key=len)
    answer: Any = speaker.completions.create(prompt=BEGINNING, stop=stop, stream=stream, **SPEAK)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_usage_of_a_stream(speaker: OpenAI) -> None:
    whole = speaker.chat.completions.create(messages=MESSAGES, **SPEAK).usage
    fields: dict[str, Any] = {"messages": MESSAGES, "stream": True, **SPEAK}
    *chunks, last = speaker.chat.completions.create(stream_options={"include_usage": True}, **fields)
    assert last.choices == [] and last.usage == whole
    assert all(chunk.usage is None for chunk in chunks)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}

    def counts_so_far() -> list[int]:
        *chunks, _ = speaker.chat.completions.create(stream_options=options, **fields)
        return [chunk.usage.completion_tokens for chunk in chunks]

    counts = in_pieces(counts_so_far)
    assert counts == sorted(counts)
    assert whole is not None and counts[-1] == whole.completion_tokens


def test_the_helper_for_streams(speaker: OpenAI) -> None:
    with speaker.chat.completions.stream(messages=MESSAGES, **SPEAK) as stream:
        contents = [event.delta for event in stream if event.type == "content.delta"]
        assert "".join(contents) == SPEECH
        assert stream.get_final_completion().choices[0].message.content == SPEECH


class Verdict(BaseModel):
    """An output of a few tokens, whatever the model."""

    answer: Literal["yes", "no"]
    certain: bool


def test_parsed_outputs(demo: OpenAI) -> None:
    fields: dict[str, Any] = {**DEMO, "max_tokens": 100, "n": 3, "seed": 5, "temperature": 1}
    completion = demo.chat.completions.parse(messages=QUESTION, response_format=Verdict, **fields)
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Verdict)
    with demo.chat.completions.stream(messages=QUESTION, response_format=Verdict, **fields) as stream:
        streamed = stream.get_final_completion()
    assert [each.message.parsed for each in streamed.choices] == [each.message.parsed for each in completion.choices]


# ---- tools -----------------------------------------------------------------------------------------------------------

TOOL_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}<tool_call></tool_call>
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}"""


class Weather(BaseModel):
    """The weather somewhere."""

    city: Literal["Paris", "Rome"]
    is_near: bool


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a random model, which calls functions because it is held to them."""
    pytest.importorskip("llguidance")
    directory = tmp_path_factory.mktemp("caller")
    make_tool_model(directory, TOOL_TEMPLATE)
    options = ("--num-blocks", "512", "--served-model-name", "caller", "--tool-call-parser", "hermes")
    with (
        serving(str(directory), *options, python=sys.executable) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_calls(caller: OpenAI, stream: bool) -> None:
    """Two calls, whose results go back, and then an answer of a type."""
    tools: Any = [openai.pydantic_function_tool(Weather)]
    messages: list[Any] = [{"role": "user", "content": "Rain?"}]
    fields: dict[str, Any] = {"model": "caller", "max_tokens": 400, "seed": 1}

    def answer(**more: Any) -> Any:
        if not stream:
            return caller.chat.completions.parse(messages=messages, **fields, **more).choices[0]
        with caller.chat.completions.stream(messages=messages, **fields, **more) as events:
            names = {event.type for event in events}
            assert "tools" not in more or more["tool_choice"] == "none" or "tool_calls.function.arguments.done" in names
            return events.get_final_completion().choices[0]

    named = {"type": "function", "function": {"name": "Weather"}}
    for choice in (named, "required"):
        said = answer(tools=tools, tool_choice=choice, parallel_tool_calls=False)
        assert said.finish_reason == "tool_calls"
        [call] = said.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
        messages.append(said.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    said = answer(tools=tools, tool_choice="none", response_format=Verdict)
    assert isinstance(said.message.parsed, Verdict) and not said.message.tool_calls


def test_guided_outputs(demo: OpenAI) -> None:
    choices = ["a list", "a tuple", "a dictionary"]
    for guide, is_one in (
        ({"guided_choice": choices}, lambda text: text in choices),
        ({"guided_regex": r"[0-9]{3}-[a-f]{2}"}, re.compile(r"[0-9]{3}-[a-f]{2}").fullmatch),
        ({"guided_grammar": 'start: "(" start ")" | "x"'}, re.compile(r"(\(*)x(\)*)").fullmatch),
    ):
        completion = demo.completions.create(prompt=PROMPT, extra_body=guide, **{**DEMO, "max_tokens": 40})
        assert completion.choices[0].finish_reason == "stop"
        assert is_one(completion.choices[0].text)


def test_the_raw_response(speaker: OpenAI) -> None:
    raw = speaker.chat.completions.with_raw_response.create(messages=MESSAGES, **SPEAK)
    assert raw.headers["content-type"] == "application/json"
    assert len(raw.headers["x-request-id"]) == 32
    assert raw.parse().choices[0].message.content == SPEECH


def test_the_asynchronous_client(speaker_server: ServerProcess) -> None:
    async def answers() -> list[str]:
        async with AsyncOpenAI(base_url=f"{speaker_server.url}/v1", api_key="none") as client:

            async def whole() -> str:
                return (await client.completions.create(prompt=BEGINNING, **SPEAK)).choices[0].text

            async def streamed() -> str:
                stream = await client.completions.create(prompt=BEGINNING, stream=True, **SPEAK)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(whole() for _ in range(20)), *(streamed() for _ in range(20)))

    assert asyncio.run(answers()) == [SPEECH] * 40


def test_as_offline(demo: OpenAI) -> None:
    """Texts, token by token log probabilities, and draws with a seed are those of LLM.generate."""
    llm = LLM(DEMO_MODEL, dtype="float32", num_blocks=64)
    [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, logprobs=2), use_tqdm=False)
    [expected] = output.outputs
    completion = demo.completions.create(prompt=PROMPT, temperature=0, logprobs=2, **DEMO)
    [choice] = completion.choices
    assert choice.text == expected.text
    assert choice.logprobs is not None and expected.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(
        [entries[token_id].logprob for token_id, entries in zip(expected.token_ids, expected.logprobs, strict=True)]
    )
    assert "".join(choice.logprobs.tokens or []) == expected.text

    drawn = SamplingParams(temperature=1, seed=5, n=3, max_tokens=12)
    [output] = llm.generate(PROMPT, drawn, use_tqdm=False)
    completion = demo.completions.create(prompt=PROMPT, temperature=1, seed=5, n=3, **DEMO)
    assert [each.text for each in completion.choices] == [each.text for each in output.outputs]
    assert [each.index for each in completion.choices] == [0, 1, 2]


def test_prompts_of_all_forms(demo: OpenAI) -> None:
    token_ids = AutoTokenizer.from_pretrained(DEMO_MODEL)(PROMPT).input_ids
    forms: list[Any] = [PROMPT, [PROMPT, PROMPT], token_ids, [token_ids, token_ids]]
    answers = [demo.completions.create(prompt=form, temperature=0, **DEMO).choices for form in forms]
    assert [len(choices) for choices in answers] == [1, 2, 1, 2]
    assert len({choice.text for choices in answers for choice in choices}) == 1


def test_echo(demo: OpenAI) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "model": "demo_model", "logprobs": 0}
    plain = demo.completions.create(max_tokens=5, **fields).choices[0]
    echoed = demo.completions.create(max_tokens=5, echo=True, **fields).choices[0]
    scored = demo.completions.create(max_tokens=0, echo=True, **fields).choices[0]
    assert echoed.text == PROMPT + plain.text
    assert scored.text == PROMPT
    assert echoed.logprobs is not None and scored.logprobs is not None and scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.token_logprobs is not None
    assert echoed.logprobs.token_logprobs[: len(scored.logprobs.token_logprobs)] == scored.logprobs.token_logprobs


def test_logprobs_of_a_chat(demo: OpenAI) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2, **DEMO}
    choice = demo.chat.completions.create(**fields).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert token.top_logprobs[0].logprob == token.logprob >= token.top_logprobs[1].logprob
        assert bytes(token.bytes or []).decode() == token.token
    streamed = [
        token
        for chunk in demo.chat.completions.create(stream=True, **fields)
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == choice.logprobs.content


def test_fields_that_are_not_openai_s(demo: OpenAI) -> None:
    [greedy] = demo.completions.create(prompt=PROMPT, temperature=0, **DEMO).choices
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "min_tokens": 3, "skip_special_tokens": True}
    [choice] = demo.completions.create(prompt=PROMPT, temperature=2, extra_body=extra, **DEMO).choices
    assert choice.text == greedy.text


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "none"}, openai.NotFoundError, "model"),
        ({"temperature": 5}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "word " * 1000}, openai.BadRequestError, "prompt"),
        ({"n": 3, "best_of": 2}, openai.BadRequestError, "best_of"),
        ({"suffix": "end"}, openai.BadRequestError, "suffix"),
        ({"extra_body": {"top_q": 1}}, openai.BadRequestError, "top_q"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(demo: OpenAI, fields: dict[str, Any], error: Any, param: str, stream: bool) -> None:
    """All of them before the first event of a stream."""
    with pytest.raises(error) as raised:
        demo.completions.create(**{"prompt": PROMPT, "stream": stream, **DEMO, **fields})
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_chats(demo: OpenAI, stream: bool) -> None:
    wizard: Any = [{"role": "wizard", "content": "a"}]
    with pytest.raises(openai.BadRequestError) as raised:
        demo.chat.completions.create(messages=wizard, stream=stream, **DEMO)
    assert raised.value.param == "messages"
    tool: Any = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError) as raised:  # the model's template knows no tools
        demo.chat.completions.create(messages=QUESTION, tools=[tool], stream=stream, **DEMO)
    assert raised.value.param == "tools"


def test_a_wrong_key(demo: OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        demo.with_options(api_key="sk-another").completions.create(prompt=PROMPT, **DEMO)
    with pytest.raises(openai.AuthenticationError):
        demo.with_options(api_key="sk-another").models.list()


LONG: dict[str, Any] = {"model": "demo_model", "max_tokens": 400, "extra_body": {"ignore_eos": True}}


def test_a_full_queue(demo: OpenAI, demo_server: ServerProcess) -> None:
    """429 says when to ask again, and a client that retries gets its answer."""
    stream = demo.completions.create(prompt=PROMPT, n=4, stream=True, **LONG)
    next(stream)

    async def several(max_retries: int) -> list[Any]:
        options: dict[str, Any] = {"base_url": f"{demo_server.url}/v1", "api_key": KEY, "max_retries": max_retries}
        async with AsyncOpenAI(**options) as client:
            ask = [client.completions.create(prompt=PROMPT, **DEMO) for _ in range(6)]
            return await asyncio.gather(*ask, return_exceptions=True)

    results = asyncio.run(several(max_retries=0))
    refused = [result for result in results if isinstance(result, openai.RateLimitError)]
    assert len(refused) == 4
    assert all(1 <= int(error.response.headers["retry-after"]) <= 60 for error in refused)
    assert all(result.usage.completion_tokens == 12 for result in results if result not in refused)
    results = asyncio.run(several(max_retries=8))
    assert [result.usage.completion_tokens for result in results] == [12] * 6
    stream.close()
    demo_server.wait_until_idle()


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_leaving_a_stream_frees_its_blocks(demo: OpenAI, demo_server: ServerProcess, kind: str) -> None:
    generated = demo_server.metrics()["generation_tokens_total"]
    stream: Any
    if kind == "chat":
        stream = demo.chat.completions.create(messages=QUESTION, n=3, stream=True, **LONG)
    else:
        stream = demo.completions.create(prompt=PROMPT, n=3, stream=True, **LONG)
    for _ in range(10):
        next(stream)
    wait_for(lambda: demo_server.num_used_blocks() > 0)  # counts may be some steps old
    stream.close()
    demo_server.wait_until_idle()
    assert demo_server.metrics()["generation_tokens_total"] - generated < 3 * 400, "it ran to its end"


def test_leaving_before_the_answer(demo: OpenAI, demo_server: ServerProcess) -> None:
    generated = demo_server.metrics()["generation_tokens_total"]
    with pytest.raises(openai.APITimeoutError):
        demo.with_options(timeout=0.2).completions.create(prompt=PROMPT, n=4, **LONG)
    demo_server.wait_until_idle()
    assert demo_server.metrics()["generation_tokens_total"] - generated < 4 * 400, "it ran to its end"
