"""What `pagedattn simulate --plot` draws: latency, throughput and memory of all runs on one sheet. Needs matplotlib."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagedattn_serve.errors import ArgumentError
from pagedattn_simulate.metrics import Distribution, Summary

Run = tuple[str, str, Summary]  # a system, its rate as it is shown, what happened
FORMATS = (".png", ".pdf", ".svg")
# The kinds of memory from the bottom of a bar to its top, with their colours.
KINDS = {"used": "C0", "reserved": "C2", "internal": "C1", "external": "C3", "free": "0.9"}


def check_plot(path: Path) -> None:
    """Before hours of simulation. Raises ImportError without matplotlib, ArgumentError for a file that cannot be."""
    if find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")
    if path.suffix not in FORMATS:
        raise ArgumentError("plot", f"a file that ends with {', '.join(FORMATS)}", path)
    if not path.parent.is_dir():
        raise ArgumentError("plot", "a file in a directory that exists", path)


def draw_runs(path: Path, title: str, runs: Sequence[Run]) -> None:
    """Lines over the rate for each system, and bars of memory for each run."""
    import_module("matplotlib").use("agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, ((latency, first), (throughput, memory)) = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    draw_lines(latency, runs, lambda run: of(run.normalized_latency, "mean"))
    latency.set_ylabel("normalised latency, mean, s/token")
    draw_lines(first, runs, lambda run: of(run.time_to_first_token, "p90"))
    first.set_ylabel("time to first token, 90th percentile, s")
    for axes in (latency, first):
        axes.set_yscale("log")  # where a system is full, latencies grow by orders of magnitude
    draw_lines(throughput, runs, lambda run: run.tokens_per_second)
    throughput.set_ylabel("output tokens/s")
    throughput.set_ylim(bottom=0)
    draw_memory(memory, runs)
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def of(distribution: Distribution | None, name: str) -> float | None:
    return None if distribution is None else getattr(distribution, name)


def draw_lines(axes: Any, runs: Sequence[Run], number: Callable[[Summary], float | None]) -> None:
    """Over the rate at which requests came."""
    for system in dict.fromkeys(system for system, _, _ in runs):
        of_system = [(float(rate), number(run)) for name, rate, run in runs if name == system]
        points = sorted((rate, value) for rate, value in of_system if value is not None)
        axes.plot([rate for rate, _ in points], [value for _, value in points], marker=".", label=system)
    axes.set_xlabel("requests/s")
    axes.legend(fontsize=8)


def draw_memory(axes: Any, runs: Sequence[Run]) -> None:
    places = [f"{system}, {rate}/s" for system, rate, _ in runs]
    left = [0.0] * len(runs)
    for kind, colour in KINDS.items():
        shares = [run.memory[kind] for _, _, run in runs]
        axes.barh(places, shares, left=left, color=colour, label=kind)
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_xlim(0, 1)
    axes.set_xlabel("slots of the cache")
    axes.legend(fontsize=8, ncols=len(KINDS), loc="upper center", bbox_to_anchor=(0.5, 1.1))
