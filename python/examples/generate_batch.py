"""transformers' continuous batching on the paged ops: `use_paged_attention`, then `generate_batch`.

Usage: python python/examples/generate_batch.py [MODEL]
On a CPU, transformers needs psutil to see how much memory there is.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedattn_ext.transformers import use_paged_attention
from pagedattn_serve import DEMO_MODEL

PROMPTS = ["The for statement", "A class definition", "Python's numeric types", 'The "with" statement is used to']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEMO_MODEL, help="default: the demo model")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    use_paged_attention(model)
    outputs = model.generate_batch(tokenizer(PROMPTS).input_ids, max_new_tokens=30)
    for prompt, output in zip(PROMPTS, outputs.values(), strict=True):
        print(f"{prompt} -> {tokenizer.decode(output.generated_tokens, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
