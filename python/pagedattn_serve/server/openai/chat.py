"""POST /v1/chat/completions: a chat in, the assistant's next message out, once or in several choices."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.output_parsing.events import CallArguments, CallBegin, Content, Event, Reasoning, is_whole
from pagedattn_serve.output_parsing.output_format import Turn
from pagedattn_serve.output_parsing.parser import OutputParser, parse
from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.server.http.errors import encode_json
from pagedattn_serve.server.openai.answers import (
    EVENT_STREAM,
    Answer,
    ChunkWriter,
    JobChunks,
    LogprobsFormat,
    Usage,
    respond,
)
from pagedattn_serve.server.openai.fields import (
    ChatCompletionRequest,
    StreamOptions,
    chat_params,
    generates,
    num_output_tokens,
)
from pagedattn_serve.server.openai.jobs import Job, JobRunner, PromptTokens
from pagedattn_serve.server.openai.logprobs import ChatLogprobs, ChatLogprobsFormat, PromptLogprobs, prompt_logprobs
from pagedattn_serve.server.openai.service import Service, service_of
from pagedattn_serve.server.openai.tools import requested_calls, template_tools
from pagedattn_serve.text.chat_template import content_text
from pagedattn_serve.text.detokenizer import TokenNames

router = APIRouter()


class CalledFunction(TypedDict):
    name: str
    arguments: str  # JSON


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None  # None beside calls, if there is no text
    refusal: None
    reasoning_content: str | None  # the thought, if there is one
    reasoning: str | None  # the same
    tool_calls: NotRequired[list[ToolCall]]  # if there are any


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None  # stop, tool_calls or length, where an output is whole
    stop_reason: int | str | None
    token_ids: list[int] | None  # with return_token_ids


class ChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: NotRequired[Literal["default"]]  # where the request names a tier
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None  # with return_token_ids


@router.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses={200: EVENT_STREAM})
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Say what the assistant says next."""
    service.check_model(body.model)
    job, turn = await chat_job(body, service, "chatcmpl-")
    if turn is None:
        return await respond(ChatAnswer(body, job, service.token_names), body, request, service)
    return await respond(ParsedChatAnswer(body, job, service, turn), body, request, service)


async def chat_prompt(body: ChatCompletionRequest, service: Service) -> PromptTokens:
    """The prompt that the chat makes. Raises ApiError."""
    text = await service.render(
        body.messages,
        generates(body.add_generation_prompt, body.continue_final_message),
        reasoning_effort=body.reasoning_effort,
        variables=body.chat_template_kwargs,
        tools=template_tools(body.tools),
        continue_final_message=body.continue_final_message is True,
    )
    adds = bool(body.add_special_tokens)  # mostly the template writes them
    must_fit = body.truncate_prompt_tokens is None
    [token_ids] = await service.tokenize([text], adds, "messages", must_fit=must_fit)
    return service.truncate(PromptTokens(text, token_ids), body, num_output_tokens(body))


async def chat_job(
    body: ChatCompletionRequest, service: Service, id_prefix: str, clips: bool = False
) -> tuple[Job, Turn | None]:
    """Work for the engine, and how its output is read; None if it is text alone. Raises ApiError.

    clips: whether an output that does not fit is made shorter instead of refused.
    """
    params, use = chat_params(body, service.defaults), requested_calls(body)
    prompt = await chat_prompt(body, service)
    num_tokens = len(prompt.token_ids)
    service.check_room(num_tokens, None if clips else num_output_tokens(body), "messages")
    if clips and params.max_tokens is not None:
        params = replace(params, max_tokens=min(params.max_tokens, service.max_model_len - num_tokens))
    assert prompt.text is not None
    continued = content_text(body.messages[-1]) if body.continue_final_message else ""
    params, turn = service.turn(prompt.text, params, use, continued, body.thinking_token_budget)
    return service.job(id_prefix, [prompt], params, body, has_tools=use is not None), turn


