"""Which slice of a model of transformers a rank holds: what the model's own plan says, in this package's slices.

transformers has a plan for most models: a word for each layer that ranks share, by the name of the layer or of its
parameter (`tp_plan`, of the config and of the class; transformers.distributed.tensor_parallel defines the words). Of
transformers' own means for several ranks nothing else is used, neither torch.distributed nor DTensor.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from pagedattn_serve.environment import environment_variable
from pagedattn_serve.models.partition import (
    Communicator,
    GatheredLinear,
    Partition,
    Reduce,
    Share,
    SlicedLinear,
    SummedEmbedding,
    SummedLinear,
    everything,
    one_after_another,
    split,
)
from pagedattn_serve.models.quantization import GROUP_SIZE
from pagedattn_serve.models.transformers_states import mixers
from pagedattn_serve.models.transformers_trial import AttentionShape, Refusal

# The words for linear layers. A rank has all outputs of GATHERED layers, and is given all inputs of WITH_ALL_INPUTS.
GATHERED = {"colwise_gather_output", "colwise_rep"}
WITH_ALL_INPUTS = {"rowwise_split_input", "rowwise_rep"}
BY_OUTPUTS = {"colwise", "packed_colwise", *GATHERED}
BY_INPUTS = {"rowwise", *WITH_ALL_INPUTS}
EMBEDDING = "embedding_rowwise"
LAYERS = {*BY_OUTPUTS, *BY_INPUTS, EMBEDDING}
# The words for modules with experts: a rank has a slice of each expert, or some whole experts. The parameters of these
# modules have words of their own.
SLICED_EXPERTS, WHOLE_EXPERTS = "moe_tp_experts", "ep_dispatch_experts"
OF_SLICED_EXPERTS = {"colwise", "packed_colwise", "rowwise", "packed_rowwise"}
OF_WHOLE_EXPERTS = {"grouped_gemm"}
# The words for what is whole on each rank, and computes as it is: they are about gradients, or about DTensor.
WHOLE = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"}


def of_layers(module: str, **words: str) -> dict[str, str]:
    """A plan's words for what lies in this module of each layer."""
    return {f"model.layers.*.{module}.{name}": word for name, word in words.items()}


HEADS = dict(q_proj="colwise", k_proj="colwise", v_proj="colwise")
MLP = dict(gate_proj="colwise", up_proj="colwise", down_proj="rowwise")
# What plans leave out, by model type: transformers lets ranks share the experts of these models, if any, and neither
# attention nor MLPs.
ATTENTION_AND_MLP = of_layers("self_attn", **HEADS, o_proj="rowwise") | of_layers("feed_forward", **MLP)
LFM2 = of_layers("self_attn", **HEADS, out_proj="rowwise")
LFM2 |= of_layers("feed_forward", w1="colwise", w3="colwise", w2="rowwise")
ADDED = {
    "bamba": ATTENTION_AND_MLP,
    "falcon_h1": ATTENTION_AND_MLP,
    "gpt_oss": of_layers("self_attn", **HEADS, sinks="colwise", o_proj="rowwise"),
    "granitemoehybrid": of_layers("self_attn", **HEADS, o_proj="rowwise")
    | of_layers("shared_mlp", input_linear="packed_colwise", output_linear="rowwise"),
    "jamba": ATTENTION_AND_MLP,
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "nemotron_h": of_layers("mixer", **HEADS, o_proj="rowwise", up_proj="colwise", down_proj="rowwise"),
}

Join = Callable[[nn.Module], nn.Module]
Joins = dict[str, Join]


