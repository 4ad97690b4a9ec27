"""What a KV cache in 8 bits does to a model: perplexity, and how often the next token stays the same.

Usage: python bench/kv_cache_accuracy.py [--model DIR] [--dtype float32] [--device auto] [--prompts 100]
           [--text FILE]

What the columns mean is in accuracy.py; all are beside the cache that is not quantized. Scales of fp8 are calibrated on
docstrings that are not measured. int8 has its own, and is measured on the CPU alone.
"""

import sys
from typing import Any

import accuracy
import torch

from pagedattn_serve import LLM, calibrate_kv_scales
from pagedattn_serve.execution.engine_setup import choose_device, token_bytes_of

ROWS = [
    ("auto", "-"),
    *((f"fp8_{kind}", scales) for kind in ("e4m3", "e5m2") for scales in ("1", "calibrated")),
    ("int8", "-"),
]
NUM_CALIBRATION = 32


def main() -> None:
    parser = accuracy.make_parser(__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    options: dict[str, Any] = dict(dtype=args.dtype, device=args.device)
    tokenizer = LLM(args.model, **options).get_tokenizer()
    held_out = accuracy.docstrings()
    calibration = held_out[:: len(held_out) // NUM_CALIBRATION][:NUM_CALIBRATION]
    texts = accuracy.texts([text for text in held_out if text not in calibration], args.text)
    token_ids = {name: tokenizer("\n\n".join(pieces), verbose=False).input_ids for name, pieces in texts.items()}
    calibration_ids = [tokenizer(text, verbose=False).input_ids[: accuracy.WINDOW // 2] for text in calibration]
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, {args.model}, {args.dtype}")
    print(f"{ {name: len(ids) for name, ids in token_ids.items()} } tokens, {args.prompts} prompts\n")
    print("| text | kv_cache_dtype | scales | bytes a token | perplexity | change | same next token | greedy |")
    print("|---|---|---|---|---|---|---|---|")
    references: dict[str, accuracy.Measured] = {}
    for kv_cache_dtype, name in ROWS if choose_device(args.device) == "cpu" else ROWS[:-1]:
        scales: Any = {"-": None, "1": (1.0, 1.0)}.get(name)
        if name == "calibrated":
            scales = calibrate_kv_scales(args.model, calibration_ids, kv_cache_dtype, **options)
        llm = LLM(args.model, kv_cache_dtype=kv_cache_dtype, kv_scales=scales, **options)
        num_bytes = token_bytes_of(llm.llm_engine.model_runner.model, kv_cache_dtype)
        for text, ids in token_ids.items():
            measured = accuracy.measure(llm, ids, args.prompts)
            line = accuracy.compare(measured, references.setdefault(text, measured))
            print(f"| {text} | {kv_cache_dtype} | {name} | {num_bytes:,} | {line} |", flush=True)


if __name__ == "__main__":
    main()
