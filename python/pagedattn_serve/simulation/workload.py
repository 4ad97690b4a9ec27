"""Requests to come: when, with how many tokens, and how long their outputs will be."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import numpy

from pagedattn_serve.config import check_int
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.simulation.beams import SimulatedBeams
from pagedattn_serve.simulation.lengths import LengthPairs

MAX_REQUESTS = 1_000_000  # of a trace that is drawn


@dataclass(slots=True, eq=False)  # compared and hashed by identity
class SimulatedRequest:
    """arrival: in seconds from the start. num_sequences: outputs to the prompt, all of the same length; or beams.

    beams: of beam search; None if the outputs are samples.
    first_token, last_token, finished: when, as far as that has happened.
    output_token_ids: of one output, once the request is over; empty in systems that only count tokens.
    """

    arrival: float
    prompt_token_ids: list[int]
    num_output_tokens: int
    num_sequences: int = 1
    priority: int = 0
    beams: SimulatedBeams | None = None
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
    of_arrivals, of_lengths = map(numpy.random.default_rng, numpy.random.SeedSequence(seed).spawn(2))
    arrivals: list[float] = []
    while not arrivals or arrivals[-1] <= duration:
        last = arrivals[-1] if arrivals else 0.0
        arrivals += (last + of_arrivals.exponential(1 / rate, 1024).cumsum()).tolist()
    count = bisect_right(arrivals, duration)
    pairs = lengths.draw(of_lengths, count, max_model_len)
    return [TraceEntry(arrival, *pair) for arrival, pair in zip(arrivals, pairs, strict=False)]


@dataclass(frozen=True)
class RequestForm:
    """What all requests of a run have in common.

    num_outputs: of a request, beside beam search. beam_width: 0 for no beam search.
    num_shared_tokens: that all prompts begin with. seed: of the beams.
    """

    num_outputs: int = 1
    beam_width: int = 0
    num_shared_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("n", self.num_outputs, 1)
        check_int("beam_width", self.beam_width, 0)
        check_int("shared_prefix", self.num_shared_tokens, 0)
        check_int("seed", self.seed, 0)
        if self.beam_width and self.num_outputs > 1:
            raise ArgumentError("n", "1 with beam_width, as a beam search has one output here", self.num_outputs)


ONE_OUTPUT = RequestForm()


def requests_of(trace: list[TraceEntry], form: RequestForm) -> Iterator[SimulatedRequest]:
    """The requests of a trace, in order of arrival. A shared prefix comes before the tokens of the trace. All other
    tokens of a prompt are its number, so that nothing else is found in a cache."""
    shared = [*range(-form.num_shared_tokens, 0)]
    seeds = Random(form.seed)
    for number, entry in enumerate(trace):
        prompt = shared + [number] * entry.num_prompt_tokens
        beams = None
        if form.beam_width:
            beams = SimulatedBeams(form.beam_width, entry.num_output_tokens, seeds.getrandbits(64))
        num_sequences = form.beam_width or form.num_outputs
        yield SimulatedRequest(entry.arrival, prompt, entry.num_output_tokens, num_sequences, entry.priority, beams)
