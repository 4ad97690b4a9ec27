"""Weights that no checkpoint has: random numbers in the shapes of a model, to time it or to try a config.json."""

from functools import partial

import torch
from torch import Tensor

from pagedattn_serve.loading.checkpoint_files import Tensors
from pagedattn_serve.loading.weights import checkpoint_shapes
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.models.native import NativeCausalLM

STANDARD_DEVIATION = 0.02
PERIOD = (1 << 20) - 3  # numbers that are drawn; odd, so that no two rows of a weight are alike for long


def dummy_checkpoint(model: CausalLM) -> Tensors:
    """A checkpoint of a model that `build_model` made. The weights are the same each time."""
    drawn = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)) * STANDARD_DEVIATION
    numbers = drawn.to(model.dtype)
    shapes: dict[str, list[int]] = {}
    if isinstance(model, NativeCausalLM):
        for name, _ in model.named_parameters():  # tied ones come once
            layer, _, kind = name.rpartition(".")
            own = checkpoint_shapes(model.get_submodule(layer), layer, kind)
            shapes |= {each: [share.whole for share in shares] for each, shares in own.items()}
    else:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):  # anew: the model has been changed for our ops, and cut for its rank
            network = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False)
        shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    return {name: partial(dummy_tensor, name, shape, numbers) for name, shape in shapes.items()}


def dummy_tensor(name: str, shape: list[int], numbers: Tensor) -> Tensor:
    """Ones for a norm, zeros for a bias, and the numbers again and again for all else."""
    if len(shape) < 2:
        return numbers.new_zeros(shape) if name.endswith("bias") else numbers.new_ones(shape)
    tensor = numbers.new_empty(shape)
    flat = tensor.view(-1)
    for begin in range(0, len(flat), PERIOD):
        part = flat[begin : begin + PERIOD]
        part.copy_(numbers[: len(part)])
    return tensor
