"""Experts of models that run through transformers, on the CPU: weights that are packed once, one product for all rows.

transformers has the experts of a layer in one module, with a parameter of three axes for each projection, and several
ways to compute with them (transformers.integrations.moe). Here a module takes the place of each. It sorts the rows by
expert, and a grouped op multiplies each row with the weight of its expert. The results of a token are added in the
order of its own top-k. So the result of a token does not depend on the other tokens, and neither does its choice of
experts (`RouterWeight`).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagedattn_ext import ops
from pagedattn_serve.errors import op_errors_about
from pagedattn_serve.models.linear import (
    PANEL,
    Int4Linear,
    Int8Linear,
    LinearForms,
    PackedLinear,
    Rows,
    as_fp32,
    give_back_freed_memory,
    narrowed,
    num_panels,
    pack_parts,
)
from pagedattn_serve.models.quantization import quantizable, quantize_int4, quantize_int8

# What transformers' decorator gives to a class of experts, beside a forward that looks for an implementation.
MARKS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
OF_THE_DECORATOR = "transformers.integrations.moe"
GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by the class of the activation
    "SiLU": ops.silu_and_mul,
    "SiLUActivation": ops.silu_and_mul,
    "GELUActivation": ops.gelu_and_mul,
    "GELUTanh": ops.gelu_tanh_and_mul,
}


class PackedExperts(nn.Module):
    """As `PackedLinear`, a weight for each expert."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """weights: [out_features, in_features] of each expert. bias: [num_experts, out_features]."""
        super().__init__()
        self.out_features = len(weights[0])
        self.packed_weight = pack(ops.pack_linear_weight, [(weight,) for weight in narrowed(weights)], weights)
        self.bias = as_fp32(bias)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """[num_rows, in_features] to [num_rows, out_features]. Rows [offsets[e], offsets[e + 1]) are of expert e. The
        other classes do the same."""
        return ops.grouped_linear_packed(rows, offsets, self.packed_weight, self.out_features, self.bias)


class Int8Experts(nn.Module):
    """As `Int8Linear`, a weight for each expert."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        super().__init__()
        scales = []

        def codes() -> Iterator[Rows]:
            for weight in weights:
                quantized = quantize_int8(quantizable(weight))
                scales.append(quantized.scales)
                yield (quantized.codes,)

        self.packed_weight = pack(ops.pack_linear_weight_int8, codes(), weights)
        self.weight_scales = torch.stack(scales)
        self.bias = as_fp32(bias)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return ops.grouped_linear_int8(rows, offsets, self.packed_weight, self.weight_scales, self.bias)


class Int4Experts(nn.Module):
    """As `Int4Linear`, a weight for each expert. Scales are in fp16 if fp16 holds those of all experts."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        super().__init__()
        quantized = [quantize_int4(quantizable(weight)) for weight in weights]
        self.out_features, self.group_size = len(weights[0]), quantized[0].group_size
        self.scale_dtype = reduce(torch.promote_types, [weight.scales.dtype for weight in quantized])
        parts = ((weight.codes, weight.scales.to(self.scale_dtype), weight.zeros) for weight in quantized)
        self.packed_weight = pack(ops.pack_linear_weight_int4, parts, weights)
        self.bias = as_fp32(bias)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return ops.grouped_linear_int4(
            rows, offsets, self.packed_weight, self.group_size, self.out_features, self.bias, self.scale_dtype
        )


FORMS = {PackedLinear: PackedExperts, Int8Linear: Int8Experts, Int4Linear: Int4Experts}


def pack(op: Callable[..., Tensor], parts: Iterable[Rows], weights: Sequence[Tensor]) -> Tensor:
    """[num_experts, ...], panels of each expert. parts: of each expert, what the op takes."""
    out_features = len(weights) * num_panels(len(weights[0])) * PANEL  # as each expert begins with a panel
    packed = pack_parts(op, parts, out_features)
    return packed.view(len(weights), -1, *packed.shape[1:])


class Experts(nn.Module):
    """In the place of a module of transformers with the experts of a layer."""

    def __init__(self, name: str, module: Any, forms: LinearForms, are_some: bool = False) -> None:
        """Takes the parameters from the module. name: of the module in the model. are_some: whether other ranks have
        others.

        Raises ValueError for weights that cannot be quantized.
        """
        super().__init__()
        first, second = projections(module)
        self.num_experts = len(getattr(module, first))
        self.are_some = are_some
        self.first = pack_projection(name, module, first, forms)
        self.second = pack_projection(name, module, second, forms)
        self.activation = activation_of(module)
        self.post_expert_norm = module.post_expert_norm if module.has_post_expert_norm else nn.Identity()

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """hidden: [num_tokens, hidden_size]. expert_ids, weights: [num_tokens, top_k]. Experts from num_experts on are
        those of other ranks, and give zeros."""
        num_tokens, top_k = expert_ids.shape
        sorted_ids, order = expert_ids.flatten().sort(stable=True)
        offsets = torch.searchsorted(sorted_ids, torch.arange(self.num_experts + 1))
        if self.are_some:  # else no number is asked for, which a CPU graph could not repeat
            order = order[: int(offsets[-1])]
        rows = self.activation(self.first(hidden[order // top_k], offsets))
        rows = self.post_expert_norm(self.second(rows, offsets))
        of_tokens = rows.new_zeros(num_tokens * top_k, rows.shape[1]).index_copy_(0, order, rows)
        weighted = of_tokens.view(num_tokens, top_k, -1).float() * weights[..., None]
        return reduce(torch.add, weighted.unbind(1)).to(hidden.dtype)


def projections(module: Any) -> tuple[str, str]:
    """The names of the two parameters with weights."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def weights_of(module: Any, projection: str) -> Tensor:
    """[num_experts, out_features, in_features]."""
    weights: Tensor = getattr(module, projection).detach()
    return weights.mT if module.is_transposed else weights


