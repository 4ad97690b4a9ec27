"""From the fields of a request to `SamplingParams`."""

from dataclasses import fields
from typing import Any

from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.openai.errors import engine_error
from pagedattn_serve.server.openai.request_bodies import ChatCompletionRequest, CompletionRequest, SamplingBody
from pagedattn_serve.structured_output import StructuredOutput

OPENAI_MAX_TOKENS = 16  # OpenAI's default for completions
# Fields of both endpoints that SamplingParams has under the same name.
SAME = tuple(SamplingBody.model_fields.keys() & {field.name for field in fields(SamplingParams)})
# Fields that come from the model's generation_config.json, if a request leaves them out.
FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
# Between two parts of JSON: enough for indentation. Without a bound, a weak model may write nothing else.
WHITE_SPACE = r"[ \t\r\n]{0,20}"
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def completion_params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """The parameters of a request to /v1/completions. defaults: the model's. Raises ApiError."""
    max_tokens = OPENAI_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: expected an int >= 1 without echo, got 0", param="max_tokens")
    if body.min_tokens is not None and body.max_tokens is None:
        max_tokens = max(max_tokens, body.min_tokens)
    chosen: dict[str, Any] = {"max_tokens": max(max_tokens, 1), "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        chosen["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return _params(body, defaults, chosen)


def chat_params(body: ChatCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """The parameters of a request to /v1/chat/completions. defaults: the model's. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: expected none unless logprobs is true", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    return _params(body, defaults, {"max_tokens": max_tokens, "logprobs": logprobs})


def _params(
    body: CompletionRequest | ChatCompletionRequest, defaults: SamplingParams, chosen: dict[str, Any]
) -> SamplingParams:
    """Parameters from the body, or else from the model's defaults. chosen: the fields that the endpoint decides."""
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs: expected none with stream", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: expected none without stream", param="stream_options")
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if body.stream and given.get("best_of", 0) > given.get("n", 1) and not body.use_beam_search:
        raise ApiError(
            400, "best_of: expected at most n with stream, as the best are known at the end alone", param="best_of"
        )
    if body.use_beam_search:  # beam search draws nothing: no defaults for drawing
        base: dict[str, Any] = {"temperature": 0, "stop": defaults.stop}
    else:
        base = {name: getattr(defaults, name) for name in FROM_MODEL}
    structured_output = _structured_output(body)
    if structured_output is not None:
        chosen["structured_output"] = structured_output
    try:
        return SamplingParams(**base | given | chosen, output_kind=RequestOutputKind.DELTA)
    except (TypeError, ValueError) as error:
        raise engine_error(error, form_field(body)) from None


def form_field(body: SamplingBody) -> str | None:
    """The field that asks for a form of the output; None if none does. Raises ApiError if several do."""
    asked = [name for name in GUIDED if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.type != "text":
        asked.append("response_format")
    if len(asked) > 1:
        raise ApiError(400, f"{asked[0]}: expected one form of the output, got {', '.join(asked)}", param=asked[0])
    return asked[0] if asked else None


def _structured_output(body: SamplingBody) -> StructuredOutput | None:
    """The form that the field of `form_field` asks for."""
    name = form_field(body)
    if name is None:
        return None
    try:
        if name == "guided_json":
            return StructuredOutput(json=body.guided_json, whitespace_pattern=WHITE_SPACE)
        if name != "response_format":
            return StructuredOutput(**{name.removeprefix("guided_"): getattr(body, name)})
        assert body.response_format is not None
        if body.response_format.type == "json_object":
            return StructuredOutput(json_object=True, whitespace_pattern=WHITE_SPACE)
        form = body.response_format.json_schema
        if form is None or form.json_schema is None:
            raise ValueError('expected {"json_schema": {"schema": ...}} beside the type json_schema, got none')
        return StructuredOutput(json=form.json_schema, whitespace_pattern=WHITE_SPACE)
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"{name}: {error}", param=name) from None
