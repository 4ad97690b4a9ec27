"""Tools and thoughts of chats, on a model whose template and weights are made here: a grammar makes it write calls."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import EOS
from pydantic import TypeAdapter
from scripted_models import SCRIPT_LEN, make_scripted_model
from tool_models import TOOL_TEMPLATE, make_tool_model

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.server.openai.chat import ChatCompletionResponse

pytest.importorskip("llguidance")
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Rain?"}]
# Any value of these is short.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_near": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "now", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time", "strict": True}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "get_time"}}
WITHOUT_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


def ask(client: Any, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """The whole answer, or what the chunks of a stream add up to."""
    body = {"messages": MESSAGES, "max_tokens": 400, "seed": 3, **fields}
    if not stream:
        return client.answer(PATH, **body)
    answer: dict[str, Any] = {"choices": []}
    for event in client.events(PATH, **body):
        for choice in event["choices"]:
            add_chunk(answer["choices"], choice)
        if event.get("usage"):
            answer["usage"] = event["usage"]
    return answer


def add_chunk(choices: list[Any], chunk: dict[str, Any]) -> None:
    while len(choices) <= chunk["index"]:
        choices.append({"index": len(choices), "message": {}, "finish_reason": None})
    choice = choices[chunk["index"]]
    assert choice["finish_reason"] is None, "a chunk after the end"
    choice["finish_reason"] = chunk["finish_reason"]
    message = choice["message"]
    for name, value in chunk["delta"].items():
        if name != "tool_calls":
            message[name] = message.get(name, "") + value
            continue
        [delta] = value
        calls = message.setdefault("tool_calls", [])
        if delta["index"] == len(calls):
            assert delta["type"] == "function" and delta["function"].keys() == {"name", "arguments"}
            calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            assert delta["index"] == len(calls) - 1 and delta.keys() == {"index", "function"}
            assert delta["function"].keys() == {"arguments"} and delta["function"]["arguments"]
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_required(tools: Any, stream: bool) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "n": 6, **WITHOUT_THOUGHT}
    answer = ask(tools, stream, **fields)
    if not stream:
        TypeAdapter(ChatCompletionResponse).validate_python(answer, strict=True)
    names = set()
    ended = [choice for choice in answer["choices"] if choice["finish_reason"] != "length"]  # some call for ever
    for choice in ended:
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"] and (stream or choice["message"]["content"] is None)
        for call in choice["message"]["tool_calls"]:
            assert call["id"].startswith("call_") and len(call["id"]) == 29
        for name, arguments in calls_of(choice):
            names.add(name)
            assert arguments == {} if name == "get_time" else arguments["city"] in ("Paris", "Rome")
    assert names == {"get_weather", "get_time"}


def test_a_stream_adds_up_to_the_whole(tools: Any) -> None:
    """Contents, thoughts, calls and usage; only the ids differ."""
    fields = {"tools": TOOLS, "n": 4, "temperature": 1.5, "stop": ["é"]}
    whole = ask(tools, **fields)
    streamed = ask(tools, True, **fields, stream_options={"include_usage": True})
    assert streamed["usage"] == whole["usage"]
    for one, other in zip(whole["choices"], streamed["choices"], strict=True):
        assert one["finish_reason"] == other["finish_reason"]
        assert (one["message"]["content"] or "") == other["message"]["content"]
        assert one["message"].get("reasoning_content") == other["message"].get("reasoning_content")
        functions = [[call["function"] for call in each["message"].get("tool_calls", [])] for each in (one, other)]
        assert functions[0] == functions[1]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": NAMED}, {"get_time"}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [NAMED]},
                }
            },
            {"get_time"},
        ),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"get_time", "get_weather"}),
    ],
    ids=["named", "allowed", "one call"],
)  # fmt: skip
def test_which_calls(tools: Any, fields: dict[str, Any], names: set[str]) -> None:
    answer = ask(tools, tools=TOOLS, n=8, **fields, **WITHOUT_THOUGHT)
    calls = [calls_of(choice) for choice in answer["choices"]]
    assert {name for each in calls for name, _ in each} == names
    is_single = "allowed_tools" not in json.dumps(fields)
    assert not is_single or all(len(each) == 1 for each in calls)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_cut(tools: Any, stream: bool) -> None:
    """There is what has come, and the reason is the length."""
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 40, **WITHOUT_THOUGHT}
    [choice] = ask(tools, stream, **fields)["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"


@pytest.fixture(scope="module")
def serve_form(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]) -> Callable[[str], Any]:
    """serve_form(name) is a server whose model writes calls as that parser reads them. The engine is not that of
    `tools`, as an engine works for one server at a time."""
    directory = tmp_path_factory.mktemp("forms")
    make_tool_model(directory, TOOL_TEMPLATE)
    engine = LLMEngine(str(directory), num_blocks=64)
    return lambda name: serve(engine, tool_call_parser=name)


ONE_CALL = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, **WITHOUT_THOUGHT}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "llama3_json", "pythonic", "deepseek_v3"])
def test_calls_that_are_cut_have_no_content(serve_form: Callable[[str], Any], name: str) -> None:
    """Whatever token is the last. So /v1/responses has no message beside a call."""
    body = {**ONE_CALL, "tools": [{"type": "function", **WEATHER["function"]}], "seed": 3}
    with serve_form(name) as client:
        for max_tokens in (1, 2, 5, 11, 14, 22, 40, 70, 90):
            for stream in (False, True):
                [choice] = ask(client, stream, **{**ONE_CALL, "max_tokens": max_tokens})["choices"]
                assert not choice["message"]["content"], choice
            response = client.answer("/v1/responses", input="Rain?", max_output_tokens=max_tokens, **body)
            [item] = response["output"]
            assert item["type"] == "function_call" or item["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("name", "stop", "reason"),
    [
        ("hermes", '"city"', "stop"),
        ("hermes", "</tool_call>", "tool_calls"),
        ("qwen3_coder", "</parameter>", "stop"),
        ("qwen3_coder", "</tool_call>", "tool_calls"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_a_stop_string(
    serve_form: Callable[[str], Any], name: str, stop: str, reason: str, stream: bool
) -> None:
    """A call whose arguments are cut is not to be run."""
    with serve_form(name) as client:
        [choice] = ask(client, stream, stop=[stop], **ONE_CALL)["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == (reason, 1)
    if reason == "tool_calls":
        assert calls_of(choice)[0][1]["city"] in ("Paris", "Rome")
    else:
        with pytest.raises(json.JSONDecodeError):
            calls_of(choice)


CALL_WITH_A_LONE_SURROGATE = r"""<tool_call>
<function=f>
<parameter=x>
['\ud800']
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_lone_surrogate_in_an_argument(
    serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, stream: bool
) -> None:
    """The argument is a literal of Python, whose escape becomes a character that UTF-8 cannot write. The answer, or
    the stream, comes to its end, and has the escape again."""
    directory = tmp_path_factory.mktemp("surrogate")
    script = CALL_WITH_A_LONE_SURROGATE + EOS * (SCRIPT_LEN - len(CALL_WITH_A_LONE_SURROGATE))
    make_scripted_model(directory, f"{{{{ tools | tojson }}}}{{{{ messages | tojson }}}}{script}")
    with serve(LLMEngine(str(directory), num_blocks=64), tool_call_parser="qwen3_coder") as client:
        [choice] = ask(client, stream, tools=with_schema({"properties": {"x": {}}}), temperature=0)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert calls_of(choice) == [("f", {"x": ["\ud800"]})]


