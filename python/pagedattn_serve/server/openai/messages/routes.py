"""POST /v1/messages: a conversation in, the assistant's next message out; and the number of tokens of a prompt."""

from dataclasses import replace
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.server.http.errors import ApiError, JSONResponse
from pagedattn_serve.server.openai.answers import EVENT_STREAM
from pagedattn_serve.server.openai.blocks import BlockAnswer
from pagedattn_serve.server.openai.chat import chat_job, chat_prompt
from pagedattn_serve.server.openai.fields import ChatCompletionRequest
from pagedattn_serve.server.openai.messages.events import MessageWriter
from pagedattn_serve.server.openai.messages.fields import NAMES, CountTokensRequest, MessageRequest, as_chat
from pagedattn_serve.server.openai.service import Service, service_of
from pagedattn_serve.server.openai.translation import renamed_errors

router = APIRouter()


class ErrorOfMessages(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class ErrorMessage(TypedDict):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: ErrorOfMessages
    request_id: str


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: int


@router.post("/v1/messages", response_model=Message, responses={200: EVENT_STREAM})
async def create_message(
    body: MessageRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Say what the assistant says or calls next."""
    service.check_model(body.model)
    if body.thread is not None:  # told so, Anthropic's clients send the whole conversation instead
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ApiError(400, "thread: expected none, as no conversation is kept", param="thread", details=details)
    chat, names = _as_chat(body, service)
    with renamed_errors(NAMES, names):
        job, turn = await chat_job(chat, service, "msg_", clips=True)
    job = replace(job, form_field=job.form_field and NAMES.get(job.form_field, job.form_field))
    stop_sequences = body.stop_sequences or []
    writer = MessageWriter(job.request_id, job.model, stop_sequences, body.max_tokens, service.output_format)
    return await BlockAnswer(job, turn, service, writer).respond(request, body.stream is True)


@router.post("/v1/messages/count_tokens", response_model=TokenCount)
async def count_tokens(body: CountTokensRequest, service: Annotated[Service, Depends(service_of)]) -> Response:
    """How many tokens the prompt of such a request has."""
    service.check_model(body.model)
    chat, names = _as_chat(body, service)
    with renamed_errors(NAMES, names):
        prompt = await chat_prompt(chat, service)
    count: TokenCount = {"input_tokens": len(prompt.token_ids)}
    return JSONResponse(count)


def _as_chat(body: CountTokensRequest, service: Service) -> tuple[ChatCompletionRequest, list[str]]:
    try:
        return as_chat(body, service.output_format.takes_budget)
    except (TypeError, ValueError) as error:
        raise ApiError(400, str(error), param="messages") from None
