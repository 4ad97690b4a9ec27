"""How a model of transformers is told the position of each row: by an argument, or by the cache that it asks."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# How layers and models call the argument that transformers' cache comes as: since 5.24; before, where a state is kept;
# before, elsewhere.
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name of the argument of a forward that takes transformers' cache, or None."""
    names = signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


class NumTokensBefore:
    """Stands for transformers' cache in layers and models that ask the cache how many tokens come before their rows.
    The answer is a number for each row of the step, so that the number and the row's index are the row's position.

    positions: of the rows, [num_rows].
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        return key, value

    def get_query_offset(self, layer_idx: int) -> int:
        return 0

    def get_mask_sizes(self, num_rows: int, layer_idx: int) -> tuple[int, int]:
        return num_rows, 0


def position_arguments(model: PreTrainedModel) -> Callable[[Tensor], dict[str, Any]]:
    """What the model's forward is given of the positions of the rows, [num_rows]. A model whose forward does not take
    `position_ids` may count on from the number of tokens in the cache, as BART's decoder does."""
    if "position_ids" in signature(model.forward).parameters:
        return lambda positions: {"position_ids": positions[None]}
    cache = cache_argument(model.forward)
    assert cache is not None  # `build` has refused models with neither
    return lambda positions: {
        cache: NumTokensBefore(positions),
        "attention_mask": torch.ones_like(positions[None]),  # which would be made of the number of all tokens
    }
