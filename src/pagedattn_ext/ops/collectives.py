"""What the processes of one machine compute together, on the CPU."""

from torch import Tensor

from pagedattn_ext.shared_memory import SharedMemoryGroup

from ._call import call_on_cpu, check_tensors


def all_reduce_shared(input: Tensor, group: SharedMemoryGroup) -> Tensor:
    """The sum of all ranks' inputs, in place: every rank gets the same bits, in every run.

    Elements are added up in fp32 in the order of the ranks, and rounded once.

    Args:
        input: fp32, fp16 or bf16, contiguous, on the CPU; updated. Of the same size and dtype in every rank.
        group: all its ranks make this call.

    Returns:
        input.
    """
    check_tensors("all_reduce_shared", input=input)
    call_on_cpu("all_reduce_shared", input, _handle_of("all_reduce_shared", group))
    return input


def all_gather_shared(input: Tensor, group: SharedMemoryGroup, *, out: Tensor | None = None) -> Tensor:
    """The inputs of all ranks side by side, in every rank.

    Args:
        input: [..., width], fp32, fp16 or bf16, contiguous, on the CPU. Of the same shape and dtype in every rank.
        group: all its ranks make this call.
        out: [..., world_size * width]; allocated by default.

    Returns:
        out: out[..., r * width : (r + 1) * width] is the input of rank r.
    """
    handle = _handle_of("all_gather_shared", group)
    check_tensors("all_gather_shared", input=input)
    if out is None:
        if input.dim() == 0:
            raise ValueError("all_gather_shared: input: expected at least 1 dimension, got 0")
        out = input.new_empty((*input.shape[:-1], group.world_size * input.shape[-1]))
    call_on_cpu("all_gather_shared", out, input, handle)
    return out


def _handle_of(op: str, group: SharedMemoryGroup) -> int:
    if not isinstance(group, SharedMemoryGroup):
        raise TypeError(f"{op}: group: expected a SharedMemoryGroup, got {type(group).__name__}")
    return group.handle
