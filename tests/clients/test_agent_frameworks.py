"""Agents through what people write them with: a loop of two calls and a typed answer, each as the framework asks."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import instructor
import outlines
import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from server_process import ServerProcess
from smolagents import OpenAIModel, ToolCallingAgent
from smolagents import tool as smolagents_tool
from weather import QUESTION, Tool, Weather, check_answer

STREAMS = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def client(caller: ServerProcess) -> Any:
    with OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@STREAMS
@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
@pytest.mark.parametrize("output", [Weather, NativeOutput(Weather), PromptedOutput(Weather)], ids=str)
def test_pydantic_ai(caller: ServerProcess, stream: bool, kind: Any, output: Any) -> None:
    """A type alone is a tool, which the model has to call."""
    tool = Tool()

    async def run() -> Any:
        model = kind("caller", provider=OpenAIProvider(base_url=f"{caller.url}/v1", api_key="none"))
        agent = Agent(model, output_type=output, tools=[tool.get_weather])
        if not stream:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    tool.check(asyncio.run(run()))


@STREAMS
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain(caller: ServerProcess, stream: bool, api: str) -> None:
    tool = Tool()
    bound = langchain_tool(tool.get_weather)
    chat = ChatOpenAI(
        model="caller",
        base_url=f"{caller.url}/v1",
        api_key="none",
        use_responses_api=api == "responses",
        max_retries=0,
    )

    def ask(model: Any) -> Any:
        if not stream:
            return model.invoke(messages)
        [first, *others] = model.stream(messages)
        return sum(others, start=first)

    messages: list[Any] = [HumanMessage(QUESTION)]
    for _ in range(2):
        message = ask(chat.bind_tools([bound]))
        [call] = message.tool_calls
        messages += [message, bound.invoke(call)]
    tool.check(ask(chat.bind_tools([bound], strict=True)).text)
    for method in ("json_schema", "function_calling"):
        structured: Any = chat.with_structured_output(Weather, method=method)
        check_answer(list(structured.stream(messages))[-1] if stream else structured.invoke(messages))


@STREAMS
@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(client: Any, stream: bool, mode: str) -> None:
    """It asks for an answer alone."""
    structured = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    fields: Any = {
        "model": "caller",
        "messages": [{"role": "user", "content": QUESTION}],
        "response_model": Weather,
        "max_retries": 0,
    }
    answer = list(structured.create_partial(**fields))[-1] if stream else structured.create(**fields)
    check_answer(answer.model_dump())


@STREAMS
def test_smolagents(caller: ServerProcess, stream: bool) -> None:
    tool = Tool()

    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: The name of the city.
        """
        return tool.get_weather(city)  # type: ignore[arg-type]

    model = OpenAIModel(model_id="caller", api_base=f"{caller.url}/v1", api_key="none")
    tools = [smolagents_tool(get_weather)]
    agent = ToolCallingAgent(tools=tools, model=model, stream_outputs=stream, verbosity_level=0)
    tool.check(list(agent.run(QUESTION, stream=True))[-1].output if stream else agent.run(QUESTION))


def test_outlines(client: Any) -> None:
    """It has no tools. It asks for types, by vLLM's fields."""
    model = outlines.from_vllm(client, "caller")
    check_answer(model(QUESTION, Weather))
    check_answer("".join(model.stream(QUESTION, Weather)))


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm")
def test_ai_sdk(caller: ServerProcess, tmp_path: Path) -> None:
    """From npm, with its providers for OpenAI, for what is compatible, and for Anthropic."""
    here = Path(__file__).parent / "ai_sdk"
    for name in ("package.json", "agent.mjs"):
        shutil.copy(here / name, tmp_path)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    if subprocess.run(install, cwd=tmp_path, check=False).returncode != 0:
        pytest.skip("the AI SDK cannot be had")
    command = ["node", "agent.mjs", caller.url]
    output = subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True).stdout
    runs = [json.loads(line) for line in output.splitlines()]
    assert len(runs) == 16
    for run in runs:
        assert run["cities"] == ["Paris", "Rome"], run
        check_answer(run["answer"])
