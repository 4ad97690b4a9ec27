"""The prompts of one HTTP request through the engine, all at once."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from pagedattn_serve.async_engine import EngineBusyError, EngineDeadError
from pagedattn_serve.errors import BadArgument
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.server.http.errors import ApiError, ClientGoneError
from pagedattn_serve.server.openai.errors import engine_error

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class PromptTokens:
    """One prompt. text: None if it came as token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(slots=True, frozen=True)
class Job:
    """What one HTTP request asks of the engine.

    request_id, created (seconds since 1970), model: as its answer tells them; nobody guesses the id.
    form_field: the field that asks for a form of the output, if one does.
    """

    request_id: str
    created: int
    model: str
    prompts: list[PromptTokens]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    form_field: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


Outputs = AsyncGenerator[RequestOutput, None]
Start = Callable[[Job, int], Outputs]  # of the prompt at a place of the job


async def generate(start: Start, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(place of the prompt, its output so far), as they come; ends when the last one is finished.

    Raises ApiError if a prompt is refused or fails. However it ends, no request of it stays in the engine.
    """
    if len(job.prompts) == 1:
        async with aclosing(_checked(job, start(job, 0))) as outputs:
            async for output in outputs:
                yield 0, output
        return
    latest: dict[int, RequestOutput] = {}
    arrived = asyncio.Event()

    async def pump(place: int) -> None:
        try:
            async with aclosing(_checked(job, start(job, place))) as outputs:
                async for output in outputs:
                    latest[place] = output
                    arrived.set()
        finally:
            arrived.set()

    tasks = [asyncio.create_task(pump(place)) for place in range(len(job.prompts))]
    unfinished = set(tasks)
    try:
        while unfinished:
            await arrived.wait()
            arrived.clear()
            for task in [task for task in unfinished if task.done()]:
                unfinished.remove(task)
                task.result()
            news = sorted(latest.items())
            latest.clear()
            for each in news:
                yield each
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finished_outputs(start: Start, job: Job) -> list[RequestOutput]:
    """The last output of each prompt. Raises as `generate`."""
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(generate(start, job)) as news:
        async for place, output in news:
            outputs[place] = output
    return [outputs[place] for place in range(len(job.prompts))]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; it is cancelled, with ClientGoneError, where the client closes its connection.

    receive: of a request whose body is read.
    """
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


async def _checked(job: Job, outputs: Outputs) -> Outputs:
    """The outputs of one prompt; raises ApiError for what the engine refuses or ends with an error."""
    try:
        async with aclosing(outputs):
            async for output in outputs:
                if output.finished:
                    _raise_failure(output, job.form_field)
                yield output
    except (EngineBusyError, EngineDeadError, BadArgument, TypeError, ValueError) as error:
        raise engine_error(error, job.form_field) from None


def _raise_failure(output: RequestOutput, form_field: str | None) -> None:
    reasons = {completion.finish_reason for completion in output.outputs}
    if "error" in reasons and output.argument_error is not None:
        raise engine_error(output.argument_error, form_field)
    if "error" in reasons:
        raise ApiError(500, f"the request could not go on: {output.error}", code="generation_failed")
    if "abort" in reasons:
        raise ApiError(503, "the request was aborted, as the server shuts down", code="aborted")
