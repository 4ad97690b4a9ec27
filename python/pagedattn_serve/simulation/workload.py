"""Requests to come: when, with how many tokens, and how long their outputs will be."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy

from pagedattn_serve.simulation.lengths import LengthPairs


@dataclass(slots=True, eq=False)  # compared and hashed by identity
class SimulatedRequest:
    """arrival: in seconds from the start. num_sequences: outputs to the prompt, all of the same length.

    first_token, last_token, finished: when, as far as that has happened.
    output_token_ids: of one output, once the request is over; empty in systems that only count tokens.
    """

    arrival: float
    prompt_token_ids: list[int]
    num_output_tokens: int
    num_sequences: int = 1
    priority: int = 0
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    has_failed: bool = False
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and one whole output."""
        return len(self.prompt_token_ids) + self.num_output_tokens


@dataclass(frozen=True)
class TraceEntry:
    """One request of a trace."""

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0


def poisson_trace(
    lengths: LengthPairs, rate: float, duration: float, max_model_len: int, seed: int
) -> list[TraceEntry]:
    """Requests of `duration` seconds, `rate` a second on average. The same seed gives the same requests, and at twice
    the rate the same requests in half the time, followed by others."""
    of_arrivals, of_lengths = numpy.random.default_rng(seed).spawn(2)
    arrivals: list[float] = []
    while not arrivals or arrivals[-1] <= duration:
        last = arrivals[-1] if arrivals else 0.0
        arrivals += (last + of_arrivals.exponential(1 / rate, 1024).cumsum()).tolist()
    count = bisect_right(arrivals, duration)
    pairs = lengths.draw(of_lengths, count, max_model_len)
    return [TraceEntry(arrival, *pair) for arrival, pair in zip(arrivals, pairs, strict=False)]


def requests_of(trace: list[TraceEntry], num_sequences: int, num_shared_tokens: int) -> Iterator[SimulatedRequest]:
    """The requests of a trace, in order of arrival. All prompts begin with the same `num_shared_tokens` tokens, which
    come before those of the trace. All other tokens are unique, so that nothing else is found in a cache."""
    shared = [*range(-num_shared_tokens, 0)]
    next_token = 0
    for entry in trace:
        end = next_token + entry.num_prompt_tokens
        prompt = [*shared, *range(next_token, end)]
        next_token = end
        yield SimulatedRequest(entry.arrival, prompt, entry.num_output_tokens, num_sequences, entry.priority)
