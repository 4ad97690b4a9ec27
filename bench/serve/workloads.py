"""Requests with the lengths of ShareGPT or Alpaca (pagedattn_simulate.workload), and models to send them to."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
import transformers

from pagedattn_simulate.workload import WORKLOADS, Lengths


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
