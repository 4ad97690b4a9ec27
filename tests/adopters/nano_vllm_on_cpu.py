"""Lets nano-vllm, which is written for CUDA, flash-attn and Triton, generate on a CPU. To be imported first."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed

from pagedattn_ext import flash_attn, ops

MEMORY = 2**24  # what nano-vllm believes to be free on the GPU, in bytes


def without_pinning(function: Callable[..., Any], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# What it imports: attention is ours, Triton is used for one kernel, which is replaced below.
torch.compile = lambda function: function
sys.modules |= {"flash_attn": flash_attn, "triton": MagicMock(), "triton.language": MagicMock()}
from nanovllm.layers import attention, layernorm  # noqa: E402
from nanovllm.models import qwen3  # noqa: E402

del sys.modules["triton"], sys.modules["triton.language"]
attention.store_kvcache = ops.reshape_and_cache

# CUDA: its tensors are the CPU's.
for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
    setattr(torch.cuda, name, lambda *args: None)
torch.cuda.mem_get_info = lambda: (MEMORY, MEMORY)
torch.cuda.memory_stats = lambda: {"allocated_bytes.all.current": 0}
torch.Tensor.cuda = lambda tensor, non_blocking: tensor
torch.set_default_device = lambda device: None
torch.zeros = partial(without_pinning, torch.zeros)
torch.tensor = partial(without_pinning, torch.tensor)
init_process_group = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda backend, *args, **kwargs: init_process_group("gloo", *args, **kwargs)

# fp32: its norms overwrite the residual where `x.float()` is `x` itself.
layernorm.RMSNorm.rms_forward = lambda norm, x: ops.rms_norm(x.contiguous(), norm.weight, norm.eps)
layernorm.RMSNorm.add_rms_forward = lambda norm, x, residual: ops.fused_add_rms_norm(x, residual, norm.weight, norm.eps)

# transformers 5: a config has a dict of the rotary embedding where nano-vllm expects None.
get_rope = qwen3.get_rope
qwen3.get_rope = lambda *args, rope_scaling, **kwargs: get_rope(*args, **kwargs)
