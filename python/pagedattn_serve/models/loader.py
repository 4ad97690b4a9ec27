"""From a Hugging Face directory to a model with its weights: config.json and *.safetensors or pytorch_model*.bin."""

import logging
import pickle
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig

from pagedattn_serve.checkpoint import model_directory, read_json
from pagedattn_serve.models.bloom import BloomForCausalLM
from pagedattn_serve.models.causal_lm import CausalLM, NativeCausalLM, misfit
from pagedattn_serve.models.gpt2 import GPT2LMHeadModel
from pagedattn_serve.models.kv_scales import KVScales, given_scales, is_kv_scale, scales_in_checkpoint
from pagedattn_serve.models.layers import ConvertedLinear
from pagedattn_serve.models.llama import LlamaForCausalLM
from pagedattn_serve.models.opt import OPTForCausalLM
from pagedattn_serve.models.transformers_model import TransformersCausalLM

# The others run through transformers.
NATIVE: dict[str, Callable[[Any, torch.dtype], NativeCausalLM]] = {
    "BloomForCausalLM": BloomForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    # Without a head: that of tied embeddings.
    "BloomModel": BloomForCausalLM,
    "GPT2Model": GPT2LMHeadModel,
    "LlamaModel": LlamaForCausalLM,
    "MistralModel": LlamaForCausalLM,
    "OPTModel": OPTForCausalLM,
    "Qwen2Model": LlamaForCausalLM,
    "Qwen3Model": LlamaForCausalLM,
}
# Fields of config.json that are whole numbers from 1 up, where they are there.
SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "vocab_size"),
    *("intermediate_size", "max_position_embeddings", "ffn_dim", "word_embed_proj_dim"),
    *("n_layer", "n_head", "n_embd", "n_inner", "n_positions"),
)
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,  # these two names are torch's and vLLM's as well
    "half": torch.float16,
}
# In order of preference: the one file, and the index that stands there if the weights lie in several.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

HEAD = "lm_head.weight"

logger = logging.getLogger(__name__)

Tensors = dict[str, Callable[[], Tensor]]  # by name; the data of a tensor is read when it is called


def load_model(path: str | PathLike[str], dtype: str | torch.dtype = "auto", device: str = "cpu") -> CausalLM:
    """The model in directory `path`, on `device`, with weights of `dtype` ("auto": that of config.json).

    path: a directory, or a repository of Hugging Face that lies in its cache.

    Raises FileNotFoundError if the directory, its config.json or its weights are missing, ValueError for files that
    cannot be read, for an architecture or option that is not supported and for tensors that are missing, unexpected or
    misshapen.
    """
    directory = model_directory(path)
    model = build_model(directory, dtype)
    if isinstance(model, TransformersCausalLM):
        weight_files(directory)  # raises if there are none
        model.load_weights(directory, device)
    else:
        load_weights(model, directory, device)
    return model.to(device).requires_grad_(False).eval()  # what has come from no checkpoint moves now


def build_model(path: str | PathLike[str], dtype: str | torch.dtype = "auto") -> NativeCausalLM | TransformersCausalLM:
    """The model without its weights: parameters are on the "meta" device. Raises as `load_model` does."""
    config = read_config(model_directory(path) / "config.json")
    architecture = (config.architectures or ["none"])[0]
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        if not is_for_cache_alone(quantization):
            raise ValueError("quantization_config: expected none, as quantized weights are not supported")
        del config.quantization_config  # transformers would look for quantized weights
    torch_dtype = choose_dtype(dtype, config.dtype if hasattr(config, "dtype") else config.torch_dtype)
    with torch.device("meta"):
        return NATIVE.get(architecture, TransformersCausalLM)(config, torch_dtype)


