"""A response of `/v1/responses`, told item by item."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from pagedattn_serve.output_parsing.events import is_whole
from pagedattn_serve.output_parsing.output_format import OutputFormat
from pagedattn_serve.server.http.errors import DONE, ApiError
from pagedattn_serve.server.openai.blocks import BlockWriter, Fields, Kind, OutputEnd, encode_events
from pagedattn_serve.server.openai.logprobs import TokenLogprob
from pagedattn_serve.server.openai.responses.tools import FunctionId

# By the type of an item: how its id begins.
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


class ResponseWriter(BlockWriter):
    """Tells the output as events, numbered from 0.

    response: the response before it has an output. output_format: makes the ids of calls. functions: by the names that
        the model has for them.
    """

    done = DONE

    def __init__(self, response: Fields, output_format: OutputFormat, functions: Mapping[str, FunctionId]) -> None:
        super().__init__()
        self._response = {**response, "status": "in_progress"}
        self._output_format = output_format
        self._functions = functions
        self._items: list[Fields] = []
        self._pieces: list[str] = []  # of the text of the open item
        self._told_logprobs: list[TokenLogprob] = []  # the same
        self._num_events = 0

    def start(self, num_prompt_tokens: int, num_cached_tokens: int) -> list[Fields]:
        return [self._event(name, response=self.answer()) for name in ("created", "in_progress")]

    def finish(self, end: OutputEnd) -> list[Fields]:
        is_long = end.finish_reason == "length"
        is_cut = is_long or (self._open == "call" and not is_whole("".join(self._pieces)))  # by a stop string
        events = self.close(is_cut)
        if not self._items:
            events = [*self._begin("text", ""), *self._end("text", is_cut)]
        self._response["usage"] = {
            "input_tokens": end.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": end.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": end.num_tokens,
            "output_tokens_details": {"reasoning_tokens": end.num_thought_tokens},
            "total_tokens": end.num_prompt_tokens + end.num_tokens,
        }
        if is_cut:
            # OpenAI has no name for a stop string as a reason.
            self._response["incomplete_details"] = {"reason": "max_output_tokens"} if is_long else {}
        else:
            self._response["completed_at"] = int(time.time())
        return [*events, self._last_event("incomplete" if is_cut else "completed")]

    def fail(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response["error"] = {"code": code, "message": error.body["error"]["message"]}
        return encode_events([*self.close(is_cut=True), self._last_event("failed")]) + DONE

    def answer(self) -> Fields:
        return {**self._response, "output": list(self._items)}

    def _begin(self, kind: Kind, name: str) -> list[Fields]:
        self._pieces, self._told_logprobs = [], []
        if kind == "call":
            call_id = self._output_format.new_call_id()
            function = self._functions.get(name, FunctionId(None, name))
            item: Fields = {"type": "function_call", "call_id": call_id, "name": function.name, "arguments": ""}
            if function.namespace is not None:
                item["namespace"] = function.namespace
        elif kind == "text":
            item = {"type": "message", "role": "assistant", "content": []}
        else:
            item = {"type": "reasoning", "summary": [], "content": []}
        item = {"id": new_item_id(item["type"]), **item, "status": "in_progress"}
        self._items.append(item)
        events = [self._event("output_item.added", output_index=self._index, item=dict(item))]
        if kind != "call":
            events.append(self._event("content_part.added", **self._place(kind), part=_part(kind, "", [])))
        return events

    def _extend(self, kind: Kind, text: str, logprobs: list[TokenLogprob]) -> list[Fields]:
        self._pieces.append(text)
        self._told_logprobs += logprobs
        return [self._event(f"{_NAMES[kind]}.delta", **self._place(kind), delta=text, **_more(kind, logprobs))]

    def _end(self, kind: Kind, is_cut: bool) -> list[Fields]:
        item, text = self._items[-1], "".join(self._pieces)
        name, place = f"{_NAMES[kind]}.done", self._place(kind)
        if kind == "call":
            item["arguments"] = text
            events = [self._event(name, **place, name=item["name"], arguments=text)]
        else:
            part = _part(kind, text, self._told_logprobs)
            item["content"] = [part]
            events = [
                self._event(name, **place, text=text, **_more(kind, self._told_logprobs)),
                self._event("content_part.done", **place, part=part),
            ]
        item["status"] = "incomplete" if is_cut else "completed"
        return [*events, self._event("output_item.done", output_index=self._index, item=dict(item))]

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _place(self, kind: Kind) -> Fields:
        """Where the text of the open item is."""
        place = {"item_id": self._items[-1]["id"], "output_index": self._index}
        return place if kind == "call" else {**place, "content_index": 0}

    def _last_event(self, status: str) -> Fields:
        self._response["status"] = status
        return self._event(status, response=self.answer())

    def _event(self, name: str, /, **fields: Any) -> Fields:
        event = {"type": f"response.{name}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


def new_item_id(item_type: str) -> str:
    """An id that nobody can guess."""
    return _ID_PREFIXES[item_type] + secrets.token_hex(24)


# The events of an item's text.
_NAMES: dict[Kind, str] = {
    "text": "output_text",
    "thought": "reasoning_text",
    "call": "function_call_arguments",
}


def _part(kind: Kind, text: str, logprobs: list[TokenLogprob]) -> Fields:
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _more(kind: Kind, logprobs: list[TokenLogprob]) -> Fields:
    """What else the events of a text have."""
    return {"logprobs": logprobs} if kind == "text" else {}
