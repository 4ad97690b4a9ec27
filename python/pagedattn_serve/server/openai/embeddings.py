"""POST /v1/embeddings: texts or token ids in, vectors out; and what it shares with the scores of texts."""

import asyncio
from array import array
from base64 import b64encode
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.pooling_params import PoolingParams
from pagedattn_serve.server.http.errors import ApiError, JSONResponse
from pagedattn_serve.server.http.event_stream import while_connected
from pagedattn_serve.server.openai.fields import Body, NumKept, Texts, TokenIds, TruncationSide
from pagedattn_serve.server.openai.jobs import Job, PromptTokens
from pagedattn_serve.server.openai.service import Service, service_of

MAX_INPUTS = 2048  # OpenAI's
AT_ONCE = 256  # inputs of one request that may wait for the engine at a time

router = APIRouter()


class PoolingBody(Body):
    """What all requests share whose texts become embeddings."""

    model: str | None = None
    user: str | None = Field(None, description="without effect")
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    truncate_prompt_tokens: NumKept | None = Field(
        None, description="the first tokens of a text, so many of them; -1: as many as the model takes"
    )
    truncation_side: TruncationSide | None = Field(None, description="the side that is cut off; right if not given")


class EmbeddingRequest(PoolingBody):
    input: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = Field(None, description="float if not given")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(None, description="all of the model's if not given")
    add_special_tokens: bool | None = Field(None, description="true if not given")


class EmbeddingUsage(TypedDict):
    """Tokens, over all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """embedding: numbers; or with base64 their fp32 bits, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
async def create_embeddings(
    body: EmbeddingRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """The embedding of each input."""
    service.check_model(body.model)
    if service.scores_pairs:
        raise ApiError(400, "model: expected one that gives embeddings, got a reranker", param="model")
    params = PoolingParams(dimensions=body.dimensions)
    prompts = await _tokenize(body, service)
    job, outputs = await embed("embd-", prompts, params, body, request, service)

    def render() -> Response:
        response: EmbeddingResponse = {
            "id": job.request_id,
            "object": "list",
            "created": job.created,
            "data": [_embedding(i, output, body.encoding_format) for i, output in enumerate(outputs)],
            "model": job.model,
            "usage": usage_of(job),
        }
        return JSONResponse(response)

    return await asyncio.to_thread(render)  # a thousand vectors take a second


def _embedding(index: int, output: RequestOutput, encoding_format: str | None) -> Embedding:
    numbers = output.embedding
    assert numbers is not None
    embedding = b64encode(array("f", numbers)).decode() if encoding_format == "base64" else numbers
    return {"object": "embedding", "index": index, "embedding": embedding}


async def _tokenize(body: EmbeddingRequest, service: Service) -> list[PromptTokens]:
    """The inputs, from any of the four forms."""
    inputs: list[Any] = body.input if isinstance(body.input, list) else [body.input]
    if inputs and isinstance(inputs[0], int):
        inputs = [inputs]
    check_number(len(inputs), "input")
    service.check_truncation(body.truncate_prompt_tokens)
    if isinstance(inputs[0], str):
        return await tokenize(inputs, body, service, "input", body.add_special_tokens is not False)
    for token_ids in inputs:
        for token_id in token_ids:
            if not 0 <= token_id < service.vocab_size:
                message = f"input: expected token ids in [0, {service.vocab_size - 1}], got {token_id}"
                raise ApiError(400, message, param="input")
    return [PromptTokens(None, kept(token_ids, body, service, "input")) for token_ids in inputs]


async def tokenize(
    texts: list[str], body: PoolingBody, service: Service, param: str, add_special_tokens: bool = True
) -> list[PromptTokens]:
    """Texts of the field `param`, as prompts. Raises ApiError, which names the field."""
    texts = checked_texts(texts, body, service, param)
    take = partial(kept, body=body, service=service, param=param)
    must_fit = body.truncate_prompt_tokens is None
    token_ids = await service.tokenize(texts, add_special_tokens, param, take, must_fit)
    return list(map(PromptTokens, texts, token_ids))


def checked_texts(texts: list[str], body: PoolingBody, service: Service, param: str) -> list[str]:
    """The texts. If the request keeps some tokens of each text, the text is cut first: no model takes tokens of more
    characters. Raises ApiError for texts that would keep the tokenizer too long."""
    check_number(len(texts), param)
    if body.truncate_prompt_tokens is not None:
        most = service.max_characters
        return [text[-most:] if body.truncation_side == "left" else text[:most] for text in texts]
    for text in texts:
        service.check_characters(text, param)
    return texts


def kept(token_ids: list[int], body: PoolingBody, service: Service, param: str) -> list[int]:
    """The tokens of a text that the request keeps. Raises ApiError, which names the field, for none or too many."""
    token_ids = _shortened(token_ids, body, service)
    service.check_length(len(token_ids), param)
    return token_ids


def _shortened(token_ids: list[int], body: PoolingBody, service: Service) -> list[int]:
    """The tokens, or the first of them, or last ones, if the request wants no more. A special token at the end stays:
    an embedding may be that of the last token. Of several only one stays: others may be padding."""
    most = body.truncate_prompt_tokens
    if most is None or len(token_ids) <= (most := service.max_model_len if most == -1 else most):
        return token_ids
    if body.truncation_side == "left":
        return token_ids[-most:]
    end = [token_id for token_id in token_ids[-1:] if token_id in service.token_names.special_texts]
    return token_ids[: most - len(end)] + end


def check_number(number: int, param: str) -> None:
    """Raises ApiError for a number of inputs that is not served."""
    if not 0 < number <= MAX_INPUTS:
        raise ApiError(400, f"{param}: expected 1 to {MAX_INPUTS:,} inputs, got {number:,}", param=param)


async def embed(
    id_prefix: str,
    prompts: list[PromptTokens],
    params: PoolingParams,
    body: PoolingBody,
    request: Request,
    service: Service,
) -> tuple[Job, list[RequestOutput]]:
    """A job with such an id, and the embedding of each prompt, for as long as the client is there. Raises ApiError."""
    job = service.pooling_job(id_prefix, prompts, params, body.priority, body.cache_salt)

    async def run() -> list[RequestOutput]:
        size = min(AT_ONCE, service.config.max_waiting)
        outputs: list[RequestOutput] = []
        for begin in range(0, len(prompts), size):
            part = replace(job, request_id=f"{job.request_id}-{begin}", prompts=prompts[begin : begin + size])
            outputs += await service.jobs.outputs(part)
        return outputs

    return job, await while_connected(request.receive, run())


def usage_of(job: Job) -> EmbeddingUsage:
    return {"prompt_tokens": job.num_prompt_tokens, "total_tokens": job.num_prompt_tokens}
