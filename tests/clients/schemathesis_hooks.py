"""What `st run` loads: most of what is made to be valid shall be answered, not refused for its model's name.

A schema cannot say what goes with what, nor what the model's vocabulary and context hold.
"""

from typing import Any

import schemathesis

UNLIKELY_TO_BE_VALID = {
    *(
        "model",
        "allowed_token_ids",
        "response_format",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    ),
    *("suffix", "previous_response_id", "tools", "tool_choice", "text", "output_config", "output_format"),
    *("use_beam_search", "best_of", "length_penalty", "early_stopping", "stream_options", "top_logprobs"),
}
MAX_TOKENS = 4


@schemathesis.hook
def map_case(context: schemathesis.HookContext, case: schemathesis.Case) -> schemathesis.Case:
    is_valid = case.meta is not None and case.meta.generation.mode == schemathesis.GenerationMode.POSITIVE
    if is_valid and isinstance(case.body, dict):
        case.body = answerable(case.operation.path, case.body)
    return case


def answerable(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body without what would have it refused for no fault of its schema, and short."""
    body = {k: v for k, v in body.items() if k not in UNLIKELY_TO_BE_VALID and v not in (None, "", [])}
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": each.get("content") or "a"} for each in body["messages"]]
    if path == "/v1/completions":
        body.setdefault("prompt", "a")
    if path.startswith("/v1/responses"):
        body.setdefault("input", "a")
        body["max_output_tokens"] = MAX_TOKENS
    if path == "/v1/messages":
        body["max_tokens"] = MAX_TOKENS
    if path.endswith("completions"):
        body["max_tokens"] = MAX_TOKENS
        body["min_tokens"] = min(body.get("min_tokens", 0), MAX_TOKENS)
    elif path == "/tokenize" and "messages" in body:
        body.pop("prompt", None)
    return body
