"""From a Hugging Face directory to a model with its weights: config.json and *.safetensors."""

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig

from pagedattn_serve.layers import FusedLinear
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
        return next((dtype for dtype in DTYPES.values() if dtype == of_checkpoint), torch.float32)
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
        for parameter_name in parameters:
            tensors = []
            for name, shape in expected_tensors(model, parameter_name).items():
                unexpected.discard(name)
                if name not in sources:
                    problems.append(f"missing {name}")
                    continue
                handle, name_in_file = sources[name]
                tensor = handle.get_tensor(name_in_file)
                if list(tensor.shape) == shape:
                    tensors.append(tensor)
                else:
                    problems.append(f"{name}: expected {shape}, got {list(tensor.shape)}")
            if not problems:
                weight = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                weight = weight.t() if parameter_name.endswith(model.TRANSPOSED) else weight
                set_parameter(model, parameter_name, weight.to(dtype).contiguous())
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


def expected_tensors(model: CausalLM, parameter_name: str) -> dict[str, list[int]]:
    """Names and shapes of the checkpoint's tensors that make up a parameter, in order."""
    shape = list(model.get_parameter(parameter_name).shape)
    layer_name, _, kind = parameter_name.rpartition(".")
    layer = model.get_submodule(layer_name)
    if isinstance(layer, FusedLinear):
        parent = layer_name.rpartition(".")[0]
        return {f"{parent}.{part}.{kind}": [size, *shape[1:]] for part, size in layer.parts.items()}
    return {parameter_name: shape[::-1] if parameter_name.endswith(model.TRANSPOSED) else shape}


def set_parameter(model: CausalLM, name: str, weight: Tensor) -> None:
    """Replace a parameter wherever it is used: tied ones in both places."""
    old = model.get_parameter(name)
    new = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, attribute, new)
