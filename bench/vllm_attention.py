"""A step of vLLM on a CPU with the attention of `pagedattn_ext.vllm_plugin`, beside the same step with vLLM's own.

Usage: make .venv-adopters/vllm/ready; .venv-adopters/vllm/bin/python bench/vllm_attention.py [--dtype bfloat16]

One engine, one thread, a LLaMA of random weights (hidden 768, 12 layers, 12 heads on 4 of 64). The two attentions take
turns, on an empty cache each time. A step's time is that of the process's CPU, and so is its part in attention, the
writes to the cache included; of several rounds the medians are printed.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

os.environ |= {
    "PAGEDATTN_VLLM": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}

from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from pagedattn_ext import cpu_capability
from pagedattn_ext.vllm_backend import PagedAttentionImpl

SHAPE = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=32000, hidden_size=768, intermediate_size=2048,
    num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
)  # fmt: skip
ATTENTIONS = {"vLLM's own": CPUAttentionBackendImpl, "this package": PagedAttentionImpl}
# (sequences, tokens of a prompt)
PROMPTS = [(4, 256), (1, 2048)]
DECODES = [(8, 256), (2, 2048)]
NUM_STEPS = 8

attention_seconds = 0.0  # so far


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        global attention_seconds
        start = time.process_time()
        result = method(*args, **kwargs)
        attention_seconds += time.process_time() - start
        return result

    return run


for attention in ATTENTIONS.values():
    attention.forward = timed(attention.forward)
    attention.do_kv_cache_update = timed(attention.do_kv_cache_update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPE))
        llm = LLM(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=args.dtype,
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
        )
    print(f"\n{args.dtype}, one thread, {cpu_capability()}; ms of CPU time a step, and of this in attention\n")
    print("| step | " + " | ".join(ATTENTIONS) + " | times as fast | its attention |\n|---|---|---|---|---|")
    for num_seqs, length in PROMPTS:
        print_row(llm, f"prompts, {num_seqs} x {length}", num_seqs, length, args.rounds, decodes=False)
    for num_seqs, length in DECODES:
        print_row(llm, f"decode, {num_seqs} x {length}", num_seqs, length, args.rounds, decodes=True)


def print_row(llm: LLM, name: str, num_seqs: int, length: int, rounds: int, decodes: bool) -> None:
    times: dict[str, list[tuple[float, float]]] = {attention: [] for attention in ATTENTIONS}
    for _ in range(rounds):
        for attention, implementation in ATTENTIONS.items():
            for layer in attention_layers(llm):
                layer.impl.__class__ = implementation
            steps = step_times(llm, num_seqs, length, NUM_STEPS if decodes else 0)
            parts = zip(*(steps[-NUM_STEPS:] if decodes else steps), strict=True)
            whole, part = (statistics.median(each) if decodes else sum(each) for each in parts)
            times[attention].append((whole, part))
    medians = [[1e3 * statistics.median(each) for each in zip(*rounds, strict=True)] for rounds in times.values()]
    columns = [f"{whole:.1f}, {part:.1f}" for whole, part in medians]
    columns += [f"{theirs / ours:.2f}" for theirs, ours in zip(*medians, strict=True)]
    print(f"| {name} | " + " | ".join(columns) + " |", flush=True)


def attention_layers(llm: LLM) -> list[Any]:
    return list(llm.llm_engine.vllm_config.compilation_config.static_forward_context.values())


def step_times(llm: LLM, num_seqs: int, length: int, num_steps: int) -> list[tuple[float, float]]:
    """Seconds of each step of so many prompts, which are decoded for num_steps after their first tokens; and of each
    step those in attention."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=1 + num_steps, ignore_eos=True, detokenize=False)
    for i in range(num_seqs):
        prompt = [(i * 7919 + t * 31) % 32000 for t in range(length)]
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    times = []
    while llm.llm_engine.has_unfinished_requests():
        start, attention_start = time.process_time(), attention_seconds
        llm.llm_engine.step()
        times.append((time.process_time() - start, attention_seconds - attention_start))
    return times


if __name__ == "__main__":
    main()
