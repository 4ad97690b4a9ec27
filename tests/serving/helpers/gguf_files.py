"""Tiny GGUF files as llama.cpp's converter writes them, and the models that have their weights."""

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def make_gemma(model_type: str, **fields: Any) -> PreTrainedModel:
    """A random model of the shape of Gemma 1, 2 or 3, with windows where the generation has them."""
    config = AutoConfig.for_model(
        model_type,
        vocab_size=97,
        hidden_size=fields.pop("hidden_size", 64),
        intermediate_size=fields.pop("intermediate_size", 96),
        num_hidden_layers=fields.pop("num_hidden_layers", 2),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **({} if model_type == "gemma" else dict(query_pre_attn_scalar=16, sliding_window=9)),
        **fields,
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(len(model_type))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.1 if "norm" in name else 0.2, generator=generator)
    return model.eval()


def gguf_name(name: str, architecture: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{end}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    parts = PARTS | AROUND if architecture in ("gemma2", "gemma3") else PARTS
    return f"blk.{layer}.{parts[part]}.{end}"


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    type_of: str | Callable[[str], str] = "f32",
    tokenizer: dict[str, Any] | None = None,
    without: Container[str] = (),
    more: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> PreTrainedModel:
    """Write the model, and give it the weights that the file has.

    type_of: of matrices, by their names in the file. tokenizer, metadata: fields more, a value of None removes one.
    without: names of tensors that are left out. more: tensors more, by name.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, architecture)
    fields = {key.replace("ARCH", architecture): value for key, value in metadata_of(config).items()}
    for key, value in (fields | (tokenizer or {}) | metadata).items():
        add_value(writer, key, value)
    state = {}
    for name, tensor in model.state_dict().items():
        own = gguf_name(name, architecture)
        if own == "output.weight" and config.tie_word_embeddings:
            continue
        kind = "f32" if tensor.dim() == 1 else type_of if isinstance(type_of, str) else type_of(own)
        heads = heads_of(own, config) if architecture == "llama" else None
        offset = 1.0 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0.0
        data = as_type(permuted(tensor, heads) + offset, Type[kind.upper()])
        if own not in without:
            writer.add_tensor(own, data, raw_dtype=Type[kind.upper()])
        values = torch.from_numpy(gguf.quants.dequantize(data, Type[kind.upper()]).astype(np.float32))
        state[name] = unpermuted(values.view(tensor.shape) - offset, heads)
    for own, data in (more or {}).items():
        writer.add_tensor(own, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def metadata_of(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields: dict[str, Any] = {
        "ARCH.block_count": config.num_hidden_layers,
        "ARCH.context_length": config.max_position_embeddings,
        "ARCH.embedding_length": config.hidden_size,
        "ARCH.feed_forward_length": config.intermediate_size,
        "ARCH.attention.head_count": config.num_attention_heads,
        "ARCH.attention.head_count_kv": config.num_key_value_heads,
        "ARCH.attention.key_length": head_size,
        "ARCH.attention.value_length": head_size,
        "ARCH.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "ARCH.rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        fields |= {"ARCH.rope.scaling.type": rope["rope_type"], "ARCH.rope.scaling.factor": float(rope["factor"])}
        if rope["rope_type"] == "yarn":
            length = rope["original_max_position_embeddings"]
            fields["ARCH.rope.scaling.original_context_length"] = length
    if config.model_type in ("mistral", "gemma2", "gemma3_text"):
        fields["ARCH.attention.sliding_window"] = config.sliding_window
    return fields


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        adders[type(value)](key, value)


def heads_of(own: str, config: Any) -> int | None:
    if ".attn_q." in own:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k." in own else None


def permuted(tensor: Tensor, heads: int | None) -> Tensor:
    """As `LlamaModel.permute` of llama.cpp's converter."""
    if heads is None:
        return tensor.detach()
    return tensor.detach().unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def unpermuted(tensor: Tensor, heads: int | None) -> Tensor:
    return tensor if heads is None else tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def as_type(tensor: Tensor, kind: Type) -> np.ndarray:
    """The tensor in a type; of types that the package cannot write, random blocks of about the tensor's size."""
    array = tensor.numpy().astype(np.float32)
    if kind not in (Type.Q4_K, Type.Q6_K):
        return gguf.quants.quantize(array, kind)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(array.size)
    blocks = draw.integers(0, 256, (array.size // size, num_bytes), dtype=np.uint8)
    std = float(array.std())
    numbers = [std / 1400] if kind == Type.Q6_K else [std / 200, std / 27]  # fp16 at the end, or the beginning
    place = slice(-2, None) if kind == Type.Q6_K else slice(0, 4)
    blocks[:, place] = np.frombuffer(np.array(numbers, dtype=np.float16).tobytes(), dtype=np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def tokenizer_fields(tokenizer: PreTrainedTokenizerBase, kind: str, **more: Any) -> dict[str, Any]:
    """Metadata that says the same as a tokenizer. kind: "gpt2" (byte-level BPE) or "llama" (SentencePiece)."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    merges = [tuple(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    fields: dict[str, Any] = {"model": kind, "tokens": tokens}
    fields["token_type"] = [3 if text in special else 6 if text.startswith("<0x") else 1 for text in tokens]
    if kind == "gpt2":
        fields |= {"pre": "gpt-2", "merges": [" ".join(merge) for merge in merges]}
    else:
        rank = {left + right: place for place, (left, right) in reversed(list(enumerate(merges)))}
        fields["scores"] = [-float(rank.get(text, 10000)) for text in tokens]
    for name in ("bos", "eos", "unk", "pad"):
        token_id = getattr(tokenizer, f"{name}_token_id")
        fields[f"{ {'unk': 'unknown', 'pad': 'padding'}.get(name, name) }_token_id"] = token_id
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | more).items()}
