"""The paper's models on the paper's GPUs, and what is asked of their simulation."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from pagedattn_serve.config import UNBOUNDED, CacheConfig, SchedulerConfig
from pagedattn_simulate.command import routing_of, shape_of
from pagedattn_simulate.cost_model import ModelShape, find_hardware
from pagedattn_simulate.deployment import Deployment, sustainable_rate
from pagedattn_simulate.metrics import Summary
from pagedattn_simulate.workload import ONE_OUTPUT, RequestForm, WorkloadPairs, poisson_trace

T = TypeVar("T")
SEED = 0
MAX_LATENCY = 0.2  # seconds a token: the normalised latency at which rates are compared
MIN_REQUESTS, MAX_RATE = 10, 1000.0  # the least for a search, and requests a second
SYSTEMS = {
    "paged": "paged",
    "orca-oracle": "Orca (Oracle)",
    "orca-pow2": "Orca (Pow2)",
    "orca-max": "Orca (Max)",
    "fastertransformer": "FasterTransformer",
}
ORCAS = [name for name in SYSTEMS if name.startswith("orca")]
DATA_SETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}


@dataclass(frozen=True)
class Effort:
    """map: like the builtin, perhaps with many processes. scale: of simulated seconds."""

    is_full: bool
    map: Callable[..., Iterable[Any]] = map
    scale: float = 1.0

    def seconds(self, quick: float, full: float = 3600) -> float:
        return (full if self.is_full else quick) * self.scale

    def at_once(self, function: Callable[..., T], *arguments: Iterable[Any]) -> Iterator[T]:
        """Like the builtin `map`."""
        return iter(self.map(function, *arguments))


class Model(NamedTuple):
    config: dict[str, Any]
    hardware: str
    num_ranks: int


def opt(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "ffn_dim": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "dtype": "float16",
    }


LLAMA_13B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "dtype": "float16",
}
MODELS = {
    "OPT-13B": Model(opt(40, 5120, 40), "A100-40", 1),
    "OPT-66B": Model(opt(64, 9216, 72), "A100-40", 4),
    "OPT-175B": Model(opt(96, 12288, 96), "A100-80", 8),
    "LLaMA-13B": Model(LLAMA_13B, "A100-40", 1),
}
OPTS = [name for name in MODELS if name.startswith("OPT")]


def shape_of_model(name: str) -> ModelShape:
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODELS[name].config))
        return shape_of(directory, "auto", "auto")


def deploy(name: str, **of_cache: Any) -> Deployment:
    """of_cache: of CacheConfig. The paper's system keeps nothing of a request that is over."""
    cache = {"enable_prefix_caching": False, **of_cache}
    return Deployment(
        shape=shape_of_model(name),
        hardware=find_hardware(MODELS[name].hardware),
        num_ranks=MODELS[name].num_ranks,
        num_replicas=1,
        scheduler_config=SchedulerConfig(max_model_len=UNBOUNDED),
        cache_config=CacheConfig(num_blocks=UNBOUNDED, **cache),
    )


class Load(NamedTuple):
    """Requests with the lengths of a data set, for so many seconds."""

    lengths: str
    duration: float
    form: RequestForm = ONE_OUTPUT


def run_at(deployment: Deployment, system: str, load: Load, rate: float) -> Summary:
    limit = deployment.max_model_len - load.form.num_shared_tokens
    trace = poisson_trace(WorkloadPairs(load.lengths), rate, load.duration, limit, SEED)
    return deployment.run(system, trace, partial(routing_of, deployment, SEED), load.form)


class Sustained(NamedTuple):
    """The highest rate at MAX_LATENCY, and (rate, normalised latency) of each run that was tried.

    rate: None if the latency is higher at the lowest rate that was tried."""

    rate: float | None
    points: list[tuple[float, float]]


def search_rate(run: Callable[[float], Summary], duration: float) -> Sustained:
    """run: of a rate, for so many seconds."""
    points: list[tuple[float, float]] = []

    def run_and_note(rate: float) -> Summary:
        summary = run(rate)
        if summary.normalized_latency is not None:
            points.append((rate, summary.normalized_latency.mean))
        return summary

    found = sustainable_rate(run_and_note, MAX_LATENCY, MIN_REQUESTS / duration, MAX_RATE)
    return Sustained(found[0] if found else None, points)


def rate_at_latency(deployment: Deployment, system: str, load: Load) -> Sustained:
    return search_rate(partial(run_at, deployment, system, load), load.duration)


def times(ours: float | None, theirs: float | None) -> float | None:
    """How many times as large; None if either number is not there."""
    return None if ours is None or theirs is None else ours / theirs
