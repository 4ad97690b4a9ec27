"""The `pagedattn` command."""

import argparse
import sys
from collections.abc import Sequence

from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.sampling_params import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A user's mistake is one line on standard error."""
    parser = argparse.ArgumentParser(prog="pagedattn", description="Serve language models on a paged KV cache.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(commands.add_parser("generate", help="complete prompts; the text appears as it is generated"))
    args = parser.parse_args(argv)
    try:
        generate(args)
    except (OSError, TypeError, ValueError) as error:
        print(f"pagedattn: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="Hugging Face directory (default: the demo model that comes with the package)",
    )
    parser.add_argument("--prompt", action="append", required=True, help="text to complete; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=-1, help="keep the k most likely tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the most likely tokens that sum to this share")
    parser.add_argument("--seed", type=int, help="of the random numbers (default: other ones for each prompt)")
    parser.add_argument("--stop", action="append", help="text that ends the output; may be repeated")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: %(default)s)")


def generate(args: argparse.Namespace) -> None:
    """All prompts run together; the first one's text streams, and each other's follows when it is its turn."""
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
    )
    engine = LLMEngine(args.model, dtype=args.dtype)
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
