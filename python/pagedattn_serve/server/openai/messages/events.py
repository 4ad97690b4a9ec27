"""A message of `/v1/messages`, told block by block."""

from typing import Any

from pydantic_core import from_json, to_json

from pagedattn_serve.output_parsing.output_format import OutputFormat
from pagedattn_serve.server.openai.blocks import BlockWriter, Fields, Kind, OutputEnd
from pagedattn_serve.server.openai.logprobs import TokenLogprob

# By the kind of a block: its type, the type of its deltas, and the field that a delta has.
_NAMES: dict[Kind, tuple[str, str, str]] = {
    "text": ("text", "text_delta", "text"),
    "thought": ("thinking", "thinking_delta", "thinking"),
    "call": ("tool_use", "input_json_delta", "partial_json"),
}
# Nobody here asks for it, but clients leave a thought without a signature out of their next request.
_SIGNATURE = "unsigned"


class MessageWriter(BlockWriter):
    """Tells the output as Anthropic's events.

    stop_sequences, max_tokens: those of the request. output_format: makes the ids of calls.
    """

    done = b""

    def __init__(
        self, message_id: str, model: str, stop_sequences: list[str], max_tokens: int, output_format: OutputFormat
    ) -> None:
        super().__init__()
        self._message: Fields = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._stop_sequences = stop_sequences
        self._max_tokens = max_tokens
        self._output_format = output_format
        self._pieces: list[str] = []  # of the text of the open block

    def start(self, num_prompt_tokens: int, num_cached_tokens: int) -> list[Fields]:
        self._message["usage"] = _usage(num_prompt_tokens, num_cached_tokens, 0)
        return [{"type": "message_start", "message": {**self._message, "content": []}}, {"type": "ping"}]

    def finish(self, end: OutputEnd) -> list[Fields]:
        events = self.close(end.finish_reason == "length")
        reason, sequence = self._stop_reason(end)
        usage = _usage(end.num_prompt_tokens, end.num_cached_tokens, end.num_tokens)
        self._message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [*events, {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def answer(self) -> Fields:
        return self._message

    def _begin(self, kind: Kind, name: str) -> list[Fields]:
        self._pieces = []
        if kind == "call":
            block: Fields = {"type": "tool_use", "id": self._output_format.new_call_id(), "name": name, "input": {}}
        elif kind == "text":
            block = {"type": "text", "text": ""}  # without citations: some clients refuse null
        else:
            block = {"type": "thinking", "thinking": "", "signature": ""}  # which comes at the end
        self._message["content"].append(block)
        return [{"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _extend(self, kind: Kind, text: str, logprobs: list[TokenLogprob]) -> list[Fields]:
        self._pieces.append(text)
        _, delta_type, field = _NAMES[kind]
        return [self._delta(delta_type, field, text)]

    def _end(self, kind: Kind, is_cut: bool) -> list[Fields]:
        block, text = self._message["content"][-1], "".join(self._pieces)
        events: list[Fields] = []
        if kind == "call":
            block["input"] = _object(text)
        else:
            block[_NAMES[kind][2]] = text
        if kind == "thought":
            block["signature"] = _SIGNATURE
            events.append(self._delta("signature_delta", "signature", _SIGNATURE))
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta_type: str, field: str, text: str) -> Fields:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": delta_type, field: text}}

    @property
    def _index(self) -> int:
        return len(self._message["content"]) - 1

    def _stop_reason(self, end: OutputEnd) -> tuple[str, str | None]:
        if end.finish_reason == "length":
            return "max_tokens" if end.num_tokens >= self._max_tokens else "model_context_window_exceeded", None
        if end.stop_reason in self._stop_sequences:
            return "stop_sequence", str(end.stop_reason)
        has_calls = any(block["type"] == "tool_use" for block in self._message["content"])
        return "tool_use" if has_calls else "end_turn", None


def _object(text: str) -> Fields:
    """An object of JSON, or as much of it as there is; an empty one for what is none. A number beyond fp64, which the
    answer could not be written with, is null."""
    try:
        value = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    value = from_json(to_json(value, inf_nan_mode="null"))
    return value if isinstance(value, dict) else {}


def _usage(num_prompt_tokens: int, num_cached_tokens: int, num_tokens: int) -> dict[str, Any]:
    """input_tokens: those that were not found in the cache."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_tokens,
    }
