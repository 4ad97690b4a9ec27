"""Outputs told in events: whatever pieces the text comes in, the events add up to what the whole text says."""

import copy
import json
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from event_streams import message_of, response_of, without_ids
from hypothesis import given
from hypothesis import strategies as st
from tool_functions import FUNCTIONS

from pagedattn_serve.output_parsing.output_format import output_format
from pagedattn_serve.output_parsing.tool_format import ToolUse
from pagedattn_serve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.openai.blocks import BlockWriter, OutputEnd, OutputReader
from pagedattn_serve.server.openai.logprobs import ChatLogprobsFormat
from pagedattn_serve.server.openai.messages.events import MessageWriter
from pagedattn_serve.server.openai.responses.events import ResponseWriter
from pagedattn_serve.text.detokenizer import TokenNames

FORMAT = output_format("hermes", "qwen3", "")
TURN = FORMAT.turn("", ToolUse(FUNCTIONS))
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris é"}}</tool_call>'
NOW = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
PIECES = ("<think>Does it rain?</think>", "I look.", CALL, NOW, "\n", "So.")
HEAD = {
    **{"id": "resp_0", "object": "response", "created_at": 0, "model": "tiny", "parallel_tool_calls": True},
    **{"tool_choice": "auto", "tools": [], "error": None, "incomplete_details": None, "completed_at": None},
    "usage": None,
}
END = OutputEnd("stop", None, 5, 0, 9, 0)
WRITERS: dict[str, tuple[Callable[[], BlockWriter], Callable[[Any], Any], str]] = {
    "responses": (lambda: ResponseWriter(HEAD, FORMAT, {}), response_of, "output"),
    "messages": (lambda: MessageWriter("msg_0", "tiny", [], 9, FORMAT), message_of, "content"),
}


def told(make_writer: Callable[[], BlockWriter], pieces: Iterable[str], end: OutputEnd = END) -> tuple[Any, Any]:
    """The events of an output, and the whole answer."""
    writer, reader = make_writer(), OutputReader(TURN)
    events = copy.deepcopy(writer.start(5, 0))
    *beginning, last = pieces
    for piece, finish_reason in [*((each, None) for each in beginning), (last, end.finish_reason)]:
        completion = CompletionOutput(0, piece, [7], 0.0, None, finish_reason)
        output = RequestOutput("id", None, [5], [completion], finish_reason is not None, RequestMetrics(0.0))
        events += copy.deepcopy(writer.write(reader.read(output)))  # as they are sent
    events += copy.deepcopy(writer.finish(end))
    return events, writer.answer()


@pytest.mark.parametrize("name", list(WRITERS))
@given(data=st.data(), words=st.lists(st.sampled_from(PIECES), min_size=1, max_size=4))
def test_events_add_up_to_the_answer(name: str, data: st.DataObject, words: list[str]) -> None:
    make_writer, sum_of, field = WRITERS[name]
    text = "".join(words)
    places = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=6)))
    events, answer = told(make_writer, [text[i:j] for i, j in zip([0, *places], [*places, None], strict=True)])
    assert sum_of(events) == answer
    _, whole = told(make_writer, [text])
    assert without_ids(answer[field]) == without_ids(whole[field])


@pytest.mark.parametrize("name", list(WRITERS))
def test_what_is_held_back_as_the_beginning_of_a_tag_is_told_at_the_end(name: str) -> None:
    make_writer, sum_of, field = WRITERS[name]
    events, answer = told(make_writer, ["So. ", "<to", "ol"])
    assert sum_of(events) == answer
    assert "'So. <tool'" in str(answer[field])


def test_a_call_that_is_cut() -> None:
    """What there is of it: as it came, and as an object."""
    pieces, end = ["<think>a</think>", CALL[:61]], OutputEnd("length", None, 5, 0, 9, 0)
    _, response = told(WRITERS["responses"][0], pieces, end)
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["arguments"] == '{"city": "Par'
    _, message = told(WRITERS["messages"][0], pieces, end)
    assert message["content"][1]["input"] == {"city": "Par"}
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        (CALL, ["completed"]),
        (CALL[:-3], ["completed"]),
        (f"{CALL}{NOW[:-16]}", ["completed", "incomplete"]),
        (f"{CALL}{NOW[:20]}", ["completed"]),
        (f"{CALL}So", ["completed", "completed"]),
    ],
)
def test_a_call_and_a_stop_string(text: str, statuses: list[str]) -> None:
    """A call is incomplete if its arguments are, and so is the response."""
    _, response = told(WRITERS["responses"][0], [text])
    assert [item["status"] for item in response["output"]] == statuses
    assert response["status"] == statuses[-1]


TOKENS = ["<think>", "Hm", ".", "</", "think>", "A", " <", "b", "", "é", "</s>", "!"]


@pytest.mark.parametrize("tokens", [TOKENS, [*TOKENS[:2], "".join(TOKENS[2:6]), *TOKENS[6:]]], ids=["apart", "as one"])
@pytest.mark.parametrize("num_at_once", [1, 4, 99])
def test_a_text_has_the_logprobs_of_its_tokens(tokens: list[str], num_at_once: int) -> None:
    """A mark before it has others, also if one token has the end of both; what the text leaves out has none. What
    could become a mark is told late, and with its own."""
    names = cast(
        TokenNames, SimpleNamespace(special_texts={10: "</s>"}, bytes_of=lambda i, name: (name or "?").encode())
    )
    writer, reader = (
        ResponseWriter(HEAD, FORMAT, {}),
        OutputReader(TURN, ChatLogprobsFormat(names, SamplingParams(logprobs=0))),
    )
    writer.start(5, 0)
    ids = [10 if token == "</s>" else i for i, token in enumerate(tokens)]
    for begin in range(0, len(tokens), num_at_once):
        texts, end = tokens[begin : begin + num_at_once], begin + num_at_once
        entries = [{i: Logprob(-1.0 - i, 1, text)} for i, text in zip(ids[begin:end], texts, strict=True)]
        text = "".join(texts).replace("</s>", "")
        reason = "length" if end >= len(tokens) else None
        completion = CompletionOutput(0, text, ids[begin:end], 0.0, entries, reason)
        output = RequestOutput("id", None, [5], [completion], reason is not None, RequestMetrics(0.0))
        writer.write(reader.read(output))
    writer.finish(END)
    [part] = writer.answer()["output"][-1]["content"]
    assert part["text"] == "A <bé!"
    begin = next(i for i, token in enumerate(tokens) if "A" in token)
    assert [token["token"] for token in part["logprobs"]] == [each for each in tokens[begin:] if each != "</s>"]


def test_an_output_that_fails() -> None:
    writer = ResponseWriter(HEAD, FORMAT, {})
    events = writer.start(5, 0)
    events += writer.write(
        OutputReader(None).read(
            RequestOutput("id", None, [5], [CompletionOutput(0, "a", [7], 0.0, None, None)], False, RequestMetrics(0.0))
        )
    )
    lines = writer.fail(ApiError(500, "no more")).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events += [json.loads(line.partition("\ndata: ")[2]) for line in lines[:-2]]
    response = response_of(events)
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["output"][0]["content"][0]["text"] == "a" and response["output"][0]["status"] == "incomplete"
