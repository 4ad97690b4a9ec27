"""POST /v1/completions and /v1/chat/completions: prompts or a chat in, choices out, whole or in chunks as they come.

A busy server spends its time on a chunk for each token. So the part that all chunks of an answer share is rendered
once, and outputs of the engine become text without objects in between.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.server.http.errors import ApiError, JSONResponse, encode_json
from pagedattn_serve.server.openai.fields import (
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
    chat_params,
    completion_params,
)
from pagedattn_serve.server.openai.logprobs import (
    ChatLogprobs,
    ChatLogprobsFormat,
    CompletionLogprobs,
    CompletionLogprobsFormat,
    PromptLogprobs,
    joined,
    prompt_logprobs,
)
from pagedattn_serve.server.openai.service import (
    EventStream,
    Job,
    JobRunner,
    PromptTokens,
    SendEvents,
    Service,
    service_of,
    while_connected,
)
from pagedattn_serve.text.detokenizer import TokenNames

router = APIRouter()


class Usage(TypedDict):
    """Tokens, over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None  # stop or length, where an output is whole
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: NotRequired[Literal["default"]]  # where the request names a tier
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None  # stop or length, where an output is whole
    stop_reason: int | str | None


class ChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: NotRequired[Literal["default"]]  # where the request names a tier
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


# Beside the JSON of a route.
EVENT_STREAM: dict[str, Any] = {
    "description": "the whole response, or with stream its chunks as they come, then [DONE]",
    "content": {"text/event-stream": {}},  # a schema here would be read as that of each event
}


