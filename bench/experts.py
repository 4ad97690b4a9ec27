"""Experts of a layer, beside transformers' implementations and vLLM's kernel for CPUs.

Usage: python bench/experts.py [--quick] [--dtype bfloat16] [--threads N] [--vllm PYTHON] [--json FILE]
       [--plot FILE.png]

A call takes rows whose experts have been chosen, and gives the weighted sum of their results: both projections, SiLU
and all sorting are part of it, the router is not. Each row draws its experts anew. Sizes are those of Mixtral 8x7B with
a quarter of the width and of the inner width, and of Qwen3-30B-A3B with half of both. GB/s counts the packed weights of
the experts that have rows once, and nothing else; the share of the read probe says how close a call comes to that.

All calls read the same weights, so a call finds in a cache what the cache holds of them. Mixtral's have 44 MB in int4
and 176 MB in bf16, Qwen3's 75 MB and 302 MB. A CPU with a large last-level cache reads int8 and int4 from there.

The peers are transformers' loop over experts (eager), its batched_mm (up to 8 rows: it copies the weights of each row)
and grouped_mm, and with --vllm (vllm_kernels.py) its `cpu_fused_moe`. All have weights of the rows' dtype. Our int8 and
int4 stand beside the same peers, as no peer has such weights on this CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm_kernels
from harness import (
    Probe,
    Row,
    assert_same,
    dtype_name,
    finish,
    hardware,
    make_inputs,
    parse_args,
    print_rows,
    time_interleaved,
    tolerance,
)
from probes import print_probes, read_probe
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from pagedattn_serve.models.experts import Experts
from pagedattn_serve.models.linear import LinearForms

NUM_ROWS = (1, 8, 32, 256)
MAX_BATCHED_ROWS = 8
TOLERANCES = {"int8": 5e-2, "int4": 0.3}  # of the largest result


@dataclass(frozen=True)
class Shape:
    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


SHAPES = [Shape("Mixtral", 8, 2, 1024, 3584), Shape("Qwen3-MoE", 128, 8, 1024, 384)]


@dataclass(frozen=True)
class Routed:
    """hidden: [num_rows, hidden_size]. expert_ids, weights: [num_rows, top_k]."""

    hidden: Tensor
    expert_ids: Tensor
    weights: Tensor


def route(shape: Shape, num_rows: int, dtype: torch.dtype) -> Routed:
    probabilities, expert_ids = torch.randn(num_rows, shape.num_experts).softmax(1).topk(shape.top_k)
    weights = probabilities / probabilities.sum(1, keepdim=True)
    return Routed(torch.randn(num_rows, shape.hidden_size, dtype=dtype), expert_ids, weights.to(dtype))


def make_module(shape: Shape, dtype: torch.dtype) -> Any:
    config = Qwen3MoeConfig(
        num_experts=shape.num_experts, hidden_size=shape.hidden_size, moe_intermediate_size=shape.intermediate_size
    )
    module: Any = Qwen3MoeExperts(config).to(dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=parameter.shape[2] ** -0.5)
    return module


def copy_of(module: Any) -> Any:
    """The same parameters in a module that may be taken apart."""
    copy: Any = Qwen3MoeExperts.__new__(Qwen3MoeExperts)
    vars(copy).update(vars(module) | {"_parameters": dict(module._parameters)})
    return copy


def of_vllm(module: Any) -> Callable[[Routed], Tensor]:
    packed, isa = [], vllm_kernels.isa(module.down_proj.dtype)
    for weight in (module.gate_up_proj, module.down_proj):
        packed.append(torch.empty_like(weight))
        torch.ops._C.prepack_moe_weight(weight, packed[-1], isa)

    def run(routed: Routed) -> Tensor:
        out = torch.empty_like(routed.hidden)
        weights, ids = routed.weights.float(), routed.expert_ids.int()
        torch.ops._C.cpu_fused_moe(out, routed.hidden, *packed, None, None, weights, ids, False, "silu", isa)
        return out

    return run


def peers_of(module: Any) -> dict[str, Callable[[Routed], Tensor]]:
    loop = Qwen3MoeExperts.forward.__wrapped__  # type: ignore[attr-defined]
    implementations = {"loop": loop} | {name: ALL_EXPERTS_FUNCTIONS[name] for name in ("batched_mm", "grouped_mm")}

    def peer(function: Callable[..., Tensor]) -> Callable[[Routed], Tensor]:
        return lambda routed: function(module, routed.hidden, routed.expert_ids, routed.weights)

    peers = {name: peer(function) for name, function in implementations.items()}
    return peers | ({"vllm": of_vllm(module)} if vllm_kernels.are_loaded() else {})


def bench_shape(shape: Shape, dtype: torch.dtype, forms: list[str | None], num_rounds: int, probe: Probe) -> list[Row]:
    module = make_module(shape, dtype)
    peers = peers_of(module)
    rows = []
    for quantization in forms:
        experts = Experts("experts", copy_of(module), LinearForms("head", quantization))
        expert_bytes = (experts.first.packed_weight.nbytes + experts.second.packed_weight.nbytes) // shape.num_experts

        def ours(routed: Routed, experts: Experts = experts) -> Tensor:
            return experts(routed.hidden, routed.expert_ids, routed.weights)  # type: ignore[no-any-return]

        for num_rows in NUM_ROWS:
            inputs = make_inputs(lambda n=num_rows: route(shape, n, dtype), shape.top_k * expert_bytes, "cpu")
            functions = {"ours": ours} | {
                name: peer for name, peer in peers.items() if name != "batched_mm" or num_rows <= MAX_BATCHED_ROWS
            }
            allowed = TOLERANCES.get(quantization or "", tolerance(dtype))
            assert_same(functions, inputs[0], allowed)
            seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
            num_read = sum(len(routed.expert_ids.unique()) for routed in inputs) // len(inputs)
            case = f"{shape.name}, {quantization or dtype_name(dtype)} weights, {num_rows} row{'s' * (num_rows > 1)}"
            rows.append(Row("experts", case, dtype, num_read * expert_bytes, probe, seconds))
    return rows


@torch.inference_mode()
def main() -> None:
    args = parse_args(__doc__.splitlines()[0], has_peers_of_vllm=True)
    if args.device != "cpu":
        raise SystemExit("bench/experts.py: these ops run on the CPU only")
    facts = hardware(args.device)
    probe = read_probe()
    print_probes(probe)
    forms = [None] if args.quick else [None, "int8", "int4"]
    rows = [
        row
        for shape in SHAPES
        for dtype in args.dtypes
        for row in bench_shape(shape, dtype, forms, 3 if args.quick else 9, probe)
    ]
    print_rows(rows)
    finish(args, facts, rows)


if __name__ == "__main__":
    main()
