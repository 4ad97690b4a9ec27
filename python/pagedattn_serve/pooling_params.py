"""How hidden states become an embedding: what a checkpoint says of it, and what a request wants."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pagedattn_serve.config import check_int

PoolingMode = Literal["lasttoken", "mean"]  # sentence-transformers' names


class Pooling(NamedTuple):
    """How a model's hidden states become an embedding, or a score.

    normalizes: whether the length of an embedding is 1.
    score_weight: of a reranker, fp64 [hidden_size]: the score of a pair of texts is its product with the last hidden
        state. None for an embedding. squashes: whether the score is brought between 0 and 1 (sigmoid).
    """

    mode: PoolingMode = "lasttoken"
    normalizes: bool = True
    score_weight: Any = None
    squashes: bool = True


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolingParams:
    """A request for the embedding of its prompt. How the prompt is pooled, the checkpoint says.

    dimensions: only so many of the embedding, the first ones, for a model that was trained for that (Matryoshka
        representation learning, Kusupati et al., 2022). A normalised embedding is normalised behind the cut. None: all.

    Raises TypeError and ValueError.
    """

    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1)
