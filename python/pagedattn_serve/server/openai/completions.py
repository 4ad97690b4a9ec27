"""POST /v1/completions: prompts in, choices out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.server.http.errors import ApiError, encode_json
from pagedattn_serve.server.openai.answers import EVENT_STREAM, Answer, ChunkWriter, LogprobsFormat, Usage, respond
from pagedattn_serve.server.openai.fields import CompletionRequest, completion_params, num_output_tokens
from pagedattn_serve.server.openai.jobs import Job, PromptTokens
from pagedattn_serve.server.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsFormat,
    PromptLogprobs,
    joined,
    prompt_logprobs,
)
from pagedattn_serve.server.openai.service import Service, service_of
from pagedattn_serve.text.detokenizer import TokenNames

router = APIRouter()


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None  # stop or length, where an output is whole
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None  # these two with return_token_ids
    token_ids: list[int] | None


class CompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: NotRequired[Literal["default"]]  # where the request names a tier
    choices: list[CompletionChoice]
    usage: Usage


@router.post("/v1/completions", response_model=CompletionResponse, responses={200: EVENT_STREAM})
async def create_completion(
    body: CompletionRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Continue a prompt, or several at once."""
    service.check_model(body.model)
    params = completion_params(body, service.defaults)
    if body.truncate_prompt_tokens is not None and body.echo:
        raise ApiError(400, "truncate_prompt_tokens: expected none with echo", param="truncate_prompt_tokens")
    prompts = await _tokenize(body, service)
    if body.suffix and service.infilling is not None:
        params = replace(params, stop_token_ids=(*(params.stop_token_ids or ()), *service.infilling.stop_token_ids))
    job = service.job("cmpl-", prompts, params, body)
    return await respond(CompletionAnswer(body, job, service.token_names), body, request, service)


async def _tokenize(body: CompletionRequest, service: Service) -> list[PromptTokens]:
    """The prompts, from any of the four forms, which fit with the output. A prompt that is echoed has a text."""
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not 0 < len(prompts) <= service.config.max_waiting:
        message = f"prompt: expected 1 to {service.config.max_waiting} prompts (the queue's places), got {len(prompts)}"
        raise ApiError(400, message, param="prompt")

    def take(token_ids: list[int]) -> list[int]:
        """The tokens of a prompt that the request keeps."""
        kept = service.truncate(PromptTokens(None, token_ids), body, num_output_tokens(body)).token_ids
        service.check_room(len(kept), num_output_tokens(body), "prompt")
        return kept

    if isinstance(prompts[0], str):
        adds = body.add_special_tokens is not False
        if body.suffix:
            token_ids = await service.tokenize_infilling(prompts, body.suffix, adds, take)
        else:
            must_fit = body.truncate_prompt_tokens is None
            token_ids = await service.tokenize(prompts, adds, take=take, must_fit=must_fit)
        return list(map(PromptTokens, prompts, token_ids))
    if body.suffix:
        raise ApiError(400, "suffix: expected none with token ids", param="suffix")
    prompts = list(map(take, prompts))
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


class CompletionAnswer(Answer):
    """Choices numbered prompt by prompt. With `echo`, each begins with its prompt."""

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionRequest, job: Job, token_names: TokenNames) -> None:
        super().__init__(job)
        self.shows_output = body.max_tokens != 0  # with 0, too, the engine makes a token
        self.shows_token_ids = bool(body.return_token_ids)
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
            if self.shows_token_ids:
                text += f',"token_ids":[]{self._prompt_field(place)}'
            chunks = [writer.choice(index, text, beginning.logprobs, finish_reason) for index in indices]
        if not self.shows_output:
            return chunks, []
        return chunks, [beginning.format and beginning.format.fork() for _ in indices]

    def render(self, text: str) -> str:
        return f'"text":{encode_json(text)}'

    def render_prompt_ids(self, place: int) -> str:
        return "" if self._body.echo else self._prompt_field(place)

    def _prompt_field(self, place: int) -> str:
        return f',"prompt_token_ids":{self.prompt_ids(place)}'

    def _choices(self, outputs: list[RequestOutput]) -> Iterator[CompletionChoice]:
        index = 0
        for place, output in enumerate(outputs):
            beginning = self._begin(place, output)
            for completion in output.outputs:
                yield self._choice(index, beginning, output, completion)
                index += 1

    def _begin(self, place: int, output: RequestOutput) -> _Beginning:
        body, prompt = self._body, self.job.prompts[place]
        text = (prompt.text or "") if body.echo else ""
        if body.logprobs is None:
            return _Beginning(text, None, None)
        as_ids = bool(body.return_tokens_as_token_ids)
        form = CompletionLogprobsFormat(self._token_names, self.job.params, as_ids)
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
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output, self._body.prompt_logprobs)
        if self.shows_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = completion.token_ids if self.shows_output else []
        return choice
