"""What the functions of all families share: the call of a raw op, with its checks and its errors."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from pagedattn_ext import _C

SEVERAL_DEVICES = "the tensors are on several devices"
LARGEST_FP32 = torch.finfo(torch.float32).max
MAYBE_ON_CPU = ("k_scale", "v_scale", "block_mapping")  # wherever the other tensors are

NAMESPACE = _C.op_namespace
overloads: dict[str, Any] = {}  # each op has one overload; torch would look for op and overload at every call
# Torch's names of types in a schema, in words.
_KINDS = {
    "Tensor": "a torch.Tensor",
    "List[Tensor]": "a list of tensors",
    "int": "an int",
    "float": "a number",
    "bool": "a bool",
    "str": "a str",
}


class _Number(NamedTuple):
    """An argument of an op that is a number, or a dtype, which torch reads as one. kind: its type in the schema. plain:
    the type of values that need no further look."""

    place: int
    name: str
    kind: str
    plain: type


_numbers: dict[str, tuple[_Number, ...]] = {}  # of each op
_argument_names: dict[str, tuple[str, ...]] = {}  # of each op
_PLAIN = {"int": int, "float": float, "ScalarType": torch.dtype}


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a raw op and gives its errors the Python types that `pagedattn_ext.ops` promises."""
    op = overloads[name]
    if forward_ad._current_level >= 0 or (
        is_grad_enabled()
        and (_any_requires_grad(args) or (kwargs and _any_requires_grad(kwargs.values())))  # kwargs are rare
    ):
        _refuse_derivatives(name, args, kwargs)
    num_args = len(args)
    for place, argument, kind, plain in _numbers[name]:
        value = args[place] if place < num_args else kwargs.get(argument)
        if value is not None and type(value) is not plain:
            _check_number(name, argument, kind, value)
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        raise_as_marked(error)
        if re.match(r'torch_call_dispatcher\( "aten::(new_)?empty"', str(error)):  # torch's reason is lost on the way
            raise MemoryError(f"{name}: torch cannot allocate the memory for a result") from None
        if isinstance(error, NotImplementedError) or SEVERAL_DEVICES in str(error):
            _name_other_device_or_layout(name, args, kwargs)  # torch's error does not say which argument differs
        raise


def given(optional: dict[str, Any]) -> dict[str, Any]:
    """Optional arguments without those that are None. Torch takes a quarter of a microsecond to read one."""
    return {name: value for name, value in optional.items() if value is not None}


def raise_as_marked(error: RuntimeError) -> None:
    """Raise a raw op's error as the type that its mark names, without the mark (csrc/marked_errors.h). Torch's own
    error for an argument that a schema does not take becomes one in the words of the ops: a TypeError, or a ValueError
    for an int of more than 64 bits. Any other error is left to the caller."""
    message = str(error)
    for marked in (TypeError, ValueError, RuntimeError):
        mark = f" ({marked.__name__})"
        if message.endswith(mark):
            raise marked(message.removesuffix(mark)) from None
    wrong_type = re.match(
        rf"{NAMESPACE}::(\w+)\(\) Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'",
        message,
    )
    if wrong_type:
        op, expected, argument, got = wrong_type.groups()
        kind = expected.removeprefix("Optional[").removesuffix("]") if expected.startswith("Optional") else expected
        if kind == got == "int":
            raise ValueError(f"{op}: {argument}: expected an int of 64 bits, got a larger one") from None
        got = f"a {got} of something else" if kind == "List[Tensor]" and got in ("list", "tuple") else got
        or_none = "" if kind == expected else " or None"
        raise TypeError(f"{op}: {argument}: expected {_KINDS.get(kind, kind)}{or_none}, got {got}") from None


def call_on_cpu(name: str, *args: Any) -> Any:
    """`call`, for an op that has kernels for the CPU alone."""
    try:
        return call(name, *args)
    except NotImplementedError:
        arguments = sorted(_arguments(overloads[name], args, {}), key=lambda item: item[0].is_write)
        for argument, tensors in arguments:
            for tensor in tensors:
                if not tensor.is_cpu:
                    message = f"{name}: {argument.name}: expected a tensor on cpu, got one on {tensor.device}"
                    raise ValueError(message) from None
        raise


def _arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, list[Tensor]]]:
    """Each argument that holds tensors, as its entry in the schema and these tensors."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        yield argument, tensors_in(value)
    for argument in op._schema.arguments:
        if argument.name in kwargs:
            yield argument, tensors_in(kwargs[argument.name])


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of a value: a tensor itself, or tensors in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for element in values for tensor in tensors_in(element)]


def _name_other_device_or_layout(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ValueError if the tensors are on several devices, or if one is not strided, and TypeError if one is
    quantized. The first input says which device is expected. Outputs, which a wrapper may have allocated, are compared
    after the inputs; tensors that may be on the CPU come last."""

    def rank(item: tuple[Any, Tensor]) -> tuple[bool, bool]:
        return item[0].name in MAYBE_ON_CPU, item[0].is_write

    tensors = [
        (argument, tensor) for argument, tensors in _arguments(overloads[name], args, kwargs) for tensor in tensors
    ]
    tensors.sort(key=rank)
    for argument, tensor in tensors:
        check_tensors(name, **{argument.name: tensor})
        if tensor.is_nested:
            raise ValueError(f"{name}: {argument.name}: expected a strided tensor, got a nested one") from None
        if tensor.is_quantized:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(f"{name}: {argument.name}: expected plain numbers, got quantized ones ({dtype})") from None
        expected = tensors[0][1].device
        if tensor.device != expected and not (argument.name in MAYBE_ON_CPU and tensor.is_cpu):
            message = f"{name}: {argument.name}: expected a tensor on {expected}, got one on {tensor.device}"
            raise ValueError(message) from None


