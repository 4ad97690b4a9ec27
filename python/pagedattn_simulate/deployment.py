"""A model on hardware under one system: what fits, and what happens to a trace of requests there."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pagedattn_serve.config import UNBOUNDED, CacheConfig, SchedulerConfig, check_int
from pagedattn_serve.errors import ArgumentError
from pagedattn_simulate.cost_model import CostModel, Hardware, ModelShape
from pagedattn_simulate.metrics import Summary
from pagedattn_simulate.simulator import Routing, Simulator
from pagedattn_simulate.systems.faster_transformer import FasterTransformerSystem
from pagedattn_simulate.systems.orca import RESERVATIONS, OrcaSystem
from pagedattn_simulate.systems.paged import PagedSystem
from pagedattn_simulate.systems.system import System
from pagedattn_simulate.workload import ONE_OUTPUT, RequestForm, SimulatedRequest, TraceEntry, requests_of

SYSTEMS = ("paged", *(f"orca-{reservation}" for reservation in RESERVATIONS), "fastertransformer")
MAX_GPUS = 4096
NUM_HALVINGS = 6  # of the last factor of two between rates: to 1.1%


class Deployment:
    """Raises ArgumentError if the model does not fit.

    num_ranks: GPUs that share the model. num_replicas: of the model and its ranks.
    scheduler_config, cache_config: where a limit is UNBOUNDED, model and memory say it.
    """

    def __init__(
        self,
        *,
        shape: ModelShape,
        hardware: Hardware,
        num_ranks: int,
        num_replicas: int,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
    ) -> None:
        check_int("tensor_parallel_size", num_ranks, 1, MAX_GPUS)
        check_int("data_parallel_size", num_replicas, 1, MAX_GPUS)
        if shape.num_heads % num_ranks:
            expected = f"a divisor of the model's {shape.num_heads} heads"
            raise ArgumentError("tensor_parallel_size", expected, num_ranks)
        self.shape = shape
        self.hardware = hardware
        self.num_ranks = num_ranks
        self.num_replicas = num_replicas
        self.cache_config = self._with_blocks(cache_config)
        limit = min(shape.max_model_len, self.num_slots)
        if scheduler_config.max_model_len == UNBOUNDED:
            scheduler_config = replace(scheduler_config, max_model_len=limit)
        check_int("max_model_len", scheduler_config.max_model_len, 2, limit)
        self.scheduler_config = scheduler_config

    def _with_blocks(self, config: CacheConfig) -> CacheConfig:
        """Fill in how many blocks the memory has room for, here and on the host, unless the number is given."""
        shares = self.shape.num_shares(self.num_ranks)
        block_bytes = self.shape.token_bytes * config.block_size / shares  # of one rank
        num_blocks = config.num_blocks
        weights = self.shape.weight_bytes / self.num_ranks
        if num_blocks == UNBOUNDED:
            memory: float | None = config.kv_cache_memory
            if memory is None:
                memory = self.hardware.memory * config.gpu_memory_utilization - weights
            num_blocks = math.floor(memory / block_bytes)
        needed = weights + num_blocks * block_bytes
        if num_blocks < 1 or needed > self.hardware.memory:
            raise ArgumentError(
                "hardware",
                f"memory for {weights / 1e9:.1f} GB of weights and {max(num_blocks, 1) * block_bytes / 1e9:.1f} GB of "
                f"cache on each of {self.num_ranks} (more GPUs: tensor_parallel_size)",
                f"{self.hardware.memory * config.gpu_memory_utilization / 1e9:.1f} GB of {self.hardware.name}",
            )
        num_host_blocks = min(int(config.swap_space * (1 << 30) / block_bytes), num_blocks)
        return replace(config, num_blocks=num_blocks, num_host_blocks=num_host_blocks)

    @property
    def num_slots(self) -> int:
        """Tokens that the cache of a replica holds."""
        return self.cache_config.num_blocks * self.cache_config.block_size

    @property
    def max_model_len(self) -> int:
        return self.scheduler_config.max_model_len

    def run(
        self,
        system: str,
        trace: list[TraceEntry],
        make_routing: Callable[[], Routing],
        form: RequestForm = ONE_OUTPUT,
        on_end: Callable[[SimulatedRequest], None] = lambda request: None,
    ) -> Summary:
        """Serve a trace. system: one of SYSTEMS. make_routing: for each run a new one. on_end: called with each request
        that is over.

        Raises ArgumentError for a request that is too long, or too wide for the system.
        """
        limit = self.max_model_len - form.num_shared_tokens
        for number, entry in enumerate(trace, 1):
            if entry.num_prompt_tokens + entry.num_output_tokens > limit:
                raise ArgumentError(
                    f"request {number} of {len(trace)}",
                    f"at most {limit} tokens of prompt and output (max_model_len {self.max_model_len}"
                    + (f", {form.num_shared_tokens} of a shared prefix)" if form.num_shared_tokens else ")"),
                    f"{entry.num_prompt_tokens} and {entry.num_output_tokens}",
                )
        make_system = self._system(system)
        cost_model = CostModel(self.shape, self.hardware, self.num_ranks)
        simulator = Simulator([make_system() for _ in range(self.num_replicas)], make_routing(), cost_model.seconds)
        return simulator.run(requests_of(trace, form), on_end)

    def _system(self, name: str) -> Callable[[], System]:
        if name == "paged":
            return partial(PagedSystem, self.scheduler_config, self.cache_config)
        if name == "fastertransformer":
            return partial(FasterTransformerSystem, self.scheduler_config, self.num_slots)
        if name in SYSTEMS:
            return partial(OrcaSystem, self.scheduler_config, self.num_slots, name.removeprefix("orca-"))
        raise ArgumentError("system", ", ".join(SYSTEMS), repr(name))


def sustainable_rate(
    run: Callable[[float], Summary], max_latency: float, min_rate: float, max_rate: float
) -> tuple[float, Summary] | None:
    """The highest rate, to about 1%, at which the mean normalised latency is at most `max_latency`, and what happens at
    this rate. None if the latency is higher at min_rate. run: of a rate in requests per second."""

    def try_at(rate: float) -> Summary | None:
        summary = run(rate)
        latency = summary.normalized_latency
        return summary if latency is not None and latency.mean <= max_latency else None

    best = try_at(min_rate)
    if best is None:
        return None
    low = min_rate
    while low < max_rate and (summary := try_at(min(2 * low, max_rate))) is not None:
        low, best = min(2 * low, max_rate), summary
    high = min(2 * low, max_rate)
    for _ in range(NUM_HALVINGS):
        if high <= low:
            break
        middle = (low * high) ** 0.5
        summary = try_at(middle)
        if summary is None:
            high = middle
        else:
            low, best = middle, summary
    return low, best