def test_none_is_no_call(tools: Any) -> None:
    """The prompt has the tools nevertheless."""
    answer = ask(tools, tools=TOOLS, tool_choice="none", max_tokens=30, n=4)
    with_tools, without = (
        tools.answer("/tokenize", messages=MESSAGES, **each)["count"] for each in ({"tools": TOOLS}, {})
    )
    assert answer["usage"]["prompt_tokens"] == with_tools > without + 50
    assert all("tool_calls" not in choice["message"] for choice in answer["choices"])


def test_a_history_with_calls(tools: Any) -> None:
    """Arguments are objects for the template; what a client sends back is taken."""
    [choice] = ask(tools, tools=TOOLS, tool_choice="required", **WITHOUT_THOUGHT)["choices"]
    call = choice["message"]["tool_calls"][0]
    history = [
        *MESSAGES,
        {**choice["message"], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    tools.answer("/tokenize", messages=history)
    ask(tools, messages=history, tools=TOOLS, max_tokens=5)


# ---- thoughts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_after_a_thought(tools: Any, stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    answer = ask(tools, stream, response_format=schema, n=12, temperature=1.2, max_tokens=600,
                 stream_options={"include_usage": True} if stream else None)  # fmt: skip
    ended = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        assert json.loads(choice["message"]["content"])["city"] in ("Paris", "Rome")
    thoughts = [choice["message"].get("reasoning_content") for choice in answer["choices"]]
    assert any(thoughts), "every output could begin with a thought"
    assert thoughts == [choice["message"].get("reasoning") for choice in answer["choices"]]
    details = answer["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_is_not_to_be_told(tools: Any, stream: bool) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>so"}]
    fields = {
        "messages": messages,
        "continue_final_message": True,
        "guided_choice": ["yes"],
        "thinking_token_budget": 7,
    }
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    for include in (True, False):
        answer = ask(tools, stream, include_reasoning=include, **fields, **usage)
        [choice] = answer["choices"]
        assert choice["message"]["content"] == "yes"
        assert bool(choice["message"].get("reasoning")) is include
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_bound_of_a_thought(tools: Any, stream: bool) -> None:
    """The answer comes after it."""
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>so"}]
    fields = {"messages": messages, "continue_final_message": True, "guided_choice": ["yes"]}
    for budget in (0, 7):
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        answer = ask(tools, stream, **fields, thinking_token_budget=budget, **usage)
        [choice] = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("yes", "stop")
        # Beside the thought: its end, white space, the answer, and the end.
        assert answer["usage"]["completion_tokens"] <= budget + 1 + 4 + len("yes") + 1
    status, param, _ = tools.error(PATH, messages=MESSAGES, thinking_token_budget=-1)
    assert (status, param) == (400, "thinking_token_budget")