def pack_projection(name: str, module: Any, projection: str, forms: LinearForms) -> nn.Module:
    """Takes the parameter from the module, so that its memory is free when the next is packed."""
    weight = weights_of(module, projection)
    bias = getattr(module, f"{projection}_bias").detach() if module.has_bias else None
    form = FORMS[forms.of(f"{name}.{projection}", weight.shape[2])]
    delattr(module, projection)
    with op_errors_about(f"quantization: {name}.{projection}"):
        packed = form(weight.unbind(), bias)
    del weight
    give_back_freed_memory()
    return packed


def activation_of(module: Any) -> Callable[[Tensor], Tensor]:
    """What lies between the projections: ours, if the module's own is a gated activation that we have."""
    own: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
    if module.has_gate and type(module)._apply_gate.__module__ == OF_THE_DECORATOR:
        return GATED_ACTIVATIONS.get(type(module.act_fn).__name__, own)
    return own


class RouterWeight(Tensor):
    """The weight of a router that calls `linear` itself: an op multiplies, so that a row's logits do not depend on the
    other rows. To what a router does before, a conversion to a float dtype, the weight is the same."""

    packed: Tensor
    num_experts: int

    @classmethod
    def pack(cls, weight: Tensor) -> "RouterWeight":
        packed = weight.as_subclass(cls)
        packed.packed, packed.num_experts = ops.pack_linear_weight(weight), len(weight)
        return packed

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.linear and not isinstance(args[0], cls):
            return linear(*args, **kwargs)
        if function is Tensor.float or (function in (Tensor.type, Tensor.to) and isinstance(args[-1], torch.dtype)):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


def linear(hidden: Tensor, weight: RouterWeight, bias: Tensor | None = None) -> Tensor:
    return ops.linear_packed(hidden, weight.packed, weight.num_experts, as_fp32(bias))


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of transformers with the experts of a layer, by name."""
    return {name: module for name, module in model.named_modules() if all(hasattr(module, mark) for mark in MARKS)}


def expert_inputs(model: nn.Module) -> dict[str, int]:
    """The in_features of each projection of each expert, by name."""
    return {
        f"{name}.{expert}.{projection}": weights.shape[1]
        for name, module in experts_of(model).items()
        for projection in projections(module)
        for expert, weights in enumerate(weights_of(module, projection))
    }


def pack_experts(model: nn.Module, forms: LinearForms, are_some: bool = False) -> None:
    """Replace the experts of a model and the weights of its routers, one layer after the other. are_some: whether other
    ranks have others."""
    experts = experts_of(model)
    if not experts:
        return
    for module in model.modules():
        calls_linear = "linear" in inspect.unwrap(type(module).forward).__code__.co_names
        weight = module._parameters.get("weight")
        if calls_linear and weight is not None and weight.dim() == 2 and not isinstance(module, nn.Linear):
            del module.weight
            module.weight = RouterWeight.pack(weight.detach())
    while experts:
        name, module = experts.popitem()
        model.set_submodule(name, Experts(name, module, forms, are_some))
        del module
