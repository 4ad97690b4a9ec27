"""Models, hardware and requests of a size that can be counted by hand."""

from random import Random
from typing import Any

from pagedattn_serve.async_engine.router import Router
from pagedattn_serve.config import UNBOUNDED, CacheConfig, SchedulerConfig
from pagedattn_simulate.cost_model import Hardware, ModelShape
from pagedattn_simulate.deployment import Deployment
from pagedattn_simulate.systems.system import System
from pagedattn_simulate.workload import SimulatedRequest, TraceEntry

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_size=2,
    num_parameters=1000,
    num_layer_parameters=600,
    num_head_parameters=400,
    max_model_len=64,
    parameter_bytes=2,
    token_bytes=10,
)
HARDWARE = Hardware(
    name="small",
    memory=10_000,
    weight_bytes=1e6,
    weight_flops=1e6,
    attention_bytes=1e6,
    attention_flops=1e6,
    host_bytes=1e5,
    link_bytes=1e6,
    link_seconds=1e-4,
    step_seconds=1e-3,
    sequence_seconds=1e-5,
    source="made up",
)


def request(num_prompt: int, num_output: int, num_sequences: int = 1, arrival: float = 0.0) -> SimulatedRequest:
    return SimulatedRequest(arrival, [*range(num_prompt)], num_output, num_sequences)


def run(system: System, num_steps: int) -> list[int]:
    """Requests in each step."""
    sizes = []
    for _ in range(num_steps):
        assert system.begin_step() is not None
        sizes.append(system.num_running)
        system.end_step(0.01)
    return sizes


def scheduler_config(**limits: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"max_model_len": 64, **limits})


def deployment(num_blocks: int = 20, num_replicas: int = 1, **options: Any) -> Deployment:
    """With blocks of 8."""
    return Deployment(
        shape=SHAPE,
        hardware=HARDWARE,
        num_ranks=options.pop("num_ranks", 1),
        num_replicas=num_replicas,
        scheduler_config=scheduler_config(max_model_len=options.pop("max_model_len", UNBOUNDED)),
        cache_config=CacheConfig(num_blocks=num_blocks, block_size=8, **options),
    )


def routing(num_replicas: int = 1) -> Router:
    router = Router(Random(0))
    for replica in range(num_replicas):
        router.start(replica, 1000)
    return router


def trace(*pairs: tuple[int, int], interval: float = 0.0) -> list[TraceEntry]:
    return [TraceEntry(i * interval, *pair) for i, pair in enumerate(pairs)]
