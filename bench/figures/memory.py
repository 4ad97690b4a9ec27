"""What the memory holds: figures 1 and 3, table 1, figures 2, 11, 13 and 15."""

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy
from serve.experiments import NUM_SEQUENCES

from figures.deployments import DATA_SETS, OPTS, SEED, SYSTEMS, Effort, Load, deploy, run_at
from figures.report import Figure, Range, Row
from pagedattn_simulate.metrics import Summary
from pagedattn_simulate.workload import MAX_PAIR, QUANTILE_RANKS, WORKLOADS, FromQuantiles, RequestForm, WorkloadPairs

CACHE_IN_PAPER = {"OPT-13B": (12, 15.7), "OPT-66B": (21, 9.7), "OPT-175B": (264, 60.1)}  # GB, thousands of slots
TOKEN_IN_PAPER = 800  # KB of OPT-13B
HELD_IN_PAPER = {"orca-max": 0.204, "orca-pow2": 0.268, "orca-oracle": 0.382, "paged": 0.963}
BATCHED_IN_PAPER = {"orca-max": 7.0, "orca-pow2": 9.8, "orca-oracle": 13.6, "paged": 30.4}
KINDS = ("used", "reserved", "internal", "external", "free")
SAVED_IN_PAPER: dict[tuple[str, str], Sequence[float | Range]] = {  # for each of NUM_SEQUENCES; ends of a range
    ("samples", "alpaca"): (0.061, 0.085, 0.098),
    ("samples", "sharegpt"): [Range(0.162, 0.305)] * 3,
    ("beams", "alpaca"): (0.376, 0.531, 0.552),
    ("beams", "sharegpt"): [Range(0.443, 0.663)] * 3,
}
PROMPT_SHARE_IN_PAPER = 0.12  # its section 3, "Complex decoding algorithms", of the experiment in section 6.3
SHARING_RATES = {"alpaca": 5.0, "sharegpt": 0.6}  # requests a second, at which nothing waits


def sizes(effort: Effort) -> Figure:
    rows = []
    deployments = {name: deploy(name) for name in OPTS}
    for name, deployment in deployments.items():
        giga_bytes = deployment.num_slots * deployment.shape.token_bytes / (1 << 30)
        rows.append(Row(f"{name}: KV cache", giga_bytes, "{:.1f} GB", "computed", CACHE_IN_PAPER[name][0]))
    for name, deployment in deployments.items():
        weights = deployment.shape.weight_bytes / (1 << 30)
        rows.append(Row(f"{name}: weights", weights, "{:.1f} GB", "computed"))
    for name, deployment in deployments.items():
        slots = deployment.num_slots / 1000
        rows.append(Row(f"{name}: slots", slots, "{:.1f}K", "computed", CACHE_IN_PAPER[name][1]))
    kilo_bytes = deployments["OPT-13B"].shape.token_bytes / 1024
    rows.append(Row("OPT-13B: cache of a token", kilo_bytes, "{:.0f} KB", "computed", TOKEN_IN_PAPER))
    return Figure(
        "Figure 1 and table 1: what weights and cache take",
        rows,
        "GB and KB are 2^30 and 2^10 bytes. The cache has what 90% of the memory leaves beside the weights; the "
        "paper's system measures what activations take, and its share of the memory is not known here.",
    )


@cache
def run_systems(effort: Effort, rate: float) -> dict[str, Summary]:
    """OPT-13B with the lengths of ShareGPT, under each system of figure 2."""
    deployment, load = deploy("OPT-13B"), Load("sharegpt", effort.seconds(900))
    num = len(HELD_IN_PAPER)
    runs = effort.at_once(run_at, [deployment] * num, HELD_IN_PAPER, [load] * num, [rate] * num)
    return dict(zip(HELD_IN_PAPER, runs, strict=True))


def held_slots(effort: Effort) -> Figure:
    runs = run_systems(effort, 4.0)
    rows = [
        Row(SYSTEMS[name], run.memory["used"], "{:.1%}", "simulated", HELD_IN_PAPER[name]) for name, run in runs.items()
    ]
    return Figure(
        "Figure 2: share of the cache that holds tokens",
        rows,
        "OPT-13B on one A100-40, ShareGPT at 4 requests/s. Lengths come from quantiles of the data set, and the time "
        "of a step from a cost model; all four systems are full at this rate, so the time hardly matters.",
    )


def waste(effort: Effort) -> Figure:
    runs = run_systems(effort, 4.0)
    names = {"used": "hold tokens", "reserved": "kept for tokens to come", "internal": "never used (internal)"}
    names |= {"external": "too small to be used (external)", "free": "free"}
    rows = [
        Row(f"{SYSTEMS[system]}: {names[kind]}", run.memory[kind], "{:.1%}", "simulated")
        for system, run in runs.items()
        for kind in KINDS
    ]
    return Figure(
        "Figure 3: three kinds of waste",
        rows,
        "The same runs as of figure 2. The paper's figure draws the kinds for two requests, without numbers. External: "
        "free while a request waits; the paged system leaves 1% of its blocks free when it lets a request in.",
    )


