"""GET /v1/models, the one model that there is, by each of its names; POST /tokenize and /detokenize, its tokenizer, in
vLLM's shape.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.server.http.errors import ApiError, JSONResponse
from pagedattn_serve.server.openai.fields import Body, Messages, TokenIds, Tools, generates
from pagedattn_serve.server.openai.service import Service, service_of
from pagedattn_serve.server.openai.tools import template_tools

router = APIRouter()


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str  # vLLM's, as is parent: the model that this one was made of, or that it is another name of
    parent: None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class TokenizeRequest(Body):
    """A prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="true for a prompt, false for messages if not given")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str


@router.get("/v1/models/", include_in_schema=False)  # else the model of no name
@router.get("/v1/models", response_model=ModelList)
async def list_models(service: Annotated[Service, Depends(service_of)]) -> Response:
    """The one model, by each of its names."""
    names = service.config.model_names
    response: ModelList = {"object": "list", "data": [_model(service, name) for name in names]}
    return JSONResponse(response)


@router.get("/v1/models/{name:path}", response_model=Model)
async def get_model(name: str, service: Annotated[Service, Depends(service_of)]) -> Response:
    """A model by its name."""
    service.check_model(name)
    return JSONResponse(_model(service, name))


def _model(service: Service, name: str) -> Model:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "pagedattn_serve",
        "max_model_len": service.max_model_len,
        "root": service.config.model_names[0],
        "parent": None,
    }


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, service: Annotated[Service, Depends(service_of)]) -> Response:
    """The token ids of a prompt, or of the messages of a chat."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        got = "none" if body.prompt is None else "both"
        raise ApiError(400, f"prompt: expected either prompt or messages, got {got}", param="prompt")
    if body.messages is not None:
        text = await service.render(
            body.messages,
            generates(body.add_generation_prompt, body.continue_final_message),
            variables=body.chat_template_kwargs,
            tools=template_tools(body.tools),
            continue_final_message=body.continue_final_message is True,
        )
        [token_ids] = await service.tokenize([text], bool(body.add_special_tokens), "messages")
    else:
        [token_ids] = await service.tokenize([body.prompt or ""], body.add_special_tokens is not False)
    response: TokenizeResponse = {
        "count": len(token_ids),
        "max_model_len": service.max_model_len,
        "tokens": token_ids,
        "token_strs": service.tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None,
    }
    return JSONResponse(response)


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, service: Annotated[Service, Depends(service_of)]) -> Response:
    """The text of token ids."""
    service.check_model(body.model)
    [text] = await service.detokenize([body.tokens], "tokens")
    response: DetokenizeResponse = {"prompt": text}
    return JSONResponse(response)
