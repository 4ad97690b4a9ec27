"""Softmax, the filters top_k and top_p, and sampling, beside what torch offers for them.

Usage: python bench/sampling.py [--device cuda] [--quick] [--threads N] [--json FILE] [--plot FILE.png]

Rows are fp32, and their logits are normal: with a standard deviation of 1 ("flat") top_p keeps more than half of
the vocabulary, with 5 ("peaked") about one token in 10,000. Everything is in no cache. GB/s counts each probability
once; the share is of reading memory. Torch samples with multinomial, behind topk or behind sort and cumsum where there
is a filter. Both sides allocate their results.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import (
    Probe,
    Row,
    assert_same,
    finish,
    hardware,
    make_inputs,
    parse_args,
    print_rows,
    time_interleaved,
)
from probes import print_probes, read_probe
from torch import Tensor

from pagedattn_ext import ops

NUM_ROWS = {"cpu": 8, "cuda": 128}
SPREADS = {"flat": 1.0, "peaked": 5.0}
TOP_K, TOP_P, TEMPERATURE = 50, 0.9, 0.7


@dataclass(frozen=True)
class Case:
    name: str
    ours: Callable[[Tensor], Tensor]
    theirs: Callable[[Tensor], Tensor]
    of_logits: bool = False
    is_random: bool = False


def top_k_of_torch(probs: Tensor) -> Tensor:
    return probs.where(probs >= probs.topk(TOP_K).values[:, -1:], 0)


def top_p_of_torch(probs: Tensor) -> Tensor:
    greatest, order = probs.sort(descending=True)
    kept = greatest.where(greatest.cumsum(-1) - greatest < TOP_P, 0)
    return torch.zeros_like(probs).scatter_(1, order, kept)


def top_k_top_p_of_torch(probs: Tensor) -> Tensor:
    greatest, order = probs.topk(TOP_K)
    greatest = greatest / greatest.sum(-1, keepdim=True)
    kept = greatest.where(greatest.cumsum(-1) - greatest < TOP_P, 0)
    return torch.zeros_like(probs).scatter_(1, order, kept)


def renormed(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def drawn(probs: Tensor) -> Tensor:
    return probs.multinomial(1)


def sample(probs: Tensor, **filters: float) -> Tensor:
    return ops.sample_from_probs(probs, seed=0, **filters)[0]


CASES = [
    Case("softmax", lambda x: ops.softmax(x, TEMPERATURE), lambda x: (x / TEMPERATURE).softmax(-1), of_logits=True),
    Case("top_k_mask_logits", lambda x: ops.top_k_mask_logits(x, TOP_K), lambda x: mask_of_torch(x), of_logits=True),
    Case("renorm_probs, top_k", lambda x: ops.renorm_probs(x, TOP_K), lambda x: renormed(top_k_of_torch(x))),
    Case("renorm_probs, top_p", lambda x: ops.renorm_probs(x, top_p=TOP_P), lambda x: renormed(top_p_of_torch(x))),
    Case("sample", sample, drawn, is_random=True),
    Case("sample, top_k", lambda x: sample(x, top_k=TOP_K), lambda x: drawn(top_k_of_torch(x)), is_random=True),
    Case("sample, top_p", lambda x: sample(x, top_p=TOP_P), lambda x: drawn(top_p_of_torch(x)), is_random=True),
    Case(
        "sample, top_k, top_p",
        lambda x: sample(x, top_k=TOP_K, top_p=TOP_P),
        lambda x: drawn(top_k_top_p_of_torch(x)),
        is_random=True,
    ),
]


def mask_of_torch(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.topk(TOP_K).values[:, -1:], -torch.inf)


def bench(case: Case, vocab_size: int, spread: str, device: str, num_rounds: int, probe: Probe) -> Row:
    shape = NUM_ROWS[device], vocab_size
    num_bytes = shape[0] * vocab_size * 4

    def make() -> Tensor:
        logits = SPREADS[spread] * torch.randn(shape)
        return logits if case.of_logits else logits.softmax(-1)

    inputs = make_inputs(make, num_bytes, device)
    functions = {"ours": case.ours, "torch": case.theirs}
    if not case.is_random:
        assert_same(functions, inputs[0], 1e-4)
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
    return Row("sampling", f"{case.name}, {vocab_size}, {spread}", torch.float32, num_bytes, probe, seconds)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    facts = hardware(args.device)
    with torch.device(args.device):
        probe = read_probe()
        print_probes(probe)
    sizes = [32000] if args.quick else [32000, 128256]
    num_rounds = 5 if args.quick else 15
    rows = [
        bench(case, vocab_size, spread, args.device, num_rounds, probe)
        for vocab_size in sizes
        for case in CASES
        for spread in SPREADS
    ]
    print_rows(rows)
    finish(args, facts, rows)


if __name__ == "__main__":
    main()
