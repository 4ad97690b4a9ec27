"""The server beside `LLM.generate`, in turns, on the same requests: what HTTP and streams cost.

The server is `pagedattn serve`, a process of its own. This process has its clients (http_streams.py), and in its own
turn generates by itself. Each round draws new requests, so that the prefix cache has nothing of them. All requests come
at once, with prompts of random tokens in the lengths of Alpaca.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import torch
from harness import draw_bars, hardware, print_table, write_files

from pagedattn_serve import LLM, SamplingParams
from serve.http_streams import exchange, make_message, read_stream
from serve.run import engine_options, percentiles
from serve.workloads import Request, make_requests

SERVE = "import sys; from pagedattn_serve.cli import main; sys.exit(main())"
STOP_SECONDS = 60
CPU_SECONDS = re.compile(r"^(?:engine_core_)?process_cpu_seconds_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Turn:
    """What one contender did in one round.

    texts: of the outputs, in the order of the requests. client_cpu_seconds: of all clients together. times: of each
    stream's events, seconds after the start.
    """

    seconds: float
    cpu_seconds: float
    texts: list[str]
    client_cpu_seconds: float = 0.0
    times: tuple[list[float], ...] = ()


Contender = Callable[[list[Request]], Turn]


@dataclass(frozen=True)
class Row:
    """All rounds with one number of requests at a time. num_tokens: of output, in a round."""

    concurrency: int
    num_tokens: int
    offline: list[Turn]
    served: list[Turn]

    def numbers(self) -> dict[str, Any]:
        turns = [*zip(self.offline, self.served, strict=True)]
        texts = [pair for offline, served in turns for pair in zip(offline.texts, served.texts, strict=True)]
        streams = [times for turn in self.served for times in turn.times]
        gaps = [later - earlier for times in streams for earlier, later in pairwise(times)]
        return {
            "generate_tokens_per_s": self.num_tokens / median(turn.seconds for turn in self.offline),
            "server_tokens_per_s": self.num_tokens / median(turn.seconds for turn in self.served),
            "ratio": median(offline.seconds / served.seconds for offline, served in turns),
            "first_event_ms": percentiles([1e3 * times[0] for times in streams], 50, 99),
            "between_events_ms": percentiles([1e3 * gap for gap in gaps], 50, 99),
            "tokens_per_event": self.num_tokens * len(turns) / sum(map(len, streams)),
            "generate_cpu_us": self._cpu_us(turn.cpu_seconds for turn in self.offline),
            "server_cpu_us": self._cpu_us(turn.cpu_seconds for turn in self.served),
            "client_cpu_us": self._cpu_us(turn.client_cpu_seconds for turn in self.served),
            "same_texts": sum(offline == served for offline, served in texts) / len(texts),
        }

    def _cpu_us(self, seconds: Iterator[float]) -> float:
        """Of a token."""
        return 1e6 * median(seconds) / self.num_tokens

    def as_dict(self) -> dict[str, object]:
        raw = {
            f"{name}_{field}": [getattr(turn, field) for turn in turns]
            for name, turns in (("generate", self.offline), ("server", self.served))
            for field in ("seconds", "cpu_seconds")
        }
        return {"concurrency": self.concurrency, "num_tokens": self.num_tokens, **self.numbers(), **raw}


# ---- the contenders -------------------------------------------------------------------------------------------------


def generate(llm: LLM, requests: list[Request]) -> Turn:
    params = [SamplingParams(temperature=0, max_tokens=each.max_tokens, ignore_eos=True) for each in requests]
    prompts = [each.prompt_token_ids for each in requests]
    cpu_started, started = time.process_time(), time.monotonic()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    return Turn(seconds, cpu_seconds, [output.outputs[0].text for output in outputs])


def stream(url: str, requests: list[Request]) -> Turn:
    """Each request is a stream of its own; connecting and sending are timed as well."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    messages = [make_message(request) for request in requests]
    server_cpu_started = cpu_seconds_of(url)
    cpu_started, started = time.process_time(), time.monotonic()
    answers = exchange((address.hostname, address.port), messages)
    seconds, client_cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    server_cpu_seconds = cpu_seconds_of(url) - server_cpu_started
    streams = [read_stream(answer) for answer in answers]
    times = tuple([moment - started for moment in each.times] for each in streams)
    return Turn(seconds, server_cpu_seconds, [each.text for each in streams], client_cpu_seconds, times)


