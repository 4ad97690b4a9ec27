"""What the modules with the functions of other libraries share: refusals, and their terms in ours."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import ops
from ._index_checks import check_indices, check_starts, num_seqs_of
from .ops import _call
from .ops._call import LARGEST_FP32, to_int64

T = TypeVar("T")


def expect_defaults(function: Callable[..., Any], **arguments: object) -> None:
    """Refuses arguments that ask for what is not offered: all but the defaults in the signature of `function`.

    None, 0 and False ask for nothing, and pass.
    """
    for name, value in arguments.items():
        if value is None or (not isinstance(value, Tensor) and not value):
            continue
        default = inspect.signature(function).parameters[name].default
        if isinstance(value, Tensor) or value != default:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{function.__qualname__}: {name}: expected {default!r}, got {got}")


def refuse_bools(function: Callable[..., Any], **scales: float | Tensor | None) -> None:
    """A bool is no scale, nor is a tensor of bools."""
    _call.refuse_bools(function.__qualname__, **scales)


def refuse_gradients(function: Callable[..., Any], **tensors: Tensor | None) -> None:
    """The ops refuse gradients, too, but under their own names of the arguments, and after a cache was written."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            _call.check_tensors(function.__qualname__, **{name: tensor})
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{function.__qualname__}: {name}: requires grad, but there is no backward: call it under "
                "torch.no_grad() or torch.inference_mode()"
            )


def kept(make: Callable[..., T]) -> Callable[..., T]:
    """Decorates a function that makes tensors of numbers, and of a device, its last argument. What it has made for the
    same arguments is kept, and must not be written to. It is made anew where something records how it is made, and of
    numbers in tensors, which may hold other numbers at the next call."""
    make_or_find = lru_cache(maxsize=32, typed=True)(make)  # typed: True is not the 1 that was checked before

    @wraps(make)
    def get(*args: Any) -> T:
        if is_recorded(args[-1]) or any(isinstance(arg, Tensor) for arg in args):
            return make(*args)
        return make_or_find(*args)

    return get


