"""Where the results of a request first differ: in which layer, and by which op.

A request that got other bits runs once more, and so does the same request alone. Each op and each module of the model
is seen as it ends, and of what it gives, the rows of the request's tokens. The first of them whose row has other bits
than it has alone is where the difference arose.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.execution.model_runner import ModelRunner, StepInputs
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.scheduling.sequence import ScheduledBatch
from pagedattn_serve.verification.conditions import ALONE, Condition, run_cases
from pagedattn_serve.verification.workload import Case

OURS = "pagedattn_ext"
MODULE = "the module"
# Memory that nothing has been written to; and rows that others are moved to, as those of an expert.
NOT_RESULTS = ("aten::empty", "aten::new_empty", "aten::index")

# What ended: the module, what ended in it, and how many of its kind had ended in the module before.
Place = tuple[str, str, int]


class Seen(NamedTuple):
    """name: of an op, or MODULE. digest: of the bits of a row."""

    name: str
    digest: int


class Origin(NamedTuple):
    """Where a difference arose. module: its name in the model. op: the first that gave other bits, or MODULE.

    position: of the token in its sequence. num_rows: of the step in which the token ran.
    """

    module: str
    op: str
    position: int
    num_rows: int

    def __str__(self) -> str:
        return (
            f"{self.module or 'the model itself'}: {self.op}, in the row of position {self.position}, "
            f"in a step of {self.num_rows:,} rows"
        )


# Of each token of a request: all that ended in its step. A token is known by itself and those before it.
Rows = dict[tuple[int, ...], dict[Place, Seen]]


def find_origin(args: EngineArgs, cases: Sequence[Case], case: Case, condition: Condition) -> Origin | None:
    """The first op whose results for the case differ from those of the case alone; None if all are the same this time.

    args: of the engine that ran the case alone. Both engines run without CPU graphs, whose ops nobody sees.
    """
    with _watched(LLMEngine.from_engine_args(replace(args, enforce_eager=True)), case, {}) as (engine, first):
        run_cases(engine, [case], ALONE)
    del engine
    gc.collect()
    options = {**(condition.options or {}), "enforce_eager": True}
    with _watched(LLMEngine.from_engine_args(replace(args, **options)), case, first.rows) as (engine, second):
        run_cases(engine, cases, condition)
    return second.origin


@contextmanager
def _watched(engine: LLMEngine, case: Case, expected: Rows) -> Iterator[tuple[LLMEngine, "_Trace"]]:
    runner = engine.model_runner
    trace = _Trace(runner, case, expected)
    with ExitStack() as undo:
        for name, module in runner.model.named_modules():
            undo.callback(module.register_forward_pre_hook(partial(trace.enter, name)).remove)
            undo.callback(module.register_forward_hook(partial(trace.leave, name)).remove)
        prepare_inputs, run_model = runner.prepare_inputs, runner.run_model

        def prepare(batch: ScheduledBatch) -> StepInputs:
            inputs = prepare_inputs(batch)
            trace.begin(batch, inputs)
            return inputs

        def run(inputs: StepInputs, carried: Tensor | None = None) -> Any:
            with trace:
                return run_model(inputs, carried)

        runner.prepare_inputs, runner.run_model = prepare, run  # type: ignore[method-assign]
        undo.callback(vars(runner).pop, "prepare_inputs")
        undo.callback(vars(runner).pop, "run_model")
        yield engine, trace


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the ops while it is entered. rows: what was seen of the case's tokens. origin: the first that is not as
    expected."""

    def __init__(self, runner: ModelRunner, case: Case, expected: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: Rows = {}
        self.origin: Origin | None = None
        self._case = case
        self._expected = expected
        self._is_native = isinstance(runner.model, NativeCausalLM)
        self._caches = {
            tensor.untyped_storage().data_ptr() for cache in runner.cache_engine.kv_caches for tensor in cache[:2]
        }
        self._modules: list[str] = []  # that run, from the outside in
        self._of_step: list[dict[int, tuple[int, ...]]] = []  # the case's tokens by row, for each way to count rows
        self._nums_rows: list[int] = []
        self._seen: Counter[tuple[str, str]] = Counter()
        self._is_looking = False  # at a result, with ops of its own

    def begin(self, batch: ScheduledBatch, inputs: StepInputs) -> None:
        """A step is about to run."""
        tokens_of_row: dict[int, tuple[int, ...]] = {}
        row = 0
        for scheduled in batch.sequences:
            sequence, begin = scheduled.sequence, scheduled.sequence.num_computed_tokens
            count = scheduled.num_new_tokens + len(scheduled.draft_token_ids)
            if self._is_watched(sequence.sampling):
                tokens = (*sequence.tokens(0, begin + scheduled.num_new_tokens), *scheduled.draft_token_ids)
                tokens_of_row.update((row + i, tokens[: begin + i + 1]) for i in range(count))
            row += count
        last_rows = inputs.rows_of_last_layer()
        of_last = [] if last_rows is None else [last_rows[0]]
        numbered = [np.arange(row), *of_last, inputs.sampling_rows]
        self._nums_rows = [len(rows) for rows in numbered]
        self._of_step = [
            {i: tokens_of_row[each] for i, each in enumerate(rows.tolist()) if each in tokens_of_row}
            for rows in numbered
        ]
        self._modules.clear()
        self._seen.clear()

    def _is_watched(self, state: SamplingState) -> bool:
        return (
            state.sampling_params.seed == self._case.params.seed
            and state.prompt_token_ids == self._case.prompt_token_ids
        )

    def enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._modules.append(name)

    def leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._modules.pop()
        self._see(name, MODULE, MODULE, _tensors(output))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if not is_view and not self._is_looking and not schema.name.startswith(NOT_RESULTS):
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
            written = [
                given[argument.name]
                for argument in schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
            ]
            # An op of ours may have another name in a step of decodes, so it is known by its turn.
            kind = OURS if schema.name.startswith(OURS) else schema.name
            self._see(self._modules[-1] if self._modules else "", kind, schema.name, _tensors([result, written]))
        return result

    def _see(self, module: str, kind: str, name: str, tensors: list[Tensor]) -> None:
        self._is_looking = True
        for tensor in tensors:
            place = module, kind, self._seen[module, kind]
            self._seen[module, kind] += 1
            if self.origin is None and (counted := self._rows_of(tensor)) is not None:
                flat = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
                rows = flat.reshape(self._nums_rows[counted], -1)
                for row, tokens in self._of_step[counted].items():
                    self._compare(tokens, place, Seen(name, hash(rows[row].tobytes())))
        self._is_looking = False

    def _rows_of(self, tensor: Tensor) -> int | None:
        """By which of the ways to count rows the tensor has one for each."""
        if not tensor.is_floating_point() or tensor.dim() < 2 or tensor.untyped_storage().data_ptr() in self._caches:
            return None
        if not self._is_native and tensor.dim() == 3 and len(tensor) == 1 and tensor.shape[1] == self._nums_rows[0]:
            return 0  # transformers' rows are a batch of one
        return next((i for i, number in enumerate(self._nums_rows) if number == len(tensor) > 0), None)

    def _compare(self, tokens: tuple[int, ...], place: Place, seen: Seen) -> None:
        of_token = self.rows.setdefault(tokens, {})
        of_token[place] = seen
        expected = self._expected.get(tokens, {}).get(place)
        if expected is not None and expected.digest != seen.digest:
            self.origin = Origin(place[0], seen.name, len(tokens) - 1, self._nums_rows[0])


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []
