"""Agents through the clients of OpenAI and Anthropic, OpenAI's agents, and litellm: a loop of two calls and a typed
answer, each as the client asks by itself."""

import asyncio
import json
from typing import Any

import litellm
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from anthropic import Anthropic, APIStatusError, beta_tool
from openai import AsyncOpenAI, OpenAI
from server_process import ServerProcess
from weather import QUESTION, SCHEMA, Tool, Weather, check_answer

STREAMS = pytest.mark.parametrize("stream", [False, True])


@STREAMS
@pytest.mark.parametrize("keeps", [False, True])
def test_openai(caller: ServerProcess, stream: bool, keeps: bool) -> None:
    """keeps: whether the server keeps the conversation, or the client sends it whole."""
    tool = Tool()
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]

    def ask(**fields: Any) -> Any:
        given = {"input": news, "previous_response_id": previous} if keeps else {"input": history}
        if not stream:
            return client.responses.parse(model="caller", store=keeps, **given, **fields)
        with client.responses.stream(model="caller", store=keeps, **given, **fields) as events:
            assert [event.type for event in events][-1] == "response.completed"
            return events.get_final_response()

    with OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0) as client:
        history: list[Any] = [{"role": "user", "content": QUESTION}]
        news, previous = history, None
        for _ in range(2):
            response = ask(tools=tools)
            call = response.output[-1]
            result = tool.get_weather(**json.loads(call.arguments))
            news = [{"type": "function_call_output", "call_id": call.call_id, "output": result}]
            history = [*history, *(item.model_dump(exclude={"parsed_arguments"}) for item in response.output), *news]
            previous = response.id
        response = ask(tools=tools, text_format=Weather)
        tool.check(response.output_parsed)
        if keeps:
            assert client.responses.retrieve(response.id).output_text == response.output_text
            assert len(client.responses.input_items.list(response.id).data) == 1
            client.responses.delete(response.id)


@STREAMS
@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
def test_openai_agents(caller: ServerProcess, stream: bool, kind: Any) -> None:
    tool = Tool()

    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0) as client:
            agent = Agent(
                name="Weather",
                instructions="Ask for the weather.",
                model=kind(model="caller", openai_client=client),
                model_settings=ModelSettings(include_usage=True),
                tools=[function_tool(tool.get_weather)],
                output_type=Weather,
            )
            config = RunConfig(tracing_disabled=True)
            if not stream:
                return await Runner.run(agent, QUESTION, run_config=config)
            result = Runner.run_streamed(agent, QUESTION, run_config=config)
            kinds = {event.type async for event in result.stream_events()}
            assert {"raw_response_event", "run_item_stream_event"} <= kinds
            return result

    tool.check(asyncio.run(run()).final_output)


@STREAMS
def test_anthropic(caller: ServerProcess, stream: bool) -> None:
    tool = Tool()
    tools: Any = [{"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}]

    def ask(**fields: Any) -> Any:
        fields |= {"model": "caller", "max_tokens": 300, "messages": messages, "tools": tools}
        if not stream:
            return client.messages.create(**fields)
        with client.messages.stream(**fields) as events:
            assert [event.type for event in events][-1] == "message_stop"
            return events.get_final_message()

    with Anthropic(base_url=caller.url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for kinds in (["thinking", "tool_use"], ["tool_use"]):
            message = ask()
            assert ([block.type for block in message.content], message.stop_reason) == (kinds, "tool_use")
            call = message.content[-1]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": tool.get_weather(**call.input)}
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        assert client.messages.count_tokens(model="caller", messages=messages).input_tokens > 0
        message = ask(output_config={"format": {"type": "json_schema", "schema": Weather.model_json_schema()}})
        tool.check(message.content[0].text)
        with pytest.raises(APIStatusError, match=r"messages\[0\].content\[0\].type") as raised:
            client.messages.create(
                model="caller", max_tokens=1, messages=[{"role": "user", "content": [{"type": "image"}]}]
            )
        assert (raised.value.status_code, raised.value.type) == (400, "invalid_request_error")


@STREAMS
def test_tool_runner_of_anthropic(caller: ServerProcess, stream: bool) -> None:
    """It asks for a thread, and goes on without one by what the error says."""
    tool = Tool()
    with Anthropic(base_url=caller.url, api_key="none", max_retries=0) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="caller",
            max_tokens=300,
            messages=[{"role": "user", "content": QUESTION}],
            tools=[beta_tool(tool.get_weather)],
            output_format=Weather,
            stream=stream,
        )
        for turn in runner:
            message = turn.get_final_message() if stream else turn
        tool.check(message.content[-1].text)


@STREAMS
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(caller: ServerProcess, stream: bool, provider: str) -> None:
    tool = Tool()
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]

    def ask(**fields: Any) -> Any:
        fields |= {"model": f"{provider}/caller", "api_base": f"{caller.url}/v1", "api_key": "none", "num_retries": 0}
        response: Any = litellm.completion(messages=messages, stream=stream, **fields)
        if stream:
            response = litellm.stream_chunk_builder(list(response))
        return response.choices[0].message

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        message = ask(tools=tools)
        [call] = message.tool_calls
        result = tool.get_weather(**json.loads(call.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    tool.check(ask(tools=tools).content)
    check_answer(ask(response_format=Weather).content)
