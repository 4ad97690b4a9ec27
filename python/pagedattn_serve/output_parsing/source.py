"""A text that comes in pieces, read as if it were there already.

What reads a source is a generator. It yields events, and None when it needs more of the text. So a parser reads from
the beginning to the end of the text, and no parser has states.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from pagedattn_serve.output_parsing.events import Content, Event, Reasoning

T = TypeVar("T")

Reader = Generator[Event | None, None, T]  # reads a part of a source, and returns what the part is
ToEvent = Callable[[str], Event]

_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # a JSON string after its first quote, as far as it is there
_PLAIN = re.compile(r'[^"{}\[\]]+')  # of an object or a list of JSON
_SCALAR = re.compile(r"[^\s,}\]]*")


class Source:
    """text: what has come and is not read yet. is_whole: whether nothing more comes. thoughts: where each thought that
    has been read begins and ends in all that has come, in characters."""

    def __init__(self) -> None:
        self.text = ""
        self.is_whole = False
        self.thoughts: list[tuple[int, int]] = []
        self._num_read = 0

    @property
    def is_at_end(self) -> bool:
        return self.is_whole and not self.text

    def more(self) -> Reader[bool]:
        """Wait for more text. Returns False if nothing more comes."""
        length = len(self.text)
        while len(self.text) == length:
            if self.is_whole:
                return False
            yield None
        return True

    def take(self, length: int) -> str:
        """The next characters, which are there."""
        taken, self.text = self.text[:length], self.text[length:]
        self._num_read += len(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Undo the last reading of this text."""
        self.text = text + self.text
        self._num_read -= len(text)

    def starts_with(self, prefix: str) -> Reader[bool]:
        """Whether the text goes on with the prefix, which is then read."""
        while len(self.text) < len(prefix) and prefix.startswith(self.text):
            if not (yield from self.more()):
                return False
        if not self.text.startswith(prefix):
            return False
        self.take(len(prefix))
        return True

    def ends_within(self, *tags: str) -> Reader[bool]:
        """Whether the text ends before or amid one of the tags. The beginning of the tag is then read."""
        while any(len(self.text) < len(tag) and tag.startswith(self.text) for tag in tags):
            if not (yield from self.more()):
                self.take(len(self.text))
                return True
        return False

    def skip_space(self) -> Reader[str]:
        """Read white space. Returns it."""
        space = ""
        while True:
            rest = self.text.lstrip()
            space += self.take(len(self.text) - len(rest))
            if rest or not (yield from self.more()):
                return space

    def read_until(self, tags: tuple[str, ...], to_event: ToEvent, drops_beginning: bool = False) -> Reader[str | None]:
        """Yield the text up to the first tag as it comes. Reads the tag, and returns it; None at the end of the text.

        drops_beginning: whether the beginning of a tag at the end of the text is left out."""
        found = re.compile("|".join(map(re.escape, tags)))
        while True:
            if match := found.search(self.text):
                if before := self.take(match.start()):
                    yield to_event(before)
                return self.take(len(match[0]))
            if free := self.take(len(self.text) - self._held_back(tags)):
                yield to_event(free)
            if not (yield from self.more()):
                if (rest := self.take(len(self.text))) and not drops_beginning:
                    yield to_event(rest)
                return None

    def read_thought(self, ends: tuple[str, ...]) -> Reader[str | None]:
        """Yield a thought up to its end as it comes. Reads the end, and returns it, as `read_until`."""
        begin = self._num_read
        end = yield from self.read_until(ends, Reasoning)
        self.thoughts.append((begin, self._num_read - len(end or "")))
        return end

    def read_rest(self, to_event: ToEvent) -> Reader[None]:
        """Yield all that is left, as it comes."""
        while True:
            if self.text:
                yield to_event(self.take(len(self.text)))
            if not (yield from self.more()):
                return

    def text_until(self, *tags: str) -> Reader[tuple[str, str | None]]:
        """The text up to the first tag, and the tag as of `read_until`."""
        found, longest = re.compile("|".join(map(re.escape, tags))), max(map(len, tags))
        begin = 0
        while not (match := found.search(self.text, begin)):
            begin = max(0, len(self.text) - longest + 1)
            if not (yield from self.more()):
                return self.take(len(self.text)), None
        return self.take(match.start()), self.take(len(match[0]))

    def json_value(self, to_event: ToEvent) -> Reader[bool]:
        """Yield a value of JSON as it comes. Returns whether the value has an end."""
        depth = 0
        while True:
            if not self.text and not (yield from self.more()):
                return False
            character = self.text[0]
            if character == '"':
                if not (yield from self._json_string(to_event)):
                    return False
            elif character in "{[":
                depth += 1
                yield to_event(self.take(1))
            elif character in "}]":
                depth -= 1
                yield to_event(self.take(1))
            elif depth:
                match = _PLAIN.match(self.text)
                assert match is not None
                yield to_event(self.take(match.end()))
            else:
                return (yield from self._json_scalar(to_event))
            if depth <= 0:
                return True

    def json_text(self) -> Reader[str]:
        """A value of JSON, or its beginning if the text ends."""
        pieces = []
        for event in self.json_value(Content):
            if event is None:
                yield None
            else:
                pieces.append(event[0])
        return "".join(map(str, pieces))

    def _json_string(self, to_event: ToEvent) -> Reader[bool]:
        yield to_event(self.take(1))
        while True:
            match = _STRING.match(self.text)
            assert match is not None
            if inner := self.take(match.end()):
                yield to_event(inner)
            if self.text.startswith('"'):
                yield to_event(self.take(1))
                return True
            if not (yield from self.more()):
                if rest := self.take(len(self.text)):
                    yield to_event(rest)
                return False

    def _json_scalar(self, to_event: ToEvent) -> Reader[bool]:
        while True:
            match = _SCALAR.match(self.text)
            assert match is not None
            if match.end():
                yield to_event(self.take(match.end()))
            if self.text:
                return True
            if not (yield from self.more()):
                return True

    def _held_back(self, tags: tuple[str, ...]) -> int:
        """How many characters at the end of the text may be the beginning of a tag."""
        longest = min(max(map(len, tags)) - 1, len(self.text))
        for length in range(longest, 0, -1):
            if any(tag.startswith(self.text[-length:]) for tag in tags):
                return length
        return 0
