"""From a Hugging Face directory to a model with its weights: config.json and *.safetensors."""

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig

from pagedattn_serve.models.gpt2 import GPT2LMHeadModel
from pagedattn_serve.models.llama import LlamaForCausalLM

CausalLM = LlamaForCausalLM | GPT2LMHeadModel
ARCHITECTURES: dict[str, type[CausalLM]] = {
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "LlamaForCausalLM": LlamaForCausalLM,
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(path: str, dtype: str = "auto") -> CausalLM:
    """The model in directory `path`, on the CPU, with weights of `dtype` ("auto": that of config.json).

    Raises FileNotFoundError if the directory, its config.json or its weights are missing, ValueError for an
    architecture or option that is not supported and for tensors that are missing, unexpected or misshapen.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"model: expected a directory with a config.json, got {path}")
    config = AutoConfig.from_pretrained(directory)
    architecture = (config.architectures or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture: expected one of {', '.join(ARCHITECTURES)}, got {architecture}")
    torch_dtype = choose_dtype(dtype, config.dtype if hasattr(config, "dtype") else config.torch_dtype)
    with torch.device("meta"):
        model = ARCHITECTURES[architecture](config, torch_dtype)
    load_weights(model, directory, torch_dtype)
    return model.requires_grad_(False).eval()


def choose_dtype(name: str, of_checkpoint: torch.dtype | None) -> torch.dtype:
    if name == "auto":
        return of_checkpoint or torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype: expected auto, {', '.join(DTYPES)}, got {name}")
    return DTYPES[name]


def load_weights(model: CausalLM, directory: Path, dtype: torch.dtype) -> None:
    """Replace every parameter of `model`, built on "meta", by the checkpoint's tensors."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"model: expected *.safetensors in {directory}, found none")
    with ExitStack() as stack:
        try:
            handles = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        except SafetensorError as error:
            raise ValueError(f"model: cannot read the weights in {directory}: {error}") from None
        names = [(handle, name) for handle in handles for name in handle.keys()]  # noqa: SIM118 (not a dict)
        sources = {checkpoint_name(model, name): (handle, name) for handle, name in names}
        unexpected = {name for name in sources if not name.endswith(model.NOT_PARAMETERS)}
        problems = []
        parameters = dict(model.named_parameters())  # tied ones appear once, under the embedding's name
        for name, parameter in parameters.items():
            parts = source_names(model, name)
            missing = [part for part in parts if part not in sources]
            problems += [f"missing {part}" for part in missing]
            unexpected.difference_update(parts)
            if missing:
                continue
            tensors = [sources[part][0].get_tensor(sources[part][1]) for part in parts]
            if name.endswith(model.TRANSPOSED):
                tensors = [tensor.t() for tensor in tensors]
            weight = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            if weight.shape != parameter.shape:
                problems.append(f"{' + '.join(parts)}: expected {list(parameter.shape)}, got {list(weight.shape)}")
                continue
            set_parameter(model, name, weight.to(dtype).contiguous())
        # A checkpoint of a model with tied embeddings may carry the copy all the same.
        if "lm_head.weight" not in parameters:
            unexpected.discard("lm_head.weight")
        problems += [f"unexpected {name}" for name in sorted(unexpected)]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"model: the weights in {directory} do not fit {type(model).__name__}: {shown}")


def checkpoint_name(model: CausalLM, name: str) -> str:
    """The name of a checkpoint's tensor with the prefix that some checkpoints leave out."""
    return name if name.startswith((model.PREFIX, "lm_head.")) else model.PREFIX + name


def source_names(model: CausalLM, name: str) -> list[str]:
    """The checkpoint's tensors that make up a parameter, in order."""
    for fused, parts in model.FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def set_parameter(model: CausalLM, name: str, weight: Tensor) -> None:
    """Replace a parameter wherever it is used: tied ones in both places."""
    old = model.get_parameter(name)
    new = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, attribute, new)
