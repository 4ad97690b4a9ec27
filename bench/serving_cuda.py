"""The engine on a GPU in bfloat16, beside transformers with the same weights and requests.

Usage: python bench/serving_cuda.py [--device cpu] [--requests N] [--json FILE]

A LLaMA with random weights, prompts of random tokens with the lengths of ShareGPT (serve/workloads.py), outputs with a
mean of 64 tokens, all there at once; one round, after a short one to warm up. Peers: `generate` with padded batches,
and the continuous batching of transformers, as it is and on our ops. The JSON file is written anew after each system.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import transformers
from harness import add_device_option, check_device, hardware, prepare, write_json
from serve.peers import compare, load_peers, print_comparison, run_in_turns
from serve.run import Run, warm_server
from serve.workloads import make_requests

from pagedattn_serve import LLMEngine

MAX_LEN, MEAN_OUTPUT = 2048, 64
CACHE_BYTES = 4 << 30
LLAMA = {
    "cuda": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, vocab_size=32000),
    "cpu": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=256),  # to try this program
}
HEADS = dict(num_attention_heads=32, num_key_value_heads=8)
ONE_BY_ONE = "generate, one by one"  # minutes


def make_model(device: str, directory: str) -> None:
    config = transformers.LlamaConfig(**LLAMA[device], **HEADS, max_position_embeddings=MAX_LEN, dtype="bfloat16")
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_device_option(parser)
    parser.set_defaults(device="cuda")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write hardware, command and all numbers")
    args = parser.parse_args()
    check_device(parser, args.device)
    prepare(num_threads=1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    facts = hardware(args.device)
    with tempfile.TemporaryDirectory() as model:
        make_model(args.device, model)
        peers = load_peers(model, "bfloat16", args.device)
        engine = LLMEngine(model, device=args.device, kv_cache_memory=CACHE_BYTES, swap_space=0)
        systems = {"engine": warm_server(engine), **{name: peers[name] for name in peers if name != ONE_BY_ONE}}
        vocab_size = LLAMA[args.device]["vocab_size"]
        requests = make_requests("sharegpt", args.requests, MAX_LEN, vocab_size, seed=0, mean_output=MEAN_OUTPUT)
        runs: dict[str, list[Run]] = {}
        for name, system in systems.items():
            runs |= run_in_turns({name: system}, requests, num_rounds=1)
            if args.json:
                write_json(args.json, facts, {"num_requests": len(requests), "peers": compare(runs)})
    print_comparison(compare(runs), len(requests), num_rounds=1)


if __name__ == "__main__":
    main()
