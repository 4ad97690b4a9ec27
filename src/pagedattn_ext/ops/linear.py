"""Linear layers on the CPU, with weights that are packed once."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedattn_ext.huge_pages import empty_huge_pages

from ._call import SEVERAL_DEVICES, call, check_rank, check_tensors

PANEL_FEATURES = 16


def pack_linear_weight(weight: Tensor) -> Tensor:
    """`weight` in the order in which `linear_packed` reads it, in huge pages where the system grants them.

    Args:
        weight: [out_features, in_features], fp32, fp16 or bf16, on the CPU.

    Returns:
        [ceil(out_features / 16), in_features, 16], a copy: features of the output in panels of 16, zeros for what the
        last one has too many.
    """
    check_tensors("pack_linear_weight", weight=weight)
    check_rank("pack_linear_weight", "weight", weight, 2)
    check_on_cpu("pack_linear_weight", "weight", weight)
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        expected = "float32, float16 or bfloat16"
        got = str(weight.dtype).removeprefix("torch.")
        raise TypeError(f"pack_linear_weight: weight: expected dtype {expected}, got {got}")
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL_FEATURES)
    packed = empty_huge_pages((num_panels, in_features, PANEL_FEATURES), weight.dtype)
    num_full = out_features // PANEL_FEATURES
    packed[:num_full] = weight[: num_full * PANEL_FEATURES].view(num_full, PANEL_FEATURES, in_features).transpose(1, 2)
    if num_full < num_panels:
        rest = weight[num_full * PANEL_FEATURES :].T
        packed[num_full] = F.pad(rest, (0, PANEL_FEATURES - rest.shape[1]))
    return packed


def linear_packed(input: Tensor, packed_weight: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias, for a weight of `pack_linear_weight`. On the CPU alone.

    Weights are multiplied in fp32, whatever they are stored as. A row's result is the same bit for bit, whatever other
    rows there are.

    Args:
        input: [..., in_features], fp32, fp16 or bf16, evenly spaced rows.
        packed_weight: [ceil(out_features / 16), in_features, 16], of any of these dtypes.
        out_features: of the weight before it was packed.
        bias: fp32 [out_features].

    Returns:
        [..., out_features], of input's dtype.
    """
    check_tensors("linear_packed", input=input)
    check_on_cpu("linear_packed", "input", input)
    out: Tensor = call("linear_packed", input, packed_weight, out_features, bias)
    return out


@torch.library.register_fake("pagedattn_ext::linear_packed")
def _(input: Tensor, packed_weight: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    # A meta tensor among real ones brings torch here, too.
    if any(other is not None and other.device != input.device for other in (packed_weight, bias)):
        raise RuntimeError(f"linear_packed: {SEVERAL_DEVICES}")
    return input.new_empty((*input.shape[:-1], out_features))


def check_on_cpu(op: str, name: str, tensor: Tensor) -> None:
    if tensor.device.type not in ("cpu", "meta"):
        raise ValueError(f"{op}: {name}: expected a tensor on cpu, got one on {tensor.device}")
