"""What the op tests assert: the tolerance (the only one), equality bit for bit, a rejected call; and data to feed."""

import inspect
import math
import os
from collections.abc import Callable, Container, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from op_table import OPS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagedattn_ext import SharedMemoryGroup, ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN_BYTES = (0x7F, 0xFF)  # NaN in both float8 formats

# A group without other ranks, for tests of one process. The raw ops take its handle.
ONE_RANK = SharedMemoryGroup(SharedMemoryGroup.create(world_size=1), rank=0)

# The floor below which an error is not an error. ROUNDING is a share of the element: the one rounding at the store
# (four units in the last place for fp32, where the arithmetic is no finer than the store). NOISE is the noise of fp32
# arithmetic: a share of the largest element of the result, or of its terms if the caller says how large they are.
# ABSOLUTE is half an fp16 subnormal; elsewhere it is next to nothing, for results whose terms cancelled.
ROUNDING = {torch.float32: 4 * 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
NOISE = 2.0**-20
ABSOLUTE = {torch.float32: 2.0**-40, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-40}


def assert_close_to_reference(
    actual: Tensor, reference: Tensor, eager: Tensor | None = None, size_of_terms: float | Tensor = 0.0
) -> None:
    """|actual - reference| <= 2 * max|eager - reference| + floor, in every element; NaN is never close.

    `eager` is what plain PyTorch computes in actual's dtype. Without it the floor alone must do, which says that the
    result was computed in fp32 and rounded once. `size_of_terms` is for a result of few elements, all of which may be
    small because their terms cancelled, and then say nothing of the noise; nor does the error of `eager`, by luck 0. As
    a tensor it has the shape of the result, or one that broadcasts to it.
    """
    assert actual.shape == reference.shape, f"shape {tuple(actual.shape)}, expected {tuple(reference.shape)}"
    dtype, actual, reference = actual.dtype, actual.double(), reference.double()
    finite = reference.isfinite()
    if not finite.any():
        assert torch.equal(actual, reference)
        return
    size = torch.as_tensor(size_of_terms, dtype=torch.float64).clamp(min=reference[finite].abs().max().item())
    allowed = ROUNDING[dtype] * reference.abs() + ABSOLUTE[dtype] + NOISE * size
    if eager is not None:
        eager_error = (eager.double() - reference)[finite].abs().max()
        assert eager_error.isfinite(), "plain PyTorch gives no finite result here: no yardstick"
        allowed += 2 * eager_error
    error = (actual - reference).abs()
    close = (actual == reference) | (finite & (error <= allowed))  # equal infinities are close
    if close.all():
        return
    worst = torch.where(close, -math.inf, error.nan_to_num(nan=math.inf) / allowed).argmax()
    index = tuple(int(i) for i in torch.unravel_index(worst, actual.shape))
    pytest.fail(
        f"{dtype} {tuple(actual.shape)}: {int((~close).sum())} elements too far; worst at {index}: got "
        f"{actual[index]:.9g}, expected {reference[index]:.9g}, error {error[index]:.3g}, allowed {allowed[index]:.3g}"
    )


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers, so that NaN equals itself and -0 differs from 0."""
    same_width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.resolve_neg().contiguous().view(same_width)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    differ = bits(actual) != bits(expected)
    assert not differ.any(), f"{int(differ.sum())} elements differ, first at {differ.nonzero()[0].tolist()}"


def random_bits(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A tensor of any bit patterns, NaN of every kind among them: for ops that move elements and must not look."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def filled_with_nan(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Nothing but NaN; of one byte an element (float8, and uint8 that holds it) of both signs in turn."""
    if dtype.itemsize > 1:
        return torch.full(shape, math.nan, dtype=dtype, device=device)
    nan = torch.tensor(NAN_BYTES, dtype=torch.uint8, device=device).repeat(math.prod(shape) // 2 + 1)
    return nan[: math.prod(shape)].view(shape).view(dtype)


def with_row_gap(tensor: Tensor, gap: int, num_dims: int = 1) -> Tensor:
    """A copy of the tensor in which `gap` NaN elements follow each index of dim 0, like a slice of a fused qkv. With 2
    or 3 of `num_dims` they follow each index of dim 1 or 2, and one more index of NaN follows in the dims before."""
    sizes = [size + 1 for size in tensor.shape[1:num_dims]]
    buffer = filled_with_nan(
        len(tensor), *sizes, math.prod(tensor.shape[num_dims:]) + gap, dtype=tensor.dtype, device=tensor.device
    )
    inside = buffer[:, *(slice(size) for size in tensor.shape[1:num_dims]), : buffer.shape[-1] - gap]
    strided = inside.unflatten(-1, tensor.shape[num_dims:])
    strided.copy_(tensor)
    return strided


def assert_row_gap_untouched(*views: Tensor) -> None:
    """The gaps of tensors made by `with_row_gap` are still NaN. Tensors in one memory, each in the gaps of the other
    ones, are given together."""
    whole = views[0].new_empty(0)
    whole.set_(views[0].untyped_storage(), 0, (views[0].untyped_storage().nbytes() // whole.element_size(),))
    is_gap = torch.ones_like(whole, dtype=torch.bool)
    for view in views:
        is_gap.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    expected = filled_with_nan(len(whole), dtype=whole.dtype, device=whole.device)
    assert_same_bits(whole[is_gap], expected[is_gap])


def tensors_in(arguments: Mapping[str, object]) -> list[Tensor]:
    lists = (value if isinstance(value, list) else [value] for value in arguments.values())
    return [value for values in lists for value in values if isinstance(value, Tensor)]


def assert_raises_and_writes_nothing(
    function: Callable, arguments: Mapping[str, object], error: type[Exception], match: str
) -> None:
    """Values of index tensors included, which CUDA kernels' callers must ask for."""
    before = [(tensor, tensor.clone()) for tensor in tensors_in(arguments)]
    with pytest.raises(error, match=match), mock.patch.dict(os.environ, PAGEDATTN_CHECK="1"):
        function(**arguments)
    for tensor, copy in before:
        assert_same_bits(tensor, copy)


def to_device(arguments: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """The arguments with all tensors on the device, strides and all."""

    def moved(value: object) -> object:
        if isinstance(value, list):
            return [moved(element) for element in value]
        if not isinstance(value, Tensor) or value.device == device:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)

    return {name: moved(value) for name, value in arguments.items()}


def for_wrapper(op: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Of a raw op's arguments those that the wrapper takes."""
    return only(inspect.signature(getattr(ops, op)).parameters, arguments)


def assert_memory_is_checked(argument: str, fit: Tensor, call: Callable[[Any], object]) -> None:
    """`call` takes memory like `fit` for a result, and refuses memory that the result does not fit into before anything
    is written. argument: "function: argument", as errors begin."""
    call(fit.clone())
    with pytest.raises(ValueError, match=rf"^{argument.partition(':')[0]}: \w+: expected "):
        call(fit.new_zeros(2, *fit.shape))
    other = torch.int32 if fit.is_floating_point() else torch.float32
    for memory, message in (
        ([1], "expected a torch.Tensor, got list"),
        (torch.zeros(fit.shape, dtype=other), rf"expected .+, got (torch\.)?{str(other).removeprefix('torch.')}"),
        (torch.zeros_like(fit, device="meta"), "expected a tensor on cpu, got one on meta"),
        (fit.new_zeros(1).expand(fit.shape), "expected memory for each element, got an expanded tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{argument}: {message}"):
            call(memory)
        assert not isinstance(memory, Tensor) or memory.is_meta or not memory.double().any()


def only(names: Container[str], arguments: Mapping[str, object]) -> dict[str, object]:
    """Of a raw op's arguments those with these names, as a wrapper takes them."""
    return {name: ONE_RANK if name == "group" else value for name, value in arguments.items() if name in names}


def assert_rejected(op: str, arguments: Mapping[str, object], argument: str, error: type[Exception]) -> None:
    """The raw op raises RuntimeError and the wrapper `error`, both naming `argument`; neither writes anything.

    `arguments` are the raw op's; the wrapper gets those that it knows.
    """
    # What was put in place of a valid argument may be written for the CPU.
    device = next((tensor.device for tensor in tensors_in(arguments) if tensor.is_cuda), torch.device("cpu"))
    arguments = to_device(arguments, device)
    raw, wrapper = getattr(OPS, op), getattr(ops, op)
    message = rf"^{op}: {argument}: expected .+, got .+"
    assert_raises_and_writes_nothing(raw, arguments, RuntimeError, message)
    known = inspect.signature(wrapper).parameters
    if any(name in known for name in argument.strip("()").split("|")):
        assert_raises_and_writes_nothing(wrapper, for_wrapper(op, arguments), error, message)


class CountsConverted(TorchDispatchMode):
    """Within it, `rows` gets how many rows a tensor of this dtype has where torch converts it into another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.rows = dtype, set[int]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._to_copy.default and args[0].dtype == self.dtype:
            self.rows.add(len(args[0]))
        return op(*args, **kwargs or {})
