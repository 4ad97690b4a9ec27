"""The arguments of the `pagedattn` command."""

import argparse
import re
from importlib.metadata import version

from pagedattn_serve.config import DEMO_MODEL

UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagedattn", description="Serve language models on a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"pagedattn-ext {version('pagedattn-ext')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate_help = "complete prompts; the text appears as it is generated"
    add_generate(commands.add_parser("generate", help=generate_help, description=capital(generate_help)))
    info_help = "shapes of a model, and what fits in the cache; no weights are read"
    add_info(commands.add_parser("info", help=info_help, description=capital(info_help)))
    return parser


def capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="Hugging Face directory, or a repository in its cache (default: the demo model of the package)",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: %(default)s)")


def add_generate(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--tokenizer", metavar="DIR", help="directory with another tokenizer than the model's")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")

    prompts = parser.add_argument_group("prompts, and what becomes of them")
    source = prompts.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="text to complete; may be repeated")
    source.add_argument(
        "--prompts-file", metavar="FILE", help="a prompt a line, empty lines left out; - is standard input"
    )
    prompts.add_argument(
        "--json",
        action="store_true",
        help="a line of JSON a prompt, in their order: prompt, text, token_ids, finish_reason, error if there is one",
    )

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="of output, at most (default: %(default)s)"
    )
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    sampling.add_argument("--top-k", type=int, default=-1, metavar="K", help="the K likeliest tokens (default: all)")
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="the likeliest tokens that sum to P (default: 1, all)"
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="tokens of P times the best one's chance (default: 0, all)",
    )
    sampling.add_argument("--seed", type=int, help="of the random numbers (default: other ones for each prompt)")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="ends the output; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")

    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of prompt and output (default: the model's)"
    )
    engine.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="prompts running at once (default: %(default)s)"
    )
    engine.add_argument(
        "--speculation", metavar="METHOD", help="ngram: guess from repetitions and verify (default: no guesses)"
    )
    cache = engine.add_mutually_exclusive_group()
    cache.add_argument(
        "--kv-cache-memory",
        type=size,
        metavar="SIZE",
        help="for the cache: bytes, or 512MiB, 4GiB (default: 1GiB on the CPU, what is left on CUDA)",
    )
    cache.add_argument("--num-blocks", type=int, metavar="N", help="for the cache, in blocks of 16 tokens")
    add_kv_cache_dtype(engine)
    engine.add_argument(
        "--kv-scales",
        metavar="FILE",
        help="JSON for fp8: [k_scale, v_scale], or a list of these by layer (default: the checkpoint's, else 1)",
    )


def add_info(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens per cache block (default: %(default)s)"
    )
    parser.add_argument(
        "--kv-cache-memory",
        type=size,
        metavar="SIZE",
        help="for the cache: bytes, or 512MiB, 4GiB (default: 1GiB, as on the CPU)",
    )
    add_kv_cache_dtype(parser)


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
