"""`Executor`: runs each batch on all ranks that share a model.

Rank 0, the process of the engine, sends the other ranks what the model reads, runs its own slice, and samples.
"""

import torch

from pagedattn_serve.distributed.messages import Step, digest
from pagedattn_serve.distributed.pipeline import cut, run_step, watch_layers
from pagedattn_serve.distributed.workers import Workers
from pagedattn_serve.errors import ExecutorDeadError, describe
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.execution.sampler import SamplerOutput
from pagedattn_serve.scheduling.sequence import ScheduledBatch


class Executor:
    """A `BatchRunner` on several ranks. runner: of rank 0. The others are making their caches (`Workers.order_caches`).

    Raises ExecutorDeadError if a rank has died or does not answer: then nothing runs any more.
    """

    def __init__(self, workers: Workers, runner: ModelRunner) -> None:
        self._workers = workers
        self._runner = runner
        watch_layers(runner.model, workers.communicator)
        self._are_in_step = False  # whether all ranks have done the same, and wait for the next step
        workers.wait_until_ready()
        try:
            self._join()
        except RuntimeError as error:  # at the start the caller would take it for a lack of memory
            raise ExecutorDeadError(f"the ranks could not come together: {error}") from error

    @property
    def can_run_again(self) -> bool:
        return self._are_in_step and self._runner.can_run_again

    def check_health(self) -> None:
        self._workers.check_health()

    def find_hang(self) -> str | None:
        return self._workers.find_hang()

    def at_work(self) -> bool:
        return self._workers.at_work()

    def _join(self) -> None:
        self._workers.raise_if_dead()
        self._runner.drop_graphs()  # which have the old group
        self._workers.join()
        self._are_in_step = True

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> SamplerOutput:
        """An error of another rank is a RuntimeError that names the rank."""
        if not self._are_in_step:
            self._join()
        self._are_in_step = False
        inputs = self._runner.prepare_inputs(batch) if batch.sequences else None
        cuts = [] if inputs is None else cut(len(inputs.token_ids), self._workers.communicator)
        ran = None
        try:
            self._workers.send_step(Step(*batch.copies, batch.table_writes, inputs, cuts))
            self._runner.make_copies(*batch.copies)
            if inputs is not None:
                ran = run_step(self._runner, self._workers.communicator, inputs, cuts)
                if self._workers.checks_inputs:
                    tables = self._runner.tables_of(inputs).numpy()
                    self._workers.check_digests(digest(inputs, tables, self._runner.block_size))
            self._workers.communicator.finish_step()
        except Exception as error:
            self._workers.communicator.abort(f"rank 0: {describe(error)}")
            self._workers.raise_cause(error)
            raise
        except BaseException as interrupt:
            self._workers.communicator.abort(f"rank 0: {describe(interrupt)}")
            self._workers.end_steps()
            raise
        self._are_in_step = True
        return SamplerOutput() if ran is None else self._runner.sample(batch, ran)
