"""Which rate a system sustains at equal latency: figures 12, 14, 16, 17, and the block sizes of figure 18."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy
from serve.experiments import NUM_SEQUENCES

from figures.deployments import (
    DATA_SETS,
    MAX_LATENCY,
    OPTS,
    ORCAS,
    SEED,
    SYSTEMS,
    Effort,
    Load,
    Sustained,
    deploy,
    rate_at_latency,
    search_rate,
    times,
)
from figures.report import Figure, Range, Row
from pagedattn_simulate.command import routing_of
from pagedattn_simulate.cost_model import CostModel
from pagedattn_simulate.deployment import Deployment
from pagedattn_simulate.metrics import Summary
from pagedattn_simulate.simulator import Simulator
from pagedattn_simulate.systems.orca import OrcaSystem
from pagedattn_simulate.systems.paged import PagedSystem
from pagedattn_simulate.systems.system import System
from pagedattn_simulate.workload import RequestForm, SimulatedRequest, TraceEntry, WorkloadPairs, poisson_trace

GAIN_IN_PAPER = {  # figure 12, on ShareGPT
    "orca-oracle": Range(1.7, 2.7),
    "orca-max": Range(2.7, 8.0),
    "fastertransformer": Range(None, 22.0),
}
GAIN_OF_OUTPUTS = Range(1.3, 2.3)  # figure 14
GAIN_OF_PREFIX = {80: 1.67, 341: 3.58}  # figure 16, by tokens
GAIN_IN_CHAT = 2.0  # figure 17
BEST_BLOCK_SIZES = {"sharegpt": "16 to 128", "alpaca": "16 to 32"}  # figure 18
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
AXES = ("requests a second", "seconds a token")
AT_LATENCY = f"Rates are the highest at which the mean normalised latency is at most {MAX_LATENCY} s a token"


def load_and_latency(effort: Effort) -> Figure:
    """Basic sampling: 3 models, 2 data sets, 5 systems."""
    loads = {"sharegpt": Load("sharegpt", effort.seconds(600)), "alpaca": Load("alpaca", effort.seconds(200))}
    deployments = {name: deploy(name) for name in OPTS}
    cases = [*product(OPTS, DATA_SETS, SYSTEMS)]
    found = dict(
        zip(
            cases,
            effort.at_once(
                rate_at_latency,
                [deployments[model] for model, _, _ in cases],
                [system for _, _, system in cases],
                [loads[workload] for _, workload, _ in cases],
            ),
            strict=True,
        )
    )
    rows, curves = [], {}
    for model, workload in product(OPTS, DATA_SETS):
        place = f"{model}, {DATA_SETS[workload]}"
        of_place = {system: found[model, workload, system] for system in SYSTEMS}
        curves[place] = {SYSTEMS[system]: sustained.points for system, sustained in of_place.items()}
        rows.append(Row(f"{place}: paged", of_place["paged"].rate, "{:.3g} requests/s", "simulated"))
        in_paper = GAIN_IN_PAPER if workload == "sharegpt" else {}
        for system in (*ORCAS, "fastertransformer"):
            gain = times(of_place["paged"].rate, of_place[system].rate)
            rows.append(
                Row(f"{place}: paged over {SYSTEMS[system]}", gain, "{:.2f}x", "simulated", in_paper.get(system))
            )
    return Figure(
        "Figure 12: normalised latency and rate",
        rows,
        f"{AT_LATENCY}. The ranges are what the paper's text says of ShareGPT; of Alpaca it says that the trend is "
        "similar, and that OPT-175B gains less over Orca (Oracle) and Orca (Pow2) there. The ratio to "
        "FasterTransformer depends on the bound, because short outputs wait for the longest of their batch: in "
        "docs/simulate.md OPT-13B has 37x at 0.1 s and 10x at 0.5 s. OPT-175B has the largest cache, and so the "
        "largest batches; where a step has more than 101 tokens, operations take it longer than reading the "
        "weights, so a larger batch gains less. If operations took no time, its ratios to the Orcas would be 1.70x, "
        "2.07x and 2.74x (150 s of requests, in which they are 1.46x, 1.70x and 2.20x with them): in the paper's "
        "ranges. How many operations an A100 reaches is assumed. The lengths of Alpaca are a guess around its means.",
        curves=curves,
        axes=AXES,
        y_limit=2 * MAX_LATENCY,
    )


def several_outputs(effort: Effort) -> Figure:
    """Samples and beams."""
    deployment = deploy("OPT-13B")
    systems = ["paged", *(ORCAS if effort.is_full else ORCAS[:1])]
    forms = {f"{n} samples": RequestForm(n) for n in NUM_SEQUENCES}
    forms |= {f"{n} beams": RequestForm(beam_width=n) for n in NUM_SEQUENCES}
    cases = [*product(forms, systems)]
    found = dict(
        zip(
            cases,
            effort.at_once(
                rate_at_latency,
                [deployment] * len(cases),
                [system for _, system in cases],
                [Load("alpaca", effort.seconds(60), forms[form]) for form, _ in cases],
            ),
            strict=True,
        )
    )
    rows = [
        Row(
            f"{form}: paged over {SYSTEMS[system]}",
            times(found[form, "paged"].rate, found[form, system].rate),
            "{:.2f}x",
            "simulated",
            GAIN_OF_OUTPUTS if system == "orca-oracle" else None,
        )
        for form in forms
        for system in systems[1:]
    ]
    curves = {form: {SYSTEMS[system]: found[form, system].points for system in systems} for form in forms}
    return Figure(
        "Figure 14: parallel sampling and beam search",
        rows,
        f"OPT-13B, Alpaca. {AT_LATENCY}. Beams of the Orcas are copied whole when one takes the place of another.",
        "" if effort.is_full else "Orca (Pow2) and Orca (Max), in the quick form.",
        curves,
        AXES,
        2 * MAX_LATENCY,
    )


def shared_prefix(effort: Effort) -> Figure:
    caching, plain = deploy("LLaMA-13B", enable_prefix_caching=True), deploy("LLaMA-13B")
    cases = [*product(GAIN_OF_PREFIX, {"paged": caching, "paged, no sharing": plain, "orca-oracle": plain}.items())]
    found = dict(
        zip(
            [(num_tokens, name) for num_tokens, (name, _) in cases],
            effort.at_once(
                rate_at_latency,
                [deployment for _, (_, deployment) in cases],
                [name.partition(",")[0] for _, (name, _) in cases],
                [Load("alpaca", effort.seconds(60), RequestForm(num_shared_tokens=num)) for num, _ in cases],
            ),
            strict=True,
        )
    )
    rows, curves = [], {}
    for num_tokens, in_paper in GAIN_OF_PREFIX.items():
        of_place = {name: found[num_tokens, name] for name in ("paged", "paged, no sharing", "orca-oracle")}
        place, ours = f"{num_tokens} shared tokens", of_place["paged"].rate
        gain = times(ours, of_place["orca-oracle"].rate)
        rows.append(Row(f"{place}: paged over Orca (Oracle)", gain, "{:.2f}x", "simulated", in_paper))
        gain = times(ours, of_place["paged, no sharing"].rate)
        rows.append(Row(f"{place}: paged over paged without sharing", gain, "{:.2f}x", "simulated"))
        curves[place] = {SYSTEMS.get(name, name): sustained.points for name, sustained in of_place.items()}
    return Figure(
        "Figure 16: a prefix that all prompts share",
        rows,
        f"LLaMA-13B on one A100-40. {AT_LATENCY}. The paper's model is LLaMA-13B, which "
        "translates sentences of WMT16 after one or five examples. How long the sentences are is not known here; after "
        "the prefix, prompts and outputs have the lengths of Alpaca. With 80 tokens the batch is large and "
        "hundreds of sequences end a second: with a host that spends 0.3 ms on each sequence of a step instead of the "
        "assumed 5 us, the ratio is 1.78x instead of 2.5x. Figure 13 also says that the paper's system takes about so "
        "much longer.",
        curves=curves,
        axes=AXES,
        y_limit=2 * MAX_LATENCY,
    )


# ---- conversations --------------------------------------------------------------------------------------------------

MAX_PROMPT = MAX_ANSWER = 1024  # tokens, as in the paper
MAX_TURNS = 8  # of a conversation, which has from 1 to so many, each number as often; a guess
PAUSE = 10.0  # seconds from an answer to the next question, at the mean; a guess


class Turn(NamedTuple):
    num_question: int
    num_answer: int
    pause: float


class Chats:
    """Conversations whose prompts are the last tokens of all that was said, with the newest question."""

    def __init__(self, rate: float, duration: float) -> None:
        """rate: conversations a second."""
        rng = numpy.random.default_rng(SEED)
        self._first: list[tuple[float, list[Turn]]] = []
        arrival = rng.exponential(1 / rate)
        while arrival < duration or not self._first:
            num_turns = int(rng.integers(1, MAX_TURNS + 1))
            pairs = WorkloadPairs("sharegpt").draw(rng, num_turns, 2 * MAX_PROMPT)
            pauses = rng.exponential(PAUSE, num_turns).tolist()
            self._first.append((arrival, [Turn(*pair, pause) for pair, pause in zip(pairs, pauses, strict=True)]))
            arrival += rng.exponential(1 / rate)
        self.num_requests = sum(len(turns) for _, turns in self._first)
        self._next_token = 0
        self._running: dict[SimulatedRequest, tuple[list[int], list[Turn]]] = {}  # what was said, and what comes

    def begin(self) -> Iterator[SimulatedRequest]:
        for arrival, turns in self._first:
            yield self._ask(arrival, [], turns)

    def follow_up(self, request: SimulatedRequest) -> SimulatedRequest | None:
        said, turns = self._running.pop(request)
        if not turns:
            return None
        assert request.finished is not None
        said = [*said, *(request.output_token_ids or self._new_tokens(request.num_output_tokens))]
        return self._ask(request.finished + turns[0].pause, said, turns)

    def _ask(self, arrival: float, said: list[int], turns: list[Turn]) -> SimulatedRequest:
        said = [*said, *self._new_tokens(turns[0].num_question)][-MAX_PROMPT:]
        request = SimulatedRequest(arrival, said, min(turns[0].num_answer, MAX_ANSWER))
        self._running[request] = said, turns[1:]
        return request

    def _new_tokens(self, count: int) -> range:
        self._next_token += count
        return range(self._next_token - count, self._next_token)


def chat_at(deployment: Deployment, system: str, duration: float, rate: float) -> Summary:
    """rate: of conversations."""
    config, chats = deployment.scheduler_config, Chats(rate, duration)
    replica: System
    if system == "paged":
        replica = PagedSystem(config, deployment.cache_config)
    else:
        replica = OrcaSystem(config, deployment.num_slots, system.removeprefix("orca-"))
    seconds_of = CostModel(deployment.shape, deployment.hardware, deployment.num_ranks).seconds
    return Simulator([replica], routing_of(deployment, SEED), seconds_of).run(chats.begin(), chats.follow_up)


def chat_rate(deployment: Deployment, system: str, duration: float) -> Sustained:
    """In requests a second, with as many turns in a conversation as are expected."""
    sustained = search_rate(partial(chat_at, deployment, system, duration), duration)
    num_turns = (1 + MAX_TURNS) / 2
    points = [(rate * num_turns, latency) for rate, latency in sustained.points]
    return Sustained(None if sustained.rate is None else sustained.rate * num_turns, points)


def long_history_at(deployment: Deployment, system: str, duration: float, rate: float) -> Summary:
    """Each prompt has as many tokens as are allowed."""
    trace = poisson_trace(WorkloadPairs("sharegpt"), rate, duration, 2 * MAX_PROMPT, SEED)
    trace = [
        TraceEntry(each.arrival, MAX_PROMPT, min(each.num_output_tokens, MAX_ANSWER))  # as long as first answers
        for each in trace
    ]
    return deployment.run(system, trace, partial(routing_of, deployment, SEED))


def long_history_rate(deployment: Deployment, system: str, duration: float) -> Sustained:
    return search_rate(partial(long_history_at, deployment, system, duration), duration)


def chatbot(effort: Effort) -> Figure:
    plain = deploy("OPT-13B")
    cases = {name: (plain, name) for name in ("paged", *ORCAS)}
    cases["paged, prefix caching"] = deploy("OPT-13B", enable_prefix_caching=True), "paged"
    durations = [effort.seconds(300)] * len(cases)
    found = dict(zip(cases, effort.at_once(chat_rate, *zip(*cases.values(), strict=True), durations), strict=True))
    systems = ("paged", *ORCAS)
    of_long = effort.at_once(long_history_rate, [plain] * len(systems), systems, durations)
    long = dict(zip(systems, of_long, strict=True))
    ours = found["paged"].rate
    rows = [
        Row(
            f"histories of {MAX_PROMPT:,} tokens: paged over {SYSTEMS[name]}",
            times(long["paged"].rate, long[name].rate),
            "{:.2f}x",
            "simulated",
            GAIN_IN_CHAT,
        )
        for name in ORCAS
    ]
    rows.append(Row("conversations: paged", ours, "{:.2f} requests/s", "simulated"))
    rows += [
        Row(f"conversations: paged over {SYSTEMS[name]}", times(ours, found[name].rate), "{:.2f}x", "simulated")
        for name in ORCAS
    ]
    gain = times(found["paged, prefix caching"].rate, ours)
    rows.append(Row("conversations: paged with prefix caching over paged", gain, "{:.2f}x", "simulated"))
    return Figure(
        "Figure 17: a chatbot",
        rows,
        f"OPT-13B. {AT_LATENCY}. Prompts are the last {MAX_PROMPT:,} tokens of what was said, answers have at most "
        "so many, and nothing is kept between turns. The paper's text says that most prompts have all of these "
        "tokens, and that the buddy allocator then gives each Orca as many slots for the output, so that the three "
        "are alike. The first rows are that case: the Orcas are alike here, too, with 7 requests at once, where "
        "the paged system has 11.7. The gain stays below the paper's 2x because a prompt takes as long in each "
        "system, 0.14 s if an A100 reaches 60% of its operations, and because the paged system computes some "
        "prompts twice, after preemptions: if operations took no time, or steps 14 ms more, the gain would be "
        "1.54x, of a bound of 1.67x by what is there at once. How long later answers are is not known here: these "
        f"have the lengths of first answers. The other rows are conversations of 1 to {MAX_TURNS} turns with a "
        f"pause of {PAUSE:.0f} s between them, both guesses, so that many prompts are short. The paper has no "
        "prefix caching. Here it finds little, because the cache holds 15 histories, and many more wait for their "
        "next turn.",
        curves={"OPT-13B": {SYSTEMS.get(name, name): sustained.points for name, sustained in found.items()}},
        axes=AXES,
        y_limit=2 * MAX_LATENCY,
    )


def block_sizes(effort: Effort) -> Figure:
    cases = [*product(DATA_SETS, BLOCK_SIZES)]
    loads = {"sharegpt": Load("sharegpt", effort.seconds(300)), "alpaca": Load("alpaca", effort.seconds(60))}
    deployments = {size: deploy("OPT-13B", block_size=size) for size in BLOCK_SIZES}
    found = effort.at_once(
        rate_at_latency,
        [deployments[size] for _, size in cases],
        ["paged"] * len(cases),
        [loads[workload] for workload, _ in cases],
    )
    rates = {case: sustained.rate for case, sustained in zip(cases, found, strict=True)}
    rows = [
        Row(
            f"{DATA_SETS[workload]}, blocks of {size}, of the rate with 16",
            times(rate, rates[workload, 16]),
            "{:.2f}x",
            "simulated",
        )
        for (workload, size), rate in rates.items()
    ]
    best = ", ".join(f"{sizes} for {DATA_SETS[workload]}" for workload, sizes in BEST_BLOCK_SIZES.items())
    return Figure(
        "Figure 18, right: block sizes",
        rows,
        f"OPT-13B. {AT_LATENCY}. The paper finds the best sizes to be {best}. Here a larger block costs what it "
        "leaves empty, and a smaller one costs nothing: the cost model has one bandwidth for all block sizes. "
        "Blocks of 1, 2 and 4 tokens are simulated with the engine's scheduler; the kernels have 8 and more.",
    )
