"""What the pooler is told of a sequence whose hidden states become one vector, and what it gives back."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from pagedattn_serve.pooling_params import Pooling


@dataclass(slots=True)
class PoolingState:
    """What the embedding of one sequence is made of.

    dimensions: how many of the first elements count; None: all.
    total: of a mean, the sum of the hidden states that were seen, fp64 [hidden_size]; None before the first.
    """

    pooling: Pooling
    dimensions: int | None = None
    total: Any = None


class Pooled(NamedTuple):
    """After a step: a mean has the sum of the positions before `end`. embedding: once the prompt has ended."""

    end: int
    total: Any
    embedding: list[float] | None
