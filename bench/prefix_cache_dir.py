"""Time to the first token of a prompt whose beginning lies on disk (prefix_cache_dir), or in the cache, or nowhere.

Usage: python bench/prefix_cache_dir.py [--shape small] [--threads N] [--rounds N] [--prefix-tokens 400]

A process sends two prompts that begin alike, and ends. Another process, with the same directory, goes round: it forgets
all blocks in its cache, and sends two prompts with this beginning. The first finds it on disk, the second in the cache.
Before each of them comes another prompt, so that both find the CPU's caches in the same state. The file is in the
system's page cache, as after a restart of the server; after a restart of the machine, the time to read it comes on top.
The first round only warms up. Medians and least values of wall and of CPU time, which counts all threads.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy
import torch
from serve.workloads import SHAPES, make_model

from pagedattn_serve import LLM, SamplingParams

NUM_OWN = 16  # tokens of a prompt after its prefix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--prefix-tokens", type=int, default=400)
    parser.add_argument("--in", dest="directory", help=argparse.SUPPRESS)  # the second process
    args = parser.parse_args()
    if args.directory is not None:
        measure(args, Sender(args))
        return
    with tempfile.TemporaryDirectory() as args.directory:
        make_model(args.shape, 0, args.directory)
        sender = Sender(args)
        for question in (1, 2):  # the second finds the prefix: now it is worth its place on disk
            sender.seconds([*sender.prefix, question])
        sender.llm.llm_engine.flush()
        files = [file.stat().st_size for file in Path(args.directory).glob("blocks/*/*.safetensors")]
        print(f"{len(files)} files, {sum(files):,} bytes", flush=True)
        del sender
        subprocess.run([sys.executable, *sys.argv, "--in", args.directory], check=True)


class Sender:
    """An engine on the directory, and the prefix, which is the same in both processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        self.llm = LLM(args.directory, dtype="bfloat16", prefix_cache_dir=f"{args.directory}/blocks")
        rng = numpy.random.default_rng(0)
        self.prefix = rng.integers(SHAPES[args.shape].vocab_size, size=args.prefix_tokens).tolist()

    def seconds(self, prompt: list[int], num_found: int | None = None) -> tuple[float, float]:
        """Wall and CPU time to the first token."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        wall, cpu = time.perf_counter(), time.process_time()
        [output] = self.llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
        taken = time.perf_counter() - wall, time.process_time() - cpu
        assert output.metrics is not None and num_found in (None, output.metrics.num_cached_tokens)
        return taken


def measure(args: argparse.Namespace, sender: Sender) -> None:
    num_found = args.prefix_tokens // 16 * 16
    times: dict[str, list[tuple[float, float]]] = {"from disk": [], "from the cache": []}
    for i in range(args.rounds):
        sender.llm.llm_engine.scheduler.restart([])
        for j, of_way in enumerate(times.values()):
            sender.seconds([i * 2 + j] * 64)
            of_way.append(sender.seconds([*sender.prefix, *[i * 2 + j] * NUM_OWN], num_found))
    computed = sender.seconds([0, *sender.prefix, *[0] * (NUM_OWN - 1)], 0)
    print(f"{'computed, once':15} wall {computed[0] * 1e3:8.1f} ms, CPU {computed[1] * 1e3:8.1f} ms")
    for name, of_way in times.items():
        wall, cpu = ([each[k] * 1e3 for each in of_way[1:]] for k in (0, 1))
        print(
            f"{name:15} wall {median(wall):8.1f} ms, at least {min(wall):.1f}; CPU {median(cpu):.1f} ms, at least "
            f"{min(cpu):.1f}"
        )


if __name__ == "__main__":
    main()
