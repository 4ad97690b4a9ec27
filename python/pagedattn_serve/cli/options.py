"""Options that commands share: which model, and how its engine is set up."""

import argparse
import re

from pagedattn_serve.config import DEMO_MODEL

UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="Hugging Face directory, or a repository in its cache (default: the demo model of the package)",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: %(default)s)")
    parser.add_argument(
        "--quantization",
        metavar="FORM",
        help="of the weights of linear layers, on the CPU: int8 or int4 (default: as in the checkpoint)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", metavar="DIR", help="directory with another tokenizer than the model's")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the engine's options, in groups of their own. `cli.engine` makes an engine of them."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of prompt and output (default: the model's)"
    )
    engine.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="sequences running at once (default: %(default)s)"
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2560,
        metavar="N",
        help="tokens through the model in one step; longer prompts run in small chunks beside others "
        "(default: %(default)s)",
    )
    engine.add_argument(
        "--scheduling-policy",
        default="fcfs",
        metavar="POLICY",
        help="fcfs, first come first served, or priority (default: %(default)s)",
    )
    engine.add_argument(
        "--preemption-mode",
        default="auto",
        metavar="MODE",
        help="of requests that make room: recompute, swap, or auto, by what is better (default: %(default)s)",
    )
    engine.add_argument(
        "--speculation", metavar="METHOD", help="ngram: guess from repetitions and verify (default: no guesses)"
    )
    engine.add_argument(
        "--max-beam-width", type=int, default=32, metavar="N", help="widest beam of a request (default: %(default)s)"
    )
    add_cache(parser.add_argument_group("cache"))


def add_cache(group: argparse._ArgumentGroup) -> None:
    cache = group.add_mutually_exclusive_group()
    cache.add_argument(
        "--kv-cache-memory",
        type=size,
        metavar="SIZE",
        help="bytes, or 512MiB, 4GiB (default: 1GiB on the CPU, what is left on CUDA)",
    )
    cache.add_argument("--num-blocks", type=int, metavar="N", help="the same in blocks")
    add_block_size(group)
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of a CUDA device that weights, activations and cache may take (default: %(default)s)",
    )
    group.add_argument(
        "--swap-space",
        type=float,
        default=4,
        metavar="GIB",
        help="of host memory, for blocks of preempted requests, of which there are no more than in the cache "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute each prompt anew, even where another began the same way",
    )
    add_kv_cache_dtype(group)
    group.add_argument(
        "--kv-scales",
        metavar="FILE",
        help="JSON for fp8: [k_scale, v_scale], or a list of these by layer (default: the checkpoint's, else 1)",
    )


def add_block_size(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens per cache block (default: %(default)s)"
    )


def add_kv_cache_dtype(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="DTYPE",
        help="auto (the model's), fp8, fp8_e4m3 or fp8_e5m2 (default: %(default)s)",
    )


def size(text: str) -> int:
    """Bytes of "1000", "512MiB", "1.5 GiB"."""
    match = re.fullmatch(r"(-?\d+|\d+\.\d+(?=\s*[a-z]))\s*([kmgt]ib|)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected bytes, or a number of KiB, MiB, GiB or TiB, got {text!r}")
    number, unit = match.groups()
    return int(float(number) * UNITS[unit]) if "." in number else int(number) * UNITS[unit]
