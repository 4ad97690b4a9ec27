"""POST /v1/responses: items of a conversation in, the next items out; GET and DELETE of those that are kept; and the
number of tokens of a prompt."""

from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from pagedattn_serve.output_parsing.output_format import Turn
from pagedattn_serve.server.http.errors import ApiError, JSONResponse
from pagedattn_serve.server.http.logs import current_request
from pagedattn_serve.server.openai.answers import EVENT_STREAM
from pagedattn_serve.server.openai.blocks import BlockAnswer, Fields
from pagedattn_serve.server.openai.chat import chat_job
from pagedattn_serve.server.openai.jobs import Job
from pagedattn_serve.server.openai.responses.events import ResponseWriter
from pagedattn_serve.server.openai.responses.fields import NAMES, ResponseRequest, as_chat
from pagedattn_serve.server.openai.responses.items import Item, NamedMessage, chat_messages, listed_items
from pagedattn_serve.server.openai.responses.objects import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
    response_head,
)
from pagedattn_serve.server.openai.responses.store import ResponseStore, StoredResponse
from pagedattn_serve.server.openai.responses.tools import functions_of
from pagedattn_serve.server.openai.service import TOO_LONG, Service, service_of
from pagedattn_serve.server.openai.translation import renamed_errors

router = APIRouter()


async def store_of(request: Request) -> ResponseStore:
    """A FastAPI dependency."""
    store: ResponseStore = request.app.state.responses
    return store


@router.post("/v1/responses", response_model=ResponseObject, responses={200: EVENT_STREAM})
async def create_response(
    body: ResponseRequest,
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    store: Annotated[ResponseStore, Depends(store_of)],
) -> Response:
    """Say what the assistant says or calls next."""
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: expected none without stream", param="stream_options")
    if body.background:
        message = "background: expected false, as responses are made while their client waits"
        raise ApiError(400, message, param="background")
    key_id = _key_id()
    before, given, messages = _read(body, store, key_id)
    job, turn = await _job(body, messages, service)
    job = replace(job, form_field=job.form_field and NAMES.get(job.form_field, job.form_field))

    def keep(response: Fields) -> None:
        if response["store"]:
            store.add(key_id, response, before, given)

    functions = {id.in_chat: id for id, _ in functions_of(body.tools or [])}
    writer = ResponseWriter(response_head(body, job), service.output_format, functions)
    return await BlockAnswer(job, turn, service, writer, keep).respond(request, body.stream is True)


@router.post("/v1/responses/input_tokens", response_model=InputTokens)
async def count_input_tokens(
    body: ResponseRequest,
    service: Annotated[Service, Depends(service_of)],
    store: Annotated[ResponseStore, Depends(store_of)],
) -> Response:
    """How many tokens the prompt of such a request has."""
    service.check_model(body.model)
    _, _, messages = _read(body, store, _key_id())
    job, _ = await _job(body, messages, service)
    count: InputTokens = {"object": "response.input_tokens", "input_tokens": len(job.prompts[0].token_ids)}
    return JSONResponse(count)


