"""What every endpoint needs, in the order of a request's life.

`Service` makes a job of a request. `JobRunner` sends the job through the engine. `while_connected` and `EventStream`
end the job when the client goes away.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedattn_serve.async_engine import AsyncLLMEngine, EngineBusyError, EngineDeadError
from pagedattn_serve.errors import ArgumentError, BadArgument
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.errors import ApiError, ClientGoneError, encode_json
from pagedattn_serve.server.http.logs import current_request
from pagedattn_serve.server.http.metrics import ServerMetrics
from pagedattn_serve.server.openai.errors import engine_error
from pagedattn_serve.server.openai.fields import SamplingBody, form_field
from pagedattn_serve.text.chat_template import render_chat
from pagedattn_serve.text.detokenizer import TokenNames

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONG_TEXT = 4096  # characters: tokenizing more takes longer than waking a thread
DONE = b"data: [DONE]\n\n"

SendEvents = Callable[[bytes], Awaitable[None]]


@dataclass(slots=True, frozen=True)
class PromptTokens:
    """One prompt. text: None if the prompt came as token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(slots=True, frozen=True)
class Job:
    """What one HTTP request asks of the engine.

    request_id, created (seconds since 1970), model: as the answer has them. Nobody can guess the id.
    params: with deltas as outputs.
    form_field: the field that asks for a form of the output, if any.
    names_tier: whether the answer says its service_tier, which is always "default".
    """

    request_id: str
    created: int
    model: str
    prompts: list[PromptTokens]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    form_field: str | None = None
    names_tier: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


class Service:
    """One model, served under one name. Raises ValueError if it has no tokenizer."""

    def __init__(self, engine: AsyncLLMEngine, config: ServerConfig) -> None:
        self.texts = engine.texts
        if (tokenizer := engine.texts.tokenizer) is None:
            raise ArgumentError("model", "a directory with a tokenizer", "one without, which serves no texts")
        self.tokenizer: Any = tokenizer
        self.token_names = TokenNames(tokenizer)
        self.max_model_len = engine.facts.max_model_len
        self.defaults = engine.facts.default_sampling_params  # for requests that leave them out
        self.config = config
        self.metrics = ServerMetrics(engine.replicas, config.served_model_name)
        self.jobs = JobRunner(engine, self.metrics)
        self.created = int(time.time())
        self._max_characters = self.max_model_len * max(map(len, self.tokenizer.get_vocab()))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless the name is the model's, or None."""
        if name is not None and name != self.config.served_model_name:
            message = f"model: expected {self.config.served_model_name}, got {name}, which does not exist here"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenize(self, texts: list[str], add_special_tokens: bool, param: str = "prompt") -> list[list[int]]:
        """Token ids of each text. Raises ApiError, which names the field, for a text that UTF-8 cannot write."""
        return await self._with_tokenizer(
            sum(map(len, texts)), lambda: [self.texts.tokenize(text, add_special_tokens) for text in texts], param
        )

    async def detokenize(self, prompts: list[list[int]], param: str = "prompt") -> list[str]:
        """The text of each prompt, with special tokens. Raises ApiError, which names the field, for unknown ids."""
        return await self._with_tokenizer(
            sum(map(len, prompts)), lambda: list(map(self.texts.detokenize, prompts)), param
        )

    async def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, reasoning_effort: str | None = None
    ) -> str:
        """A chat as the text that the model continues. Raises ApiError for a chat that the template refuses."""
        try:  # in a thread: a template is a program
            return await asyncio.to_thread(
                render_chat,
                self.tokenizer,
                messages,
                self.config.chat_template,
                add_generation_prompt,
                reasoning_effort,
            )
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), param="messages") from None

    def check_characters(self, text: str, param: str) -> None:
        """Raises ApiError for a text that is too long even if all tokens are as long as the longest token. Such a text
        could keep the tokenizer for a minute."""
        if len(text) > self._max_characters:
            raise self._too_long(f"{len(text)} characters in the {param}, which are more", param)

    def job(self, kind: str, prompts: list[PromptTokens], params: SamplingParams, body: SamplingBody) -> Job:
        """Work for the engine. Its id is the kind and the id of the HTTP request, so the log of either names both."""
        context = current_request.get()
        assert context is not None, "RequestLog has set it"
        context.answer_id = f"{kind}-{context.request_id}"
        return Job(
            request_id=context.answer_id,
            created=int(time.time()),
            model=self.config.served_model_name,
            prompts=prompts,
            params=params,
            priority=body.priority or 0,
            cache_salt=self._salt(body.cache_salt or ""),
            form_field=form_field(body),
            names_tier=body.service_tier is not None,
        )

    def check_room(self, num_tokens: int, max_tokens: int | None, param: str) -> None:
        """Raises ApiError if the prompt and its output do not fit. max_tokens: None takes any output that fits."""
        if num_tokens == 0:
            raise ApiError(400, f"{param}: expected one token at least, got none", param=param)
        num_output = max_tokens or 1
        if num_tokens + num_output > self.max_model_len:
            requested = (
                f"{num_tokens + num_output} tokens ({num_tokens} in the {param}, {num_output} for the completion)"
            )
            raise self._too_long(requested, param)

    def _too_long(self, requested: str, param: str) -> ApiError:
        """The error in OpenAI's words, which clients look for."""
        text = (
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {requested}."
        )
        return ApiError(400, text, param=param, code="context_length_exceeded")

    async def _with_tokenizer(self, size: int, work: Callable[[], T], param: str) -> T:
        """What `work` returns. Raises ApiError, which names the field, instead of its TypeError or ValueError. Long
        work runs in a thread. So does work while another thread has the tokenizer: the event loop does not wait."""
        try:
            if size < LONG_TEXT and not self.texts.is_busy:
                return work()
            return await asyncio.to_thread(work)
        except (TypeError, ValueError) as error:
            message = error.renamed(param) if isinstance(error, BadArgument) else f"{param}: {error}"
            raise ApiError(400, str(message), param=param) from None

    def _salt(self, own: str) -> str:
        """Only prompts with the same salt share cached blocks: the request's salt, within the salt of its key."""
        context = current_request.get()
        return f"{context.key_id}:{own}" if context and self.config.prefix_cache_per_key else own


