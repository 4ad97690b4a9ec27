"""From a Hugging Face directory to a model: what config.json says of it, then its weights."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pagedattn_serve.config import DTYPES, FP8_DTYPES, check_dtype, check_quantization
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading.checkpoint_files import OpenFiles, Tensors, open_checkpoint, warn_of_other_weights
from pagedattn_serve.loading.checkpoint_formats import CheckpointFormat
from pagedattn_serve.loading.directory import config_fields, model_directory, read_plain_config
from pagedattn_serve.loading.dummy_weights import dummy_checkpoint
from pagedattn_serve.loading.gguf_file import is_gguf
from pagedattn_serve.loading.gguf_weights import GgufFormat, as_float
from pagedattn_serve.loading.kv_scales import KVScales, given_scales, is_kv_scale, scales_in_checkpoint
from pagedattn_serve.loading.quantized_checkpoint import as_floats, checkpoint_format, whole_weights
from pagedattn_serve.loading.scaled_floats import dtype_of
from pagedattn_serve.loading.weights import (
    lacks_head,
    load_weights,
    pack_as_stored,
    pack_whole_weights,
    refuse_codes,
)
from pagedattn_serve.models.bloom import BloomForCausalLM
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.models.experts import expert_inputs, pack_experts
from pagedattn_serve.models.gpt2 import GPT2LMHeadModel
from pagedattn_serve.models.linear import LinearForms, linear_layers, pack_linear_layers
from pagedattn_serve.models.llama import LlamaForCausalLM
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.models.opt import OPTForCausalLM
from pagedattn_serve.models.partition import SINGLE, Partition
from pagedattn_serve.models.quantization import QuantizedWeight
from pagedattn_serve.progress import Report

if TYPE_CHECKING:
    from pagedattn_serve.models.transformers_model import TransformersCausalLM

# Checkpoints without a head. If the embeddings are tied, the embedding is the head; else the model cannot generate.
BASE_MODELS: dict[str, Callable[[Any, torch.dtype, Partition], NativeCausalLM]] = {
    "BloomModel": BloomForCausalLM,
    "GPT2Model": GPT2LMHeadModel,
    "LlamaModel": LlamaForCausalLM,
    "MistralModel": LlamaForCausalLM,
    "OPTModel": OPTForCausalLM,
    "Qwen2Model": LlamaForCausalLM,
    "Qwen3Model": LlamaForCausalLM,
}
# Models whose head is a score. They load without the head: `loading.pooling` reads it.
CLASSIFIERS: dict[str, Callable[[Any, torch.dtype, Partition], NativeCausalLM]] = {
    "LlamaForSequenceClassification": LlamaForCausalLM,
    "MistralForSequenceClassification": LlamaForCausalLM,
    "Qwen2ForSequenceClassification": LlamaForCausalLM,
    "Qwen3ForSequenceClassification": LlamaForCausalLM,
}
# Every other architecture runs through transformers. What the fallback imports takes longer than all of this package,
# so the fallback is imported for a model that needs it.
NATIVE = {
    "BloomForCausalLM": BloomForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    **BASE_MODELS,
    **CLASSIFIERS,
}
# Fields of config.json that must be whole numbers from 1 up, if the config has them.
SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "vocab_size"),
    *("intermediate_size", "max_position_embeddings", "ffn_dim", "word_embed_proj_dim"),
    *("n_layer", "n_head", "n_embd", "n_embed", "n_inner", "n_positions"),
)
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in DTYPES.items()}

logger = logging.getLogger(__name__)


def load_model(
    path: str | PathLike[str],
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    quantization: str | None = None,
    partition: Partition = SINGLE,
    on_loading: Report | None = None,
    load_format: str = "auto",
) -> CausalLM:
    """The model in directory `path`, on `device`, in `dtype` ("auto": that of config.json).

    path: a directory, a GGUF file, or a repository of Hugging Face that lies in its cache.
    quantization: "int8", "int4", or None for the weights as the checkpoint has them. On the CPU alone, where linear
        layers take the forms of `models.linear`.
    partition: the slice of the model that is loaded. Its communicator is called by each step of the model, not before.
    on_loading: is called with the weights that are loaded and the number of all, some times; without it a terminal
        shows the progress.
    load_format: "dummy" takes random weights in place of the checkpoint's.

    Raises FileNotFoundError if the directory, its config.json or its weights are missing, ValueError for files that
    cannot be read, for an architecture or option that is not supported and for tensors that are missing, unexpected or
    misshapen.
    """
    directory = model_directory(path)
    model = build_model(directory, dtype, partition)
    dummies: Tensors | None = None
    if load_format == "dummy":
        dummies = dummy_checkpoint(model)
    elif isinstance(model, NativeCausalLM) and model.architecture in BASE_MODELS and lacks_head(model, directory):
        model.drop_head()
    stored = checkpoint_format(directory)
    if dummies is not None and stored is not None:
        raise ArgumentError("load_format", "auto for a quantized checkpoint or a GGUF file", load_format)
    forms = linear_forms(model, stored, quantization, device)
    description = describe_linear_layers(model, stored, forms)
    joins = model.joins()
    if partition.rank == 0 and partition.is_last_stage and dummies is None:  # once
        warn_of_other_weights(directory)
    if isinstance(model, NativeCausalLM):
        of_layers = stored if isinstance(stored, CheckpointFormat) else None
        load_weights(model, directory, device, of_layers, forms, on_loading, dummies)
    else:
        load_through_transformers(model, directory, device, stored, on_loading, dummies)
    if forms is not None and isinstance(stored, GgufFormat):
        prefix = "" if isinstance(model, NativeCausalLM) else "model."
        with OpenFiles() as open_files:
            by_name = {prefix + name: read for name, read in open_checkpoint(directory, open_files).items()}
        pack_as_stored(model, by_name, forms)
    if forms is not None:
        pack_linear_layers(model, forms)
        pack_experts(model, forms, are_some=partition.world_size > 1)
        logger.info("linear layers: %s", description)
    for name, join in joins.items():
        model.set_submodule(name, join(model.get_submodule(name)))
    model.to(device).requires_grad_(False).eval()  # tensors that did not come from the checkpoint move now
    look_up_directly(model)
    return model


def load_through_transformers(
    model: "TransformersCausalLM",
    directory: Path,
    device: str,
    stored: CheckpointFormat | GgufFormat | None,
    on_loading: Report | None,
    dummies: Tensors | None,
) -> None:
    """Floats first, which transformers knows. Then linear layers get the weights that the checkpoint has quantized; of
    a GGUF file later, as native models do."""
    with OpenFiles() as open_files:
        in_files = open_checkpoint(directory, open_files) if dummies is None else dummies
        weights: dict[str, Callable[[], QuantizedWeight]] = {}
        dtype, of_floats = model.dtype, in_files
        if isinstance(stored, CheckpointFormat):
            weights, dtype = whole_weights(in_files, stored), dtype_of(config_fields(directory))
            of_floats = as_floats(in_files, weights, dtype)
        tensors = {name: as_float(read()) for name, read in of_floats.items()}
        tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        for name, tensor in tensors.items():
            if name.endswith("weight"):  # others may be masks and positions
                refuse_codes(name, tensor)
        model.load_weights(tensors, directory, device, on_loading)
        del tensors
        left = pack_whole_weights(model, weights, dtype)
        if left and model.partition.rank == 0:  # once
            text = "%d of %d layers that the checkpoint has quantized are floats here, such as %s"
            logger.warning(text, len(left), len(weights), left[0])


def look_up_directly(model: nn.Module) -> None:
    """Make submodules, parameters and buffers plain attributes, too. Otherwise nn.Module looks for them after Python
    has failed to find them, a dozen times a layer, which is a tenth of a step of one request.

    For a model that changes no more: a buffer that is replaced later is not seen.
    """
    for module in model.modules():
        vars(module).update(module._modules | module._parameters | module._buffers)


def build_model(
    path: str | PathLike[str], dtype: str | torch.dtype = "auto", partition: Partition = SINGLE
) -> "NativeCausalLM | TransformersCausalLM":
    """The model without its weights: parameters are on the "meta" device. Raises as `load_model` does."""
    directory = model_directory(path)
    config = read_config(directory)
    architecture = (config.architectures or ["none"])[0]
    stored = checkpoint_format(directory)
    vars(config).pop("quantization_config", None)  # transformers would look for quantized weights
    of_checkpoint = config.dtype if hasattr(config, "dtype") else config.torch_dtype
    if of_checkpoint is None and hasattr(config, "text_config"):  # a model that takes more than texts
        of_checkpoint = config.text_config.dtype
    torch_dtype = choose_dtype(dtype, of_checkpoint)
    if isinstance(stored, GgufFormat) or (stored is not None and architecture in NATIVE):
        partition = replace(partition, group_size=stored.inputs_per_rank)
    with torch.device("meta"):
        if architecture in NATIVE:
            model = NATIVE[architecture](config, torch_dtype, partition)
            if architecture in CLASSIFIERS:
                model.drop_head()
            if partition.num_stages > 1:
                model.keep_stage(config)
            return model
        if partition.num_stages > 1:
            expected = f"1, as {architecture} runs through transformers, where nothing says what passes between layers"
            raise ArgumentError("pipeline_parallel_size", expected, partition.num_stages)
        return transformers_fallback()(config, torch_dtype, partition)


def transformers_fallback() -> "type[TransformersCausalLM]":
    from pagedattn_serve.models.transformers_model import TransformersCausalLM

    return TransformersCausalLM


def linear_forms(
    model: CausalLM, stored: CheckpointFormat | GgufFormat | None, quantization: str | None, device: str = "cpu"
) -> LinearForms | None:
    """Which forms the linear layers take that the checkpoint has not quantized. None on CUDA: layers stay as they are,
    and the weights of a GGUF file become floats.

    stored: what `checkpoint_format` says of the checkpoint. quantization: of the layers that it leaves.

    Raises ValueError for another quantization than the checkpoint's own. On CUDA any quantization raises.
    """
    check_quantization(quantization)
    if device != "cpu":
        if isinstance(stored, CheckpointFormat):
            raise ArgumentError("quantization_config", f"none on {device}, as quantized weights are for the CPU")
        if quantization is not None:
            raise ArgumentError("quantization", f"None on {device}, as quantized weights are for the CPU")
        return None
    if isinstance(stored, CheckpointFormat) and quantization not in (None, stored.QUANTIZATION):
        raise ArgumentError(
            "quantization",
            f"None or {stored.QUANTIZATION}, in which {stored.METHOD} has quantized the checkpoint",
            quantization,
        )
    return LinearForms(model.head, quantization)


def describe_linear_layers(
    model: CausalLM, stored: CheckpointFormat | GgufFormat | None, forms: LinearForms | None
) -> str:
    """The forms of the linear layers in words, for a model that `build_model` made."""
    if forms is None:
        return "torch's own"
    in_features = {name: linear.in_features for name, linear in linear_layers(model).items()}
    words = forms.describe(in_features | expert_inputs(model))
    if isinstance(stored, GgufFormat):
        return stored.describe() if forms.quantization is None else words
    return words if stored is None else f"{stored.describe()}; where the checkpoint is not quantized: {words}"


def read_config(directory: Path) -> Any:
    """What models read of a config.json, or of a GGUF file. Raises ValueError with the name of a field that no model
    can have."""
    file = directory if is_gguf(directory) else directory / "config.json"
    fields = config_fields(directory)
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ArgumentError("architectures", f"a list of names in {file}", repr(architectures))
    if fields.get("is_causal", True) is False:
        raise ArgumentError("model", "one whose tokens see only those before them", f"is_causal false in {file}")
    for name in SIZES if NATIVE.keys() & architectures else ():
        size = fields.get(name)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ArgumentError(name, f"an int >= 1 in {file}", repr(size))
    if architectures and architectures[0] in NATIVE and (plain := read_plain_config(fields)) is not None:
        plain.dtype = TORCH_DTYPES.get(plain.dtype)
        return plain
    from transformers import AutoConfig

    try:
        if is_gguf(directory):
            return AutoConfig.for_model(**fields)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # of any type: from its checks, or from a field that it does not check
        raise ValueError(f"model: cannot read {file}: {' '.join(str(error).split())}") from None
    if config.model_type == "exaone" and architectures == ["LlamaForCausalLM"]:
        # transformers saves EXAONE under LLaMA's name. The model of this name here looks for other tensors.
        config.architectures = ["ExaoneForCausalLM"]
    return config


def choose_kv_scales(
    kv_cache_dtype: str, given: Any, directory: Path, layers: Sequence[int], load_format: str = "auto"
) -> KVScales | None:
    """Scales for an fp8 cache: the given scales, else the checkpoint's, else None, which means 1, with a warning.

    layers: those with a cache of their own.
    given: what `given_scales` takes, or None. Raises what `given_scales` raises.
    """
    if kv_cache_dtype not in FP8_DTYPES:
        return None
    if given is not None:
        return given_scales(given, len(layers))
    if load_format == "dummy":
        return None
    with OpenFiles() as open_files:
        tensors = open_checkpoint(directory, open_files)
        scales = scales_in_checkpoint(((name, read()) for name, read in tensors.items() if is_kv_scale(name)), layers)
    if scales is None:
        logger.warning(
            "kv_cache_dtype=%s: keys and values are not scaled, as neither the checkpoint nor kv_scales says how; "
            "calibrate_kv_scales finds scales",
            kv_cache_dtype,
        )
    return scales


def choose_dtype(name: str | torch.dtype, of_checkpoint: torch.dtype | None) -> torch.dtype:
    name = check_dtype(name)
    if name == "auto":
        return next((dtype for dtype in TORCH_DTYPES.values() if dtype == of_checkpoint), torch.float32)
    return TORCH_DTYPES[name]
