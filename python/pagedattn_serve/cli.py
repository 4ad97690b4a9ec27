"""The `pagedattn` command."""

import argparse
import sys
from collections.abc import Sequence

from pagedattn_serve.config import DEMO_MODEL, CacheConfig
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.execution.cache_memory import DEFAULT_CPU_MEMORY, block_bytes_of, choose_num_blocks
from pagedattn_serve.models.loader import build_model
from pagedattn_serve.sampling_params import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A user's mistake is one line on standard error."""
    parser = argparse.ArgumentParser(prog="pagedattn", description="Serve language models on a paged KV cache.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(commands.add_parser("generate", help="complete prompts; the text appears as it is generated"))
    add_info(commands.add_parser("info", help="shapes of a model, and what fits in the cache; no weights are read"))
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (OSError, TypeError, ValueError) as error:
        print(f"pagedattn: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="Hugging Face directory (default: the demo model that comes with the package)",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: %(default)s)")


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=generate)
    add_model(parser)
    parser.add_argument("--prompt", action="append", required=True, help="text to complete; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=-1, help="keep the k most likely tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the most likely tokens that sum to this share")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep tokens of this share of the likeliest's chance")
    parser.add_argument("--seed", type=int, help="of the random numbers (default: other ones for each prompt)")
    parser.add_argument("--stop", action="append", help="text that ends the output; may be repeated")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


def add_info(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=info)
    add_model(parser)
    parser.add_argument("--block-size", type=int, default=16, help="tokens per cache block (default: %(default)s)")
    parser.add_argument(
        "--kv-cache-memory",
        type=int,
        default=DEFAULT_CPU_MEMORY,
        metavar="BYTES",
        help="for the cache (default: %(default)s, as on the CPU)",
    )


def generate(args: argparse.Namespace) -> None:
    """All prompts run together; the first one's text streams, and each other's follows when it is its turn."""
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
    )
    engine = LLMEngine(args.model, dtype=args.dtype, device=args.device)
    for i, prompt in enumerate(args.prompt):
        engine.add_request(str(i), prompt, params)

    texts = [""] * len(args.prompt)
    done = [False] * len(args.prompt)
    shown = 0  # the prompt whose text is on the screen
    num_printed = 0  # characters of it
    print(args.prompt[0], end="", flush=True)
    while shown < len(texts):
        for output in engine.step():
            texts[int(output.request_id)] = output.outputs[0].text
            done[int(output.request_id)] = output.finished
        while shown < len(texts):
            print(texts[shown][num_printed:], end="", flush=True)
            num_printed = len(texts[shown])
            if not done[shown]:
                break
            shown, num_printed = shown + 1, 0
            print("\n" if shown < len(texts) else "")
            if shown < len(texts):
                print(args.prompt[shown], end="", flush=True)


def info(args: argparse.Namespace) -> None:
    CacheConfig(num_blocks=1, block_size=args.block_size)  # checks block_size
    model = build_model(args.model, args.dtype)
    block_bytes = block_bytes_of(model, args.block_size)
    num_blocks = choose_num_blocks(model, args.kv_cache_memory, args.block_size, sys.maxsize)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for name, value in [
        ("model", args.model),
        ("architecture", model.architecture),
        ("runs", model.runs),
        ("parameters", f"{num_parameters:,} ({num_parameters * model.dtype.itemsize:,} bytes)"),
        ("dtype", str(model.dtype).removeprefix("torch.")),
        ("layers", f"{model.num_layers}"),
        ("heads", f"{model.num_heads} query, {model.num_kv_heads} key-value, of size {model.head_size}"),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("max_model_len", f"{model.max_model_len:,} tokens"),
        (
            "cache",
            f"{block_bytes // args.block_size:,} bytes per token, {block_bytes:,} per block of {args.block_size}",
        ),
        (
            "that fit",
            f"{num_blocks:,} blocks ({num_blocks * args.block_size:,} tokens) in {args.kv_cache_memory:,} bytes",
        ),
    ]:
        print(f"{name:15}{value}")
