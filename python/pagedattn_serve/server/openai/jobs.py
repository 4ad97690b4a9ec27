"""`Job`: what one HTTP request asks of the engine. `JobRunner` sends jobs through the engine."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from pagedattn_serve.async_engine import AsyncLLMEngine, EngineBusyError, EngineDeadError
from pagedattn_serve.errors import BadArgument
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.pooling_params import PoolingParams
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.http.metrics import ServerMetrics
from pagedattn_serve.server.openai.errors import engine_error

Take = Callable[[int, RequestOutput], Awaitable[None]]  # the place of a prompt, and a delta of its outputs
# The place of a prompt whose outputs come again from the beginning, if the client has seen none: returns whether.
Forget = Callable[[int], bool]


@dataclass(slots=True, frozen=True)
class PromptTokens:
    """One prompt. text: None if the prompt came as token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(slots=True, frozen=True)
class Job:
    """What one HTTP request asks of the engine.

    request_id, created (seconds since 1970), model, system_fingerprint: as the answer has them. No id can be guessed.
    params: with deltas as outputs. pooling: instead of params, where the prompts become embeddings.
    form_field: the field that asks for a form of the output, if any.
    names_tier: whether the answer says its service_tier, which is always "default".
    """

    request_id: str
    created: int
    model: str
    system_fingerprint: str
    prompts: list[PromptTokens]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    form_field: str | None = None
    names_tier: bool = False
    pooling: PoolingParams | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


class RecentEnds:
    """When the requests of the last minute ended: the speed of the queue.

    The minute is one in which there were requests: its clock stands still while there is none. Otherwise idle time
    would look like slowness, and clients that stay away for long would make it longer.
    """

    SECONDS = 60.0

    def __init__(self) -> None:
        self._num_requests = 0
        self._busy_seconds = 0.0  # of all times with requests that are over
        self._busy_since = 0.0  # when the time with requests began that goes on, if one does
        self._times: deque[float] = deque(maxlen=10_000)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Within, there is a request."""
        if self._num_requests == 0:
            self._busy_since = time.monotonic()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if self._num_requests == 0:
                self._busy_seconds += time.monotonic() - self._busy_since

    def add(self) -> None:
        self._times.append(self._clock())

    def retry_after(self, num_waiting: int) -> int:
        """Seconds, 1 to 60, after which half of those that wait have left the queue, if all goes on as it does."""
        now = self._clock()
        while self._times and self._times[0] < now - self.SECONDS:
            self._times.popleft()
        observed = now - (self._times[0] if len(self._times) == self._times.maxlen else 0.0)
        seconds = num_waiting / 2 * min(self.SECONDS, observed) / max(len(self._times), 1)
        return math.ceil(min(max(seconds, 1.0), self.SECONDS))

    def _clock(self) -> float:
        return self._busy_seconds + (time.monotonic() - self._busy_since if self._num_requests else 0.0)


class JobRunner:
    """Sends jobs through the engine, and shows the outputs to the metrics."""

    def __init__(self, engine: AsyncLLMEngine, metrics: ServerMetrics, max_waiting: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._recent_ends = RecentEnds()

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
        with self._recent_ends.request(), self._metrics.watch() as see:

            def forget_all() -> bool:
                may_begin_anew = forget(place)
                if may_begin_anew:
                    see.forget()
                return may_begin_anew

            outputs = self._engine.generate(
                prompt,
                job.pooling or job.params,
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
                        retry_after = self._recent_ends.retry_after(self._max_waiting)
                        raise engine_error(error, job.form_field, retry_after) from None
                    is_finished = output.finished
                    see(output)
                    if is_finished:
                        self._recent_ends.add()
                        _raise_failure(output, job.form_field)
                    await take(place, output)


def _raise_failure(output: RequestOutput, form_field: str | None) -> None:
    reasons = {completion.finish_reason for completion in output.outputs}
    if "error" in reasons and output.argument_error is not None:
        raise engine_error(output.argument_error, form_field)
    if "error" in reasons:
        raise ApiError(500, f"the request could not go on: {output.error}", code="generation_failed")
    if "abort" in reasons:
        raise ApiError(503, "the request was aborted, as the server shuts down", code="aborted")
