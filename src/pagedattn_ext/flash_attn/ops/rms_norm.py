"""RMS norm."""

import torch
from torch import Tensor, nn

from pagedattn_ext.flash_attn.ops.triton.layer_norm import rms_norm_fn


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x ** 2) + epsilon) * weight, over the last dimension (Zhang and Sennrich, 2019)."""
    return rms_norm_fn(x, weight, None, eps=epsilon)


class RMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
