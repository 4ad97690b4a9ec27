"""One name for all that decides which bits a request gets."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

import pagedattn_ext
from pagedattn_ext import _C
from pagedattn_serve.config import CacheConfig
from pagedattn_serve.loading.fingerprint import file_digest
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.models.native import NativeCausalLM


def fingerprint(
    checkpoint: Callable[[], bytes],
    model: CausalLM,
    cache_config: CacheConfig,
    device: str,
    quantization: str | None,
    tensor_parallel_size: int,
    facts_of_ranks: tuple[object, ...] = (),
) -> str:
    """The model with its format, its cache, the kernels and what runs them: fp_ and 16 hex digits.

    Where it is equal, a request with a seed gets the same tokens and logprobs, on any machine, for the models and the
    limits in docs/deterministic.md. Where it differs, the bits may be the same all the same.

    checkpoint: gives `checkpoint_digest`. tensor_parallel_size: how sums are cut; stages change no bits.
    facts_of_ranks: what else of the ranks decides about bits.
    """
    facts = (
        *(model.architecture, model.dtype, quantization),
        *(cache_config.kv_cache_dtype, cache_config.kv_scales, cache_config.block_size),
        *(pagedattn_ext.__version__, torch.__version__, *capabilities(device)),
        *(tensor_parallel_size, *facts_of_ranks),
    )
    digest = hashlib.sha256(checkpoint() + _digest_of_kernels())
    digest.update(repr(facts).encode())
    if not isinstance(model, NativeCausalLM):
        import transformers

        digest.update(transformers.__version__.encode())
    return f"fp_{digest.hexdigest()[:16]}"


def capabilities(device: str) -> tuple[str, str]:
    """By which torch, and the ops, choose the kernels of this process."""
    of_ops = pagedattn_ext.cpu_capability() if device == "cpu" else torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability(), of_ops


@cache
def _digest_of_kernels() -> bytes:
    """Of the compiled library: kernels change between two versions."""
    return file_digest(Path(_C.__file__))
