"""A step under PAGEDATTN_SANITIZE=1, beside a step without, with CPU graphs and op by op."""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from harness import draw_bars, print_table, write_files

from pagedattn_serve import DEMO_MODEL, LLMEngine
from serve.peers import compare, run_in_turns
from serve.run import engine_options, warm_server
from serve.workloads import Request

PROMPT_LEN, OUTPUT_LEN = 100, 48
NAMES = {"engine": "with graphs", "eager": "without (enforce_eager)", "sanitized": "with graphs and the sanitizer"}


def start(options: dict[str, Any], is_sanitized: bool = False) -> LLMEngine:
    os.environ["PAGEDATTN_SANITIZE"] = str(int(is_sanitized))
    return LLMEngine(DEMO_MODEL, device="cpu", enable_prefix_caching=False, **options)


def plot_steps(path: Path, title: str, tables: dict[str, dict[str, float]]) -> None:
    """Bars of milliseconds of CPU time, for each number of sequences."""
    figure, axes = draw_bars(tables, "{:.2f}")
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=120)


def measure_sanitizer(args: argparse.Namespace, facts: dict[str, object]) -> None:
    """The command `sanitizer`. Steps of prompts are among the steps."""
    options = engine_options(args.format)
    engines = {
        "engine": start(options),
        "eager": start({**options, "enforce_eager": True}),
        "sanitized": start(options, is_sanitized=True),
    }
    systems = {name: warm_server(engine) for name, engine in engines.items()}
    rng = numpy.random.default_rng(args.seed)
    tables: dict[str, dict[str, float]] = {}
    for num_sequences in args.sequences:
        prompts = rng.integers(2048, size=(num_sequences, PROMPT_LEN)).tolist()
        requests = [Request(prompt, OUTPUT_LEN) for prompt in prompts]
        rows = compare(run_in_turns(systems, requests, args.rounds))
        at_once = f"{num_sequences} at once"
        tables[at_once] = {NAMES[name]: 1e3 * num_sequences / row["tokens_per_cpu_s"] for name, row in rows.items()}
        table = [[f"{at_once}, {args.format}; median of {args.rounds}", "CPU ms a step", "of graphs", "same output"]]
        for name, row in rows.items():
            ms = f"{tables[at_once][NAMES[name]]:.2f}"
            table.append([NAMES[name], ms, f"{row['cpu_ratio']:.2f}x", f"{row['identical']:.0%}"])
        print_table(table)
    write_files(args, facts, partial(plot_steps, tables=tables), {"cpu_ms": tables})
