"""Server-sent events: the chunks of a response, rendered by hand, and the response that sends them.

A busy server spends its time on a chunk for each token. So the part that all chunks of a response share is rendered
once, and outputs of the engine become text without objects in between.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.server.http.errors import ApiError, ClientGoneError, encode_json
from pagedattn_serve.server.openai.generation import Job, JobRunner, while_connected
from pagedattn_serve.server.openai.request_bodies import StreamOptions
from pagedattn_serve.server.openai.response_bodies import Usage

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

SendEvents = Callable[[bytes], Awaitable[None]]


class LogprobsFormat(Protocol):
    """The form of one choice's logprobs. `add` takes what is new of the choice."""

    def add(self, completion: CompletionOutput) -> Any: ...


class ChunkWriter:
    """Renders the chunks of one response. kind: the field `object` of the chunks."""

    def __init__(self, job: Job, kind: str, options: StreamOptions | None) -> None:
        fields = {"id": job.request_id, "object": kind, "created": job.created, "model": job.model}
        head = encode_json(fields | {"service_tier": "default"} if job.names_tier else fields)
        self.counts_at_end = options is not None and bool(options.include_usage)
        self.counts_on = options is not None and bool(options.continuous_usage_stats)
        self._head = f'data: {head[:-1]},"choices":['
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
        told = "null" if logprobs is None else encode_json(logprobs)
        end = "null"
        if finish_reason is not None:
            end = f'"{finish_reason}","stop_reason":{encode_json(stop_reason)}'
        return f'{self._head}{{"index":{index},{content},"logprobs":{told},"finish_reason":{end}}}{self._tail}'

    def usage(self, usage: Usage) -> str:
        """The chunk after the chunks of all choices."""
        return self.with_usage(f"{self._head}{self._tail}", usage)

    def with_usage(self, chunk: str, usage: Usage) -> str:
        """A chunk with the usage so far."""
        return f'{chunk.removesuffix(self._tail)}],"usage":{encode_json(usage)}}}\n\n'


# From the first output of a prompt: the first chunks of its choices, and for each choice the form of its logprobs, or
# None if no logprobs are asked for. An empty list of forms: the choices have no further chunks.
Opening = Callable[[ChunkWriter, int, RequestOutput], tuple[list[str], list[LogprobsFormat | None]]]


class JobChunks:
    """The events of one job. render: makes the JSON of a field from a text."""

    def __init__(
        self, jobs: JobRunner, job: Job, writer: ChunkWriter, opening: Opening, render: Callable[[str], str]
    ) -> None:
        self._jobs = jobs
        self._job = job
        self._writer = writer
        self._opening = opening
        self._render = render
        self._forms: dict[int, list[LogprobsFormat | None]] = {}  # by the place of the prompt
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
        told: list[str] = []
        if place not in self._forms:
            told, self._forms[place] = self._opening(self._writer, place, output)
        if forms := self._forms[place]:
            for completion in output.outputs:
                self._nums_tokens[place] += len(completion.token_ids)
                index = place * self._job.params.n + completion.index
                told += self._news(index, completion, forms[completion.index])
        if self._writer.counts_on:
            told = [self._writer.with_usage(chunk, self._usage()) for chunk in told]
        return "".join(told).encode()

    def _news(self, index: int, completion: CompletionOutput, form: LogprobsFormat | None) -> list[str]:
        """The chunk with the news of a choice, if there is any."""
        text, finish_reason = completion.text, completion.finish_reason
        logprobs = None
        if form is not None and completion.token_ids:
            logprobs = form.add(completion)
        if not text and logprobs is None and finish_reason is None:
            return []
        return [self._writer.choice(index, self._render(text), logprobs, finish_reason, completion.stop_reason)]

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


class EventStream(Response):
    """Sends the events of `send_all`, then [DONE].

    An error before the first event is raised, and gets a response of its own. A later error becomes the last event
    before [DONE]. `send_all` is cancelled as soon as the client has gone.
    """

    media_type = "text/event-stream"

    def __init__(self, send_all: Callable[[SendEvents], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._send_all = send_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._respond(send))
        except ClientGoneError:
            logger.debug("a client left its stream")

    async def _respond(self, send: Send) -> None:
        has_begun = False
        sending = asyncio.Lock()  # each prompt of a job has a task

        async def send_events(events: bytes) -> None:
            nonlocal has_begun
            async with sending:
                if not has_begun:
                    has_begun = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": events, "more_body": True})

        try:
            await self._send_all(send_events)
        except ApiError as error:
            if not has_begun:
                raise
            await _send_end(send, error_event(error))
        except Exception:  # a bug; the middleware logs it
            if has_begun:
                await _send_end(send, error_event(ApiError(500, "the server failed; its log says where")))
            raise
        else:
            await _send_end(send)


async def _send_end(send: Send, last: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": last + DONE})


def error_event(error: ApiError) -> bytes:
    return f"data: {encode_json(error.body)}\n\n".encode("utf-8", "backslashreplace")
