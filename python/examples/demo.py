"""Serve 64 ragged prompts at once on the demo model, and measure it.

Usage: python python/examples/demo.py [--requests N] [--threads N]

Prompts are pieces of the Python language reference (it ships with CPython), 8 to 160 tokens long; the outputs have 16
to 128 tokens. The table compares the same requests served together, one at a time, and by Hugging Face `generate` in
static batches padded to their longest member, all greedy and in fp32, with the same weights and threads. The default is
one thread: on a busy machine, the small matrix products of this model mostly wait for a second thread.
"""

import argparse
import random
import sys
import time
from pydoc_data.topics import topics

import torch
import transformers

from pagedattn_serve import DEMO_MODEL, EngineStats, LLMEngine, SamplingParams

BATCH_SIZE = 16  # of the static batches
DTYPE = "float32"

Request = tuple[list[int], int]  # prompt token ids, tokens to generate


def make_requests(engine: LLMEngine, count: int) -> list[Request]:
    rng = random.Random(0)
    names = sorted(topics)
    requests = []
    for _ in range(count):
        token_ids = engine.tokenizer(topics[rng.choice(names)].strip(), verbose=False).input_ids
        requests.append((token_ids[: rng.randint(8, 160)], rng.randint(16, 128)))
    return requests


def serve(engine: LLMEngine, requests: list[Request], show_progress: bool = False) -> tuple[float, list, list]:
    """Returns the seconds, the finished outputs by request, and the engine's stats after each step."""
    outputs, history = [None] * len(requests), []
    started = time.perf_counter()
    for i, (token_ids, max_tokens) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(str(i), prompt_token_ids=token_ids, sampling_params=params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = output
        history.append(engine.stats())
        if show_progress:
            show(len(history), history[-1], time.perf_counter() - started)
    return time.perf_counter() - started, outputs, history


def show(step: int, stats: EngineStats, seconds: float) -> None:
    """On a terminal the line is redrawn after every step; in a log, a line now and then is enough."""
    line = (
        f"step {step:4d}  waiting {stats.num_waiting:3d}  running {stats.num_running:3d}  "
        f"cache {stats.num_used_blocks:4d}/{stats.num_blocks} blocks  {stats.num_output_tokens / seconds:6.0f} tokens/s"
    )
    if sys.stdout.isatty():
        print(f"\r{line}", end="" if stats.num_running else "\n", flush=True)
    elif step in (1, 2) or step % 16 == 0 or stats.num_running == 0:
        print(line, flush=True)


def serve_one_by_one(engine: LLMEngine, requests: list[Request]) -> float:
    return sum(serve(engine, [request])[0] for request in requests)


def serve_static_batches(requests: list[Request]) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as with ignore_eos
    started = time.perf_counter()
    for begin in range(0, len(requests), BATCH_SIZE):
        batch = requests[begin : begin + BATCH_SIZE]
        width = max(len(token_ids) for token_ids, _ in batch)
        padded = torch.tensor([[0] * (width - len(token_ids)) + token_ids for token_ids, _ in batch])
        mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t, _ in batch])
        steps = max(max_tokens for _, max_tokens in batch)
        model.generate(padded, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64, help="prompts to serve (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    args = parser.parse_args()
    for name in ("requests", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()

    engine = LLMEngine(DEMO_MODEL, dtype=DTYPE, max_num_seqs=args.requests)
    requests = make_requests(engine, args.requests)
    num_tokens = sum(max_tokens for _, max_tokens in requests)
    print(f"{len(requests)} prompts, {num_tokens} tokens to generate, threads: {args.threads}\n")
    seconds, outputs, history = serve(engine, requests, show_progress=True)

    for output in outputs[:3]:
        print(f"\n--- prompt: {engine.tokenizer.decode(output.prompt_token_ids)!r}")
        print(output.outputs[0].text)

    one_by_one = serve_one_by_one(engine, requests)
    static = serve_static_batches(requests)
    print(f"\n{'':44}{'tokens/s':>10}{'speed-up':>10}")
    for name, other in [
        ("continuous batching on the paged cache", seconds),
        ("the same engine, one request at a time", one_by_one),
        (f"transformers generate, padded batches of {BATCH_SIZE}", static),
    ]:
        print(f"{name:44}{num_tokens / other:10.0f}{other / seconds:9.2f}x")

    block_size = engine.scheduler.block_manager.block_size
    peak = max(history, key=lambda stats: stats.num_used_blocks)
    wasted = 1 - sum(s.num_used_slots for s in history) / sum(s.num_used_blocks * block_size for s in history)
    reserved = sum(s.num_running for s in history) * engine.max_model_len
    wasted_if_reserved = 1 - sum(s.num_used_slots for s in history) / reserved
    print(f"\npeak use of the cache: {peak.num_used_blocks} blocks of {block_size} tokens")
    print(f"wasted slots: {wasted:.1%} (reserving {engine.max_model_len} tokens a request: {wasted_if_reserved:.1%})")


if __name__ == "__main__":
    main()