class ChatAnswer(Answer):
    """A message of the assistant in each choice."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatCompletionRequest, job: Job, token_names: TokenNames) -> None:
        super().__init__(job)
        self._num_prompt_logprobs = body.prompt_logprobs
        self.shows_token_ids = bool(body.return_token_ids)
        self._logprobs: ChatLogprobsFormat | None = None
        if body.logprobs:
            as_ids = bool(body.return_tokens_as_token_ids)
            self._logprobs = ChatLogprobsFormat(token_names, job.params, as_ids)

    def opening(self, writer: ChunkWriter, place: int, output: RequestOutput) -> tuple[list[str], list[LogprobsFormat]]:
        """The first chunk of a choice says who speaks, and has the prompt's tokens if they are asked for."""
        indices = range(self.job.params.n)
        chunks = [writer.choice(index, '"delta":{"role":"assistant","content":""}') for index in indices]
        if self.shows_token_ids:
            chunks = [writer.with_prompt(chunk, self.prompt_ids(place)) for chunk in chunks]
        return chunks, [self._logprobs for _ in indices]

    def render(self, text: str) -> str:
        return f'"delta":{{"content":{encode_json(text)}}}' if text else '"delta":{}'

    def _fields(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        fields = super()._fields(outputs)
        asked = self._num_prompt_logprobs
        fields["prompt_logprobs"] = None if asked is None else prompt_logprobs(outputs[0], asked)
        fields["prompt_token_ids"] = self.job.prompts[0].token_ids if self.shows_token_ids else None
        return fields

    def _choices(self, outputs: list[RequestOutput]) -> Iterator[ChatChoice]:
        for index, completion in enumerate(outputs[0].outputs):
            message: ChatMessage = {
                "role": "assistant",
                "content": completion.text,
                "refusal": None,
                "reasoning_content": None,
                "reasoning": None,
            }
            yield {
                "index": index,
                "message": message,
                "logprobs": None if self._logprobs is None else self._logprobs.add(completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "token_ids": completion.token_ids if self.shows_token_ids else None,
            }


class ParsedChatAnswer(ChatAnswer):
    """A message in each choice, with its thought and its calls apart from its content."""

    takes_long = True  # counting the tokens of a thought

    def __init__(self, body: ChatCompletionRequest, job: Job, service: Service, turn: Turn) -> None:
        super().__init__(body, job, service.token_names)
        self.turn = turn
        self.shows_thoughts = body.include_reasoning is not False
        self._service = service

    def new_call_id(self) -> str:
        return self._service.output_format.new_call_id()

    def chunks(self, jobs: JobRunner, options: StreamOptions | None) -> JobChunks:
        return ParsedChatChunks(jobs, self, options)

    def add_details(self, usage: Usage, outputs: Iterable[tuple[OutputParser, list[int]]]) -> Usage:
        """The usage with the number of tokens of thoughts, which may take long to count. outputs: what has read the
        text of each choice, and its tokens."""
        nums_tokens = [self._service.num_thought_tokens(self.job, *output) for output in outputs]
        return {**usage, "completion_tokens_details": {"reasoning_tokens": sum(nums_tokens)}}

    def _fields(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        completions = outputs[0].outputs
        parsers = [self.turn.parser() for _ in completions]
        self._parsed = [parse(parser, each.text) for parser, each in zip(parsers, completions, strict=True)]
        fields = super()._fields(outputs)
        tokens = [completion.token_ids for completion in completions]
        return {**fields, "usage": self.add_details(fields["usage"], zip(parsers, tokens, strict=True))}

    def _choices(self, outputs: list[RequestOutput]) -> Iterator[ChatChoice]:
        for choice, parsed in zip(super()._choices(outputs), self._parsed, strict=True):
            message: ChatMessage = {**choice["message"], "content": parsed.content}
            if parsed.reasoning and self.shows_thoughts:
                message["reasoning_content"] = message["reasoning"] = parsed.reasoning
            if parsed.calls:
                message["content"] = parsed.content or None
                message["tool_calls"] = [
                    {
                        "id": self.new_call_id(),
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in parsed.calls
                ]
                choice["finish_reason"] = reason_with_calls(choice["finish_reason"], parsed.calls[-1].arguments)
            yield {**choice, "message": message}


class ParsedChatChunks(JobChunks):
    """The events of such an answer, with a parser for each choice."""

    def __init__(self, jobs: JobRunner, answer: ParsedChatAnswer, options: StreamOptions | None) -> None:
        super().__init__(jobs, answer, options)
        self._parsed_answer = answer
        self._parsers: dict[int, OutputParser] = {}  # by the index of a choice
        self._arguments: dict[int, list[str]] = {}  # the same: pieces of those of the last call, if there is one
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)  # the same

    def _news(self, index: int, completion: CompletionOutput, form: LogprobsFormat) -> list[str]:
        """A chunk for each thing that the new text of a choice says. The first has the logprobs, the last the end."""
        if (parser := self._parsers.get(index)) is None:
            parser = self._parsers[index] = self._parsed_answer.turn.parser()
        self._token_ids[index] += completion.token_ids
        events = parser.feed(completion.text)
        finish_reason = completion.finish_reason
        if finish_reason is not None:
            events += parser.finish()
        if not self._parsed_answer.shows_thoughts:
            events = [event for event in events if not isinstance(event, Reasoning)]
        deltas = [self._delta(index, event) for event in events]
        logprobs = form.add(completion) if form is not None and completion.token_ids else None
        token_ids = self._render_ids(index, completion)
        if not deltas and (logprobs is not None or finish_reason is not None or token_ids):
            deltas = ["{}"]
        if index in self._arguments and finish_reason is not None:
            finish_reason = reason_with_calls(finish_reason, "".join(self._arguments[index]))
        chunks = []
        for i, delta in enumerate(deltas):
            is_last = i == len(deltas) - 1
            chunks.append(
                self._writer.choice(
                    index,
                    f'"delta":{delta}{token_ids if i == 0 else ""}',
                    logprobs if i == 0 else None,
                    finish_reason if is_last else None,
                    completion.stop_reason if is_last else None,
                )
            )
        return chunks

    def _delta(self, index: int, event: Event) -> str:
        match event:
            case Content(text):
                return encode_json({"content": text})
            case Reasoning(text):
                return encode_json({"reasoning_content": text, "reasoning": text})
            case CallBegin(call_index, name):
                self._arguments[index] = []
                call_id = self._parsed_answer.new_call_id()
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                return encode_json({"tool_calls": [{"index": call_index, **call}]})
            case CallArguments(call_index, text):
                self._arguments[index].append(text)
                return encode_json({"tool_calls": [{"index": call_index, "function": {"arguments": text}}]})

    async def _final_usage(self) -> Usage:
        outputs = [(parser, self._token_ids[index]) for index, parser in self._parsers.items()]
        return await asyncio.to_thread(self._parsed_answer.add_details, self._usage(), outputs)


def reason_with_calls(finish_reason: str | None, arguments: str) -> str | None:
    """The finish_reason of an output with calls. arguments: of the last call, which a stop string may have cut."""
    return "tool_calls" if finish_reason == "stop" and is_whole(arguments) else finish_reason
