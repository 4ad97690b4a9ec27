"""POST /v1/completions: prompts in, choices out, numbered prompt by prompt."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.server.http.errors import ApiError, encode_json
from pagedattn_serve.server.openai.body_params import completion_params
from pagedattn_serve.server.openai.errors import response_of
from pagedattn_serve.server.openai.generation import Job, PromptTokens, while_connected
from pagedattn_serve.server.openai.logprobs import CompletionLogprobsFormat, joined, prompt_logprobs
from pagedattn_serve.server.openai.request_bodies import CompletionRequest
from pagedattn_serve.server.openai.response_bodies import (
    EVENT_STREAM,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
)
from pagedattn_serve.server.openai.service import Service, service_of
from pagedattn_serve.server.openai.streaming import ChunkWriter, EventStream, JobChunks, LogprobsFormat, make_usage

router = APIRouter()


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
    answer = _Answer(body, job, service)
    if body.stream:
        writer = ChunkWriter(job, "text_completion", body.stream_options)
        return EventStream(JobChunks(service.jobs, job, writer, answer.opening, _render).send_all)
    outputs = await while_connected(request.receive, service.jobs.outputs(job))
    if params.logprobs is None and params.prompt_logprobs is None:
        return answer.whole(outputs)
    return await asyncio.to_thread(answer.whole, outputs)


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


@dataclass(slots=True, frozen=True)
class _Beginning:
    """The beginning of the choices of one prompt: the prompt and its logprobs if the prompt is echoed.

    format: for the logprobs of the output; None if no logprobs are asked for.
    """

    text: str
    logprobs: CompletionLogprobs | None
    format: CompletionLogprobsFormat | None


class _Answer:
    """The engine's outputs in the form that a request asks for."""

    def __init__(self, body: CompletionRequest, job: Job, service: Service) -> None:
        self._body = body
        self._job = job
        self._token_names = service.token_names
        self._shows_output = body.max_tokens != 0  # with 0, too, the engine makes a token

    def whole(self, outputs: list[RequestOutput]) -> Response:
        """outputs: one for each prompt, the sum of its deltas."""
        num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        answer: CompletionResponse = {
            "id": self._job.request_id,
            "object": "text_completion",
            "created": self._job.created,
            "model": self._job.model,
            "choices": [],
            "usage": make_usage(self._job.num_prompt_tokens, num_tokens if self._shows_output else 0),
        }
        if self._job.names_tier:
            answer["service_tier"] = "default"
        return response_of(answer, self._choices(outputs))

    def _choices(self, outputs: list[RequestOutput]) -> Iterator[CompletionChoice]:
        index = 0
        for place, output in enumerate(outputs):
            beginning = self._begin(place, output)
            for completion in output.outputs:
                yield self._choice(index, beginning, output, completion)
                index += 1

    def opening(
        self, writer: ChunkWriter, place: int, output: RequestOutput
    ) -> tuple[list[str], list[LogprobsFormat | None]]:
        """The first chunks of a prompt's choices, and the forms of the logprobs that follow."""
        beginning = self._begin(place, output)
        num_choices = self._job.params.n
        indices = range(place * num_choices, (place + 1) * num_choices)
        finish_reason = None if self._shows_output else "length"
        told = []
        if self._body.echo:
            text = _render(beginning.text)
            told = [writer.choice(index, text, beginning.logprobs, finish_reason) for index in indices]
        if not self._shows_output:
            return told, []
        return told, [beginning.format and beginning.format.fork() for _ in indices]

    def _begin(self, place: int, output: RequestOutput) -> _Beginning:
        body, prompt, params = self._body, self._job.prompts[place], self._job.params
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
        if beginning.format is not None and self._shows_output:
            of_output = beginning.format.fork().add(completion)
            logprobs = of_output if logprobs is None else joined(logprobs, of_output)
        choice: CompletionChoice = {
            "index": index,
            "text": beginning.text + completion.text if self._shows_output else beginning.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason if self._shows_output else "length",
            "stop_reason": completion.stop_reason if self._shows_output else None,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output, self._body.prompt_logprobs)
        return choice


def _render(text: str) -> str:
    return f'"text":{encode_json(text)}'
