"""Requests to come: when, with how many tokens, how long their outputs will be, and which of their beams survive."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log, log1p
from random import Random
from statistics import NormalDist
from typing import Any, Protocol

import numpy

from pagedattn_serve.config import check_int
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.scheduling.beam_search import BeamSearch

MAX_REQUESTS = 1_000_000  # of a trace that is drawn


# ---- lengths: of ShareGPT and Alpaca, or pairs that a user brings ----------------------------------------------------
#
# ShareGPT: prompts and first answers as Kwon et al. (SOSP 2023) used them, pairs of up to 2048 tokens together, in
# tokens of OPT. Lengths are drawn from their quantiles, linear between them, prompt and output independently (their
# correlation is 0.04). Straight lines lie above the data's quantiles, which are convex: the means come out at 169 and
# 342 instead of 161 and 338. Alpaca: of its lengths only the means are known here; they are log-normal, with a spread
# that is assumed.

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


# ---- beams -----------------------------------------------------------------------------------------------------------

# A beam's likeliest next token has a probability drawn from a beta distribution with these parameters, and each further
# token as large a share of what is left. They are chosen so that beams share about as many blocks as in figure 15 of
# Kwon et al. (SOSP 2023); so what beams share is fitted to the paper.
ALPHA, BETA = 6.0, 1.0


class SimulatedBeams:
    """The beams of one request. All run to the end of the output."""

    def __init__(self, width: int, num_output_tokens: int, seed: int) -> None:
        self.width = width
        self._search = BeamSearch[None](width, num_output_tokens)
        self._random = Random(seed)
        self._scores = [0.0]
        self._num_tokens = 0

    def step(self) -> list[int]:
        """The parent of each beam that runs on, by the parent's place among the beams that ran. Best first. The last
        token ends all beams, and has no step."""
        num_candidates = self._search.num_candidates
        candidates = [self._candidates(num_candidates) for _ in self._scores]
        step = self._search.select(self._scores, self._num_tokens, candidates, lambda beam, token_id: False)
        self._scores = [each.score for each in step.running]
        self._num_tokens += 1
        return [each.beam for each in step.running]

    def num_copies(self) -> int:
        """Take a step where no blocks are shared: how many beams have to be copied into the slots of others."""
        parents = self.step()
        return len(parents) - len(set(parents))

    def _candidates(self, count: int) -> list[tuple[int, float]]:
        likeliest = min(max(self._random.betavariate(ALPHA, BETA), 1e-6), 1 - 1e-6)
        return [(i, log(likeliest) + i * log1p(-likeliest)) for i in range(count)]


# ---- requests --------------------------------------------------------------------------------------------------------


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
