"""Linear layers with packed weights, beside those of torch.

Usage: python bench/linear.py [--quick] [--dtype float32] [--threads N] [--json FILE] [--plot FILE.png]

Weights are in no cache: calls cycle through copies of a layer. GB/s counts a layer's packed weight once, and nothing
else. Reading the weight is the limit of one row, whose share of the read probe says how close it comes. Arithmetic is
the limit of many rows, and their share is lower. Packed weights and the probe's memory lie in huge pages where the
system grants them.

The peers of float weights are F.linear and, in fp32, oneDNN's product with a weight packed for 64 rows, as torch takes
it in compiled models. The peer of int8 is torch.ops.quantized.linear_dynamic (FBGEMM), which takes fp32. It rounds all
rows with one scale, and to 7 bits where 8 bits would overflow. So its results are coarser than ours, and are compared
with a tolerance of 3% of the largest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from harness import (
    Probe,
    Row,
    check_and_time,
    finish,
    hardware,
    make_inputs,
    parse_args,
    print_probes,
    print_rows,
    read_probe,
)
from torch import Tensor
from torch.nn import functional

from pagedattn_ext import ops

LAYERS = [(768, 4096), (2048, 8192)]  # in_features, out_features
NUM_ROWS = (1, 8, 16, 32, 64, 512)
PEER_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Layer:
    """One copy of a layer in our format and, where there is a peer, in the peer's."""

    packed_weight: Tensor
    ours: Callable[[Tensor], Tensor]
    peers: dict[str, Callable[[Tensor], Tensor]]


def make_float(weight_dtype: torch.dtype, in_features: int, out_features: int, dtype: torch.dtype) -> Layer:
    weight = torch.randn(out_features, in_features, dtype=weight_dtype)
    packed = ops.pack_linear_weight(weight)
    peers: dict[str, Callable[[Tensor], Tensor]] = {}
    if dtype == weight_dtype:
        peers["torch"] = lambda rows: functional.linear(rows, weight)
    if dtype == weight_dtype == torch.float32:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        peers["onednn"] = lambda rows: torch.ops.mkldnn._linear_pointwise(rows, reordered, None, "none", [], "")
    return Layer(packed, lambda rows: ops.linear_packed(rows, packed, out_features), peers)


def make_int8(in_features: int, out_features: int, dtype: torch.dtype) -> Layer:
    weight = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    scales = torch.rand(out_features) * 1e-3 + 1e-4
    bias = torch.randn(out_features)
    packed = ops.pack_linear_weight_int8(weight)

    def ours(rows: Tensor) -> Tensor:
        return ops.linear_int8(rows, packed, scales, bias)

    if dtype != torch.float32:
        return Layer(packed, ours, {})
    quantized = torch._make_per_channel_quantized_tensor(weight, scales.double(), torch.zeros(out_features).long(), 0)
    theirs = torch.ops.quantized.linear_prepack(quantized, bias)
    return Layer(packed, ours, {"torch": lambda rows: torch.ops.quantized.linear_dynamic(rows, theirs, True)})


def make_int4(group_size: int, in_features: int, out_features: int, dtype: torch.dtype) -> Layer:
    """Without a peer, because torch's 4-bit product takes rows in bf16."""
    codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
    scales = torch.rand(out_features, in_features // group_size, dtype=torch.float16)
    packed = ops.pack_linear_weight_int4(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8))
    return Layer(
        packed, lambda rows: ops.linear_int4(rows, packed, group_size, out_features, scale_dtype=scales.dtype), {}
    )


FORMATS = {
    "fp32": partial(make_float, torch.float32),
    "bf16": partial(make_float, torch.bfloat16),
    "int8": make_int8,
    "int4 in groups of 32": partial(make_int4, 32),
    "int4 in groups of 128": partial(make_int4, 128),
}


def bench(
    name: str, layer_size: tuple[int, int], num_rows: int, dtype: torch.dtype, num_rounds: int, probe: Probe
) -> Row:
    in_features, out_features = layer_size
    make = partial(FORMATS[name], in_features, out_features, dtype)
    rows = torch.randn(num_rows, in_features, dtype=dtype)
    first = make()
    layers = make_inputs(make, first.packed_weight.nbytes, "cpu")
    functions: dict[str, Callable[[Layer], Tensor]] = {"ours": lambda layer: layer.ours(rows)}
    for peer in first.peers:
        functions[peer] = lambda layer, peer=peer: layer.peers[peer](rows)
    seconds = check_and_time(functions, layers, PEER_TOLERANCE, num_rounds, probe)
    case = f"{name}, {in_features} x {out_features}, {num_rows} row{'s' * (num_rows > 1)}"
    return Row("linear", case, dtype, first.packed_weight.nbytes, probe, seconds)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    if args.device != "cpu":
        raise SystemExit("bench/linear.py: these ops run on the CPU only")
    facts = hardware(args.device)
    probe = read_probe()
    print_probes(probe)
    num_rounds = 5 if args.quick else 25
    rows = [
        bench(name, layer, num_rows, dtype, num_rounds, probe)
        for name in FORMATS
        for layer in LAYERS[: 1 if args.quick else None]
        for dtype in args.dtypes
        for num_rows in NUM_ROWS
    ]
    print_rows(rows)
    finish(args, facts, rows)


if __name__ == "__main__":
    main()
