"""The engine for many callers at once: it runs in a thread of its own, they in an event loop."""

from pagedattn_serve.async_engine.core import EngineBusyError as EngineBusyError
from pagedattn_serve.async_engine.core import EngineDeadError as EngineDeadError
from pagedattn_serve.async_engine.engine import AsyncLLMEngine as AsyncLLMEngine
