"""POST /v1/rerank, as Jina and Cohere have it, and POST /v1/score, as vLLM has it: the cosine of embeddings, or what a
reranker says of each pair. Both have all the paths and names that vLLM knows them by."""

import asyncio
import math
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, Self

from fastapi import APIRouter, Depends, Request
from pydantic import AliasChoices, Field, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator
from pydantic_core import InitErrorDetails
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.outputs import RequestOutput, cosine
from pagedattn_serve.pooling_params import PoolingParams
from pagedattn_serve.server.http.errors import ApiError, JSONResponse
from pagedattn_serve.server.openai.embeddings import (
    EmbeddingUsage,
    PoolingBody,
    check_number,
    checked_texts,
    embed,
    kept,
    tokenize,
    usage_of,
)
from pagedattn_serve.server.openai.fields import Body, Texts
from pagedattn_serve.server.openai.jobs import Job, PromptTokens
from pagedattn_serve.server.openai.service import Service, service_of

router = APIRouter()

# Of the texts of a score, in pairs.
NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
FIRST_NAMES, SECOND_NAMES = (tuple(dict.fromkeys(names)) for names in zip(*NAMES, strict=True))
DOCUMENTS_OF_A_UNIT = 100  # Cohere bills search units, each a query with so many documents


class ScoringBody(PoolingBody):
    """What both requests share."""

    max_tokens_per_query: Annotated[int, Field(ge=0)] | None = Field(
        None, description="the first tokens of a query, or first text, so many of them; 0: all"
    )
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = Field(
        None, description="the first tokens of a document, or second text, so many of them; 0: all"
    )


class Document(Body):
    text: str


class RerankRequest(ScoringBody):
    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True)]
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="all documents if not given, or 0")
    return_documents: bool | None = Field(None, description="true if not given")


class ScoreRequest(ScoringBody):
    text_1: str | Texts = Field(validation_alias=AliasChoices(*FIRST_NAMES))
    text_2: str | Texts = Field(validation_alias=AliasChoices(*SECOND_NAMES))
    _names: tuple[str, str] = PrivateAttr()  # that the request has for the two

    @model_validator(mode="wrap")
    @classmethod
    def _keep_names(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        given = {name for name, each in value.items() if each is not None} if isinstance(value, dict) else set()
        first, second = (next((n for n in names if n in given), None) for names in (FIRST_NAMES, SECOND_NAMES))
        if (first is None) != (second is None):  # the other one is missing by the name that goes with this one
            missing = next(pair[first is not None] for pair in NAMES if first in pair or second in pair)
            error = InitErrorDetails(type="missing", loc=(missing,), input=value)
            raise ValidationError.from_exception_data(cls.__name__, [error])
        body = handler(value)
        assert first is not None and second is not None
        body._names = first, second
        return body

    def named_texts(self) -> dict[str, list[str]]:
        """The texts of the two fields by the names that the request has for these."""
        texts = (self.text_1, self.text_2)
        return {n: [each] if isinstance(each, str) else each for n, each in zip(self._names, texts, strict=True)}


class RankedText(TypedDict):
    text: str


class RerankResult(TypedDict):
    """index: of the document in the request."""

    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class ApiVersion(TypedDict):
    version: str


class BilledUnits(TypedDict):
    search_units: int


class RerankMeta(TypedDict):
    """What Cohere's answers have."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(TypedDict):
    """results: the best first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]
    meta: RerankMeta


