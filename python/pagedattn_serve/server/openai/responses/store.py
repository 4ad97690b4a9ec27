"""Responses that are kept in memory, for as long as the server runs, a time to live, and a bound of bytes."""

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pagedattn_serve.server.http.errors import encode_json, to_utf8
from pagedattn_serve.server.openai.blocks import Fields
from pagedattn_serve.server.openai.responses.items import Item


@dataclass(frozen=True)
class StoredResponse:
    """A response with all items of its conversation, as JSON: so it outlives the responses before it.

    key_id: a name of the API key that asked for it. num_items_before: of the conversation, before the input.
    output_ids: of the items of the output, which end the conversation.
    """

    key_id: str
    response: bytes
    items: bytes
    num_items_before: int
    output_ids: tuple[str, ...]
    expires: float

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)

    def conversation(self) -> list[Item]:
        items: list[Item] = json.loads(self.items)
        return items

    def input_items(self) -> list[Item]:
        return self.conversation()[self.num_items_before :][: -len(self.output_ids) or None]


class ResponseStore:
    """max_bytes: of all together; when a response comes, the oldest go until there is room. seconds: that each is kept.
    Whoever asks with another API key finds nothing."""

    def __init__(self, max_bytes: int, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._now = now
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # from the oldest on
        self._ids: dict[str, str] = {}  # of a response, by the id of an item of its output
        self.num_bytes = 0

    def add(self, key_id: str, response: Fields, before: list[Item], given: list[Item]) -> None:
        """before, given: the items of the conversation before the input, and of the input."""
        output = response["output"]
        stored = StoredResponse(
            key_id,
            _encode(response),
            _encode([*before, *given, *output]),
            len(before),
            tuple(item["id"] for item in output),
            self._now() + self._seconds,
        )
        if stored.num_bytes > self._max_bytes:
            return
        self._drop_expired()
        while self.num_bytes + stored.num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))
        self._stored[response["id"]] = stored
        self._ids.update((item_id, response["id"]) for item_id in stored.output_ids)
        self.num_bytes += stored.num_bytes

    def get(self, key_id: str, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        stored = self._stored.get(response_id)
        return stored if stored is not None and stored.key_id == key_id else None

    def output_item(self, key_id: str, item_id: str) -> Item | None:
        """An item of the output of a response that is kept."""
        stored = self.get(key_id, self._ids.get(item_id, ""))
        return next((item for item in stored.conversation() if item.get("id") == item_id), None) if stored else None

    def delete(self, key_id: str, response_id: str) -> bool:
        """Returns whether there was one."""
        if self.get(key_id, response_id) is None:
            return False
        self._drop(response_id)
        return True

    def _drop_expired(self) -> None:
        while self._stored and next(iter(self._stored.values())).expires <= self._now():
            self._drop(next(iter(self._stored)))

    def _drop(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        self.num_bytes -= stored.num_bytes
        for item_id in stored.output_ids:
            del self._ids[item_id]


def _encode(value: object) -> bytes:
    return to_utf8(encode_json(value))
