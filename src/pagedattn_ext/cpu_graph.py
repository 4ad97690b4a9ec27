"""What a function computes on the CPU, captured once and replayed on the same memory without Python between the ops."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode
from torch.utils._pytree import tree_map_only

from . import _C
from .ops._call import raise_as_marked, tensors_in

ALLOCATIONS = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)  # leave nothing to replay


class CaptureError(RuntimeError):
    """Within a capture came what a replay could not repeat."""


class CPUGraph:
    """For the CPU what `torch.cuda.CUDAGraph` is for a GPU: a step of a model without the time that Python and torch
    spend between kernels. That is half of the time if the model or its weights are small, and rows are few.

    What Python does on the way, such as a branch, happens once, at the capture. Tensors stay where they are: a replay
    reads what the inputs hold at the replay, and writes its results into the tensors that the captured function
    returned. The graph keeps the memory of all tensors that the function met, including intermediate results, as long
    as the graph lives.

    A replay reads and writes this memory, whatever becomes of the tensors. If a tensor is given other memory, as
    `module.half()` or `parameter.data = ...` do with weights, replays go on with the old memory, so capture anew.
    Memory itself must not move while a graph has it, as it does in `Tensor.resize_`, in `Tensor.share_memory_`, and
    when a tensor goes through a queue of `torch.multiprocessing`: put `out.clone()` there.

    >>> graph = CPUGraph()
    >>> with torch.inference_mode(), graph.capture():
    ...     logits = model(token_ids)
    >>> token_ids.copy_(others)
    >>> graph.replay()
    """

    def __init__(self) -> None:
        self._capture: _Capture | None = None

    def capture(self) -> AbstractContextManager[object]:
        """A context. Within it, on this thread, the ops of this package are captured and not run: until `replay`, the
        tensors that they return are zeros. Ops of torch and of others are run, and run again at each replay, unless
        they only allocate memory or return views. The ops of this package that they call are run with them. Ops whose
        results are indices (`batch_positions`, `compute_slot_mapping` and `consecutive_block_tables`) are run as well,
        because the ops behind them look at these values.

        Under autocast its casts are captured as well, as ops of torch.

        Raises RuntimeError if this graph has a capture already, or if another capture is under way on this thread.
        Raises CaptureError, a RuntimeError, if a tensor is not on the CPU, or for an op that a replay could not repeat:
        its result is no tensor, as of `Tensor.item`; or the shape of its result depends on values, as of
        `torch.nonzero` or `x[mask]`; or it resizes memory. After any error within the context the graph is empty.

        `Tensor.tolist`, `Tensor.numpy` and `torch.tensor` of tensors read memory past torch's dispatcher, so a capture
        does not see them: replays go on with the values of the capture.
        """
        if self._capture is not None and self._capture.state in (_State.UNDER_WAY, _State.COMPLETE):
            raise RuntimeError(f"CPUGraph: expected a new graph, got one with a capture that is {self._capture.state}")
        if self._capture is None or self._capture.state is not _State.NEW:
            self._capture = _Capture() if "torch._dynamo" in sys.modules else _CaptureWithoutCompiler()
        return self._capture

    @property
    def num_bytes(self) -> int:
        """The memory of all results, including intermediate ones, that the graph keeps. Memory that tensors had before
        the capture, such as that of weights, does not count."""
        return 0 if self._capture is None else sum(self._capture.own_bytes.values())

    def reset(self) -> None:
        """Empty the graph, and end a capture of it that an interrupt has left under way on this thread, as one can that
        comes in the middle of the context's `__exit__`."""
        if self._capture is not None:
            self._capture.end()
            self._capture = None

    def replay(self) -> None:
        """Run all that was captured. Each op of this package first checks the values that its index tensors and scales
        hold by then.

        Raises ValueError with the op's own words if such a value is out of range. This op has written nothing, all ops
        before it have done their work, and none after it has run. The graph can be replayed again. Raises RuntimeError
        without a capture, after one that failed, and within one, which could not see what is replayed. Raises
        RuntimeError, before anything has run, if memory of the graph has moved. Raises RuntimeError if an op of torch
        gives a result of another shape than at the capture.
        """
        if _C.CpuGraph.is_capturing():
            raise RuntimeError("CPUGraph: expected a replay outside of captures, got one within a capture")
        if self._capture is None or self._capture.state is not _State.COMPLETE:
            got = "none" if self._capture is None else f"one that is {self._capture.state}"
            raise RuntimeError(f"CPUGraph: expected a complete capture, got {got}")
        # Tensors that were made in inference mode cannot be written to outside of it. The mode is not entered twice: an
        # interrupt as the inner one is left would bring the mode back when the outer one is over.
        inference_mode = nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()
        # Casts of autocast have been captured. An op gets what it got then.
        no_autocast = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
        self._capture.check_memory()
        with inference_mode, no_autocast:
            for step in self._capture.steps:
                step()


