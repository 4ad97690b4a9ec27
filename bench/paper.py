"""The figures of the PagedAttention paper beside what this project gives, as paper/report.md with plots.

Usage: python bench/paper.py [FIGURE ...] [--full] [--out DIR]        (make paper [FIGURES="2 13"] [FULL=1])

Without names all figures are made, in the order of the list: figures/memory.py, figures/rates.py (simulated, on all
cores) and figures/measured.py (measured on this machine, one after the other). The report is written anew after each
figure, so that a run that is ended keeps what is done. --full simulates an hour of requests for each number, as the
paper does, instead of minutes, and measures more rounds: hours.
"""

import argparse
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from figures import measured, memory, rates
from figures.deployments import Effort
from figures.report import Figure, write_report
from harness import command_line, hardware

FIGURES: Mapping[str, Callable[[Effort], Figure]] = {
    "1": memory.sizes,
    "2": memory.held_slots,
    "3": memory.waste,
    "11": memory.lengths,
    "12": rates.load_and_latency,
    "13": memory.batched,
    "14": rates.several_outputs,
    "15": memory.saved_blocks,
    "16": rates.shared_prefix,
    "17": rates.chatbot,
    "18-kernel": measured.kernel,
    "18-blocks": rates.block_sizes,
    "19": measured.preemption,
    "transformers": measured.beside_transformers,
}


def figure_name(text: str) -> str:
    if text not in FIGURES:
        raise argparse.ArgumentTypeError(f"expected any of {', '.join(FIGURES)}; got {text!r}")
    return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("figures", nargs="*", type=figure_name, metavar="FIGURE", help=f"any of {', '.join(FIGURES)} (default: all)")
    add("--full", action="store_true", help="an hour of requests for each number, and more rounds: takes hours")
    add("--out", type=Path, default=Path("paper"), metavar="DIR", help="for report.md and plots (default: paper)")
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: expected a directory, got {args.out}: {error.strerror}")
    return args


def facts_of(args: argparse.Namespace) -> list[str]:
    machine = hardware("cpu")
    return [
        f"`{command_line()}`",
        "{cpu}, {num_cpus} CPUs, load {load} at the start; torch {torch}".format(**machine),
        "an hour of requests for each simulated number" if args.full else "quick: minutes of requests for each number",
    ]


def make_figures(names: list[str], directory: Path, facts: list[str], effort: Effort) -> None:
    with_plots = importlib.util.find_spec("matplotlib") is not None
    figures: dict[str, Figure] = {}
    for name in names:
        started = time.monotonic()
        (directory / f"{plot_name(name)}.png").unlink(missing_ok=True)  # of an earlier run
        figures[plot_name(name)] = FIGURES[name](effort)
        write_report(directory, facts, figures, with_plots)
        print(f"{name}: {figures[plot_name(name)].title}, {time.monotonic() - started:.0f} s", flush=True)
    print(directory / "report.md")


def plot_name(figure: str) -> str:
    return f"figure-{figure}" if figure[0].isdigit() else figure


def main() -> None:
    args = parse_args()
    names = [name for name in FIGURES if name in args.figures] if args.figures else [*FIGURES]
    facts = facts_of(args)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        try:
            make_figures(names, args.out, facts, Effort(args.full, pool.map))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            sys.exit(f"interrupted; {args.out / 'report.md'} has the figures that were done")


if __name__ == "__main__":
    main()
