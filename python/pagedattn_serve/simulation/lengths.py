"""How long prompts and outputs are: of ShareGPT and Alpaca, or pairs that a user brings.

ShareGPT: prompts and first answers as Kwon et al. (SOSP 2023) used them, pairs of up to 2048 tokens together, in tokens
of OPT. Lengths are drawn from their quantiles, linear between them, prompt and output independently (their correlation
is 0.04). Straight lines lie above the data's quantiles, which are convex: the means come out at 169 and 342 instead of
161 and 338. Alpaca: of its lengths only the means are known here; they are log-normal, with a spread that is assumed.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

import numpy

from pagedattn_serve.errors import ArgumentError

QUANTILE_RANKS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)  # per cent; the table of ShareGPT begins at 10
Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class FromQuantiles:
    quantiles: tuple[int, ...]  # tokens, at QUANTILE_RANKS
    mean: float  # of the data

    def at(self, ranks: Array) -> Array:
        """Lengths at ranks in (0, 1)."""
        return numpy.interp(ranks * 100, QUANTILE_RANKS, self.quantiles)


@dataclass(frozen=True)
class LogNormal:
    mean: float
    sigma: float  # of the logarithms; at 1.0 the median is 0.6 of the mean, one in a hundred is six times the mean

    def at(self, ranks: Array) -> Array:
        """Lengths at ranks in (0, 1)."""
        logarithms = NormalDist(numpy.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return numpy.exp([logarithms.inv_cdf(rank) for rank in ranks])


Lengths = FromQuantiles | LogNormal
WORKLOADS: dict[str, tuple[Lengths, Lengths]] = {  # of prompt and output
    "sharegpt": (
        FromQuantiles((1, 9, 13, 18, 24, 35, 55, 94, 203, 507, 864, 1464, 2028), mean=161.31),
        FromQuantiles((1, 45, 101, 157, 216, 271, 330, 405, 525, 754, 899, 1280, 2009), mean=337.99),
    ),
    "alpaca": (LogNormal(mean=19.31, sigma=1.0), LogNormal(mean=58.45, sigma=1.0)),
}
MAX_PAIR = 2048  # tokens of a pair of the workloads, as in the paper


class LengthPairs(Protocol):
    """Where the lengths of requests come from."""

    def draw(self, rng: numpy.random.Generator, count: int, max_model_len: int) -> list[tuple[int, int]]:
        """Tokens of a prompt and of its output, which fit in max_model_len together, `count` times."""
        ...


class WorkloadPairs:
    """Lengths of a workload, cut so that a pair has at most 2048 tokens."""

    def __init__(self, name: str) -> None:
        self._of_prompts, self._of_outputs = WORKLOADS[name]

    def draw(self, rng: numpy.random.Generator, count: int, max_model_len: int) -> list[tuple[int, int]]:
        limit = min(max_model_len, MAX_PAIR)
        ranks = rng.uniform(size=(count, 2))
        prompts = self._of_prompts.at(ranks[:, 0]).round().astype(int).clip(1, limit - 1)
        outputs = self._of_outputs.at(ranks[:, 1]).round().astype(int).clip(1, limit - prompts)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


class GivenPairs:
    """Pairs of a file, each as often as any other. As in the paper, pairs that are too long together are left out."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        self._pairs = pairs

    def draw(self, rng: numpy.random.Generator, count: int, max_model_len: int) -> list[tuple[int, int]]:
        fitting = [pair for pair in self._pairs if sum(pair) <= max_model_len]
        if not fitting:
            raise ArgumentError("lengths", f"a pair of at most {max_model_len} tokens", "longer pairs alone")
        return [fitting[i] for i in rng.integers(len(fitting), size=count)]
