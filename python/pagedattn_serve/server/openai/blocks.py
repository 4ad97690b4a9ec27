"""An output as a row of blocks: thoughts, texts and calls, each of which begins, goes on and ends. `/v1/responses` and
`/v1/messages` tell an output in this way, each in its own words; the sum of what they tell is the whole answer."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from fastapi import Request
from starlette.responses import Response

from pagedattn_serve.output_parsing.events import CallArguments, CallBegin, Content, Event, Reasoning
from pagedattn_serve.output_parsing.output_format import Turn
from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.server.http.errors import ApiError, JSONResponse, encode_json, last_events, to_utf8
from pagedattn_serve.server.http.event_stream import EventStream, SendEvents, while_connected
from pagedattn_serve.server.openai.jobs import Job
from pagedattn_serve.server.openai.logprobs import ChatLogprobsFormat, TokenLogprob
from pagedattn_serve.server.openai.service import Service

Kind = Literal["thought", "text", "call"]
Fields = dict[str, Any]


class Piece(NamedTuple):
    """What a piece of an output says, and the logprobs of its tokens, if they are asked for."""

    events: list[Event]
    logprobs: list[TokenLogprob]


class OutputEnd(NamedTuple):
    """How an output ended, and what it took.

    finish_reason, stop_reason: as in `CompletionOutput`. num_cached_tokens: of the prompt, those that were found in the
    cache.
    """

    finish_reason: str | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    num_thought_tokens: int


class BlockWriter(ABC):
    """Tells one output in the words of an API. Each method returns the events that it makes.

    done: what ends a stream after these events.
    """

    done: ClassVar[bytes]

    def __init__(self) -> None:
        self._open: Kind | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens that no event was for yet

    def write(self, pieces: Iterable[Piece]) -> list[Fields]:
        """Go on with what a parser says."""
        written: list[Fields] = []
        for piece in pieces:
            self._logprobs += piece.logprobs
            for event in piece.events:
                kind, name, text = _read(event)
                if kind != self._open or name:
                    written += self.close()
                    self._open = kind
                    written += self._begin(kind, name)
                if text:
                    written += self._extend(kind, text, self._logprobs_of(len(text)))
            if piece.events:
                self._logprobs.clear()
        return written

    def _logprobs_of(self, num_characters: int) -> list[TokenLogprob]:
        """Those of a text that ends with the last token; without the tokens of marks before it, and without tokens that
        the text leaves out."""
        found: list[TokenLogprob] = []
        for token in reversed(self._logprobs):
            if num_characters <= 0 and _num_characters(token):
                break
            num_characters -= _num_characters(token)
            if token["bytes"]:
                found.append(token)
        return found[::-1]

    def close(self, is_cut: bool = False) -> list[Fields]:
        """End the block that is open, if one is. is_cut: whether the output ends within it."""
        kind, self._open = self._open, None
        return [] if kind is None else self._end(kind, is_cut)

    @abstractmethod
    def start(self, num_prompt_tokens: int, num_cached_tokens: int) -> list[Fields]:
        """Begin the answer."""

    @abstractmethod
    def finish(self, end: OutputEnd) -> list[Fields]:
        """End the answer."""

    def fail(self, error: ApiError) -> bytes:
        """The end of a stream that cannot go on."""
        return last_events(error)

    @abstractmethod
    def answer(self) -> Fields:
        """All that the events say; after `finish`."""

    @abstractmethod
    def _begin(self, kind: Kind, name: str) -> list[Fields]:
        """name: of the function, if the block is a call."""

    @abstractmethod
    def _extend(self, kind: Kind, text: str, logprobs: list[TokenLogprob]) -> list[Fields]: ...

    @abstractmethod
    def _end(self, kind: Kind, is_cut: bool) -> list[Fields]: ...


def _read(event: Event) -> tuple[Kind, str, str]:
    """The block that an event is of, the name of the function if it begins a call, and the new text."""
    match event:
        case Content(text):
            return "text", "", text
        case Reasoning(text):
            return "thought", "", text
        case CallBegin(_, name):
            return "call", name, ""
        case CallArguments(_, text):
            return "call", "", text


class OutputReader:
    """Reads the deltas of the one output of a job.

    turn: None if the output is text alone. logprobs: their form; None if none are asked for.
    """

    def __init__(self, turn: Turn | None, logprobs: ChatLogprobsFormat | None = None) -> None:
        self._parser = None if turn is None else turn.parser()
        self._logprobs = logprobs
        self._text = ""  # with logprobs: what is not in a piece yet, of the text and of the tokens
        self._tokens: deque[TokenLogprob] = deque()
        self._token_ids: list[int] = []
        self._num_cached_tokens = 0
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def read(self, output: RequestOutput) -> list[Piece]:
        self._num_cached_tokens = output.num_cached_tokens or 0
        pieces: list[Piece] = []
        for completion in output.outputs:  # there is one, or none without news
            self._token_ids += completion.token_ids
            self._finish_reason, self._stop_reason = completion.finish_reason, completion.stop_reason
            for text, logprobs in self._cut(completion):
                events: list[Event] = [Content(text)] if text else []
                pieces.append(Piece(events if self._parser is None else self._parser.feed(text), logprobs))
            if self._parser is not None and completion.finish_reason is not None:
                pieces.append(Piece(self._parser.finish(), []))
        return pieces

    def _cut(self, completion: CompletionOutput) -> Iterator[tuple[str, list[TokenLogprob]]]:
        """The new text. With logprobs it is cut into the texts of its tokens, so that each is told with its own."""
        if self._logprobs is None:
            yield completion.text, []
            return
        self._tokens += self._logprobs.add(completion)["content"]
        text, begin = self._text + completion.text, 0
        while self._tokens and (end := begin + _num_characters(self._tokens[0])) <= len(text):
            yield text[begin:end], [self._tokens.popleft()]
            begin = end
        self._text = text[begin:]
        if completion.finish_reason is not None and self._text:  # a stop string has cut the token
            yield self._text, [self._tokens[0]] if self._tokens else []

    async def end(self, job: Job, service: Service) -> OutputEnd:
        num_thought_tokens = 0
        if self._parser is not None:
            count = service.num_thought_tokens
            num_thought_tokens = await asyncio.to_thread(count, job, self._parser, self._token_ids)
        return OutputEnd(
            self._finish_reason,
            self._stop_reason,
            job.num_prompt_tokens,
            self._num_cached_tokens,
            len(self._token_ids),
            num_thought_tokens,
        )


def _num_characters(token: TokenLogprob) -> int:
    """How long the text is that a token adds. A special token that the text leaves out has a name, and no bytes."""
    return len(token["token"]) if token["bytes"] else 0


class BlockAnswer:
    """The answer to a job with one output. done: called with the whole answer before its last event is sent."""

    def __init__(
        self,
        job: Job,
        turn: Turn | None,
        service: Service,
        writer: BlockWriter,
        done: Callable[[Fields], None] = lambda _: None,
    ) -> None:
        self._job = job
        self._service = service
        logprobs = ChatLogprobsFormat(service.token_names, job.params) if job.params.reports_logprobs else None
        self._reader = OutputReader(turn, logprobs)
        self._writer = writer
        self._done = done
        self._has_begun = False

    async def respond(self, request: Request, stream: bool) -> Response:
        """A stream that begins now, or the whole answer at the end."""
        if stream:
            return EventStream(self._send_all, self._writer.done, self._writer.fail)
        [output] = await while_connected(request.receive, self._service.jobs.outputs(self._job))
        self._start(output)
        self._writer.write(await self._read(output))
        await self._finish()
        return JSONResponse(self._writer.answer())

    async def _read(self, output: RequestOutput) -> list[Piece]:
        """As the reader reads: logprobs in another thread, as an output may have many."""
        if not self._job.params.reports_logprobs:
            return self._reader.read(output)
        return await asyncio.to_thread(self._reader.read, output)

    def _start(self, output: RequestOutput) -> list[Fields]:
        self._has_begun = True
        return self._writer.start(self._job.num_prompt_tokens, output.num_cached_tokens or 0)

    async def _finish(self) -> list[Fields]:
        events = self._writer.finish(await self._reader.end(self._job, self._service))
        self._done(self._writer.answer())
        return events

    async def _send_all(self, send: SendEvents) -> None:
        """Raises ApiError as `JobRunner.run`."""

        async def take(_: int, output: RequestOutput) -> None:
            events = [] if self._has_begun else self._start(output)
            if events := events + self._writer.write(await self._read(output)):
                await send(encode_events(events))

        # An output that comes again from its beginning is refused once the client has seen something of it.
        await self._service.jobs.run(self._job, take, lambda _: not self._has_begun)
        await send(encode_events(await self._finish()))


def encode_events(events: Iterable[Fields]) -> bytes:
    """Server-sent events, each with its type as its name."""
    texts = (f"event: {event['type']}\ndata: {encode_json(event)}\n\n" for event in events)
    return to_utf8("".join(texts))
