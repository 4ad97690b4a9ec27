"""The serving loop of the PagedAttention paper on `pagedattn_ext`: scheduler, block manager, runner, engine.

from pagedattn_serve import LLM, SamplingParams
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine as LLMEngine
    from pagedattn_serve.llm import LLM as LLM
    from pagedattn_serve.outputs import CompletionOutput as CompletionOutput
    from pagedattn_serve.outputs import EngineStats as EngineStats
    from pagedattn_serve.outputs import RequestOutput as RequestOutput
    from pagedattn_serve.sampling_params import SamplingParams as SamplingParams

# The small LLaMA that comes with the package (see its README.md).
DEMO_MODEL = str(Path(__file__).parent / "demo_model")

_PUBLIC = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "EngineStats": "outputs",
    "LLMEngine": "engine",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}
__all__ = ["DEMO_MODEL", *_PUBLIC]


def __getattr__(name: str) -> object:
    """Public names, imported on first use: the scheduling side works where torch is not installed."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
