"""`ThreadCore`: an engine that runs in threads of this process, for an event loop."""

import asyncio
import atexit
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pagedattn_serve.async_engine.core import EngineCore, facts_of
from pagedattn_serve.async_engine.loop import News

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine


class ThreadCore(EngineCore):
    """An `EngineCore` that tells its news in the event loop which `start` runs in."""

    def __init__(self, engine: "LLMEngine") -> None:
        super().__init__(engine, self._publish, self._end, self._take_hang)
        self.hang: str | None = None
        self.facts = facts_of(engine)
        self.first_stats = engine.stats()
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def start(self, deliver: Callable[[News], None], finish: Callable[[str | None], None]) -> None:
        """deliver, finish: called with the news, and with what ended the engine (None after `stop`)."""
        self._event_loop = asyncio.get_running_loop()
        self._deliver, self._tell_end = deliver, finish
        self.start_threads()
        atexit.register(self._stop_at_exit)

    async def join(self) -> None:
        """Wait until nothing of the core is left."""
        if self._event_loop is not None:
            await asyncio.to_thread(self.join_threads)
            atexit.unregister(self._stop_at_exit)

    def _publish(self, news: News) -> None:
        self._tell(self._deliver, news)

    def _end(self, error: str | None) -> None:
        self._tell(self._tell_end, error)

    def _take_hang(self, hang: str | None) -> None:
        self.hang = hang

    def _tell(self, f: Callable[..., object], *args: Any) -> None:
        """Call `f` in the event loop. If the event loop is closed, nobody is left, and the engine stops."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(f, *args)
        except RuntimeError:
            if not self._event_loop.is_closed():
                raise
            self.stop()

    def _stop_at_exit(self) -> None:
        """For a program that ends without `shutdown`: a step that runs at the interpreter's end ends in abort()."""
        self.stop()
        self.join_threads()
