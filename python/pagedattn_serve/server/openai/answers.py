"""Answers of jobs: whole, or in chunks as they come.

A busy server spends its time on a chunk for each token. So the part that all chunks of an answer share is rendered
once, and outputs of the engine become text without objects in between.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NotRequired

from fastapi import Request
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.server.http.errors import JSONResponse, encode_json, to_utf8
from pagedattn_serve.server.http.event_stream import EventStream, SendEvents, while_connected
from pagedattn_serve.server.openai.fields import ChatCompletionRequest, CompletionRequest, StreamOptions
from pagedattn_serve.server.openai.jobs import Job, JobRunner
from pagedattn_serve.server.openai.logprobs import ChatLogprobsFormat, CompletionLogprobsFormat
from pagedattn_serve.server.openai.service import Service


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """Tokens, over all prompts and choices. Of prompts, also those that were found in the cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]  # where thoughts are told apart


# Beside the JSON of a route.
EVENT_STREAM: dict[str, Any] = {
    "description": "the whole response, or with stream its chunks as they come, then [DONE]",
    "content": {"text/event-stream": {}},  # a schema here would be read as that of each event
}


async def respond(
    answer: "Answer", body: CompletionRequest | ChatCompletionRequest, request: Request, service: Service
) -> Response:
    """Run the answer's job: a stream that begins now, or the whole answer at the end."""
    if body.stream:
        return EventStream(answer.chunks(service.jobs, body.stream_options).send_all)
    outputs = await while_connected(request.receive, service.jobs.outputs(answer.job))
    return await asyncio.to_thread(answer.whole, outputs) if answer.takes_long else answer.whole(outputs)


