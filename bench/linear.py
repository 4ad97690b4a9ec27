"""Linear layers with packed weights, beside those of torch.

Usage: python bench/linear.py [--quick] [--dtype float32] [--threads N] [--vllm PYTHON] [--json FILE] [--plot FILE.png]

Weights are in no cache: calls cycle through copies of a layer. GB/s counts a layer's packed weight once, and nothing
else. Reading the weight is the limit of one row, whose share of the read probe says how close it comes. Arithmetic is
the limit of many rows: their share is lower, and the last column counts operations, two for each weight and row.
Packed weights and the probe's memory lie in huge pages where the system grants them.

The peers of float weights are F.linear and, in fp32, oneDNN's product with a weight packed for 64 rows, as torch takes
it in compiled models. The peer of int8 is torch.ops.quantized.linear_dynamic (FBGEMM), which takes fp32. With --vllm
(vllm_kernels.py), oneDNN as vLLM calls it is one of both, where oneDNN has such a product for the CPU. int4 stands
beside our int8 with the same weights and, for rows of 16 bits, vLLM's product, which does not quantize rows. SGLang's
products are peers of bf16, and of rows in bf16 beside int8 and int4, where they are loaded (sglang_kernels.py).

FBGEMM rounds all rows with one scale, and to 7 bits where 8 bits would overflow. So results are compared with a
tolerance of 3% of the largest. oneDNN does overflow with weights of 8 bits where the CPU has no VNNI. So the codes here
have 7 bits.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

import sglang_kernels
import torch
import vllm_kernels
from harness import (
    Probe,
    Row,
    check_and_time,
    finish,
    hardware,
    make_inputs,
    parse_args,
    print_rows,
)
from probes import print_probes, read_probe
from torch import Tensor
from torch.nn import functional

from pagedattn_ext import ops

LAYERS = [(768, 4096), (2048, 8192)]  # in_features, out_features
NUM_ROWS, QUICK_NUM_ROWS = (1, 8, 16, 32, 64, 128, 512, 2048), (1, 8, 64, 512)
PEERS = "torch", "onednn", "vLLM", "SGLang"
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
    if dtype == weight_dtype and vllm_kernels.are_loaded():
        with suppress(RuntimeError):  # oneDNN has no product of bf16 for a CPU without AVX512
            peers["vLLM"] = vllm_kernels.onednn_linear(weight)
    if dtype == weight_dtype == torch.bfloat16 and sglang_kernels.are_loaded():
        peers["SGLang"] = sglang_kernels.linear(weight)
    return Layer(packed, lambda rows: ops.linear_packed(rows, packed, out_features), peers)


def make_int8(in_features: int, out_features: int, dtype: torch.dtype) -> Layer:
    weight = torch.randint(-63, 64, (out_features, in_features), dtype=torch.int8)
    scales = torch.rand(out_features) * 1e-3 + 1e-4
    bias = torch.randn(out_features)
    packed = ops.pack_linear_weight_int8(weight)
    peers: dict[str, Callable[[Tensor], Tensor]] = {}
    if dtype == torch.float32:
        zeros = torch.zeros(out_features, dtype=torch.long)
        quantized = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
        theirs = torch.ops.quantized.linear_prepack(quantized, bias)
        peers["torch"] = lambda rows: torch.ops.quantized.linear_dynamic(rows, theirs, True)
    if vllm_kernels.are_loaded():
        peers["vLLM"] = vllm_kernels.onednn_linear_int8(weight, scales, bias, dtype)
    if dtype == torch.bfloat16 and sglang_kernels.are_loaded():
        peers["SGLang"] = sglang_kernels.linear_int8(weight, scales, bias)
    return Layer(packed, lambda rows: ops.linear_int8(rows, packed, scales, bias), peers)


def make_int4(group_size: int, in_features: int, out_features: int, dtype: torch.dtype) -> Layer:
    """All groups of a row have one scale, so that int8 has the same weights."""
    codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
    row_scales = torch.rand(out_features, 1, dtype=torch.float16)
    scales = row_scales.repeat(1, in_features // group_size)
    packed = ops.pack_linear_weight_int4(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8))
    packed_int8, scales_int8 = ops.pack_linear_weight_int8((codes.int() - 8).to(torch.int8)), row_scales.float()[:, 0]
    peers = {"int8": lambda rows: ops.linear_int8(rows, packed_int8, scales_int8)}
    if theirs := vllm_kernels.wna16_linear(codes, scales, dtype):
        peers["vLLM"] = theirs
    if dtype == torch.bfloat16 and sglang_kernels.are_loaded():
        peers["SGLang"] = sglang_kernels.linear_int4(codes, scales)
    return Layer(
        packed, lambda rows: ops.linear_int4(rows, packed, group_size, out_features, scale_dtype=scales.dtype), peers
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
    num_operations = 2 * num_rows * in_features * out_features
    note = f"{num_operations / median(seconds['ours']) / 1e9:.0f} G operations/s"
    return Row("linear", case, dtype, first.packed_weight.nbytes, probe, seconds, note)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0], has_peers_of_vllm=True)
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
        for num_rows in (QUICK_NUM_ROWS if args.quick else NUM_ROWS)
    ]
    print_rows(rows)
    finish(args, facts, rows)


if __name__ == "__main__":
    main()
