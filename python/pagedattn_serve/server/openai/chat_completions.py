"""POST /v1/chat/completions: a chat in, the assistant's next message out."""

import asyncio
import itertools
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.server.http.errors import encode_json
from pagedattn_serve.server.openai.body_params import chat_params
from pagedattn_serve.server.openai.errors import response_of
from pagedattn_serve.server.openai.generation import Job, PromptTokens, while_connected
from pagedattn_serve.server.openai.logprobs import ChatLogprobsFormat, prompt_logprobs
from pagedattn_serve.server.openai.request_bodies import ChatCompletionRequest
from pagedattn_serve.server.openai.response_bodies import EVENT_STREAM, ChatChoice, ChatCompletionResponse
from pagedattn_serve.server.openai.service import Service, service_of
from pagedattn_serve.server.openai.streaming import ChunkWriter, EventStream, JobChunks, LogprobsFormat, make_usage

router = APIRouter()


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
    answer = _Answer(body, job, service)
    if body.stream:
        writer = ChunkWriter(job, "chat.completion.chunk", body.stream_options)
        return EventStream(JobChunks(service.jobs, job, writer, answer.opening, _render).send_all)
    [output] = await while_connected(request.receive, service.jobs.outputs(job))
    if params.logprobs is None and params.prompt_logprobs is None:
        return answer.whole(output)
    return await asyncio.to_thread(answer.whole, output)


class _Answer:
    """The engine's output in the form that a request asks for."""

    def __init__(self, body: ChatCompletionRequest, job: Job, service: Service) -> None:
        self._body = body
        self._job = job
        self._logprobs: ChatLogprobsFormat | None = None
        if body.logprobs:
            self._logprobs = ChatLogprobsFormat(service.token_names, body.top_logprobs or 0, job.params)

    def whole(self, output: RequestOutput) -> Response:
        """output: the sum of the deltas."""
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        response: ChatCompletionResponse = {
            "id": self._job.request_id,
            "object": "chat.completion",
            "created": self._job.created,
            "model": self._job.model,
            "choices": [],
            "usage": make_usage(self._job.num_prompt_tokens, num_tokens),
        }
        if self._job.names_tier:
            response["service_tier"] = "default"
        if self._body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(output, self._body.prompt_logprobs)
        return response_of(response, itertools.starmap(self._choice, enumerate(output.outputs)))

    def opening(
        self, writer: ChunkWriter, place: int, output: RequestOutput
    ) -> tuple[list[str], list[LogprobsFormat | None]]:
        """The first chunk of each choice, which says who speaks, and the forms of the logprobs that follow."""
        indices = range(self._job.params.n)
        told = [writer.choice(index, '"delta":{"role":"assistant","content":""}') for index in indices]
        return told, [self._logprobs for _ in indices]

    def _choice(self, index: int, completion: CompletionOutput) -> ChatChoice:
        logprobs = None if self._logprobs is None else self._logprobs.add(completion)
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }


def _render(text: str) -> str:
    return f'"delta":{{"content":{encode_json(text)}}}' if text else '"delta":{}'