def read_config(file: Path) -> Any:
    """What transformers makes of a config.json. Raises ValueError with the name of a field that no model can have."""
    fields = read_json(file)
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"architectures: expected a list of names in {file}, got {architectures!r}")
    for name in SIZES if NATIVE.keys() & architectures else ():
        size = fields.get(name)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name}: expected an int >= 1 in {file}, got {size!r}")
    try:
        return AutoConfig.from_pretrained(file.parent, trust_remote_code=False)
    except Exception as error:  # of any type: its checks of the fields, and what follows from those it does not check
        raise ValueError(f"model: cannot read {file}: {' '.join(str(error).split())}") from None


def is_for_cache_alone(quantization: Any) -> bool:
    """Whether a quantization_config, one of compressed-tensors, leaves the weights as they are."""
    return (
        isinstance(quantization, dict)
        and bool(quantization.get("kv_cache_scheme"))
        and not quantization.get("config_groups")
    )


def choose_kv_scales(kv_cache_dtype: str, given: Any, directory: Path, num_layers: int) -> KVScales | None:
    """Scales for an fp8 cache: those that are given, else those of the checkpoint, else None for 1, with a warning.

    given: what `given_scales` takes, or None. Raises as that does, and ValueError beside kv_cache_dtype "auto".
    """
    if kv_cache_dtype == "auto":
        if given is not None:
            raise ValueError("kv_scales: expected None with kv_cache_dtype auto, which scales nothing")
        return None
    if given is not None:
        return given_scales(given, num_layers)
    with ExitStack() as open_files:
        tensors = open_checkpoint(directory, open_files)
        scales = scales_in_checkpoint(
            ((name, read()) for name, read in tensors.items() if is_kv_scale(name)), num_layers
        )
    if scales is None:
        logger.warning(
            "kv_cache_dtype=%s: keys and values are not scaled, as neither the checkpoint nor kv_scales says how; "
            "calibrate_kv_scales finds scales",
            kv_cache_dtype,
        )
    return scales


def choose_dtype(name: str | torch.dtype, of_checkpoint: torch.dtype | None) -> torch.dtype:
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if name == "auto":
        return next((dtype for dtype in DTYPES.values() if dtype == of_checkpoint), torch.float32)
    if name not in DTYPES:
        raise ValueError(f"dtype: expected auto, {', '.join(DTYPES)}, got {name}")
    return DTYPES[name]


def load_weights(model: NativeCausalLM, directory: Path, device: str) -> None:
    """Replace every parameter of `model`, built on "meta", by the checkpoint's tensors."""
    with ExitStack() as open_files:
        tensors = {checkpoint_name(model, n): read for n, read in open_checkpoint(directory, open_files).items()}
        unexpected = {name for name in tensors if not name.endswith(model.NOT_PARAMETERS) and not is_kv_scale(name)}
        problems: list[str] = []
        parameters = dict(model.named_parameters())  # tied ones appear once, under the embedding's name
        # No bar where nobody looks: disable=None is "unless on a terminal".
        for name in tqdm(parameters, desc="Loading weights", disable=None, leave=False):
            shapes = checkpoint_shapes(model, name)
            unexpected -= shapes.keys()
            parts = read_tensors(tensors, shapes, problems)
            if not problems:
                weight = convert(model, name, parts).to(device, model.dtype).contiguous()
                set_parameter(model, name, weight)
        if HEAD in unexpected and not problems:  # its embeddings are tied
            unexpected.discard(HEAD)
            load_own_head(model, tensors[HEAD]().to(device, model.dtype))
    problems += [f"unexpected {name}" for name in sorted(unexpected)]
    if problems == [f"missing {HEAD}"]:
        problems[0] += ", which config.json does not tie to the embedding: a model without its head cannot generate"
    if problems:
        raise ValueError(misfit(directory, type(model).__name__, problems))


def load_own_head(model: NativeCausalLM, weight: Tensor) -> None:
    """What a checkpoint keeps as lm_head though the config ties it: mostly a copy; if not, it is the model's head."""
    if not torch.equal(weight, model.lm_head.weight):
        logger.warning("lm_head.weight differs from the embedding, so they are not tied as config.json has it")
        model.lm_head.weight = nn.Parameter(weight.contiguous(), requires_grad=False)


