"""POST /tokenize and /detokenize, in vLLM's shape."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from pagedattn_serve.server.http.errors import ApiError, JSONResponse
from pagedattn_serve.server.openai.request_bodies import DetokenizeRequest, TokenizeRequest
from pagedattn_serve.server.openai.response_bodies import DetokenizeResponse, TokenizeResponse
from pagedattn_serve.server.openai.service import Service, service_of

router = APIRouter()


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, service: Annotated[Service, Depends(service_of)]) -> Response:
    """The token ids of a prompt, or of the messages of a chat."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: expected either prompt or messages", param="prompt")
    if body.messages is not None:
        text = await service.render(body.messages, body.add_generation_prompt is not False)
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
