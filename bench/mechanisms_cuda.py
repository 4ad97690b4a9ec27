"""What each mechanism of a GPU of sm_90 is worth to attention: the same call with it and without.

Usage: python bench/mechanisms_cuda.py [--device cpu] [--json FILE]

bf16, block size 16, cold L2. Both ways are captured in graphs and take turns (cuda_timing.py). PAGEDATTN_CUDA_WITHOUT
leaves the mechanism out, and "1.20x" says that a call takes 1.2 times as long without it. If the variable names the
mechanism from the start, both ways are the same. --device cpu is for trying this program: a CPU has no such mechanism,
so all factors are about 1. FILE is written anew after each row.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import attn
import torch
from attention.inputs import Attention, Model
from harness import (
    Probe,
    Row,
    add_device_option,
    check_and_time,
    check_device,
    cold_bytes,
    hardware,
    make_inputs,
    prepare,
    print_rows,
    tolerance,
    write_json,
)
from probes import matmul_probe, read_probe
from torch import Tensor

SWITCH = "PAGEDATTN_CUDA_WITHOUT"
BF16 = torch.bfloat16
NUM_ROUNDS = {"cuda": 25, "cpu": 1}
# For each mechanism, decode of sequences for which the kernel uses it; for wgmma, prefill.
DECODES: dict[str, Sequence[tuple[str, Model, str, Sequence[int]]]] = {
    "cuda": [
        ("bulk", attn.MHA, "64 x 1024", [1024] * 64),
        ("bulk", attn.GQA8, "64 x 4096", [4096] * 64),
        ("bulk", attn.MQA, "64 x 4096", [4096] * 64),
        ("cluster", attn.MHA, "1 x 1024", attn.ONE),
        ("cluster", attn.GQA8, "1 x 1024", attn.ONE),
        ("pdl", attn.GQA8, "1 x 8192", [8192]),
        ("pdl", attn.GQA8, "4 x 32768", [32768] * 4),
    ],
    "cpu": [("bulk", attn.SMALL, "1 x 1024", attn.ONE)],
}
PREFILLS = {"cuda": [(attn.MHA, 2048), (attn.GQA8, 8192)], "cpu": [(attn.SMALL, 64)]}


def without(word: str, function: Callable[[Attention], Tensor]) -> Callable[[Attention], Tensor]:
    """The function, with the word beside those that the variable names."""
    words = ",".join(filter(None, [os.environ.get(SWITCH), word]))

    def run(attention: Attention) -> Tensor:
        with mock.patch.dict(os.environ, {SWITCH: words}):
            return function(attention)

    return run


def time_both(
    word: str, function: Callable[[Attention], Tensor], inputs: Sequence[Attention], device: str, probe: Probe
) -> dict[str, list[float]]:
    functions = {"ours": function, f"without {word}": without(word, function)}
    return check_and_time(functions, inputs, tolerance(BF16), NUM_ROUNDS[device], probe)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_device_option(parser)
    parser.set_defaults(device="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write hardware, command and raw times")
    args = parser.parse_args()
    check_device(parser, args.device)
    prepare(num_threads=1)
    facts, device = hardware(args.device), args.device
    with torch.device(device):
        reading, multiplying = read_probe(), matmul_probe(BF16)
    rows: list[dict[str, object]] = []

    def add(name: str, measure: Callable[[], Row]) -> None:
        """Measure a row. An error ends this row only."""
        try:
            row = measure()
        except Exception as error:  # wrong results, a kernel that fails
            print(f"{name}: failed: {type(error).__name__}: {error}", flush=True)
            rows.append({"case": name, "error": f"{type(error).__name__}: {error}"})
        else:
            print_rows([row])
            rows.append(row.as_dict())
        if args.json:
            write_json(args.json, facts, {"rows": rows})

    def decode(word: str, model: Model, name: str, seq_lens: list[int]) -> Row:
        num_bytes = attn.kv_bytes(model, seq_lens, BF16)
        inputs = make_inputs(partial(Attention, model, seq_lens, 1, BF16), num_bytes, device)
        seconds = time_both(word, Attention.decode, inputs, device, reading)
        return Row("decode", name, BF16, num_bytes, reading, seconds)

    def prefill(model: Model, name: str, num_tokens: int) -> Row:
        inputs = make_inputs(partial(Attention, model, [num_tokens], num_tokens, BF16), cold_bytes(device), device)
        seconds = time_both("wgmma", Attention.prefill, inputs, device, multiplying)
        return Row("prefill", name, BF16, attn.num_operations(model, num_tokens), multiplying, seconds)

    for word, model, lengths, seq_lens in DECODES[device]:
        name = f"decode, {model.name}, {lengths}"
        add(name, partial(decode, word, model, name.removeprefix("decode, "), list(seq_lens)))
    for model, num_tokens in PREFILLS[device]:
        name = f"prefill, {model.name}, {num_tokens} tokens"
        add(name, partial(prefill, model, name.removeprefix("prefill, "), num_tokens))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
