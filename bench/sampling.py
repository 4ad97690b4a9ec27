"""Softmax, the filters top_k and top_p, and sampling, beside what torch offers for them.

Usage: python bench/sampling.py [--device cuda] [--quick] [--threads N] [--json FILE] [--plot FILE.png]

Rows are fp32, and their logits are normal: with a standard deviation of 1 ("flat") top_p keeps more than half of
the vocabulary, with 5 ("peaked") about one token in 10,000. Everything is in no cache. GB/s counts each probability
once; the share is of reading memory. Both sides allocate their results.

The torch forms are the fastest that we know on a CPU. With top_k, torch draws among the k of topk with multinomial. For
top_p it sorts the row. A draw from a whole row looks a random number up in the cumulative sum. "multinomial" is the
same with multinomial in that place.
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
    peers: dict[str, Callable[[Tensor], Tensor]]
    of_logits: bool = False
    is_random: bool = False


# ---- torch's forms --------------------------------------------------------------------------------------------------


def mask(logits: Tensor) -> Tensor:
    greatest, order = logits.topk(TOP_K)
    return torch.full_like(logits, -torch.inf).scatter_(1, order, greatest)


def top_k(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of the tokens that are kept, and the tokens."""
    greatest, order = probs.topk(TOP_K)
    return greatest / greatest.sum(-1, keepdim=True), order


def within_top_p(greatest: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return greatest.where(greatest.cumsum(-1) - greatest < TOP_P, 0), order


def top_p(probs: Tensor) -> tuple[Tensor, Tensor]:
    return within_top_p(*probs.sort(descending=True))


def renormed(probs: Tensor, kept: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(probs).scatter_(1, order, kept / kept.sum(-1, keepdim=True))


def multinomial(probs: Tensor) -> Tensor:
    return probs.multinomial(1)


def looked_up(probs: Tensor) -> Tensor:
    sums = probs.cumsum(-1)
    return torch.searchsorted(sums, torch.rand(len(probs), 1, device=probs.device) * sums[:, -1:])


def drawn(kept: Tensor, order: Tensor, draw: Callable[[Tensor], Tensor] = multinomial) -> Tensor:
    return order.gather(1, draw(kept))


# ---- the comparison -------------------------------------------------------------------------------------------------


def sample(probs: Tensor, **filters: float) -> Tensor:
    return ops.sample_from_probs(probs, seed=0, **filters)[0]


CASES = [
    Case(
        "softmax",
        lambda x: ops.softmax(x, TEMPERATURE),
        {"torch": lambda x: (x / TEMPERATURE).softmax(-1)},
        of_logits=True,
    ),
    Case("top_k_mask_logits", lambda x: ops.top_k_mask_logits(x, TOP_K), {"torch": mask}, of_logits=True),
    Case("renorm_probs, top_k", lambda x: ops.renorm_probs(x, TOP_K), {"torch": lambda x: renormed(x, *top_k(x))}),
    Case(
        "renorm_probs, top_p",
        lambda x: ops.renorm_probs(x, top_p=TOP_P),
        {"torch": lambda x: renormed(x, *top_p(x))},
    ),
    Case("sample", sample, {"torch": looked_up, "multinomial": multinomial}, is_random=True),
    Case("sample, top_k", lambda x: sample(x, top_k=TOP_K), {"torch": lambda x: drawn(*top_k(x))}, is_random=True),
    Case(
        "sample, top_p",
        lambda x: sample(x, top_p=TOP_P),
        {"torch": lambda x: drawn(*top_p(x), looked_up), "multinomial": lambda x: drawn(*top_p(x))},
        is_random=True,
    ),
    Case(
        "sample, top_k, top_p",
        lambda x: sample(x, top_k=TOP_K, top_p=TOP_P),
        {"torch": lambda x: drawn(*within_top_p(*top_k(x)))},
        is_random=True,
    ),
]


def bench(case: Case, vocab_size: int, spread: str, device: str, num_rounds: int, probe: Probe) -> Row:
    shape = NUM_ROWS[device], vocab_size
    num_bytes = shape[0] * vocab_size * 4

    def make() -> Tensor:
        logits = SPREADS[spread] * torch.randn(shape)
        return logits if case.of_logits else logits.softmax(-1)

    inputs = make_inputs(make, num_bytes, device)
    functions = {"ours": case.ours, **case.peers}
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