def test_tokens_of_a_thought_are_those_that_came(tools: Any) -> None:
    """Up to its end. Random bytes, mostly broken characters, would be more tokens if the text were tokenized again."""
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>so"}]
    fields = {"messages": messages, "continue_final_message": True, "thinking_token_budget": 20, "max_tokens": 60}
    answer = ask(tools, **fields, return_token_ids=True)
    streamed = ask(tools, True, **fields, stream_options={"include_usage": True})
    [end] = tools.answer("/tokenize", prompt="</think>", add_special_tokens=False)["tokens"]
    num_tokens = answer["choices"][0]["token_ids"].index(end)
    for each in (answer, streamed):
        assert each["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}


def test_without_a_parser_a_thought_is_text(tool_engine: LLMEngine, serve: Callable[..., Any]) -> None:
    with serve(tool_engine, tool_call_parser="none", reasoning_parser="none") as client:
        [choice] = ask(client, guided_grammar='start: <think> "a" </think> "b"')["choices"]
        assert choice["message"]["content"] == "<think>a</think>b"
        assert choice["message"]["reasoning"] is None
        status, param, message = client.error(PATH, messages=MESSAGES, tools=TOOLS)
        assert (status, param) == (400, "tools") and "--tool-call-parser" in message
        status, param, message = client.error(PATH, messages=MESSAGES, thinking_token_budget=5)
        assert (status, param) == (400, "thinking_token_budget") and "--reasoning-parser" in message


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"guided_choice": ["yes"]}], ids=["alone", "tools", "form"])
def test_a_bound_of_a_thought_whose_end_is_no_token(
    demo_engine: LLMEngine, serve: Callable[..., Any], more: Any
) -> None:
    """Catches an error that blames another field."""
    with serve(demo_engine, chat_template=TOOL_TEMPLATE) as client:
        status, param, message = client.error(PATH, messages=MESSAGES, thinking_token_budget=5, **more)
        assert (status, param) == (400, "thinking_token_budget")
        expected = "none, as the end of a thought, </think>, is not one of the tokenizer's added tokens"
        assert message == f"thinking_token_budget: expected {expected}"


