"""The serving loop of the PagedAttention paper on `pagedattn_ext`: scheduler, block manager, runner, engine.

`LLM` for a list of prompts; `LLMEngine` for requests that come and go, `AsyncLLMEngine` for those of an event loop;
`SamplingParams` for all.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pagedattn_serve.errors import how_to_install

if TYPE_CHECKING:
    from pagedattn_serve.async_engine import AsyncLLMEngine as AsyncLLMEngine
    from pagedattn_serve.async_engine import EngineBusyError as EngineBusyError
    from pagedattn_serve.async_engine import EngineDeadError as EngineDeadError
    from pagedattn_serve.calibration import calibrate_kv_scales as calibrate_kv_scales
    from pagedattn_serve.config import DEMO_MODEL as DEMO_MODEL
    from pagedattn_serve.engine import LLMEngine as LLMEngine
    from pagedattn_serve.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from pagedattn_serve.engine_args import EngineArgs as EngineArgs
    from pagedattn_serve.errors import ArgumentError as ArgumentError
    from pagedattn_serve.errors import ArgumentTypeError as ArgumentTypeError
    from pagedattn_serve.llm import LLM as LLM
    from pagedattn_serve.outputs import BeamSearchOutput as BeamSearchOutput
    from pagedattn_serve.outputs import BeamSearchSequence as BeamSearchSequence
    from pagedattn_serve.outputs import CacheMap as CacheMap
    from pagedattn_serve.outputs import CompletionOutput as CompletionOutput
    from pagedattn_serve.outputs import EmbeddingOutput as EmbeddingOutput
    from pagedattn_serve.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from pagedattn_serve.outputs import EngineStats as EngineStats
    from pagedattn_serve.outputs import Logprob as Logprob
    from pagedattn_serve.outputs import ReplicaStatus as ReplicaStatus
    from pagedattn_serve.outputs import RequestMetrics as RequestMetrics
    from pagedattn_serve.outputs import RequestOutput as RequestOutput
    from pagedattn_serve.outputs import RequestState as RequestState
    from pagedattn_serve.outputs import ScoringOutput as ScoringOutput
    from pagedattn_serve.outputs import ScoringRequestOutput as ScoringRequestOutput
    from pagedattn_serve.pooling_params import PoolingParams as PoolingParams
    from pagedattn_serve.requests.inputs import TextPrompt as TextPrompt
    from pagedattn_serve.requests.inputs import TokensPrompt as TokensPrompt
    from pagedattn_serve.sampling_params import BeamSearchParams as BeamSearchParams
    from pagedattn_serve.sampling_params import RequestOutputKind as RequestOutputKind
    from pagedattn_serve.sampling_params import SamplingParams as SamplingParams
    from pagedattn_serve.structured_output import GuidedDecodingParams as GuidedDecodingParams
    from pagedattn_serve.structured_output import StructuredOutput as StructuredOutput
    from pagedattn_serve.structured_output import StructuredOutputsParams as StructuredOutputsParams

    __version__: str

_PUBLIC = {
    "async_engine": ("AsyncLLMEngine", "EngineBusyError", "EngineDeadError"),
    "calibration": ("calibrate_kv_scales",),
    "config": ("DEMO_MODEL",),
    "engine": ("LLMEngine",),
    "engine_args": ("AsyncEngineArgs", "EngineArgs"),
    "errors": ("ArgumentError", "ArgumentTypeError"),
    "llm": ("LLM",),
    "outputs": (
        *(
            "BeamSearchOutput",
            "BeamSearchSequence",
            "CacheMap",
            "CompletionOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "EngineStats",
            "Logprob",
            "ReplicaStatus",
        ),
        *("RequestMetrics", "RequestOutput", "RequestState", "ScoringOutput", "ScoringRequestOutput"),
    ),
    "pooling_params": ("PoolingParams",),
    "requests.inputs": ("TextPrompt", "TokensPrompt"),
    "sampling_params": ("BeamSearchParams", "RequestOutputKind", "SamplingParams"),
    "structured_output": ("GuidedDecodingParams", "StructuredOutput", "StructuredOutputsParams"),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [*_MODULE_OF, "__version__"]

# What this package depends on, of that what the server alone needs, and the modules here that need the rest. The other
# modules work without them, as from a clone.
_NEEDED = ("huggingface_hub", "numpy", "safetensors", "transformers")
_NEEDED_BY_SERVER = ("fastapi", "httptools", "jinja2", "prometheus_client", "pydantic", "uvicorn")
_NEED_MORE = ("llm", "engine", "async_engine", "calibration")


def require_dependencies(for_server: bool = False) -> None:
    """Raises ImportError, which says what to do, where what this package depends on is not installed."""
    needed = sorted(_NEEDED + _NEEDED_BY_SERVER) if for_server else _NEEDED
    if missing := [package for package in needed if find_spec(package) is None]:
        raise ImportError(f"pagedattn_serve: expected {', '.join(missing)}: {how_to_install()}")


def __getattr__(name: str) -> object:
    """Public names, imported on first use: the scheduling side works where torch is not installed."""
    if name == "__version__":
        return import_module("pagedattn_ext").__version__
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF[name]
    if module in _NEED_MORE:
        require_dependencies()
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
