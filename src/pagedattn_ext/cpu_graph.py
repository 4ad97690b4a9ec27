"""What a function computes on the CPU, captured once and replayed on the same memory without Python between the ops."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode

from . import _C
from .inference_mode import inference_mode
from .ops._call import tensors_in

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # leave nothing to replay


class CPUGraph:
    """For the CPU what `torch.cuda.CUDAGraph` is for a GPU: a step of a model without what Python and torch spend
    between its kernels, which is half of the time where a model is small, or its weights, and rows are few.

    What Python does on the way, such as a branch, happens once. Tensors stay where they are: a replay reads what the
    inputs hold then, and writes its results into the tensors that the captured function returned. The graph keeps all
    tensors that the function met; what it computed between them takes memory as long as the graph lives.

    >>> graph = CPUGraph()
    >>> with torch.inference_mode(), graph.capture():
    ...     logits = model(token_ids)
    >>> token_ids.copy_(others)
    >>> graph.replay()
    """

    def __init__(self) -> None:
        self._capture: _Capture | None = None

    def capture(self) -> AbstractContextManager[object]:
        """A context. Within it, on this thread, the ops of this package are captured and not run, so their results are
        undefined until `replay`; ops of torch are run and, unless they only allocate memory or return views, run again
        at each replay.

        Raises RuntimeError if there is a capture already, this graph's or another one on this thread; where a tensor
        is not on the CPU; and for an op with a result that is no tensor, as `Tensor.item`: a replay could not take it
        into account. After any error within it the graph is empty.
        """
        if self._capture is not None and self._capture.is_complete:
            raise RuntimeError("CPUGraph: expected a new graph, got one with a capture")
        self._capture = _Capture()
        return self._capture

    def reset(self) -> None:
        """Empty the graph, and end a capture of it that an interrupt has left under way on this thread, as one can that
        comes in the middle of the context's `__exit__`."""
        if self._capture is not None:
            self._capture.end()
            self._capture = None

    @inference_mode()  # or what was made in that mode could not be written to outside of it
    def replay(self) -> None:
        """Run all that was captured. Values that an op checks at its door, such as block numbers, are not checked
        again."""
        if self._capture is not None and self._capture.is_complete:
            for step in self._capture.steps:
                step()


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each op, with the memory of its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], None]] = []
        self.is_complete = False
        self._kept: list[Tensor] = []
        self._graph = _C.CpuGraph()

    def __enter__(self) -> "_Capture":
        self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._graph.end_capture()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.is_complete = exception[0] is None

    def end(self) -> None:
        """Undo what `__enter__` has done and `__exit__` has not."""
        self._graph.end_capture()
        if _get_current_dispatch_mode() is self:
            _pop_mode()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        self._keep(op, inputs)
        result = op(*args, **kwargs)
        results = tensors_in(result)
        self._keep(op, results)
        is_captured = op.namespace == "pagedattn_ext" or op._opname in ALLOCATIONS
        if not is_captured and not (op.is_view and _share_memory(results, inputs)):
            if not results:
                raise RuntimeError(f"CPUGraph: expected ops that return tensors, got {op}, which a replay would miss")
            self._graph.end_capture()
            self.steps.append(partial(_run_again, op, args, kwargs, results))
            self._begin()
        return result

    def _begin(self) -> None:
        self._graph = _C.CpuGraph()
        self.steps.append(self._graph.replay)
        self._graph.begin_capture()

    def _keep(self, op: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_cpu:
                raise RuntimeError(f"CPUGraph: expected tensors on the CPU, got one on {tensor.device} in {op}")
            self._kept.append(tensor)


def _run_again(op: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
    for old, new in zip(results, tensors_in(op(*args, **kwargs)), strict=True):
        if new is not old:
            old.copy_(new)


def _share_memory(results: list[Tensor], inputs: list[Tensor]) -> bool:
    memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return all(tensor.untyped_storage().data_ptr() in memory for tensor in results)