def batched(effort: Effort) -> Figure:
    runs = run_systems(effort, 2.0)
    rows = [
        Row(SYSTEMS[name], run.batch_size, "{:.1f}", "simulated", BATCHED_IN_PAPER[name]) for name, run in runs.items()
    ]
    return Figure(
        "Figure 13: requests batched",
        rows,
        "OPT-13B on one A100-40, ShareGPT at 2 requests/s. The Orcas are full, and memory alone gives their batches. "
        "The paged system is not full: its batch is the rate times the time of a request, so the paper's 30.4 mean "
        "45 ms a token, where the simulated A100 takes 26 ms, near the 18 ms that reading the weights takes. With "
        "14 ms more a step the batch is 30.8 (docs/simulate.md).",
    )


def lengths(effort: Effort) -> Figure:
    rows, curves = [], {}
    for workload, data_set in DATA_SETS.items():
        pairs = WorkloadPairs(workload).draw(numpy.random.default_rng(SEED), 100_000, MAX_PAIR)
        drawn = dict(zip(("prompt", "output"), numpy.array(pairs).T, strict=True))
        for (kind, values), of_data in zip(drawn.items(), WORKLOADS[workload], strict=True):
            rows.append(Row(f"{data_set}, {kind}: mean", values.mean(), "{:.1f} tokens", "computed", of_data.mean))
            if isinstance(of_data, FromQuantiles):
                for rank, quantile in zip(QUANTILE_RANKS, of_data.quantiles, strict=True):
                    if rank in (10, 50, 90, 99):
                        here = float(numpy.percentile(values, rank))
                        name = f"{data_set}, {kind}: {rank}% have at most"
                        rows.append(Row(name, here, "{:.0f} tokens", "computed", quantile))
        curves[data_set] = {
            kind: [(float(numpy.percentile(values, rank)), float(rank)) for rank in range(0, 101, 2)]
            for kind, values in drawn.items()
        }
    return Figure(
        "Figure 11: lengths of prompts and outputs",
        rows,
        "Drawn from quantiles of ShareGPT's pairs, with straight lines between them: the lines lie above the data's "
        "convex quantiles, hence the prompts' mean. Of Alpaca the means alone are known here, and its lengths are a "
        "log-normal guess around them.",
        curves=curves,
        axes=("tokens", "% have at most so many"),
    )


def saved_blocks(effort: Effort) -> Figure:
    deployment = deploy("OPT-13B")
    cases = [*product(("samples", "beams"), DATA_SETS, enumerate(NUM_SEQUENCES))]
    loads, rates = [], []
    for method, workload, (_, n) in cases:
        form = RequestForm(n) if method == "samples" else RequestForm(beam_width=n)
        loads.append(Load(workload, effort.seconds(240), form))
        rates.append(SHARING_RATES[workload])
    runs = [*effort.at_once(run_at, [deployment] * len(cases), ["paged"] * len(cases), loads, rates)]
    rows = [
        Row(
            f"{n} {method}, {DATA_SETS[workload]}",
            run.shared,
            "{:.1%}",
            "simulated",
            SAVED_IN_PAPER[method, workload][i],
        )
        for (method, workload, (i, n)), run in zip(cases, runs, strict=True)
    ]
    n = max(NUM_SEQUENCES)
    for (method, workload, (_, num)), run in zip(cases, runs, strict=True):
        if method == "samples" and num == n:
            in_paper = PROMPT_SHARE_IN_PAPER if workload == "alpaca" else None
            name = f"the prompt's share, {n}/{n - 1} of what {n} samples save, {DATA_SETS[workload]}"
            rows.append(Row(name, run.shared * n / (n - 1), "{:.1%}", "simulated", in_paper))
    return Figure(
        "Figure 15: memory saved by sharing",
        rows,
        "OPT-13B, requests that do not wait. What samples share follows from lengths alone, and those of Alpaca "
        "are a guess around its means: hence up to a quarter more. Which beams survive is drawn, and the two "
        "numbers behind the draw were chosen by the paper's numbers: the rows of beams are a fit. For ShareGPT the "
        "paper's text has the ends of the range alone. The prompt's share is that of its full blocks, of which n "
        "samples save (n - 1) / n. The paper's 12% stand in its section 3, for the experiment of its section 6.3; its "
        "rows of samples, too, are (n - 1) / n of 11% to 12%. An hour of requests instead of minutes gives 12.0%.",
    )