@router.get("/v1/responses/{response_id}", response_model=ResponseObject)
async def get_response(
    response_id: str, store: Annotated[ResponseStore, Depends(store_of)], stream: bool = False
) -> Response:
    """A response that is kept."""
    if stream:
        raise ApiError(400, "stream: expected false, as only the whole response is kept", param="stream")
    stored = _stored(store, _key_id(), response_id, "response_id")
    return Response(stored.response, media_type=JSONResponse.media_type)


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
async def delete_response(response_id: str, store: Annotated[ResponseStore, Depends(store_of)]) -> Response:
    """Forget a response. Those that go on from it stay as they are."""
    if not store.delete(_key_id(), response_id):
        raise _not_found(response_id, "response_id")
    deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
    return JSONResponse(deleted)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, store: Annotated[ResponseStore, Depends(store_of)]) -> Response:
    """Refused: a response that has an id to ask with is whole."""
    _stored(store, _key_id(), response_id, "response_id")
    message = f"response_id: expected a response in the background, and none is made there, got {response_id!r}"
    raise ApiError(400, message, param="response_id")


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList)
async def list_input_items(
    response_id: str,
    store: Annotated[ResponseStore, Depends(store_of)],
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The input that a response was made for, without that of responses before it."""
    items = _stored(store, _key_id(), response_id, "response_id").input_items()
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError(400, f"after: expected the id of an input item, got {after!r}", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    response: ItemList = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
    return JSONResponse(response)


def _read(
    body: ResponseRequest, store: ResponseStore, key_id: str
) -> tuple[list[Item], list[Item], list[NamedMessage]]:
    """The items before those of the request; the request's own; the messages of all of them. Raises ApiError."""
    before: list[Item] = []
    if body.previous_response_id is not None:
        before = _stored(store, key_id, body.previous_response_id, "previous_response_id").conversation()
    try:
        given = listed_items(_resolved(body.input, store, key_id))
        named = [("previous_response_id", item) for item in before]
        named += [(f"input[{i}]", item) for i, item in enumerate(given)]
        return before, given, chat_messages(named)
    except (TypeError, ValueError) as error:
        raise ApiError(400, str(error), param="input") from None


async def _job(body: ResponseRequest, messages: list[NamedMessage], service: Service) -> tuple[Job, Turn | None]:
    """As `chat_job`, of the messages that `truncation` leaves."""
    return await (_latest_job if body.truncation == "auto" else _whole_job)(body, messages, service)


async def _whole_job(body: ResponseRequest, messages: list[NamedMessage], service: Service) -> tuple[Job, Turn | None]:
    """As `chat_job`. Errors call messages by their names."""
    names = ["instructions"] * (body.instructions is not None) + [name for name, _ in messages]
    with renamed_errors(NAMES, names):
        return await chat_job(as_chat(body, [message for _, message in messages]), service, "resp_")


async def _latest_job(body: ResponseRequest, messages: list[NamedMessage], service: Service) -> tuple[Job, Turn | None]:
    """As `_whole_job`, of as many turns as fit, the latest, and of all system messages. A turn begins with a message of
    the user. Raises ApiError if the last turn alone does not fit."""
    starts = [i for i, (_, message) in enumerate(messages) if message["role"] == "user"]
    starts[:1] = [0]

    async def job_since(start: int) -> tuple[Job, Turn | None]:
        system = [each for each in messages[:start] if each[1]["role"] in ("system", "developer")]
        return await _whole_job(body, [*system, *messages[start:]], service)

    low, middle, high = 0, 0, len(starts) - 1  # all turns are tried first, as they mostly fit
    found = None  # the job since starts[high]
    while low < high:
        try:
            found = await job_since(starts[middle])
            high = middle
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            low = middle + 1
        middle = (low + high) // 2
    return found or await job_since(starts[high])


def _key_id() -> str:
    context = current_request.get()
    return context.key_id if context else ""


def _stored(store: ResponseStore, key_id: str, response_id: str, param: str) -> StoredResponse:
    if (stored := store.get(key_id, response_id)) is None:
        raise _not_found(response_id, param)
    return stored


def _not_found(response_id: str, param: str) -> ApiError:
    message = f"{param}: expected the id of a response that is kept, got {response_id!r}"
    return ApiError(404, message, param=param, code="response_not_found")


def _resolved(given: str | list[Item], store: ResponseStore, key_id: str) -> str | list[Item]:
    """The input with the items that it refers to. Raises ApiError."""
    if isinstance(given, str):
        return given
    items = []
    for i, item in enumerate(given):
        if item.get("type") == "item_reference":
            found = store.output_item(key_id, str(item.get("id")))
            if found is None:
                message = f"input[{i}].id: expected the id of an output item that is kept, got {item.get('id')!r}"
                raise ApiError(404, message, param="input", code="item_not_found")
            items.append(found)
        else:
            items.append(item)
    return items