async def service_of(request: Request) -> Service:
    """A FastAPI dependency. It is async, because FastAPI runs other dependencies in threads."""
    service: Service = request.app.state.service
    return service


Take = Callable[[int, RequestOutput], Awaitable[None]]  # the place of a prompt, and a delta of its outputs
# The place of a prompt whose outputs come again from the beginning, if the client has seen none: returns whether.
Forget = Callable[[int], bool]


class JobRunner:
    """Sends jobs through the engine, and shows the outputs to the metrics."""

    def __init__(self, engine: AsyncLLMEngine, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def run(self, job: Job, take: Take, forget: Forget = lambda _: False) -> None:
        """Call `take` with each output of each prompt, until all prompts are finished. Raises ApiError if a prompt is
        refused or fails. In any case, no request of the job stays in the engine."""
        tasks = [asyncio.create_task(self._run_one(job, place, take, forget)) for place in range(len(job.prompts))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def outputs(self, job: Job) -> list[RequestOutput]:
        """The sum of the deltas of each prompt. Raises as `run`."""
        outputs: dict[int, RequestOutput] = {}

        async def take(place: int, output: RequestOutput) -> None:
            if place in outputs:
                outputs[place].add(output)
            else:
                outputs[place] = output

        def forget(place: int) -> bool:
            outputs.pop(place, None)
            return True

        await self.run(job, take, forget)
        return [outputs[place] for place in range(len(job.prompts))]

    async def _run_one(self, job: Job, place: int, take: Take, forget: Forget) -> None:
        text, token_ids = job.prompts[place].text, job.prompts[place].token_ids
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        if job.params.prompt_logprobs is not None and text is not None:
            prompt["prompt"] = text  # so that the names of the prompt's tokens are pieces of this text
        is_finished = False
        with self._metrics.watch() as see:

            def forget_all() -> bool:
                may_begin_anew = forget(place)
                if may_begin_anew:
                    see.forget()
                return may_begin_anew

            outputs = self._engine.generate(
                prompt,
                job.params,
                f"{job.request_id}-{place}",
                job.priority,
                job.cache_salt,
                forget_all,
            )
            async with aclosing(outputs):
                while not is_finished:
                    try:
                        output = await anext(outputs)
                    except (EngineBusyError, EngineDeadError, BadArgument, TypeError, ValueError) as error:
                        raise engine_error(error, job.form_field) from None
                    is_finished = output.finished
                    see(output)
                    if is_finished:
                        _raise_failure(output, job.form_field)
                    await take(place, output)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. If the client closes its connection, cancels `work` and raises ClientGoneError.
    receive: of a request whose body has been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _raise_failure(output: RequestOutput, form_field: str | None) -> None:
    reasons = {completion.finish_reason for completion in output.outputs}
    if "error" in reasons and output.argument_error is not None:
        raise engine_error(output.argument_error, form_field)
    if "error" in reasons:
        raise ApiError(500, f"the request could not go on: {output.error}", code="generation_failed")
    if "abort" in reasons:
        raise ApiError(503, "the request was aborted, as the server shuts down", code="aborted")


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