class Slices:
    """What a rank holds of a model, and what joins the slices of all ranks.

    cuts: which axis of a parameter is split, and the rank's share of the axis, by the parameter's name. A parameter
        without a cut is whole on each rank.
    words: what the plan says of the modules that ranks share, by the module's name.
    vocabulary: the tokens whose embeddings the rank holds.
    attention: what the rank's slices of the layers ask of attention, by layer.
    """

    def __init__(self, model: PreTrainedModel, attention: dict[int, AttentionShape], partition: Partition) -> None:
        """model: whole, on any device. attention: what its whole layers ask of attention.

        Raises Refusal for a plan that is not supported, and ArgumentError for a number of ranks that is not.
        """
        self.whole_attention, self.attention = attention, dict(attention)
        self.partition = partition
        self.cuts: dict[str, tuple[int, Share]] = {}
        self.words: dict[str, str] = {}
        plan = plan_of(model)
        of_mixers = {name for mixer in mixers(model) for name in mixer.module_names(model)}
        for name, module in model.named_modules():
            parameters = dict(module.named_parameters(recurse=False))
            if name in of_mixers:
                word = self.word_in_mixer(module)
                words = dict.fromkeys(parameters, word)
            else:
                word = plan.get(in_plan(name), "replicate")
                inherited = word if word in LAYERS else "replicate"
                words = {kind: plan.get(in_plan(f"{name}.{kind}"), inherited) for kind in parameters}
            if not is_supported(module, word, words):
                said = ", ".join(sorted({word, *words.values()} - WHOLE))
                raise Refusal(f"its plan says {said} of {in_plan(name)}, which is not supported")
            if word not in WHOLE:
                self.words[name] = word
            for kind, parameter in parameters.items():
                axis = split_axis(words[kind], kind, parameter.dim())
                if axis is not None:
                    layer = name if word in LAYERS else f"{name}.{kind}"
                    self.cuts[f"{name}.{kind}"] = axis, self.share(model, layer, words[kind], parameter.shape[axis])
        embedding = model.get_input_embeddings()
        whole = 0, everything(embedding.num_embeddings)
        _, self.vocabulary = self.cuts.get(f"{name_of(model, embedding)}.weight", whole)

    def word_in_mixer(self, module: nn.Module) -> str:
        """A mixer and its states are whole on each rank. Ranks share its linear layers, if the mixer only calls them,
        and each rank has all outputs: whatever the mixer does with them stays as it is."""
        is_shared = type(module) is nn.Linear and module.out_features >= self.partition.world_size
        return "colwise_gather_output" if is_shared else "replicate"

    def share(self, model: nn.Module, layer: str, word: str, size: int) -> Share:
        """The rank's share of an axis with `size` elements. layer: the name of a module, or of a bare parameter."""
        if word.startswith("packed_"):
            half = self.share(model, layer, word.removeprefix("packed_"), size // 2)
            return one_after_another(half, half)
        parent, _, last_name = layer.rpartition(".")
        layer_idx = getattr(model.get_submodule(parent), "layer_idx", None)
        if word in ("colwise", "rowwise") and layer_idx is not None:
            return self.share_of_heads(layer_idx, last_name, word, size)
        if size < self.partition.world_size:
            raise self.partition.refusal(f"at most {size}, the size of what ranks share of {in_plan(layer)}")
        # Torch adds a row's products in other orders where there is a rest of a group.
        has_groups = word in ("colwise", "rowwise") and size // GROUP_SIZE >= self.partition.world_size
        return split(size, self.partition.rank, self.partition.world_size, GROUP_SIZE if has_groups else 1)

    def share_of_heads(self, layer_idx: int, name: str, word: str, size: int) -> Share:
        """The share of an axis of attention, whose elements are those of heads. name: of the module, or a parameter."""
        whole = self.whole_attention[layer_idx]
        num_heads, num_kv_heads = whole.num_heads, whole.num_kv_heads
        if whole.is_latent:  # latents are whole on each rank
            heads = self.partition.heads(num_heads)
            self.attention[layer_idx] = replace(whole, num_heads=heads.size)
            return heads.times(size // num_heads)
        heads, kv_heads = self.partition.heads(num_heads), self.partition.kv_heads(num_kv_heads)
        self.attention[layer_idx] = replace(whole, num_heads=heads.size, num_kv_heads=kv_heads.size)
        if num_kv_heads % self.partition.world_size == 0:
            return split(size, self.partition.rank, self.partition.world_size)  # whichever heads they are
        if name in ("k_proj", "v_proj"):
            return kv_heads.times(size // num_kv_heads)
        if name in ("q_proj", "sinks") or word == "rowwise":
            return heads.times(size // num_heads)
        raise self.partition.refusal(
            f"a divisor of the {num_kv_heads} key-value heads of the model, as its {name} may hold some of them"
        )

    # ---- a model of slices ----

    def cut(self, name: str, parameter: Tensor) -> nn.Parameter:
        """The rank's slice of a parameter, with memory of its own."""
        axis, share = self.cuts[name]
        own = share.of(parameter.detach(), axis).clone(memory_format=torch.contiguous_format)
        return nn.Parameter(own, requires_grad=False)

    def cut_all(self, model: nn.Module) -> None:
        """Replace the parameters of a model without weights, whose layers do not know yet that they are slices."""
        for name in self.cuts:
            module, _, kind = name.rpartition(".")
            setattr(model.get_submodule(module), kind, self.cut(name, model.get_parameter(name)))

    @contextmanager
    def cut_when_loaded(self, model_class: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
        """A class whose `from_pretrained` keeps of each parameter the rank's slice alone, as soon as it has loaded the
        parameter.

        transformers makes a parameter of what the checkpoint holds, which may have another name, other axes, or as many
        tensors as there are experts; a tensor that stays as it is is mapped from the file, and not read as a whole.
        """
        names: dict[tuple[nn.Module, str], str] = {}

        def init(model: PreTrainedModel, *args: Any, **options: Any) -> None:
            model_class.__init__(model, *args, **options)
            for name in self.cuts:
                module, _, kind = name.rpartition(".")
                names[model.get_submodule(module), kind] = name

        def on_registration(module: nn.Module, kind: str, parameter: nn.Parameter) -> Any:
            name = names.get((module, kind))
            if name is None or parameter.is_meta:
                return None
            axis, share = self.cuts[name]
            if parameter.shape[axis] != share.whole:  # it is tied to one that is cut
                return None
            own = self.cut(name, parameter)
            vars(own).update(vars(parameter))  # what transformers notes of it, as that it is loaded
            return own

        hook = register_module_parameter_registration_hook(on_registration)
        try:
            # One tensor at a time. Otherwise threads convert as much of a checkpoint as they can beforehand.
            with environment_variable("HF_DEACTIVATE_ASYNC_LOAD", "1"):
                yield type(
                    model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__}
                )
        finally:
            hook.remove()
            names.clear()  # which the class has for as long as the model lives

    def make_slices(self, model: nn.Module) -> None:
        """Tell the layers of a model, all of whose parameters are cut, that they are slices."""
        for name, word in self.words.items():
            layer: Any = model.get_submodule(name)
            if word in BY_OUTPUTS | BY_INPUTS:
                axis, share = self.cuts[f"{name}.weight"]
                inputs = share if axis == 1 else everything(layer.in_features)
                outputs = share if axis == 0 else everything(layer.out_features)
                with torch.device("meta"):
                    sliced = SlicedLinear(inputs, outputs, bias=False)
                sliced.weight = layer.weight
                sliced.register_parameter("bias", layer.bias if sliced.adds_bias else None)
                model.set_submodule(name, sliced)
            elif word == WHOLE_EXPERTS:
                layer.num_experts = self.experts(name).size
                layer._is_expert_parallel = True  # so it leaves out the tokens of an expert with the number num_experts
        for layer in model.modules():
            if hasattr(layer, "num_key_value_groups"):  # for transformers' own attention
                own = self.attention.get(layer.layer_idx)
                if own is None or own.is_latent:  # Zamba's, which is whole; or a key and a value for each head
                    continue
                layer.num_key_value_groups = own.num_heads // own.num_kv_heads

    def experts(self, name: str) -> Share:
        """The experts that the rank holds of the module called `name`."""
        return next(share for parameter, (_, share) in self.cuts.items() if parameter.rpartition(".")[0] == name)

    def joins(self, ranks: Communicator) -> Joins:
        """What the layers that give slices become, by name: modules that join the slices of all ranks."""
        joins: Joins = {}
        for name, word in self.words.items():
            if word == EMBEDDING:
                joins[name] = partial(SummedEmbedding, vocabulary=self.vocabulary, all_reduce=ranks.all_reduce)
            elif word in GATHERED:
                partition = replace(self.partition, communicator=ranks)
                _, outputs = self.cuts[f"{name}.weight"]
                joins[name] = partial(GatheredLinear, partition=partition, num_outputs=outputs.whole)
            elif word in BY_INPUTS:
                _, inputs = self.cuts[f"{name}.weight"]
                own_inputs = inputs if word in WITH_ALL_INPUTS else None
                joins[name] = partial(SummedLinear, all_reduce=ranks.all_reduce, own_inputs=own_inputs)
            elif word == SLICED_EXPERTS:
                joins[name] = partial(SummedExperts, all_reduce=ranks.all_reduce)
            elif word == WHOLE_EXPERTS:
                joins[name] = partial(SummedExperts, all_reduce=ranks.all_reduce, own_experts=self.experts(name))
        return joins

    def joins_alone(self) -> Joins:
        """The same for a rank that computes without the others."""
        return self.joins(Alone(self.partition.rank, self.partition.world_size))


# ---- the plan -------------------------------------------------------------------------------------------------------


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    """The words of a model's plan, by names with * for the number of a layer. Raises Refusal if it has none.

    Where the plan leaves experts out, ranks share the experts as the model's other plan says (`ep_plan`).
    """
    tp_plan, ep_plan = model.tp_plan, model.ep_plan
    experts = {name for name, word in ep_plan.items() if word == WHOLE_EXPERTS} - tp_plan.keys()
    plan = {name: word for name, word in ep_plan.items() if experts & {name, name.rpartition(".")[0]}}
    plan |= tp_plan | ADDED.get(model.config.model_type, {})
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding_name, head_name = name_of(model, embedding), name_of(model, head)
    if not plan.keys() - {embedding_name, head_name} and not mixers(model):
        raise Refusal("transformers has no plan for it")
    if head_name in plan:
        plan |= {embedding_name: EMBEDDING, head_name: "colwise_gather_output"}
    elif head.weight is embedding.weight:
        plan.pop(embedding_name, None)
    return plan


def in_plan(name: str) -> str:
    """The name by which a plan speaks of a module or parameter."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def name_of(model: nn.Module, layer: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is layer)


def is_supported(module: nn.Module, word: str, words: dict[str, str]) -> bool:
    """Whether a module can be split so. words: those of its own parameters."""
    of_parameters = set(words.values())
    if word in BY_OUTPUTS | BY_INPUTS:
        return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and of_parameters == {word}
    if word == EMBEDDING:
        return isinstance(module, nn.Embedding) and of_parameters == {word}
    if word == SLICED_EXPERTS:
        # A bias of all ranks would count several times.
        are_weights = all(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
        return are_weights and of_parameters <= OF_SLICED_EXPERTS
    if word == WHOLE_EXPERTS:
        return of_parameters == OF_WHOLE_EXPERTS
    return word in WHOLE and of_parameters <= WHOLE | {"colwise"}


def split_axis(word: str, kind: str, num_axes: int) -> int | None:
    """Which axis of a parameter is split. Weights are [outputs, inputs], those of experts [experts, outputs, inputs].

    Some experts have their weights transposed. Their words are for this form, `packed_rowwise` for gate and up.
    """
    if word in BY_OUTPUTS:
        return max(num_axes - 2, 0)
    if word in BY_INPUTS or word == "packed_rowwise":
        return None if kind == "bias" else num_axes - 1
    if word == EMBEDDING or word in OF_WHOLE_EXPERTS:
        return 0
    return None


# ---- modules and contexts -------------------------------------------------------------------------------------------


class SummedExperts(nn.Module):
    """Experts of which a rank has slices or, with `own_experts`, some as a whole."""

    def __init__(self, experts: nn.Module, all_reduce: Reduce, own_experts: Share | None = None) -> None:
        super().__init__()
        self.experts = experts
        self.all_reduce = all_reduce
        self.own_experts = own_experts

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """hidden: [num_tokens, hidden_size]. expert_ids, weights: [num_tokens, experts of a token]."""
        if self.own_experts is not None:
            [(begin, end)] = self.own_experts.ranges
            is_own = (expert_ids >= begin) & (expert_ids < end)
            expert_ids = (expert_ids - begin).masked_fill(~is_own, end - begin)
            weights = weights.masked_fill(~is_own, 0.0)
        return self.all_reduce(self.experts(hidden, expert_ids, weights))


@dataclass(slots=True)
class Alone:
    """A `Communicator` of a rank that computes without the others: numbers that mean nothing, in the right shapes."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.world_size, *tensor.shape)


@contextmanager
def joined(model: nn.Module, joins: Joins) -> Iterator[None]:
    """The model with its layers joined, for as long as the context lasts."""
    layers = {name: model.get_submodule(name) for name in joins}
    try:
        for name, join in joins.items():
            model.set_submodule(name, join(layers[name]))
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
