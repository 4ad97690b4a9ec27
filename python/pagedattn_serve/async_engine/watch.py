"""`Watch`: whether an engine hangs."""

import os
from collections.abc import Callable
from threading import Event, Thread
from typing import TYPE_CHECKING

from pagedattn_serve.async_engine.loop import EngineLoop
from pagedattn_serve.distributed.activity import HANG_SECONDS, LOOK_SECONDS, MAX_LOOKS, Activity

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine


class Watch(Thread):
    """Looks every LOOK_SECONDS at an engine that another thread runs.

    The engine hangs if a rank of the model is stopped, or does not answer. And it hangs if a step, or a call, neither
    ends nor has work: no thread of any rank computes, and none waits for the CPU or the disk. A step that computes may
    take as long as it takes.

    thread: the one that runs the loop. tell: is called after each look with what hangs, and how; None if nothing does.
    """

    def __init__(
        self, engine: "LLMEngine", loop: EngineLoop, thread: Thread, tell: Callable[[str | None], None]
    ) -> None:
        super().__init__(name="pagedattn-watch", daemon=True)
        self._runner = engine.model_runner
        self._loop = loop
        self._tell = tell
        self._activity = Activity(os.getpid(), thread)
        self._num_done = -1  # of the loop, at the last look
        self._num_idle = 0
        self._end = Event()

    def end(self) -> None:
        self._end.set()

    def run(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self._tell(self.look())

    def look(self) -> str | None:
        """What hangs, and how."""
        hang = self._runner.find_hang()
        is_same, self._num_done = self._loop.num_done == self._num_done, self._loop.num_done
        is_idle = False
        if is_same and self._loop.is_at_work:
            works = [self._activity.works(), self._runner.at_work()]  # a look at each of them
            is_idle = not any(works)
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if hang is None and self._num_idle >= MAX_LOOKS:
            hang = f"a step of the engine (process {os.getpid()}) has stood still for {HANG_SECONDS:g} seconds"
        return hang