def cpu_seconds_of(url: str) -> float:
    """What the server's two processes have taken of the CPU so far."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        found = CPU_SECONDS.findall(response.read().decode())
    assert len(found) == 2, "prometheus_client knows it on Linux alone"
    return sum(map(float, found))


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[str]:
    """A server on a free port, as its URL. Raises RuntimeError if it does not start; why is on standard error."""
    options = ["--port", "0", "--device", "cpu", "--log-level", "warning"]
    for name, value in engine_options(args.format).items():
        options += [f"--{name}", value]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", args.model, *options, "--max-num-seqs", str(max(args.concurrency))],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
    )
    with process:
        assert process.stdout is not None
        try:
            urls = (line.split()[1] for line in process.stdout if line.startswith("URL "))
            url = next(urls, None)  # the last line of what it says when it takes connections
            if url is None:
                raise RuntimeError(f"the server ended with status {process.wait()}")
            yield url
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


# ---- the comparison -------------------------------------------------------------------------------------------------


def draw(args: argparse.Namespace, llm: LLM, concurrency: int, round_idx: int) -> list[Request]:
    max_model_len, vocab_size = llm.llm_engine.max_model_len, llm.llm_engine.model_runner.model.vocab_size
    longest = max_model_len - args.output_tokens
    requests = make_requests("alpaca", concurrency, max_model_len, vocab_size, args.seed + round_idx)
    return [Request(each.prompt_token_ids[:longest], args.output_tokens) for each in requests]


def measure(args: argparse.Namespace, llm: LLM, offline: Contender, served: Contender, concurrency: int) -> Row:
    """The first round is not counted."""
    row = Row(concurrency, concurrency * args.output_tokens, [], [])
    for round_idx in range(args.rounds + 1):
        requests = draw(args, llm, concurrency, round_idx)
        turns = offline(requests), served(requests)
        if round_idx > 0:
            row.offline.append(turns[0])
            row.served.append(turns[1])
    return row


def print_rows(rows: Sequence[Row]) -> None:
    """Two tables: rates and what they cost; latencies."""
    rates = [["tokens/s", "generate", "server", "ratio", "same texts", "CPU us a token", "server", "clients"]]
    latencies = [["ms", "first event p50", "p99", "next p50", "p99", "tokens an event"]]
    for row in rows:
        numbers, title = row.numbers(), f"{row.concurrency} at once"
        per_second = [f"{numbers[f'{name}_tokens_per_s']:.0f}" for name in ("generate", "server")]
        cpu = [f"{numbers[f'{name}_cpu_us']:.0f}" for name in ("generate", "server", "client")]
        rates.append([title, *per_second, f"{numbers['ratio']:.1%}", f"{numbers['same_texts']:.0%}", *cpu])
        ms = [
            "-" if ms is None else f"{ms:.1f}"
            for name in ("first_event_ms", "between_events_ms")
            for ms in numbers[name].values()
        ]
        latencies.append([title, *ms, f"{numbers['tokens_per_event']:.2f}"])
    print_table(rates)
    print_table(latencies)


def plot_rows(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Bars of tokens per second, a colour for each contender."""
    bars = {
        name: {f"{row.concurrency} at once": row.numbers()[key] for row in rows}
        for name, key in (("LLM.generate", "generate_tokens_per_s"), ("server", "server_tokens_per_s"))
    }
    figure, axes = draw_bars(bars, "{:.0f}")
    axes.set_xlabel("tokens/s")
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=120)


def compare_server(args: argparse.Namespace) -> None:
    """The command `server`. Ends the process with status 2 for a mistake in the options."""
    torch.set_num_threads(args.threads)
    facts = hardware("cpu")
    try:
        llm = LLM(args.model, device="cpu", max_num_seqs=max(args.concurrency), **engine_options(args.format))
    except (FileNotFoundError, ValueError) as error:
        args.parser.error(str(error))
    print(f"{args.model}, {args.format}; {args.output_tokens} tokens of output each; medians of {args.rounds} rounds")
    with serving(args) as url:
        offline, served = partial(generate, llm), partial(stream, url)
        rows = [measure(args, llm, offline, served, concurrency) for concurrency in args.concurrency]
    print_rows(rows)
    write_files(args, facts, partial(plot_rows, rows=rows), {"rows": [row.as_dict() for row in rows]})
