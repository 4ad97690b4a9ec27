"""Orca and FasterTransformer for real: the schedules of pagedattn_simulate.systems on the engine's own runner.

A range of adjacent slots is blocks that happen to be adjacent, so model, ops and sampler are those of the engine, and
each request gets the same tokens. Rows of FasterTransformer that are done run on until their batch is done, as they do
there; prompts are not padded, because the ops take rows of any length.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from pagedattn_serve import LLMEngine, SamplingParams
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.scheduling.sequence import ScheduledBatch, ScheduledSequence, Sequence
from pagedattn_simulate.systems.faster_transformer import FasterTransformerSystem
from pagedattn_simulate.systems.orca import RESERVATIONS, OrcaSystem
from pagedattn_simulate.systems.system import ReservingSystem
from pagedattn_simulate.workload import SimulatedRequest
from serve.run import Run
from serve.workloads import Request

GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class BaselineRun(Run):
    mean_batch_size: float  # requests in a step
    used_slots: float  # share of all slots that holds tokens; mean of all steps
    normalized_latency: float  # seconds until a request is told, for each of its tokens; mean of all requests


def make_systems(engine: LLMEngine) -> dict[str, Callable[[], ReservingSystem]]:
    """Ways to make each system, for the cache and the limits of an engine."""
    config, manager = engine.scheduler.config, engine.scheduler.block_manager
    num_slots, block_size = manager.num_blocks * manager.block_size, manager.block_size

    def orca(reservation: str) -> Callable[[], ReservingSystem]:
        return lambda: OrcaSystem(config, num_slots, reservation, block_size)

    systems = {f"orca-{reservation}": orca(reservation) for reservation in RESERVATIONS}
    return {**systems, "fastertransformer": lambda: FasterTransformerSystem(config, num_slots)}


def serve_baseline(engine: LLMEngine, system: ReservingSystem, requests: list[Request]) -> BaselineRun:
    """Serve requests that are all there at once. engine: idle; its runner and its cache are used."""
    runner, manager = engine.model_runner, engine.scheduler.block_manager
    sequences: dict[tuple[SimulatedRequest, int], Sequence] = {}
    tables: dict[Sequence, list[int]] = {}
    waiting = [SimulatedRequest(0.0, request.prompt_token_ids, request.max_tokens) for request in requests]
    for request in waiting:
        system.add(request)
    batch_sizes, used, latencies = [], [], []
    cpu_started, started = time.process_time(), time.monotonic()
    while system.begin_step() is not None:
        batch = ScheduledBatch()
        for row in system.rows():
            sequence = sequences.get((row.request, row.output_idx))
            if sequence is None:
                sequence = Sequence(str(len(sequences)), row.request.prompt_token_ids)
                sequence.sampling = SamplingState(GREEDY, sequence.prompt_token_ids, sequence.output_token_ids)
                sequences[row.request, row.output_idx] = sequence
                first = row.first_slot // manager.block_size
                tables[sequence] = [*range(first, first + row.num_slots // manager.block_size)]
            if sequence.num_tokens <= row.num_slots:  # else its row is full, and it waits for the batch
                manager.table_array.write(0, len(batch.sequences), 0, tables[sequence])
                batch.sequences.append(ScheduledSequence(sequence, sequence.num_uncomputed_tokens, num_samples=1))
        batch_sizes.append(system.num_running)
        used.append(system.memory().used)
        token_ids = runner.execute(batch).token_ids
        for scheduled, token_id in zip(batch.sequences, token_ids, strict=True):
            scheduled.sequence.num_computed_tokens += scheduled.num_new_tokens
            scheduled.sequence.output_token_ids.append(token_id)
        now = time.monotonic() - started
        latencies += [now / request.num_output_tokens for request in system.end_step(0.0).finished]
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    outputs = [sequences[request, 0].output_token_ids[: request.num_output_tokens] for request in waiting]
    num_slots = manager.num_blocks * manager.block_size
    return BaselineRun(
        seconds, cpu_seconds, outputs, mean(batch_sizes), mean(used) / num_slots, normalized_latency=mean(latencies)
    )
