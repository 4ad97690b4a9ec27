"""LlamaIndex: a loop of two calls and a typed answer. It needs an older openai than the others: make test-agents."""

import asyncio
from typing import Any

import pytest
from server_process import ServerProcess
from weather import QUESTION, Tool, Weather, check_answer

pytest.importorskip("llama_index.llms.openai_like")

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_typed", [False, True])
def test_llama_index(caller: ServerProcess, stream: bool, is_typed: bool) -> None:
    tool = Tool()
    llm = OpenAILike(
        model="caller",
        api_base=f"{caller.url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )

    async def run() -> Any:
        tools = [FunctionTool.from_defaults(tool.get_weather)]
        agent = FunctionAgent(tools=tools, llm=llm, streaming=stream, output_cls=Weather if is_typed else None)
        output = await agent.run(QUESTION)
        return output.get_pydantic_model(Weather) if is_typed else output.response.content

    answer = asyncio.run(run())
    tool.check(answer.model_dump() if is_typed else answer)
    structured, question = llm.as_structured_llm(Weather), [ChatMessage(QUESTION)]
    response = list(structured.stream_chat(question))[-1] if stream else structured.chat(question)
    check_answer(response.raw.model_dump())