# ---- files ----------------------------------------------------------------------------------------------------------


def open_checkpoint(directory: Path, open_files: ExitStack) -> Tensors:
    """Every tensor of the checkpoint, memory-mapped where the format allows it."""
    tensors: Tensors = {}
    for file in weight_files(directory):
        try:
            if file.suffix == ".safetensors":
                handle = open_files.enter_context(safe_open(file, framework="pt"))
                tensors |= {name: lambda h=handle, n=name: h.get_tensor(n) for name in handle.keys()}  # noqa: SIM118
            else:
                # Before torch 1.6 it was another format, which cannot be mapped.
                mmap = zipfile.is_zipfile(file)
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
                if not isinstance(state, dict):
                    raise ValueError(f"expected a dict of tensors, got {type(state).__name__}")
                tensors |= {name: lambda t=tensor: t for name, tensor in state.items()}
        except pickle.UnpicklingError:  # whose message advises to run what the file holds
            raise ValueError(
                f"model: cannot read the weights in {file}: expected tensors, as torch saves them, got something else"
            ) from None
        except (SafetensorError, EOFError, RuntimeError, ValueError) as error:
            reason = str(error).strip().split("\n")[0] or "it ends too early"
            raise ValueError(f"model: cannot read the weights in {file}: {reason}") from None
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, safetensors if there are any."""
    for name in WEIGHT_FILES:
        index = directory / f"{name}.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ValueError(f"weight_map: expected the files of tensors in {index}, got {weight_map!r:.80}")
            files = [directory / file for file in sorted(set(weight_map.values()))]
            for file in files:
                if not file.is_file():
                    raise FileNotFoundError(f"model: expected {file.name} in {directory}, as {index.name} names it")
            return files
        if (directory / name).is_file():
            return [directory / name]
    # Files of any other name: shards without their index.
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        if files := sorted(directory.glob(pattern)):
            return files
    raise FileNotFoundError(f"model: expected {' or '.join(WEIGHT_FILES)} in {directory}, found neither")


# ---- from the checkpoint's tensors to parameters ---------------------------------------------------------------------


def checkpoint_name(model: NativeCausalLM, name: str) -> str:
    """The name of a checkpoint's tensor with the prefix that some checkpoints leave out."""
    return name if name.startswith((model.PREFIX, "lm_head.")) else model.PREFIX + name


def checkpoint_shapes(model: NativeCausalLM, parameter_name: str) -> dict[str, list[int]]:
    """Names and shapes of the checkpoint's tensors that make up a parameter, in order."""
    layer_name, _, kind = parameter_name.rpartition(".")
    layer = model.get_submodule(layer_name)
    if isinstance(layer, ConvertedLinear):
        return layer.checkpoint_shapes(layer_name, kind)
    return {parameter_name: list(model.get_parameter(parameter_name).shape)}


def read_tensors(tensors: Tensors, shapes: dict[str, list[int]], problems: list[str]) -> list[Tensor]:
    """The named tensors; those that are missing or misshapen are added to `problems`."""
    found = []
    for name, shape in shapes.items():
        if name not in tensors:
            problems.append(f"missing {name}")
            continue
        tensor = tensors[name]()
        if isinstance(tensor, Tensor) and list(tensor.shape) == shape:
            found.append(tensor)
        else:
            found_instead = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            problems.append(f"{name}: expected {shape}, got {found_instead}")
    return found


def convert(model: NativeCausalLM, parameter_name: str, tensors: list[Tensor]) -> Tensor:
    layer_name, _, kind = parameter_name.rpartition(".")
    layer = model.get_submodule(layer_name)
    return layer.from_checkpoint(kind, tensors) if isinstance(layer, ConvertedLinear) else tensors[0]


def set_parameter(model: NativeCausalLM, name: str, weight: Tensor) -> None:
    """Replace a parameter wherever it is used: tied ones in both places."""
    old = model.get_parameter(name)
    new = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, attribute, new)