def check_one_device(op: str, *values: object) -> None:
    """For a fake kernel, which torch also calls if one meta tensor is among real ones."""
    if len({value.device for value in values if isinstance(value, Tensor)}) > 1:
        raise RuntimeError(f"{op}: {SEVERAL_DEVICES}")


def _any_requires_grad(values: Iterable[object]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)) and _any_requires_grad(value):
            return True
    return False


def _refuse_derivatives(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An op writes without autograd's knowledge: a gradient or a tangent would be lost, and nothing would say so.

    Dynamo traces this function, and cannot iterate over a schema.
    """
    for argument, value in (*zip(_argument_names[name], args, strict=False), *kwargs.items()):
        for tensor in tensors_in(value):
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise RuntimeError(
                    f"{name}: {argument}: requires grad, but the ops have no backward: call them under "
                    "torch.no_grad() or torch.inference_mode()"
                )
            if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
                raise RuntimeError(
                    f"{name}: {argument}: carries a tangent, but the ops have no forward-mode derivative"
                )


def empty_like(op: str, input: Tensor) -> Tensor:
    """A contiguous tensor for what an op makes of its input."""
    if not isinstance(input, Tensor) or input.layout != torch.strided:
        check_tensors(op, input=input)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def check_tensors(op: str, **tensors: object) -> None:
    """For functions that look at an argument before the op does."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise ValueError(f"{op}: {name}: expected a strided tensor, got one of layout {tensor.layout}") from None


def check_float(op: str, **tensors: Tensor) -> None:
    """For functions that convert an argument before the op sees it."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            got = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(f"{op}: {name}: expected dtype float32, float16 or bfloat16, got {got}")


def check_rank(op: str, name: str, tensor: Tensor, rank: int) -> None:
    if not isinstance(tensor, Tensor):
        check_tensors(op, **{name: tensor})
    if tensor.dim() != rank:
        raise ValueError(f"{op}: {name}: expected {rank} dimensions, got {tensor.dim()} (shape {list(tensor.shape)})")


def check_bool(op: str, name: str, value: object) -> None:
    """Torch would take None as False."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name}: expected a bool, got {type(value).__name__}")


def refuse_bools(op: str, **numbers: object) -> None:
    """Torch would take True as 1.0. A caller with a bool has most likely another order of arguments in mind."""
    for name, value in numbers.items():
        if isinstance(value, bool):
            raise TypeError(f"{op}: {name}: expected a number, got {value}")
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            raise TypeError(f"{op}: {name}: expected numbers, got a tensor of bools")


def _check_number(op: str, name: str, kind: str, value: Any) -> None:
    """Raise TypeError for what torch would take as another number than it is: a bool as 1, and for an int a number with
    a fraction, of numpy or in a tensor, without its fraction. Raise ValueError for an int that no float can be."""
    if kind == "ScalarType":
        raise TypeError(f"{op}: {name}: expected a torch.dtype or None, got {type(value).__name__}")
    if kind == "float":
        refuse_bools(op, **{name: value})
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise ValueError(f"{op}: {name}: expected a finite number of float32, got {value}")
    elif isinstance(value, Tensor):
        _check_int_dtype(op, name, value)
    else:
        to_int(op, name, value)


def _check_int_dtype(op: str, name: str, value: Tensor) -> None:
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        raise TypeError(f"{op}: {name}: expected an int, got a tensor of {str(value.dtype).removeprefix('torch.')}")


def to_int(op: str, name: str, value: Any) -> int:
    """For functions that compute with an argument. Takes what torch would take as an int, but no bool."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor):
        _check_int_dtype(op, name, value)
    if hasattr(value, "__index__") and not isinstance(value, bool):
        with suppress(TypeError):  # as of an array
            return index(value)
    raise TypeError(f"{op}: {name}: expected an int, got {type(value).__name__}")


def to_int64(op: str, name: str, value: Any) -> int:
    """`to_int`, for what becomes an element of a tensor."""
    number = to_int(op, name, value)
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueError(f"{op}: {name}: expected an int of 64 bits, got {number}")
    return number


def _kernel_for_negated(name: str, op: Any) -> Callable[..., Any]:
    """What an op does if an argument is a view that torch negates when it is read (Tensor.is_neg). Without this kernel
    torch writes results to a copy. It finds that it cannot copy them back only when other arguments have been
    written."""

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(element) for element in value]
        return value.resolve_neg() if isinstance(value, Tensor) else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        for argument, tensors in _arguments(op, args, kwargs):
            if argument.is_write and any(tensor.is_neg() for tensor in tensors):
                message = "expected memory to write to, got a negated view: call resolve_neg() on it (ValueError)"
                raise RuntimeError(f"{name}: {argument.name}: {message}")
        return op(*map(resolved, args), **{name: resolved(value) for name, value in kwargs.items()})

    return kernel


_library = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]


def add_ops(names: list[str]) -> None:
    """The raw ops that `call` calls. They get `_kernel_for_negated`."""
    for name in names:
        overloads[name] = op = getattr(getattr(torch.ops, NAMESPACE), name).default
        _argument_names[name] = tuple(each.name for each in op._schema.arguments)
        kinds = [str(each.real_type).removeprefix("Optional[").removesuffix("]") for each in op._schema.arguments]
        _numbers[name] = tuple(
            _Number(place, each.name, kind, _PLAIN[kind])
            for place, (each, kind) in enumerate(zip(op._schema.arguments, kinds, strict=True))
            if kind in _PLAIN
        )
        _library.impl(name, _kernel_for_negated(name, op), "Negative")  # type: ignore[no-untyped-call]
