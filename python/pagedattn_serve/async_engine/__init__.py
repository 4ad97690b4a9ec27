"""The engine for many callers at once: it runs in a thread of its own, they in an event loop."""

from pagedattn_serve.async_engine.engine import AsyncLLMEngine as AsyncLLMEngine
from pagedattn_serve.async_engine.errors import EngineBusyError as EngineBusyError
from pagedattn_serve.async_engine.errors import EngineDeadError as EngineDeadError
