"""The CPU time of a step outside of the model and the sampler: scheduling, blocks, inputs, outputs and their text."""

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import numpy
from harness import draw_bars, print_table, write_files

from pagedattn_serve import DEMO_MODEL, LLMEngine
from serve.run import Server, engine_options, host_time, warm_server
from serve.workloads import Request

BLOCK_SIZE = 16  # the engine's default
OUTPUT_LEN = 64
NAMES = {True: "with prefix caching", False: "without"}


def start(args: argparse.Namespace, is_caching: bool) -> Server:
    most = max(args.sequences)
    num_blocks = most * (2 + OUTPUT_LEN // BLOCK_SIZE) + 64  # for all, and some that stay free
    options = {"max_num_seqs": most, "num_blocks": num_blocks, "enable_prefix_caching": is_caching}
    return warm_server(LLMEngine(DEMO_MODEL, device="cpu", **engine_options(args.format), **options))


def measure(server: Server, num_sequences: int, rng: numpy.random.Generator) -> float:
    """Microseconds a sequence: the median of the steps that give each sequence a token, and do nothing else. In each,
    one sequence of 16 fills a block."""
    prompts = [rng.integers(2048, size=BLOCK_SIZE - i % BLOCK_SIZE).tolist() for i in range(num_sequences)]
    steps = server([Request(prompt, OUTPUT_LEN) for prompt in prompts]).steps
    all_run = [step for step in steps if step.batch_size == num_sequences and not step.num_waiting]
    return host_time(all_run[1:])["us_per_sequence"]["p50"]  # in the first, prompts ran


def plot_host(path: Path, title: str, tables: dict[str, dict[str, float]]) -> None:
    """Bars of microseconds a sequence, with prefix caching and without."""
    figure, axes = draw_bars(tables, "{:.1f}")
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=120)


def measure_host(args: argparse.Namespace, facts: dict[str, object]) -> None:
    """The command `host`. Each round has prompts of its own, which no cache knows."""
    rng = numpy.random.default_rng(args.seed)
    servers = {name: start(args, is_caching) for is_caching, name in NAMES.items()}
    tables: dict[str, dict[str, float]] = {name: {} for name in servers}
    table = [
        [
            f"{args.format}; median of {args.rounds}",
            *(f"{unit}, {name}" for name in servers for unit in ("ms", "us a sequence")),
        ]
    ]
    for num_sequences in args.sequences:
        rounds = [[measure(server, num_sequences, rng) for server in servers.values()] for _ in range(args.rounds)]
        row = [f"{num_sequences} at once"]
        for name, micros in zip(servers, map(median, zip(*rounds, strict=True)), strict=True):
            tables[name][f"{num_sequences} at once"] = micros
            row += [f"{micros * num_sequences / 1000:.2f}", f"{micros:.1f}"]
        table.append(row)
    print_table(table)
    write_files(args, facts, partial(plot_host, tables=tables), {"us_per_sequence": tables})