class Score(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", response_model=RerankResponse)
async def rerank(body: RerankRequest, request: Request, service: Annotated[Service, Depends(service_of)]) -> Response:
    """Order documents by how well they fit a query."""
    service.check_model(body.model)
    texts = [each.text if isinstance(each, Document) else each for each in body.documents]
    check_number(len(texts), "documents")
    job, scores = await _score("rerank-", {"query": [body.query], "documents": texts}, body, request, service)
    results = []
    for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]:
        result: RerankResult = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    search_units = math.ceil(len(texts) / DOCUMENTS_OF_A_UNIT)
    response: RerankResponse = {
        "id": job.request_id,
        "model": job.model,
        "usage": usage_of(job),
        "results": results,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": search_units}},
    }
    return JSONResponse(response)


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", response_model=ScoreResponse)
async def score(body: ScoreRequest, request: Request, service: Annotated[Service, Depends(service_of)]) -> Response:
    """How well texts fit each other: one and each of several, or pairs."""
    service.check_model(body.model)
    texts = body.named_texts()
    (first, firsts), (second, seconds) = texts.items()
    check_number(len(seconds), second)
    if len(firsts) not in (1, len(seconds)):
        message = f"{first}: expected one text, or {len(seconds)} as in {second}, got {len(firsts)}"
        raise ApiError(400, message, param=first)
    job, scores = await _score("score-", texts, body, request, service)
    response: ScoreResponse = {
        "id": job.request_id,
        "object": "list",
        "created": job.created,
        "model": job.model,
        "data": [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)],
        "usage": usage_of(job),
    }
    return JSONResponse(response)


async def _score(
    id_prefix: str, texts: dict[str, list[str]], body: ScoringBody, request: Request, service: Service
) -> tuple[Job, list[float]]:
    """texts: of two fields, the first of which has one text or as many as the second. Returns a score for each of the
    second. Raises ApiError."""
    (first, firsts), (second, seconds) = texts.items()
    times = len(seconds) // len(firsts)
    service.check_truncation(body.truncate_prompt_tokens)
    firsts = await _cut(firsts, body, "max_tokens_per_query", service, first)
    seconds = await _cut(seconds, body, "max_tokens_per_doc", service, second)
    if service.scores_pairs:
        firsts = checked_texts(firsts, body, service, first)
        seconds = checked_texts(seconds, body, service, second)
        take = partial(kept, body=body, service=service, param=second)
        token_ids = await service.tokenize_pairs(firsts * times, seconds, second, take)
        prompts = [PromptTokens(None, each) for each in token_ids]
        job, outputs = await embed(id_prefix, prompts, PoolingParams(), body, request, service)
        return job, [_embedding(output)[0] for output in outputs]
    prompts = await tokenize(firsts, body, service, first) + await tokenize(seconds, body, service, second)
    job, outputs = await embed(id_prefix, prompts, PoolingParams(), body, request, service)
    of_firsts, of_seconds = outputs[: len(firsts)] * times, outputs[len(firsts) :]

    def scores() -> list[float]:
        return [cosine(_embedding(a), _embedding(b)) for a, b in zip(of_firsts, of_seconds, strict=True)]

    return job, await asyncio.to_thread(scores)


async def _cut(texts: list[str], body: ScoringBody, limit: str, service: Service, param: str) -> list[str]:
    """The texts; of a text with more tokens than the limit, the text of its first ones. The special tokens that the
    tokenizer adds to a text do not count. None, 0, and more tokens than the model takes cut nothing. Raises ApiError,
    which names the field."""
    most: int | None = getattr(body, limit)
    if not most or most > service.max_model_len:
        return texts
    texts = [text[: service.max_characters] for text in texts]  # no model takes tokens of more characters
    token_ids = await service.tokenize(texts, False, param, lambda each: each[: most + 1])
    beginnings = await service.detokenize([each[:most] for each in token_ids], param)
    cut = []
    for text, each, beginning in zip(texts, token_ids, beginnings, strict=True):
        if len(each) <= most:
            beginning = text
        elif not text.startswith(beginning):
            beginning = beginning.rstrip("\ufffd")  # which stands for a part of a character
        if text and not beginning:
            raise ApiError(400, f"{limit}: expected the tokens of one character at least, got {most}", param=limit)
        cut.append(beginning)
    return cut


def _embedding(output: RequestOutput) -> list[float]:
    assert output.embedding is not None
    return output.embedding