def test_a_message_that_is_continued(tools: Any) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It rai"}]
    fields = {"continue_final_message": True, "guided_choice": ["ns."]}
    [choice] = ask(tools, messages=begun, **fields)["choices"]
    assert choice["message"]["content"] == "ns."
    answer = ask(tools, messages=[*MESSAGES, {"role": "assistant", "content": "<think>It rai"}], max_tokens=5,
                 continue_final_message=True)  # fmt: skip
    assert answer["choices"][0]["message"].get("reasoning_content"), "it goes on with the thought"
    status, param, _ = tools.error(PATH, messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert (status, param) == (400, "continue_final_message")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools", "tools: expected 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools: "),
        ({"tools": [TIME, TIME]}, "tools", "tools[1].function.name: expected a name of its own, got 'get_time' again"),
        ({"tools": [TIME] * 300}, "tools", "tools: expected at most 256 items, got 300"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice: expected auto or none without tools"),
        (
            {"tools": [WEATHER], "tool_choice": NAMED},
            "tool_choice",
            "tool_choice: expected names of tools, got",
        ),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "tool_choice: expected "),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "chat_template_kwargs: expected var"),
        ({"tools": TOOLS, "use_beam_search": True, "n": 2}, "use_beam_search", "use_beam_search: "),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}]},
            "tools",
            "tools: expected a form (structural_tag) that an output can be held to, got format.",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_are_none(tools: Any, fields: dict[str, Any], param: str, message: str, stream: bool) -> None:
    status, blamed, said = tools.error(PATH, messages=MESSAGES, **fields, stream=stream)
    assert (status, blamed) == (400, param)
    assert said.startswith(message)


def with_schema(schema: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema, **fields}}]


def test_keywords_that_are_not_known(tools: Any) -> None:
    """They count for nothing, as tools of others are full of them; but not in a strict function."""
    schema = {"properties": {"a": {"type": "array", "items": {"enum": [1]}, "maxItems": 2, "uniqueItems": True}}}
    fields: dict[str, Any] = {"messages": MESSAGES, "tool_choice": "required", "max_tokens": 30}
    tools.answer(PATH, tools=with_schema(schema), **fields)
    status, param, message = tools.error(PATH, tools=with_schema(schema, strict=True), **fields)
    assert (status, param) == (400, "tools") and "uniqueItems" in message


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"const": float("nan")}}}, "no JSON"),
        ({"required": 5}, "format."),
        ({"properties": {"\ud800": {}}}, ""),
    ],
    ids=["nan", "required", "surrogate"],
)
def test_schemas_that_are_none(tools: Any, schema: Any, message: str) -> None:
    status, _, said = tools.error(PATH, messages=MESSAGES, tools=with_schema(schema), max_tokens=5)
    assert status == 400 and message in said, said


def test_a_deep_schema(tools: Any) -> None:
    """Either taken or refused, and no failure of the server."""
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    response = tools.post(PATH, messages=MESSAGES, tools=with_schema({"properties": {"a": schema}}), max_tokens=5)
    assert response.status_code in (200, 400), response.text


def test_completions_have_no_tools(tools: Any) -> None:
    status, param, _ = tools.error("/v1/completions", prompt="a", tools=TOOLS)
    assert (status, param) == (400, "tools")


def test_a_template_without_tools(tool_engine: LLMEngine, serve: Callable[..., Any]) -> None:
    """Nothing is lost without a word."""
    template = "<tool_call>{% for message in messages %}{{ message.content }}{% endfor %}"
    with serve(tool_engine, chat_template=template) as client:
        status, param, message = client.error(PATH, messages=MESSAGES, tools=TOOLS)
    assert (status, param) == (400, "tools")
    assert message == "tools: expected none, as the model's chat template does not write them into the prompt"
