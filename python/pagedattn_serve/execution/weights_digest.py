"""A hash of all weights of a model, as they lie in memory: quantized and packed as they are computed with.

It is for what may never be mistaken, as blocks on disk: `system_fingerprint` reads pieces of a large checkpoint only.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from pagedattn_serve.models.causal_lm import CausalLM

COLUMNS = 1021  # a prime, so that rows which change places change the sums


def weights_digest(model: CausalLM) -> bytes:
    """16 bytes, of a model on the CPU. Takes the time to read the weights once or twice."""
    found = blake2b(digest_size=16)
    for name, module in model.named_modules():
        for attribute, value in sorted(vars(module).items()):
            for tensor in tensors_in(value):
                found.update(f"{name}.{attribute} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(sums(tensor).numpy().tobytes())
    return found.digest()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that an attribute of a module holds, its parameters and buffers among them; not those of modules."""
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def sums(tensor: Tensor) -> Tensor:
    """int64: what other bits of the tensor would change, at the speed of the memory."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data[: len(data) // 8 * 8].view(torch.int64)
    rows = whole[: len(whole) // COLUMNS * COLUMNS].view(-1, COLUMNS)
    rest = torch.cat((whole[rows.numel() :], data[len(data) // 8 * 8 :].to(torch.int64)))
    return torch.cat((rows.sum(0), rest))
