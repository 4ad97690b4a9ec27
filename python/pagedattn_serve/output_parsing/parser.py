"""A parser of one output."""

from collections.abc import Callable

from pagedattn_serve.output_parsing.events import CallArguments, Content, Event, ParsedOutput, Reasoning
from pagedattn_serve.output_parsing.source import Reader, Source

_PIECE = 4096  # characters: what is read is taken from the text, which is copied each time
Read = Callable[[Source], Reader[None]]  # reads a source to its end


class OutputParser:
    """Tells the events of an output, whose text comes in pieces.

    White space around thoughts, around calls, and between them and the text for the user is left out.
    """

    def __init__(self, read: Read) -> None:
        self._source = Source()
        self._reader = read(self._source)
        self._content, self._reasoning = _Trimmed(), _Trimmed(is_interrupted=True)

    @property
    def thoughts(self) -> list[tuple[int, int]]:
        """Where each thought that has ended begins and ends in the text, in characters; all of them after `finish`."""
        return self._source.thoughts

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of the output's text."""
        self._source.text += text
        return self._events()

    def finish(self) -> list[Event]:
        """The events of what is held back when the output has ended."""
        self._source.is_whole = True
        events = self._events()
        if rest := self._content.finish():
            events.append(Content(rest))
        return events

    def _events(self) -> list[Event]:
        """What the text says that is there. Pieces of one thing are one event."""
        events: list[Event] = []
        for event in self._reader:
            if event is None:
                break
            trimmed = self._trim(event)
            joined = _joined(events[-1], trimmed) if events and trimmed else None
            if joined:
                events[-1] = joined
            elif trimmed:
                events.append(trimmed)
        return events

    def _trim(self, event: Event) -> Event | None:
        """The event without white space that is held back or left out. None if nothing is left."""
        if isinstance(event, Content):
            text = self._content.add(event.text)
            return Content(text) if text else None
        self._content.is_interrupted = True
        if isinstance(event, Reasoning):
            text = self._reasoning.add(event.text)
            return Reasoning(text) if text else None
        return event


def _joined(one: Event, other: Event) -> Event | None:
    """The event of two pieces of one thing; None if they are not."""
    match one, other:
        case (Content(text), Content(more)):
            return Content(text + more)
        case (Reasoning(text), Reasoning(more)):
            return Reasoning(text + more)
        case (CallArguments(call_index, text), CallArguments(_, more)):
            return CallArguments(call_index, text + more)
    return None


class _Trimmed:
    """A text that comes in pieces, without white space between an end of it and something else.

    is_interrupted: whether something else came last.
    """

    def __init__(self, is_interrupted: bool = False) -> None:
        self.is_interrupted = is_interrupted
        self._has_begun = False
        self._space = ""  # held back, as it may be at the end

    def add(self, piece: str) -> str:
        text = self._space + piece
        if self.is_interrupted and not self._has_begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._has_begun, self.is_interrupted = True, False
        return shown

    def finish(self) -> str:
        return "" if self.is_interrupted else self._space


def parse(parser: OutputParser, text: str) -> ParsedOutput:
    """All that a whole output says."""
    output = ParsedOutput()
    for begin in range(0, len(text), _PIECE):
        output.add(parser.feed(text[begin : begin + _PIECE]))
    output.add(parser.finish())
    return output
