"""What weights in 8 and 4 bits do to a model: error a layer, perplexity, and how often the next token stays the same.

Usage: python bench/quantization_accuracy.py [--model DIR] [--dtype float32] [--prompts 100] [--text FILE]

What the last four columns mean is in accuracy.py; all are beside the weights of the checkpoint. Error a layer: what is
added to the outputs of a linear layer by the quantization of its weights and rows, as a share of these outputs' norm,
over the rows that it sees in 512 tokens of the text; the mean of all layers, and the largest. Bytes: of all linear
layers, lm_head among them.
"""

import sys
from functools import partial
from statistics import mean

import accuracy
import torch
from torch import Tensor, nn

from pagedattn_serve import LLM
from pagedattn_serve.calibration import run_alone
from pagedattn_serve.models.linear import Int4Linear, Int8Linear, PackedLinear

FORMS = (None, "int8", "int4")
PACKED = PackedLinear | Int8Linear | Int4Linear


def packed_layers(llm: LLM) -> dict[str, nn.Module]:
    modules = llm.llm_engine.model_runner.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, PACKED)}


def weight_bytes(layer: nn.Module) -> int:
    return sum(value.nbytes for value in vars(layer).values() if isinstance(value, Tensor))


@torch.inference_mode()
def layer_errors(llm: LLM, reference: LLM, token_ids: list[int]) -> list[float]:
    """Of each linear layer, on the inputs that it has in `reference`."""
    layers = packed_layers(llm)
    errors: list[float] = []

    def compare(layer: nn.Module, _: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        errors.append(float((layer(inputs[0]) - out).norm() / out.norm()))

    hooks = [
        expected.register_forward_hook(partial(compare, layers[name]))
        for name, expected in packed_layers(reference).items()
    ]
    for _ in run_alone(reference.llm_engine.model_runner, token_ids[: accuracy.WINDOW], accuracy.WINDOW):
        pass
    for hook in hooks:
        hook.remove()
    return errors


def main() -> None:
    args = accuracy.make_parser(__doc__.splitlines()[0]).parse_args()
    reference = LLM(args.model, dtype=args.dtype, device="cpu")
    tokenizer = reference.get_tokenizer()
    assert tokenizer is not None
    texts = accuracy.texts(accuracy.docstrings(), args.text)
    token_ids = {name: tokenizer("\n\n".join(pieces), verbose=False).input_ids for name, pieces in texts.items()}
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, {args.model}, {args.dtype}")
    print(f"{ {name: len(ids) for name, ids in token_ids.items()} } tokens, {args.prompts} prompts\n")
    print("| text | quantization | bytes | error a layer | perplexity | change | same next token | greedy |")
    print("|---|---|---|---|---|---|---|---|")
    references: dict[str, accuracy.Measured] = {}
    for form in FORMS:
        llm = LLM(args.model, dtype=args.dtype, device="cpu", quantization=form)
        num_bytes = sum(weight_bytes(layer) for layer in packed_layers(llm).values())
        for text, ids in token_ids.items():
            errors = layer_errors(llm, reference, ids)
            measured = accuracy.measure(llm, ids, args.prompts)
            line = accuracy.compare(measured, references.setdefault(text, measured))
            error = f"{mean(errors):.2%}, {max(errors):.2%}"
            print(f"| {text} | {form or '-'} | {num_bytes:,} | {error} | {line} |", flush=True)


if __name__ == "__main__":
    main()
