"""Layers for `kernelize`: each `forward` becomes that of a layer of the model, whose attributes it finds in `self`."""

from torch import Tensor, nn

from pagedattn_ext import ops


class RMSNorm(nn.Module):
    can_torch_compile = True
    has_backward = False
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class SiluAndMul(nn.Module):
    can_torch_compile = True
    has_backward = False

    def forward(self, input: Tensor) -> Tensor:
        return ops.silu_and_mul(input)
