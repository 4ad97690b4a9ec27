"""Requests with the lengths of ShareGPT or Alpaca, and models to send them to.

ShareGPT: prompts and first answers as Kwon et al. (SOSP 2023) used them, pairs of up to 2048 tokens together, in tokens
of OPT. Lengths are drawn from their quantiles, linear between them, prompt and output independently (their correlation
is 0.04). Straight lines lie above the data's quantiles, which are convex: the means come out at 169 and 342 instead of
161 and 338. Alpaca: of its lengths only the means are known here; they are log-normal, with a spread that is assumed.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy
import torch
import transformers

QUANTILE_RANKS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)  # per cent; the table of ShareGPT begins at 10


class Shape(NamedTuple):
    """The shape of a LLaMA."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SHAPES = {
    "micro": Shape(32, 88, 1, 2, 1, 256),  # where blocks are counted and the model only keeps the engine going
    "tiny": Shape(256, 704, 4, 4, 2, 2048),
    "small": Shape(768, 2112, 12, 12, 4, 32000),
    "1B": Shape(2048, 8192, 16, 32, 8, 32000),
}


@dataclass(frozen=True)
class FromQuantiles:
    quantiles: tuple[int, ...]  # tokens, at QUANTILE_RANKS
    mean: float  # of the data

    def at(self, ranks: numpy.ndarray) -> numpy.ndarray:
        """Lengths at ranks in (0, 1)."""
        return numpy.interp(ranks * 100, QUANTILE_RANKS, self.quantiles)


@dataclass(frozen=True)
class LogNormal:
    mean: float
    sigma: float  # of the logarithms; at 1.0 the median is 0.6 of the mean, one in a hundred is six times the mean

    def at(self, ranks: numpy.ndarray) -> numpy.ndarray:
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


@dataclass(frozen=True)
class Request:
    prompt_token_ids: list[int]
    max_tokens: int
    arrival: float = 0.0  # seconds after the start


def make_requests(
    workload: str,
    num_requests: int,
    max_model_len: int,
    vocab_size: int,
    seed: int,
    *,
    rate: float | None = None,
    mean_input: float | None = None,
    mean_output: float | None = None,
) -> list[Request]:
    """Random tokens, in the lengths of a workload, scaled to other means if any are given.

    Of N ranks, one lies in each Nth of a distribution (stratified sampling), so that a few requests are like many.
    Lengths are clipped so that prompt and output fit in max_model_len together. Outputs have at least 2 tokens, so that
    there is a time between tokens. Arrivals are Poisson with `rate` requests a second; without a rate all come at once.
    """
    rng = numpy.random.default_rng(seed)

    def lengths(of_workload: Lengths, mean: float | None) -> numpy.ndarray:
        ranks = (rng.permutation(num_requests) + rng.uniform(size=num_requests)) / num_requests
        scale = 1 if mean is None else mean / of_workload.mean
        return (of_workload.at(ranks) * scale).round().astype(int)

    of_prompts, of_outputs = WORKLOADS[workload]
    prompts = lengths(of_prompts, mean_input).clip(1, max_model_len - 2)
    outputs = lengths(of_outputs, mean_output).clip(2, max_model_len - prompts)
    arrivals = rng.exponential(1 / rate, num_requests).cumsum() if rate else numpy.zeros(num_requests)
    return [
        Request(rng.integers(vocab_size, size=prompt).tolist(), int(output), float(arrival))
        for prompt, output, arrival in zip(prompts, outputs, arrivals, strict=True)
    ]


def make_model(shape: str, seed: int, directory: str, max_len: int = 2048) -> None:
    """Write a LLaMA with random weights and this many positions."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SHAPES[shape]._asdict(), max_position_embeddings=max_len)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