def is_recorded(device: torch.device) -> bool:
    """Whether something records what is called: torch.compile, a CPUGraph, a CUDA graph."""
    return (
        torch.compiler.is_compiling()
        or _get_current_dispatch_mode() is not None
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def is_one_scale(scale: float | Tensor | None) -> bool:
    """Whether a scale is the same for the whole cache: none, a float, or a tensor of one element, expanded or not."""
    if not isinstance(scale, Tensor):
        return True
    each = zip(scale.shape, scale.stride(), strict=True)
    return scale.numel() > 0 and all(size == 1 or stride == 0 for size, stride in each)


def call_as(
    function: Callable[..., Any], names: Mapping[str, str], op: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls `op` for `function`. Errors of the op name the function, and the function's own arguments.

    names: of arguments of the op, what the function calls them.
    """
    try:
        return op(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError) as error:
        if type(error) not in (ValueError, TypeError, RuntimeError):
            raise
        raise type(error)(_in_terms_of(function, names, str(error))) from None


def _in_terms_of(function: Callable[..., Any], names: Mapping[str, str], message: str) -> str:
    """An error of an op, "op: argument: text", as one of the function. In the text names with an underscore are
    replaced alone, because other names are words as well."""
    parts = re.fullmatch(r"[\w.]+: (\w+): (.*)", message, re.DOTALL)
    if not parts:
        return message
    argument, text = parts.groups()
    text = re.sub(r"[a-z]+(?:_[a-z]+)+", lambda name: names.get(name[0], name[0]), text)
    return f"{function.__qualname__}: {names.get(argument, argument)}: {text}"


def scale_tensor(function: Callable[..., Any], name: str, scale: float | Tensor | None) -> Tensor | None:
    """The scale of a cache as the ops take it, fp32 of one element; None for 1. A tensor may be one element expanded to
    any shape (a scale for each sequence and head, all the same). A number becomes a tensor on the CPU, where the ops
    take scales, whatever device the other tensors are on."""
    if scale is None or (isinstance(scale, float) and scale == 1):
        return None
    if isinstance(scale, Tensor) and scale.dtype == torch.float32 and scale.numel() == 1:
        return scale
    refuse_bools(function, **{name: scale})
    if not isinstance(scale, Tensor):
        if not isinstance(scale, (int, float)):
            raise TypeError(f"{function.__qualname__}: {name}: expected a number, got {type(scale).__name__}")
        if LARGEST_FP32 < abs(scale) < math.inf:
            raise ValueError(f"{function.__qualname__}: {name}: expected a finite number of float32, got {scale}")
        return torch.tensor([scale], dtype=torch.float32, device="cpu")
    if not is_one_scale(scale):
        raise ValueError(
            f"{function.__qualname__}: {name}: expected a scale for the whole cache (a float, or a tensor of one "
            f"element, expanded or not), got shape {list(scale.shape)}"
        )
    return to_fp32(function, name, scale[(0,) * scale.dim()]).reshape(1)


def check_scales(function: Callable[..., Any], **scales: float | Tensor) -> None:
    """Numbers, or tensors of one element."""
    refuse_bools(function, **scales)
    for name, scale in scales.items():
        if isinstance(scale, Tensor):
            if scale.numel() != 1:
                got = list(scale.shape)
                raise ValueError(f"{function.__qualname__}: {name}: expected one element, got shape {got}")
            check_real(function, **{name: scale})
            refuse_gradients(function, **{name: scale})
        elif not isinstance(scale, Real):
            raise TypeError(f"{function.__qualname__}: {name}: expected a number, got {type(scale).__name__}")
        elif isinstance(scale, int):
            to_int64(function.__qualname__, name, scale)


def packed_heads(tensor: Tensor) -> Tensor:
    """[..., num_heads, head_size] as the attention ops take it: a copy if heads do not follow each other, as slices of
    wider heads do not."""
    if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.layout != torch.strided:
        return tensor
    if tensor.stride()[-2:] == (tensor.shape[-1], 1):
        return tensor
    return tensor.contiguous()


def window_of(left: int | None) -> int | None:
    """The sliding_window of an inclusive window of `left` tokens before a row's own; None or less than 0 is no window.
    A sliding window counts the row's own token."""
    return None if left is None or left < 0 else left + 1


def sequences_of_rows(starts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Of each row of a ragged batch, its sequence and its place among the rows of the sequence; int64 [num_rows].

    starts: [num_seqs + 1], from 0 to num_rows.
    """
    return ops.batch_positions(starts, torch.zeros_like(starts[1:]), num_rows)


def check_ranks(function: Callable[..., Any], **tensors: tuple[Tensor, int]) -> None:
    for name, (tensor, rank) in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != rank or tensor.layout != torch.strided:
            _call.check_tensors(function.__qualname__, **{name: tensor})
            _call.check_rank(function.__qualname__, name, tensor, rank)


def check_shape(function: Callable[..., Any], name: str, tensor: Tensor | None, shape: Sequence[int]) -> None:
    """For what the op does not see as it came. None has any shape."""
    if tensor is None:
        return
    _call.check_tensors(function.__qualname__, **{name: tensor})
    if tensor.shape != shape:
        expected, got = list(shape), list(tensor.shape)
        raise ValueError(f"{function.__qualname__}: {name}: expected shape {expected}, got {got}")


def check_memory(
    function: Callable[..., Any],
    name: str,
    memory: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Memory that a caller gives for a result of this shape, dtype and device. None is no memory, and passes.

    Torch would repeat the result in memory of a larger shape, and cut off fractions in memory of ints. In memory of the
    meta device the result would be lost, and in memory that requires grad torch refuses it after a cache was written.

    dtype: None is any float dtype, to which the result is rounded.
    """
    if memory is None:
        return
    check_shape(function, name, memory, shape)
    is_right = memory.is_floating_point() if dtype is None else memory.dtype == dtype
    if not is_right:
        expected = "a float dtype" if dtype is None else f"dtype {str(dtype).removeprefix('torch.')}"
        got = str(memory.dtype).removeprefix("torch.")
        raise TypeError(f"{function.__qualname__}: {name}: expected {expected}, got {got}")
    if memory.device != device:
        raise ValueError(f"{function.__qualname__}: {name}: expected a tensor on {device}, got one on {memory.device}")
    refuse_expanded(function, **{name: memory})
    refuse_gradients(function, **{name: memory})


def refuse_expanded(function: Callable[..., Any], **memory: Tensor) -> None:
    """For memory that is written: several elements of an expanded tensor are one place, which can hold one of them."""
    for name, tensor in memory.items():
        if isinstance(tensor, Tensor) and tensor.is_contiguous():
            continue  # mostly, and soon told
        _call.check_tensors(function.__qualname__, **{name: tensor})
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{function.__qualname__}: {name}: expected memory for each element, got an expanded tensor"
            )


def check_real(function: Callable[..., Any], **tensors: Tensor | None) -> None:
    """For what is copied into another dtype: torch would drop what is imaginary."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_complex():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(f"{function.__qualname__}: {name}: expected a real dtype, got {dtype}")


def to_fp32(function: Callable[..., Any], name: str, tensor: Tensor) -> Tensor:
    check_real(function, **{name: tensor})
    return tensor.float()


def in_one_dtype(function: Callable[..., Any], **tensors: Tensor) -> list[Tensor]:
    """The tensors as they are if all have one dtype, otherwise in fp32."""
    if len({tensor.dtype for tensor in tensors.values()}) == 1:
        return [*tensors.values()]
    return [to_fp32(function, name, tensor) for name, tensor in tensors.items()]


def packed_rows(tensor: Tensor) -> Tensor:
    """A tensor as ops take rows: a copy if the dimensions from 1 on are not contiguous."""
    return tensor if tensor[:1].is_contiguous() else tensor.contiguous()


def starts_of_equal(num_seqs: int, num_rows: int, device: torch.device) -> Tensor:
    """query_start_loc, int32 [num_seqs + 1], of sequences that have num_rows rows each."""
    return torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_rows


def sequences_of_batch(function: Callable[..., Any], batch: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Where each sequence of [batch, seq_len, ...] begins in its rows, and the last ends. With cu_seqlens, where they
    begin and end in a batch of 1."""
    batch_size, seq_len = batch.shape[:2]
    if cu_seqlens is None:
        return torch.arange(batch_size + 1, device=batch.device) * seq_len
    num_seqs = num_seqs_of(function, "cu_seqlens", cu_seqlens)
    if batch_size != 1:
        raise ValueError(
            f"{function.__qualname__}: cu_seqlens: expected None with a batch of {batch_size}, got a tensor"
        )
    check_starts(function, "cu_seqlens", cu_seqlens, num_seqs, seq_len)
    return cu_seqlens


def starts_of_runs(function: Callable[..., Any], name: str, numbers: Tensor, shape: tuple[int, int]) -> Tensor:
    """Where sequences begin in the rows of [batch, seq_len, ...], and the last ends, int64. A sequence is a run of
    equal numbers within one of the batch.

    numbers: int32 or int64 [batch, seq_len], this shape.
    """
    check_shape(function, name, numbers, shape)
    check_indices(function, name, numbers.flatten())
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return torch.cat([begins.flatten().nonzero().squeeze(1), begins.new_tensor([begins.numel()], dtype=torch.int64)])


def states_before(
    function: Callable[..., Any], name: str, states: Tensor | None, shape: tuple[int, ...], like: Tensor
) -> Tensor:
    """fp32 memory of this shape for an op to update, with the given states in it, or zeros."""
    if states is None:
        return like.new_zeros(shape, dtype=torch.float32)
    check_shape(function, name, states, shape)
    check_real(function, **{name: states})
    return states.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def log_decay(function: Callable[..., Any], g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """fp32, the logarithm of a gate's decay, of what the decay is made of: -exp(A_log) * softplus(g + dt_bias).

    Args:
        g: [..., num_heads].
        A_log: [num_heads].
        dt_bias: [num_heads]; None is zeros.
    """
    _call.check_tensors(function.__qualname__, A_log=A_log)
    assert A_log is not None
    dt_bias = torch.zeros_like(A_log) if dt_bias is None else dt_bias
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_shape(function, name, tensor, g.shape[-1:])
    named = {"g": g, "A_log": A_log, "dt_bias": dt_bias}
    g, A_log, dt_bias = (to_fp32(function, name, tensor) for name, tensor in named.items())
    return -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)


def converted_rows(tensor: Tensor, rows: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """convert(tensor), contiguous. If `rows` are fewer than the rows of the tensor, only these are converted, and the
    others hold anything. So a call costs what its rows cost. The rows keep their numbers, so that an op checks `rows`
    as for the tensor itself.

    Args:
        tensor: [num_rows, ...].
        rows: of any shape. Numbers outside of the tensor are left to the op, which refuses them.
        convert: row by row.
    """
    if tensor.dim() == 0 or rows.numel() >= len(tensor):
        return convert(tensor).contiguous()
    rows = rows.flatten().to(tensor.device, torch.int64).clamp(0, len(tensor) - 1)
    converted = convert(tensor[rows])
    memory = converted.new_empty(len(tensor), *converted.shape[1:])
    memory[rows] = converted
    return memory


def write_to_slots(
    memory: Tensor, slots: Tensor, values: Tensor, is_written: Tensor, page_size: int | None = None
) -> None:
    """memory[slots] = values, where is_written. All shapes are known, so that a graph can record the call. On a GPU,
    and in a graph, a call that writes nothing writes to slot 0 what slot 0 holds.

    Args:
        memory: [num_slots, ...], or with a page_size [num_pages, page_size, ...]; any dtype.
        slots: int32 or int64 [num_values]; any number where nothing is written.
        values: [num_values, ...].
        is_written: bool [num_values].
    """
    if len(slots) == 0 or (slots.is_cpu and not is_recorded(slots.device) and not is_written.any()):
        return
    # What is not written becomes the first that is, once more.
    sources = torch.arange(len(slots), device=slots.device).where(is_written, is_written.int().argmax())
    slots = slots[sources].clamp_min(0)
    places = (slots,) if page_size is None else (slots // page_size, slots % page_size)
    memory[places] = values[sources].to(memory.dtype).where(is_written.any(), memory[places])
