"""Server-sent events: the chunks of a response, rendered by hand, and the response that sends them.

A chunk a token is what a busy server spends its time on, so what is the same in all chunks of a response is rendered
once, and the engine's outputs become text without objects in between.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.server.http.errors import ApiError, ClientGoneError, encode_json
from pagedattn_serve.server.openai.generation import Job, Start, generate, while_connected
from pagedattn_serve.server.openai.request_bodies import StreamOptions
from pagedattn_serve.server.openai.response_bodies import Usage

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class LogprobsFormat(Protocol):
    def add(self, token_ids: list[int], entries: list[Any]) -> Any: ...


class ChunkWriter:
    """Renders the chunks of one response, of the kind that its field `object` says."""

    def __init__(self, job: Job, kind: str, options: StreamOptions | None) -> None:
        head = encode_json({"id": job.request_id, "object": kind, "created": job.created, "model": job.model})
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
        """A chunk with the news of one choice. content: its text, as a rendered field."""
        told = "null" if logprobs is None else encode_json(logprobs)
        end = "null"
        if finish_reason is not None:
            end = f'"{finish_reason}","stop_reason":{encode_json(stop_reason)}'
        return f'{self._head}{{"index":{index},{content},"logprobs":{told},"finish_reason":{end}}}{self._tail}'

    def usage(self, usage: Usage) -> str:
        """The chunk after the last of all choices."""
        return self.with_usage(f"{self._head}{self._tail}", usage)

    def with_usage(self, chunk: str, usage: Usage) -> str:
        """The chunk with what is used so far."""
        return f'{chunk.removesuffix(self._tail)}],"usage":{encode_json(usage)}}}\n\n'


class StreamedChoice:
    """How much of one output the client has got. logprobs: their format; None if none are asked for."""

    def __init__(self, index: int, logprobs: LogprobsFormat | None) -> None:
        self.num_tokens = 0
        self._index = index
        self._logprobs = logprobs
        self._num_characters = 0
        self._is_finished = False

    def news(self, completion: CompletionOutput, writer: ChunkWriter, render: Callable[[str], str]) -> str | None:
        """The chunk with what has come since the last one; None if there is nothing to tell."""
        if self._is_finished:
            return None
        addition, finish_reason = completion.text[self._num_characters :], completion.finish_reason
        logprobs = None
        if self._logprobs is not None:
            token_ids, entries = completion.tail(self.num_tokens)
            logprobs = self._logprobs.add(token_ids, entries or []) if token_ids else None
        self.num_tokens = completion.num_tokens
        self._num_characters += len(addition)
        self._is_finished = finish_reason is not None
        if not addition and logprobs is None and finish_reason is None:
            return None
        return writer.choice(self._index, render(addition), logprobs, finish_reason, completion.stop_reason)


# From the first output of a prompt: the first chunks of its choices, and what tells the rest of them.
Opening = Callable[[ChunkWriter, int, RequestOutput], tuple[list[str], list[StreamedChoice]]]


async def chunks(
    start: Start, job: Job, writer: ChunkWriter, opening: Opening, render: Callable[[str], str]
) -> AsyncGenerator[bytes, None]:
    """The events of a response, what comes at once together. Raises ApiError as `generate`.

    render: a text as the JSON of a field.
    """
    choices: dict[int, list[StreamedChoice]] = {}

    def usage() -> Usage:
        num_tokens = sum(choice.num_tokens for each in choices.values() for choice in each)
        return make_usage(job.num_prompt_tokens, num_tokens)

    async with aclosing(generate(start, job)) as news:
        async for place, output in news:
            if job.params.use_beam_search and not output.finished:
                continue  # other beams may take the places of these
            told: list[str] = []
            if place not in choices:
                told, choices[place] = opening(writer, place, output)
            for choice, completion in zip(choices[place], output.outputs, strict=False):
                chunk = choice.news(completion, writer, render)
                if chunk is not None:
                    told.append(chunk)
            if writer.counts_on:
                told = [writer.with_usage(chunk, usage()) for chunk in told]
            if told:
                yield "".join(told).encode()
    if writer.counts_at_end:
        yield writer.usage(usage()).encode()


def make_usage(num_prompt_tokens: int, num_tokens: int) -> Usage:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


class EventStream(Response):
    """Sends events as they come, then [DONE].

    An error before the first event is raised, for a response of its own; a later one becomes the last event before
    [DONE]. The generator is closed as soon as the client has gone.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            logger.debug("a client left its stream")

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                await _send_end(send, error_event(error))
            except Exception:  # a bug, which the middleware logs
                await _send_end(send, error_event(ApiError(500, "the server failed; its log says where")))
                raise
            else:
                await _send_end(send)


async def _send_end(send: Send, last: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": last + DONE})


def error_event(error: ApiError) -> bytes:
    return f"data: {encode_json(error.body)}\n\n".encode("utf-8", "backslashreplace")