def run_at_replays(step: Callable[[], None]) -> None:
    """Within a capture on this thread: call this at each replay, behind what was captured so far."""
    _under_way.capture.add(step)


class _State(StrEnum):
    NEW = "new"
    UNDER_WAY = "under way"
    COMPLETE = "complete"
    FAILED = "failed"


_under_way = threading.local()  # its `capture`, within one


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each op that is called, and keeps the memory of its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], None]] = []
        self.state = _State.NEW
        self.own_bytes: dict[int, int] = {}  # of memory that the captured function has allocated, by address
        self._kept: dict[int, UntypedStorage] = {}  # all memory that has been met, by torch's own key
        self._addresses: list[int] = []  # of what is kept, at the capture
        self._graph = _C.CpuGraph()
        self._is_ended = False

    def __enter__(self) -> "_Capture":
        if self.state is not _State.NEW:
            raise RuntimeError(f"CPUGraph: expected a new graph, got one with a capture that is {self.state}")
        torch.clear_autocast_cache()  # a weight that was cast before the capture would be cast no more at replays
        self._begin()
        self.state = _State.UNDER_WAY
        _under_way.capture = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._is_ended:  # by a reset of the graph within the context
            return
        self._graph.end_capture()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _under_way.capture = None
        is_whole = exception[0] is None and self.state is _State.UNDER_WAY
        self.state = _State.COMPLETE if is_whole else _State.FAILED

    def end(self) -> None:
        """Undo what `__enter__` has done and `__exit__` has not."""
        self._graph.end_capture()
        if _get_current_dispatch_mode() is self:
            _pop_mode()
            _under_way.capture = None
            self._is_ended = True

    def add(self, step: Callable[[], None]) -> None:
        """A step between what was captured so far and what comes."""
        self._graph.end_capture()
        self.steps.append(step)
        self._begin()

    def check_memory(self) -> None:
        """Raise if memory is elsewhere than at the capture, as the ops of this package go on with the old addresses."""
        if [*map(UntypedStorage.data_ptr, self._kept.values())] != self._addresses:
            raise RuntimeError(
                "CPUGraph: expected memory that stays where it was at the capture, got a tensor whose memory has moved,"
                " as in share_memory_, in a queue of torch.multiprocessing and in resize_: capture anew, and share or "
                "resize a clone()"
            )

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch wraps this method, so that its compiler, if it compiles at the time, leaves the method alone."""
        return self._see(op, types, args, kwargs or {})

    def _see(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """types: of arguments. Some say themselves what an op does, as quantized weights of torchao do; what they call
        comes here in turn."""
        if any(each.__torch_dispatch__ is not Tensor.__torch_dispatch__ for each in types):
            return NotImplemented
        inputs = tensors_in((args, kwargs))
        self._keep(op, inputs)  # results of earlier ops are kept already
        addresses = _addresses(inputs)
        if _has_shape_by_values(op, args):
            self._refuse(f"expected shapes that do not depend on values, got {op}, whose result's does")
        is_own = op.namespace == _C.op_namespace
        result = op(*args, **kwargs) if is_own else self._run(op, args, kwargs)
        results = tensors_in(result)
        new = {storage.data_ptr(): storage.nbytes() for storage in self._keep(op, results)}
        self.own_bytes |= new
        if any(before not in (0, after) for before, after in zip(addresses, _addresses(inputs), strict=True)):
            self._refuse(f"expected tensors that stay in their memory, got {op}, which moves one")
        is_allocation = op.namespace == "aten" and op._opname in ALLOCATIONS
        for tensor in results:
            # Else ops of torch behind this one would be run on NaN, or on indices out of range, by luck, and might
            # raise. Ops of this package that make memory for ints have been run.
            is_unwritten = is_allocation or (is_own and tensor.is_floating_point())
            if is_unwritten and tensor.untyped_storage().data_ptr() in new:
                tensor.zero_()
        is_view = torch.Tag.inplace_view in op.tags or (op.is_view and {*_addresses(results)} <= {*addresses})
        if not is_own and not is_allocation and not is_view:
            if not results:
                self._refuse(f"expected ops that return tensors, got {op}, which a replay would miss")
            own = {id(tensor): tensor.detach() for tensor in inputs + results}  # which nobody gives other memory
            args, kwargs, results = tree_map_only(Tensor, lambda tensor: own[id(tensor)], (args, kwargs, results))
            self.add(partial(_run_again, op, args, kwargs, results))
        return result

    def _run(self, op: Any, args: Any, kwargs: Any) -> Any:
        """An op of torch or of others, not captured. What it calls within is not seen here, so ops of this package run
        there, whenever the op does."""
        self._graph.end_capture()
        try:
            return op(*args, **kwargs)
        finally:
            self._graph.begin_capture()
            _under_way.capture = self  # after captures within the op

    def _begin(self) -> None:
        self._graph = _C.CpuGraph()
        self.steps.append(partial(_replay, self._graph))
        self._graph.begin_capture()

    def _refuse(self, message: str) -> NoReturn:
        """Raise. A caller who catches the error must not get a graph that lacks what was refused."""
        self.state = _State.FAILED
        raise CaptureError(f"CPUGraph: {message}")

    def _keep(self, op: Any, tensors: list[Tensor]) -> list[UntypedStorage]:
        """The memory among it that was not kept before."""
        new = []
        for tensor in tensors:
            if not tensor.is_cpu:
                self._refuse(f"expected tensors on the CPU, got one on {tensor.device} in {op}")
            if tensor.layout != torch.strided:
                self._refuse(f"expected strided tensors, got one of layout {tensor.layout} in {op}")
            storage = tensor.untyped_storage()
            if storage._cdata not in self._kept and storage.data_ptr() != 0:  # without elements it may get memory yet
                self._kept[storage._cdata] = storage
                self._addresses.append(storage.data_ptr())
                new.append(storage)
        return new


class _CaptureWithoutCompiler(_Capture):  # type: ignore[no-untyped-call]
    """A capture that begins before anything has imported torch's compiler. The wrapper of `__torch_dispatch__` imports
    the compiler for each mode, which takes two seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no wrapper here

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "torch._dynamo" in sys.modules:  # something has compiled within the capture
            return super().__torch_dispatch__(op, types, args, kwargs)
        return self._see(op, types, args, kwargs or {})


def _has_shape_by_values(op: Any, args: Any) -> bool:
    """Whether the shape of the result depends on the values of the arguments."""
    if op is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in op.tags


def _replay(graph: _C.CpuGraph) -> None:
    try:
        graph.replay()
    except RuntimeError as error:
        raise_as_marked(error)
        raise


def _run_again(op: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
    for old, new in zip(results, tensors_in(op(*args, **kwargs)), strict=True):
        if new is not old:
            if new.shape != old.shape:
                expected = f"expected a result of shape {list(old.shape)} from {op}, as at the capture"
                raise RuntimeError(f"CPUGraph: {expected}, got {list(new.shape)}")
            old.copy_(new)


def _addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]
