"""A loop with a tool: the model asks for it, the program calls it, until the model answers.

Usage: python python/examples/tools.py MODEL [QUESTION] (MODEL's chat template has to know tools, as Qwen 3's does)
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from pagedattn_serve import LLM, SamplingParams

QUESTION = "Where does it rain more, in Paris or in Rome?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str) -> str:
    weather = {"Paris": "light rain", "Rome": "heavy rain"}
    return f"{weather.get(city, 'sun')} in {city}"


FUNCTIONS: dict[str, Callable[..., str]] = {"get_weather": get_weather}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="its chat template has to know tools, as Qwen 3's does")
    parser.add_argument("question", nargs="?", default=QUESTION, help="default: %(default)s")
    args = parser.parse_args()
    llm = LLM(args.model)
    params = SamplingParams(temperature=0, max_tokens=400)
    messages: list[dict[str, Any]] = [{"role": "user", "content": args.question}]
    for _ in range(5):  # a model may call for ever
        [output] = llm.chat(messages, params, use_tqdm=False, tools=TOOLS)
        [said] = llm.parse_chat(output, TOOLS)
        if not said.calls:
            print(said.content, flush=True)
            break
        ids = [f"call_{len(messages)}_{i}" for i in range(len(said.calls))]
        calls = [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id, call in zip(ids, said.calls, strict=True)
        ]
        messages.append({"role": "assistant", "content": said.content or None, "tool_calls": calls})
        for id, call in zip(ids, said.calls, strict=True):
            try:  # whole arguments follow the schema; those of an answer that max_tokens has cut are no JSON
                result = FUNCTIONS[call.name](**json.loads(call.arguments))
            except ValueError as error:
                result = f"error: {error}"
            print(f"[{call.name}({call.arguments}) is {result}]", flush=True)
            messages.append({"role": "tool", "tool_call_id": id, "content": result})


if __name__ == "__main__":
    main()
