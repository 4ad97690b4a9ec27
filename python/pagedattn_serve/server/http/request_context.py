"""What the server knows of the request that the current task serves: for the log, and for those who count tokens."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class RequestContext:
    """One HTTP request. It may be several to the engine, or none.

    request_id: the server's own, as in the header X-Request-Id; cannot be guessed.
    key_number: the place among the server's API keys, from 1, of the one that it came with; None without one.
    num_prompt_tokens, num_output_tokens: of the requests to the engine that have ended.
    """

    request_id: str
    key_number: int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)
