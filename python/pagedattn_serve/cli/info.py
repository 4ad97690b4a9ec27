"""`pagedattn info`: the shapes of a model, and what fits in the cache."""

import argparse

from pagedattn_serve.execution.engine_setup import DEFAULT_CPU_MEMORY, describe_memory
from pagedattn_serve.loading.directory import model_directory
from pagedattn_serve.loading.loader import build_model, describe_linear_layers, linear_forms
from pagedattn_serve.loading.quantized_checkpoint import checkpoint_format


def info(args: argparse.Namespace) -> int:
    directory = model_directory(args.model)
    model, stored = build_model(directory, args.dtype), checkpoint_format(directory)
    linear_layers = describe_linear_layers(model, stored, linear_forms(model, stored, args.quantization))
    memory = DEFAULT_CPU_MEMORY if args.kv_cache_memory is None else args.kv_cache_memory
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for name, value in [
        ("model", args.model),
        ("architecture", model.architecture),
        ("runs", model.runs),
        ("parameters", f"{num_parameters:,} ({num_parameters * model.dtype.itemsize:,} bytes)"),
        ("dtype", str(model.dtype).removeprefix("torch.")),
        ("linear layers", f"{linear_layers} (on the CPU)"),
        ("layers", model.describe_layers()),
        *([("heads", f"{model.num_heads} query, {model.describe_caches()}")] if model.cache_shapes else []),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("max_model_len", f"{model.max_model_len:,} tokens"),
        *describe_memory(model, memory, args.block_size, args.kv_cache_dtype).items(),
    ]:
        print(f"{name:15}{value}")
    return 0
