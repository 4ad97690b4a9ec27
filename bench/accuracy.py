"""How a model changes when something in it has fewer bits: texts, perplexity, tokens that stay the same.

Texts: docstrings of the standard library, which the demo model has not seen; the language reference, on which it was
trained; a file. Perplexity: over windows of 512 tokens, each from an empty cache, in chunks of 64 tokens, whose
attention reads all keys and values from the cache. Same next token: the share of these positions at which the most
likely token stays the same. Greedy: after the first 32 tokens of each of N pieces of the text, 64 tokens are generated;
this is the share of equal tokens, place by place. A first difference changes what follows it.
"""

import argparse
import ast
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch

from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams
from pagedattn_serve.calibration import run_alone

NUM_WINDOWS, WINDOW, CHUNK_SIZE, NUM_NEW = 40, 512, 64, 64

Measured = tuple[float, torch.Tensor, torch.Tensor]


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--dtype", default="float32", help="of the model and of what is not quantized")
    parser.add_argument("--prompts", type=int, default=100, metavar="N")
    parser.add_argument("--text", type=Path, metavar="FILE")
    return parser


def docstrings() -> list[str]:
    """Docstrings of the standard library's modules, without packages, and of their classes and functions; each once."""
    found: dict[str, None] = {}
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found[ast.get_docstring(node) or ""] = None
    return [text for text in found if len(text) > 150]


def texts(held_out: list[str], file: Path | None) -> dict[str, list[str]]:
    """The texts by name, in pieces. held_out: docstrings."""
    found = {"docstrings": held_out, "reference": list(topics.values())}
    return found if file is None else found | {file.name: [file.read_text()]}


@torch.inference_mode()
def measure(llm: LLM, token_ids: list[int], num_prompts: int) -> Measured:
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


def compare(measured: Measured, reference: Measured) -> str:
    """Cells of a table: perplexity, its change, and the two shares of equal tokens."""
    perplexity, *tokens = measured
    expected, *expected_tokens = reference
    shares = [(a == b).float().mean().item() for a, b in zip(tokens, expected_tokens, strict=True)]
    return f"{perplexity:.3f} | {perplexity / expected - 1:+.2%} | {shares[0]:.1%} | {shares[1]:.1%}"