@router.post("/v1/completions", response_model=CompletionResponse, responses={200: EVENT_STREAM})
async def create_completion(
    body: CompletionRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Continue a prompt, or several at once."""
    service.check_model(body.model)
    params = completion_params(body, service.defaults)
    prompts = await _tokenize(body, service)
    for prompt in prompts:
        service.check_room(len(prompt.token_ids), body.max_tokens, "prompt")
    job = service.job("cmpl", prompts, params, body)
    return await _respond(CompletionAnswer(body, job, service.token_names), body, request, service)


@router.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses={200: EVENT_STREAM})
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Say what the assistant says next."""
    service.check_model(body.model)
    params = chat_params(body, service.defaults)
    text = await service.render(body.messages, body.add_generation_prompt is not False, body.reasoning_effort)
    service.check_characters(text, "messages")
    [token_ids] = await service.tokenize([text], bool(body.add_special_tokens), "messages")  # the template writes them
    service.check_room(len(token_ids), params.max_tokens, "messages")
    job = service.job("chatcmpl", [PromptTokens(text, token_ids)], params, body)
    return await _respond(ChatAnswer(body, job, service.token_names), body, request, service)


async def _tokenize(body: CompletionRequest, service: Service) -> list[PromptTokens]:
    """The prompts, from any of the four forms. A prompt that is echoed has a text."""
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not 0 < len(prompts) <= service.config.max_waiting:
        message = f"prompt: expected 1 to {service.config.max_waiting} prompts (the queue's places), got {len(prompts)}"
        raise ApiError(400, message, param="prompt")
    if isinstance(prompts[0], str):
        for text in prompts:
            service.check_characters(text, "prompt")
        token_ids = await service.tokenize(prompts, body.add_special_tokens is not False)
        return list(map(PromptTokens, prompts, token_ids))
    texts = await service.detokenize(prompts) if body.echo else [None] * len(prompts)
    return list(map(PromptTokens, texts, prompts))


async def _respond(
    answer: "Answer", body: CompletionRequest | ChatCompletionRequest, request: Request, service: Service
) -> Response:
    """Run the answer's job: a stream that begins now, or the whole answer at the end."""
    if body.stream:
        return EventStream(JobChunks(service.jobs, answer, body.stream_options).send_all)
    outputs = await while_connected(request.receive, service.jobs.outputs(answer.job))
    params = answer.job.params
    if params.logprobs is None and params.prompt_logprobs is None:
        return answer.whole(outputs)
    return await asyncio.to_thread(answer.whole, outputs)


class ChunkWriter:
    """Renders the chunks of one answer. head: the fields that all chunks begin with."""

    def __init__(self, head: dict[str, Any], options: StreamOptions | None) -> None:
        self.counts_at_end = options is not None and bool(options.include_usage)
        self.counts_on = options is not None and bool(options.continuous_usage_stats)
        self._head = f'data: {encode_json(head)[:-1]},"choices":['
        self._tail = '],"usage":null}\n\n' if self.counts_at_end else "]}\n\n"

    def choice(
        self,
        index: int,
        content: str,
        logprobs: Any | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> str:
        """A chunk for one choice. content: its new text, as a rendered field."""
        logprobs_json = "null" if logprobs is None else encode_json(logprobs)
        end = "null"
        if finish_reason is not None:
            end = f'"{finish_reason}","stop_reason":{encode_json(stop_reason)}'
        return f'{self._head}{{"index":{index},{content},"logprobs":{logprobs_json},"finish_reason":{end}}}{self._tail}'

    def usage(self, usage: Usage) -> str:
        """The chunk after the chunks of all choices."""
        return self.with_usage(f"{self._head}{self._tail}", usage)

    def with_usage(self, chunk: str, usage: Usage) -> str:
        """A chunk with the usage so far."""
        return f'{chunk.removesuffix(self._tail)}],"usage":{encode_json(usage)}}}\n\n'


# The form of the logprobs of a choice, if any are asked for. `add` takes what is new of the choice.
LogprobsFormat = CompletionLogprobsFormat | ChatLogprobsFormat | None


class Answer:
    """The outputs of one job in the form that the request asks for. Each endpoint has its own form.

    kind, chunk_kind: the field `object` of a whole answer, and of a chunk. shows_output: whether the answer has more
    than the prompt.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    shows_output = True

    def __init__(self, job: Job) -> None:
        self.job = job

    def whole(self, outputs: list[RequestOutput]) -> Response:
        """outputs: one for each prompt, the sum of its deltas."""
        return response_of(self._fields(outputs), self._choices(outputs))

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that a whole answer and all chunks begin with."""
        job = self.job
        fields = {"id": job.request_id, "object": kind, "created": job.created, "model": job.model}
        return fields | {"service_tier": "default"} if job.names_tier else fields

    def opening(self, writer: ChunkWriter, place: int, output: RequestOutput) -> tuple[list[str], list[LogprobsFormat]]:
        """From the first output of the prompt at a place: the first chunks of its choices, and for each choice the form
        of the logprobs that follow. An empty list of forms: the choices have no further chunks."""
        raise NotImplementedError

    def render(self, text: str) -> str:
        """New text of a choice as the JSON of a chunk's field."""
        raise NotImplementedError

    def _fields(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """A whole answer without its choices."""
        num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        usage = make_usage(self.job.num_prompt_tokens, num_tokens if self.shows_output else 0)
        return {**self.head(self.kind), "choices": [], "usage": usage}

    def _choices(self, outputs: list[RequestOutput]) -> Iterator[Mapping[str, Any]]:
        raise NotImplementedError


@dataclass(slots=True, frozen=True)
class _Beginning:
    """The beginning of the choices of one prompt: the prompt and its logprobs if the prompt is echoed.

    format: for the logprobs of the output; None if no logprobs are asked for.
    """

    text: str
    logprobs: CompletionLogprobs | None
    format: CompletionLogprobsFormat | None


class CompletionAnswer(Answer):
    """Choices numbered prompt by prompt. With `echo`, each begins with its prompt."""

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionRequest, job: Job, token_names: TokenNames) -> None:
        super().__init__(job)
        self.shows_output = body.max_tokens != 0  # with 0, too, the engine makes a token
        self._body = body
        self._token_names = token_names

    def opening(self, writer: ChunkWriter, place: int, output: RequestOutput) -> tuple[list[str], list[LogprobsFormat]]:
        """With `echo`, the first chunks have the prompt."""
        beginning = self._begin(place, output)
        num_choices = self.job.params.n
        indices = range(place * num_choices, (place + 1) * num_choices)
        finish_reason = None if self.shows_output else "length"
        chunks = []
        if self._body.echo:
            text = self.render(beginning.text)
            chunks = [writer.choice(index, text, beginning.logprobs, finish_reason) for index in indices]
        if not self.shows_output:
            return chunks, []
        return chunks, [beginning.format and beginning.format.fork() for _ in indices]

    def render(self, text: str) -> str:
        return f'"text":{encode_json(text)}'

    def _choices(self, outputs: list[RequestOutput]) -> Iterator[CompletionChoice]:
        index = 0
        for place, output in enumerate(outputs):
            beginning = self._begin(place, output)
            for completion in output.outputs:
                yield self._choice(index, beginning, output, completion)
                index += 1

    def _begin(self, place: int, output: RequestOutput) -> _Beginning:
        body, prompt, params = self._body, self.job.prompts[place], self.job.params
        text = (prompt.text or "") if body.echo else ""
        if body.logprobs is None:
            return _Beginning(text, None, None)
        form = CompletionLogprobsFormat(self._token_names, body.logprobs, params.skip_special_tokens)
        logprobs = form.add_prompt(text, prompt.token_ids, output.prompt_logprobs or []) if body.echo else None
        return _Beginning(text, logprobs, form)

    def _choice(
        self, index: int, beginning: _Beginning, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        logprobs = beginning.logprobs
        if beginning.format is not None and self.shows_output:
            of_output = beginning.format.fork().add(completion)
            logprobs = of_output if logprobs is None else joined(logprobs, of_output)
        choice: CompletionChoice = {
            "index": index,
            "text": beginning.text + completion.text if self.shows_output else beginning.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason if self.shows_output else "length",
            "stop_reason": completion.stop_reason if self.shows_output else None,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output, self._body.prompt_logprobs)
        return choice


class ChatAnswer(Answer):
    """A message of the assistant in each choice."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatCompletionRequest, job: Job, token_names: TokenNames) -> None:
        super().__init__(job)
        self._num_prompt_logprobs = body.prompt_logprobs
        self._logprobs: ChatLogprobsFormat | None = None
        if body.logprobs:
            self._logprobs = ChatLogprobsFormat(token_names, body.top_logprobs or 0, job.params)

    def opening(self, writer: ChunkWriter, place: int, output: RequestOutput) -> tuple[list[str], list[LogprobsFormat]]:
        """The first chunk of a choice says who speaks."""
        indices = range(self.job.params.n)
        chunks = [writer.choice(index, '"delta":{"role":"assistant","content":""}') for index in indices]
        return chunks, [self._logprobs for _ in indices]

    def render(self, text: str) -> str:
        return f'"delta":{{"content":{encode_json(text)}}}' if text else '"delta":{}'

    def _fields(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        fields = super()._fields(outputs)
        if self._num_prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(outputs[0], self._num_prompt_logprobs)
        return fields

    def _choices(self, outputs: list[RequestOutput]) -> Iterator[ChatChoice]:
        for index, completion in enumerate(outputs[0].outputs):
            yield {
                "index": index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": None if self._logprobs is None else self._logprobs.add(completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }


class JobChunks:
    """The events of a streamed answer."""

    def __init__(self, jobs: JobRunner, answer: Answer, options: StreamOptions | None) -> None:
        self._jobs = jobs
        self._answer = answer
        self._job = answer.job
        self._writer = ChunkWriter(answer.head(answer.chunk_kind), options)
        self._forms: dict[int, list[LogprobsFormat]] = {}  # by the place of the prompt
        self._nums_tokens: Counter[int] = Counter()  # by the place of the prompt
        self._sent: set[int] = set()  # places of the prompts of whose outputs something was sent

    async def send_all(self, send: SendEvents) -> None:
        """Raises ApiError as `JobRunner.run`."""

        async def take(place: int, output: RequestOutput) -> None:
            if events := self._events(place, output):
                self._sent.add(place)
                await send(events)

        await self._jobs.run(self._job, take, self._forget_prompt)
        if self._writer.counts_at_end:
            await send(self._writer.usage(self._usage()).encode())

    def _events(self, place: int, output: RequestOutput) -> bytes:
        chunks: list[str] = []
        if place not in self._forms:
            chunks, self._forms[place] = self._answer.opening(self._writer, place, output)
        if forms := self._forms[place]:
            for completion in output.outputs:
                self._nums_tokens[place] += len(completion.token_ids)
                index = place * self._job.params.n + completion.index
                chunks += self._news(index, completion, forms[completion.index])
        if self._writer.counts_on:
            chunks = [self._writer.with_usage(chunk, self._usage()) for chunk in chunks]
        return "".join(chunks).encode()

    def _news(self, index: int, completion: CompletionOutput, form: LogprobsFormat) -> list[str]:
        """The chunk with the news of a choice, if there is any."""
        text, finish_reason = completion.text, completion.finish_reason
        logprobs = None
        if form is not None and completion.token_ids:
            logprobs = form.add(completion)
        if not text and logprobs is None and finish_reason is None:
            return []
        return [self._writer.choice(index, self._answer.render(text), logprobs, finish_reason, completion.stop_reason)]

    def _usage(self) -> Usage:
        return make_usage(self._job.num_prompt_tokens, self._nums_tokens.total())

    def _forget_prompt(self, place: int) -> bool:
        """The outputs of the prompt come again. Returns False if the client has seen something of them."""
        if place in self._sent:
            return False
        self._forms.pop(place, None)
        del self._nums_tokens[place]
        return True


def make_usage(num_prompt_tokens: int, num_tokens: int) -> Usage:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def response_of(answer: Mapping[str, Any], choices: Iterable[Mapping[str, Any]]) -> Response:
    """An answer with its `choices`, each of which is made and written before the next.

    Those with logprobs are large: so memory holds one of them, and between them another thread lets the event loop on.
    """
    texts = ",".join(encode_json(choice) for choice in choices)
    # No text has this: its quotes are escaped.
    before, after = encode_json({**answer, "choices": []}).split('"choices":[]')
    content = f'{before}"choices":[{texts}]{after}'
    return Response(content.encode("utf-8", "backslashreplace"), media_type=JSONResponse.media_type)