class ChunkWriter:
    """Renders the chunks of one answer. head: the fields that all chunks begin with."""

    def __init__(self, head: dict[str, Any], options: StreamOptions | None) -> None:
        self.counts_at_end = options is not None and bool(options.include_usage)
        self.counts_on = self.counts_at_end and options is not None and bool(options.continuous_usage_stats)
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

    def with_prompt(self, chunk: str, prompt_ids: str) -> str:
        """A chunk with the tokens of the prompt, as JSON, beside its choices."""
        return chunk.replace('"choices":[', f'"prompt_token_ids":{prompt_ids},"choices":[', 1)

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
    than the prompt. shows_token_ids: whether it has the ids of tokens beside their texts.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    shows_output = True
    shows_token_ids = False

    def __init__(self, job: Job) -> None:
        self.job = job
        self._prompt_ids: dict[int, str] = {}  # by the place of the prompt

    def whole(self, outputs: list[RequestOutput]) -> Response:
        """outputs: one for each prompt, the sum of its deltas."""
        return response_of(self._fields(outputs), self._choices(outputs))

    @property
    def takes_long(self) -> bool:
        """Whether `whole` takes long."""
        params = self.job.params
        return self.shows_token_ids or params.reports_logprobs or params.prompt_logprobs is not None

    def chunks(self, jobs: JobRunner, options: StreamOptions | None) -> "JobChunks":
        return JobChunks(jobs, self, options)

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that a whole answer and all chunks begin with."""
        job = self.job
        fields = {"id": job.request_id, "object": kind, "created": job.created, "model": job.model}
        fields["system_fingerprint"] = job.system_fingerprint
        return fields | {"service_tier": "default"} if job.names_tier else fields

    def opening(self, writer: ChunkWriter, place: int, output: RequestOutput) -> tuple[list[str], list[LogprobsFormat]]:
        """From the first output of the prompt at a place: the first chunks of its choices, and for each choice the form
        of the logprobs that follow. An empty list of forms: the choices have no further chunks."""
        raise NotImplementedError

    def render(self, text: str) -> str:
        """New text of a choice as the JSON of a chunk's field."""
        raise NotImplementedError

    def render_prompt_ids(self, place: int) -> str:
        """The fields that the first chunk with tokens of a choice has for the prompt, beside `token_ids`."""
        return ""

    def prompt_ids(self, place: int) -> str:
        """The tokens of a prompt as JSON, written once for the chunks of all its choices."""
        if place not in self._prompt_ids:
            self._prompt_ids[place] = encode_json(self.job.prompts[place].token_ids)
        return self._prompt_ids[place]

    def _fields(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """A whole answer without its choices."""
        num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
        usage = make_usage(self.job.num_prompt_tokens, num_tokens if self.shows_output else 0, num_cached)
        return {**self.head(self.kind), "choices": [], "usage": usage}

    def _choices(self, outputs: list[RequestOutput]) -> Iterator[Mapping[str, Any]]:
        raise NotImplementedError


class JobChunks:
    """The events of a streamed answer."""

    def __init__(self, jobs: JobRunner, answer: Answer, options: StreamOptions | None) -> None:
        self._jobs = jobs
        self._answer = answer
        self._job = answer.job
        self._writer = ChunkWriter(answer.head(answer.chunk_kind), options)
        self._forms: dict[int, list[LogprobsFormat]] = {}  # by the place of the prompt
        self._nums_tokens: Counter[int] = Counter()  # by the place of the prompt
        self._nums_cached: Counter[int] = Counter()  # the same, of tokens of the prompt
        self._sent: set[int] = set()  # places of the prompts of whose outputs something was sent
        self._begun: set[int] = set()  # indices of choices that have told ids of tokens

    async def send_all(self, send: SendEvents) -> None:
        """Raises ApiError as `JobRunner.run`."""

        async def take(place: int, output: RequestOutput) -> None:
            if events := self._events(place, output):
                self._sent.add(place)
                await send(events)

        await self._jobs.run(self._job, take, self._forget_prompt)
        if self._writer.counts_at_end:
            await send(to_utf8(self._writer.usage(await self._final_usage())))

    def _events(self, place: int, output: RequestOutput) -> bytes:
        chunks: list[str] = []
        if place not in self._forms:
            self._nums_cached[place] = output.num_cached_tokens or 0
            opening, self._forms[place] = self._answer.opening(self._writer, place, output)
            chunks += self._counted(opening)
        if forms := self._forms[place]:
            for completion in output.outputs:
                self._nums_tokens[place] += len(completion.token_ids)
                index = place * self._job.params.n + completion.index
                chunks += self._counted(self._news(index, completion, forms[completion.index]))
        return to_utf8("".join(chunks))

    def _counted(self, chunks: list[str]) -> list[str]:
        """The chunks, with the usage up to them if it is asked for."""
        return [self._writer.with_usage(chunk, self._usage()) for chunk in chunks] if self._writer.counts_on else chunks

    def _news(self, index: int, completion: CompletionOutput, form: LogprobsFormat) -> list[str]:
        """The chunk with the news of a choice, if there is any."""
        text, finish_reason = completion.text, completion.finish_reason
        logprobs = None
        if form is not None and completion.token_ids:
            logprobs = form.add(completion)
        token_ids = self._render_ids(index, completion)
        if not text and logprobs is None and finish_reason is None and not token_ids:
            return []
        content = self._answer.render(text) + token_ids
        return [self._writer.choice(index, content, logprobs, finish_reason, completion.stop_reason)]

    def _render_ids(self, index: int, completion: CompletionOutput) -> str:
        """The fields of a chunk with the ids of new tokens, to follow its text; empty if they are not asked for."""
        if not self._answer.shows_token_ids:
            return ""
        fields = f',"token_ids":{encode_json(completion.token_ids)}'
        if index not in self._begun:
            self._begun.add(index)
            fields += self._answer.render_prompt_ids(index // self._job.params.n)
        return fields

    def _usage(self) -> Usage:
        return make_usage(self._job.num_prompt_tokens, self._nums_tokens.total(), self._nums_cached.total())

    async def _final_usage(self) -> Usage:
        return self._usage()

    def _forget_prompt(self, place: int) -> bool:
        """The outputs of the prompt come again. Returns False if the client has seen something of them."""
        if place in self._sent:
            return False
        self._forms.pop(place, None)
        del self._nums_tokens[place]
        return True


def make_usage(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int) -> Usage:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def response_of(answer: Mapping[str, Any], choices: Iterable[Mapping[str, Any]]) -> Response:
    """An answer with its `choices`, each of which is made and written before the next.

    Those with logprobs are large: so memory holds one of them, and between them another thread lets the event loop on.
    """
    texts = ",".join(encode_json(choice) for choice in choices)
    # No text has this: its quotes are escaped.
    before, after = encode_json({**answer, "choices": []}).split('"choices":[]')
    content = f'{before}"choices":[{texts}]{after}'
    return Response(to_utf8(content), media_type=JSONResponse.media_type)
