"""Lets mini-sglang, which is written for CUDA, FlashInfer and sgl_kernel, generate on a CPU. To be imported first."""

import sys
from types import ModuleType

from on_cpu import use_cpu
from torch import Tensor

from pagedattn_ext import flash_attn, flashinfer, ops

use_cpu()

# What it imports: norms, rotary embedding, sampling and one backend from FlashInfer, the other backend from sgl_kernel.
for name in [name for name in sys.modules if name.startswith(flashinfer.__name__)]:
    sys.modules[name.removeprefix("pagedattn_ext.")] = sys.modules[name]
sys.modules |= {"sgl_kernel": ModuleType("sgl_kernel"), "sgl_kernel.flash_attn": flash_attn}
from minisgl import kernel  # noqa: E402
from minisgl.attention import fi  # noqa: E402


def store_cache(k_cache: Tensor, v_cache: Tensor, indices: Tensor, k: Tensor, v: Tensor) -> None:
    """Caches are [num_slots, num_kv_heads, head_size]: pages of one token."""
    k, v = (new.view(-1, *cache.shape[1:]) for new, cache in ((k, k_cache), (v, v_cache)))
    ops.reshape_and_cache(k, v, k_cache[:, None], v_cache[:, None], indices)


def fast_compare_key(x: Tensor, y: Tensor) -> int:
    """The length of the common beginning."""
    length = min(len(x), len(y))
    return int((x[:length] == y[:length]).cumprod(0).sum())


# Its own kernels, which it compiles when it first calls them.
kernel.store_cache = store_cache
kernel.fast_compare_key = fast_compare_key
kernel.indexing = lambda weights, indices, vocab_range=None: weights[indices]

# It asserts that FlashInfer's metadata lies on a GPU.
fi.FIMetadata.__post_init__ = lambda metadata: None
