"""What the server knows of the HTTP request that the current task serves: for the log, and for counting tokens."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class RequestContext:
    """One HTTP request. It may make several requests to the engine, or none.

    request_id: as in the header X-Request-Id; the server makes it, and nobody can guess it.
    answer_id: the id in the answer's body, which ends with the request_id; "" if the answer has none.
    key_number: the request's key, as its place among the server's API keys, from 1; None without a key.
    key_id: a name of the key that does not reveal the key; "" without a key.
    num_prompt_tokens, num_output_tokens: tokens of its requests to the engine, of those that have ended.
    """

    request_id: str
    answer_id: str = ""
    key_number: int | None = None
    key_id: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)
