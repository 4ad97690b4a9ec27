"""What an fp8 KV cache does to a model: perplexity, and how often the next token stays the same.

Usage: python bench/kv_cache_accuracy.py [--model DIR] [--dtype float32] [--device auto] [--prompts 100]
           [--text FILE]

Texts: docstrings of the standard library, which the demo model has not seen; the language reference, on which it was
trained; a file. Perplexity: windows of 512 tokens, each from an empty cache, in chunks of 64 whose attention reads all
keys and values from the cache. Same next token: share of these positions at which the most likely token is that of the
unquantized cache. Greedy: share of equal tokens, place by place, among 64 after the first 32 tokens of each of N pieces
of the text; a first difference changes what follows it. Scales are calibrated on docstrings that are not measured.
"""

import argparse
import ast
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams, calibrate_kv_scales
from pagedattn_serve.calibration import run_alone
from pagedattn_serve.execution.cache_memory import block_bytes_of

ROWS = [("auto", "-"), *((f"fp8_{kind}", scales) for kind in ("e4m3", "e5m2") for scales in ("1", "calibrated"))]
NUM_CALIBRATION, NUM_WINDOWS, WINDOW, CHUNK_SIZE, NUM_NEW = 32, 40, 512, 64, 64


def docstrings() -> list[str]:
    """Those of the standard library's modules, packages left out, and of their classes and functions; each once."""
    found: dict[str, None] = {}
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found[ast.get_docstring(node) or ""] = None
    return [text for text in found if len(text) > 150]


@torch.inference_mode()
def measure(llm: LLM, token_ids: list[int], num_prompts: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Perplexity; the most likely next tokens, [num_windows, window - 1]; greedy ones, [num_prompts, NUM_NEW]."""
    window = min(WINDOW, llm.llm_engine.max_model_len)
    starts = range(0, len(token_ids) - window, len(token_ids) // NUM_WINDOWS)[:NUM_WINDOWS]
    losses, likeliest = [], []
    for piece in [token_ids[start : start + window] for start in starts]:
        logits = torch.cat(list(run_alone(llm.llm_engine.model_runner, piece, CHUNK_SIZE)))[:-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(piece[1:], device=logits.device)))
        likeliest.append(logits.argmax(-1))
    prompts = [token_ids[i : i + 32] for i in range(0, len(token_ids) - 32, len(token_ids) // num_prompts)][
        :num_prompts
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    return math.exp(torch.stack(losses).mean().item()), torch.stack(likeliest), torch.tensor(outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--dtype", default="float32", help="of the model, and of the cache that is not quantized")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=100, metavar="N")
    parser.add_argument("--text", type=Path, metavar="FILE")
    args = parser.parse_args()
    options: dict[str, Any] = dict(dtype=args.dtype, device=args.device)
    tokenizer = LLM(args.model, **options).get_tokenizer()
    held_out = docstrings()
    calibration = held_out[:: len(held_out) // NUM_CALIBRATION][:NUM_CALIBRATION]
    texts = {"docstrings": [text for text in held_out if text not in calibration], "reference": list(topics.values())}
    if args.text is not None:
        texts[args.text.name] = [args.text.read_text()]
    token_ids = {name: tokenizer("\n\n".join(pieces), verbose=False).input_ids for name, pieces in texts.items()}
    calibration_ids = [tokenizer(text, verbose=False).input_ids[: WINDOW // 2] for text in calibration]
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, {args.model}, {args.dtype}")
    print(f"{ {name: len(ids) for name, ids in token_ids.items()} } tokens, {args.prompts} prompts\n")
    print("| text | kv_cache_dtype | scales | bytes a token | perplexity | change | same next token | greedy |")
    print("|---|---|---|---|---|---|---|---|")
    references: dict[str, Any] = {}
    for kv_cache_dtype, name in ROWS:
        scales: Any = {"-": None, "1": (1.0, 1.0)}.get(name)
        if name == "calibrated":
            scales = calibrate_kv_scales(args.model, calibration_ids, kv_cache_dtype, **options)
        llm = LLM(args.model, kv_cache_dtype=kv_cache_dtype, kv_scales=scales, **options)
        num_bytes = block_bytes_of(llm.llm_engine.model_runner.model, 16, kv_cache_dtype) // 16
        for text, ids in token_ids.items():
            perplexity, *tokens = measure(llm, ids, args.prompts)
            expected, *expected_tokens = references.setdefault(text, (perplexity, *tokens))
            shares = [(a == b).float().mean().item() for a, b in zip(tokens, expected_tokens, strict=True)]
            line = f"{perplexity:.3f} | {perplexity / expected - 1:+.2%} | {shares[0]:.1%} | {shares[1]:.1%}"
            print(f"| {text} | {kv_cache_dtype} | {name} | {num_bytes:,} | {line} |", flush=True)


if __name__ == "__main__":
    main()
