"""Which model a GGUF file holds: the fields of config.json and generation_config.json that its metadata stands for, and
the names that its tensors have in a checkpoint from Hugging Face.

llama.cpp's converter has changed some tensors, which `TensorNames` says: the rows of LLaMA's query and key layers are
in another order, and 1 is added to the weights of Gemma's norms.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading.gguf_file import GgufFile, unreadable

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
ROPE_FACTORS = "rope_freqs.weight"  # by which each pair of a head's elements turns slower: LLaMA 3.1's scaling
# Tokens that end an output by their names, beside those that the file names. llama.cpp has the same rule, and names for
# other architectures. A token of any type counts: if a file has a wrong type, an output would never end. `</s>` is
# left out, because it is a tag of HTML in Gemma's vocabulary.
ENDS_BY_NAME = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "<｜end▁of▁sentence｜>",  # DeepSeek's, also in its LLaMA and Qwen2
    }
)
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Fields of generation_config.json.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS_AROUND = {  # a norm before and one behind each half of a layer
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(slots=True, frozen=True)
class TensorNames:
    """What the tensors of a file are in a checkpoint.

    in_layers: names of what a layer has, less the weight's or bias's end, by the file's names.
    permuted_heads: of layers whose rows are permuted within each head, by the file's names: the number of heads.
    norm_offset: what is subtracted from the weight of each norm.
    """

    in_layers: dict[str, str]
    permuted_heads: dict[str, int] = field(default_factory=dict)
    norm_offset: float = 0.0

    def of(self, name: str) -> str | None:
        """The name in a checkpoint; None if there is none."""
        stem, _, end = name.rpartition(".")
        if end in ("weight", "bias"):
            if stem in OUTSIDE_LAYERS:
                return f"{OUTSIDE_LAYERS[stem]}.{end}"
            prefix, _, layer_and_part = stem.partition(".")
            layer, _, part = layer_and_part.partition(".")
            if prefix == "blk" and layer.isdecimal() and part in self.in_layers:
                return f"model.layers.{layer}.{self.in_layers[part]}.{end}"
        return None

    def heads_of(self, name: str) -> int | None:
        """How many heads have their rows permuted; None: the rows are in order."""
        return self.permuted_heads.get(name.rpartition(".")[0].rpartition(".")[2])

    def offset_of(self, name: str) -> float:
        return self.norm_offset if name.endswith("norm.weight") else 0.0


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """What config.json would say. Raises ValueError, with the file's name, for an architecture or an option of it that
    no model here has."""
    fields = family_of(file)(file)
    end_ids = [file.metadata[key] for key in map("tokenizer.ggml.{}".format, END_KEYS) if key in file.metadata]
    return fields | {
        "vocab_size": place_of(file, "token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": dtype_of(file),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": sorted(set(end_ids)) or None,
    }


def generation_fields(file: GgufFile) -> dict[str, Any]:
    """What generation_config.json would say."""
    fields: dict[str, Any] = {"eos_token_id": end_token_ids(file)}
    for key, name in SAMPLING.items():
        if (value := file.metadata.get(f"general.sampling.{key}")) is not None:
            fields[name] = decimal(value) if isinstance(value, float) else value
    return fields


def end_token_ids(file: GgufFile) -> list[int]:
    """The tokens that end an output: those that the file names as such, and those that end one by their names."""
    found = {file.get(f"tokenizer.ggml.{key}", int, None) for key in END_KEYS} - {None}
    if "tokenizer.ggml.tokens" in file.metadata:
        found |= {token_id for token_id, text in enumerate(file.texts("tokenizer.ggml.tokens")) if text in ENDS_BY_NAME}
    return sorted(found)


def tensor_names(file: GgufFile) -> TensorNames:
    match file.architecture:
        case "llama":
            heads, kv_heads = num_heads(file)
            return TensorNames(IN_LAYERS, {"attn_q": heads, "attn_k": kv_heads})
        case "gemma":
            return TensorNames(IN_LAYERS, norm_offset=1.0)
        case "gemma2" | "gemma3":
            return TensorNames(IN_LAYERS | HEAD_NORMS | NORMS_AROUND, norm_offset=1.0)
        case _:
            return TensorNames(IN_LAYERS | HEAD_NORMS)


# ---- families -------------------------------------------------------------------------------------------------------


def llama(file: GgufFile) -> dict[str, Any]:
    """Mistral is the same architecture in these files; what makes a difference is a sliding window."""
    window = file.get("llama.attention.sliding_window", int, None) or None  # 0, too, says that there is none
    return {
        **common(file),
        "model_type": "llama" if window is None else "mistral",
        "architectures": ["LlamaForCausalLM" if window is None else "MistralForCausalLM"],
        "sliding_window": window,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def qwen2(file: GgufFile) -> dict[str, Any]:
    return {**common(file), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def qwen3(file: GgufFile) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in file.tensors
    return {**common(file), "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": bias}


def gemma(file: GgufFile) -> dict[str, Any]:
    return {**common_of_gemma(file), "model_type": "gemma", "architectures": ["GemmaForCausalLM"]}


def gemma2(file: GgufFile) -> dict[str, Any]:
    theta = file.get("gemma2.rope.freq_base", float, 10000.0)
    if (theta_of_windows := file.get("gemma2.rope.freq_base_swa", float, theta)) != theta:
        expected = f"{theta:g}, that of all layers, in {file.path}"
        raise ArgumentError("gemma2.rope.freq_base_swa", expected, f"{theta_of_windows:g}")
    return {
        **common_of_gemma(file),
        **attention_of_gemma(file, full_every=2, largest=46),
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": decimal(file.get("gemma2.attn_logit_softcapping", float, 50.0)),
        "final_logit_softcapping": decimal(file.get("gemma2.final_logit_softcapping", float, 30.0)),
    }


def gemma3(file: GgufFile) -> dict[str, Any]:
    fields = common_of_gemma(file)
    theta_of_windows = decimal(file.get("gemma3.rope.freq_base_swa", float, 10000.0))
    fields["rope_parameters"] = {
        "full_attention": fields["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": theta_of_windows},
    }
    softcap = file.get("gemma3.final_logit_softcapping", float, None)
    return {
        **fields,
        **attention_of_gemma(file, full_every=6, largest=62),
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "final_logit_softcapping": decimal(softcap) if softcap else None,
    }


FAMILIES: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
}


def family_of(file: GgufFile) -> Callable[[GgufFile], dict[str, Any]]:
    name = file.architecture
    if name not in FAMILIES:
        raise ArgumentError("general.architecture", f"{' or '.join(FAMILIES)} in {file.path}", repr(name))
    if (num_files := file.get("split.count", int, 1)) > 1:
        raise ArgumentError("split.count", f"one file (llama-gguf-split --merge makes one), not {file.path}", num_files)
    if num_experts := file.get(f"{name}.expert_count", int, 0):
        expected = f"none in {file.path}, as models with experts are not read from such files"
        raise ArgumentError(f"{name}.expert_count", expected, num_experts)
    if not file.get(f"{name}.attention.causal", bool, True):
        expected = f"true in {file.path}, as each token has to see only those before it"
        raise ArgumentError(f"{name}.attention.causal", expected, "false")
    return FAMILIES[name]


def common(file: GgufFile) -> dict[str, Any]:
    name = file.architecture
    hidden_size = file.get(f"{name}.embedding_length", int)
    heads, kv_heads = num_heads(file)
    head_size = head_size_of(file, hidden_size, heads)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": file.get(f"{name}.feed_forward_length", int),
        "num_hidden_layers": file.get(f"{name}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": file.get(f"{name}.context_length", int),
        "rms_norm_eps": decimal(file.get(f"{name}.attention.layer_norm_rms_epsilon", float)),
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(file, head_size),
    }


def common_of_gemma(file: GgufFile) -> dict[str, Any]:
    fields = common(file)
    del fields["hidden_act"]
    return fields | {"hidden_activation": "gelu_pytorch_tanh"}


def attention_of_gemma(file: GgufFile, full_every: int, largest: int) -> dict[str, Any]:
    """What llama.cpp knows by heart: every so many layers one sees all tokens, if the file does not say which, and the
    largest model of a generation, by its number of layers, scales its queries by another number."""
    name = file.architecture
    num_layers, window = (file.get(f"{name}.{key}", int) for key in ("block_count", "attention.sliding_window"))
    hidden_size, (heads, _) = file.get(f"{name}.embedding_length", int), num_heads(file)
    head_size = head_size_of(file, hidden_size, heads)
    return {
        "query_pre_attn_scalar": hidden_size // heads if num_layers == largest else head_size,
        "sliding_window": window,
        "layer_types": layer_types(file, num_layers, full_every),
    }


def layer_types(file: GgufFile, num_layers: int, full_every: int) -> list[str]:
    """As config.json has them. The file may have another number than full_every, or say of each layer whether the layer
    has a window."""
    key = f"{file.architecture}.attention.sliding_window_pattern"
    pattern = file.get(key, (int, list), full_every)
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    is_list = isinstance(pattern, list) and len(pattern) == num_layers
    if not is_list or not all(isinstance(has_window, bool) for has_window in pattern):
        expected = f"an int >= 1, or a bool for each of {num_layers} layers, in {file.path}"
        raise ArgumentError(key, expected, f"{pattern!r:.80}")
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def num_heads(file: GgufFile) -> tuple[int, int]:
    """Query heads, and key-value heads."""
    name = file.architecture
    heads = file.get(f"{name}.attention.head_count", int)
    kv_heads = file.get(f"{name}.attention.head_count_kv", int, heads)
    for key, number in (("head_count", heads), ("head_count_kv", kv_heads)):
        if number < 1:
            raise ArgumentError(f"{name}.attention.{key}", f"an int >= 1 in {file.path}", number)
    return heads, kv_heads


def head_size_of(file: GgufFile, hidden_size: int, heads: int) -> int:
    name = file.architecture
    turned = file.get(f"{name}.rope.dimension_count", int, None)
    size = file.get(f"{name}.attention.key_length", int, turned or hidden_size // heads)
    if (value_size := file.get(f"{name}.attention.value_length", int, size)) != size:
        expected = f"{size}, the size of a key, in {file.path}"
        raise ArgumentError(f"{name}.attention.value_length", expected, value_size)
    if turned not in (None, size):
        raise ArgumentError(f"{name}.rope.dimension_count", f"{size}, all of a head, in {file.path}", turned)
    return size


def rope_parameters(file: GgufFile, head_size: int) -> dict[str, Any]:
    """As config.json has them since transformers 5."""
    name = file.architecture
    rope: dict[str, Any] = {"rope_type": "default"}
    rope["rope_theta"] = decimal(file.get(f"{name}.rope.freq_base", float, 10000.0))
    factor = file.get(f"{name}.rope.scaling.factor", float, file.get(f"{name}.rope.scale_linear", float, 0.0))
    if factor < 0:
        raise ArgumentError(f"{name}.rope.scaling.factor", f"a number >= 0 in {file.path}", factor)
    kind = file.get(f"{name}.rope.scaling.type", str, "linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise ArgumentError(f"{name}.rope.scaling.type", f"none, linear or yarn in {file.path}", repr(kind))
    if kind == "yarn":
        rope |= yarn_parameters(file, factor or 1.0)
    elif kind == "linear" and factor:
        rope |= {"rope_type": kind, "factor": decimal(factor)}
    check_neutral(file, kind)
    if ROPE_FACTORS in file.tensors:
        if rope["rope_type"] != "default":
            raise ArgumentError(f"{name}.rope.scaling.type", f"none beside {ROPE_FACTORS} in {file.path}", repr(kind))
        factors = file.floats(ROPE_FACTORS)
        if len(factors) != head_size // 2:
            raise unreadable(file.path, f"expected {head_size // 2} elements of {ROPE_FACTORS}, got {len(factors)}")
        length = file.get(f"{name}.context_length", int)
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        rope |= {"factor": 1.0, "original_max_position_embeddings": length}
    return rope


def yarn_parameters(file: GgufFile, factor: float) -> dict[str, Any]:
    prefix = f"{file.architecture}.rope.scaling"
    length = file.get(f"{file.architecture}.context_length", int)
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": decimal(factor)}
    yarn["original_max_position_embeddings"] = file.get(f"{prefix}.original_context_length", int, length)
    for name in ("beta_fast", "beta_slow"):
        if (beta := file.get(f"{prefix}.yarn_{name}", float, None)) is not None:
            yarn[name] = decimal(beta)
    if (attention_factor := file.get(f"{prefix}.attn_factor", float, 1.0)) != 1.0:
        yarn["attention_factor"] = attention_factor * (1.0 + 0.1 * math.log(factor))
    return yarn


def check_neutral(file: GgufFile, kind: str) -> None:
    """Raise ArgumentError for a number of llama.cpp's scaling that would change the rotary embedding, and has no place
    in config.json. kind: of scaling. A negative yarn_ext_factor stands for the neutral one."""
    neutral_numbers = {"yarn_ext_factor": float(kind == "yarn"), "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
    if kind != "yarn":
        neutral_numbers["attn_factor"] = 1.0
    for name, neutral in neutral_numbers.items():
        key = f"{file.architecture}.rope.scaling.{name}"
        value = file.get(key, float, neutral)
        if value != neutral and not (name == "yarn_ext_factor" and value < 0):
            raise ArgumentError(key, f"{neutral:g}, or none, in {file.path}", f"{value:g}")


def place_of(file: GgufFile, name: str) -> Any:
    if name not in file.tensors:
        raise unreadable(file.path, f"it has no tensor {name}")
    return file.tensors[name]


def dtype_of(file: GgufFile) -> str | None:
    """The dtype that most weights have; None if most are quantized."""
    sizes: Counter[str] = Counter()
    for place in file.tensors.values():
        sizes[place.type] += math.prod(place.shape)
    floats = Counter({dtype: sizes[name] for name, dtype in DTYPES.items()})
    return floats.most_common(1)[0][0] if 2 * floats.total() > sizes.total() else None


def decimal(number: float) -> float:
    """The number that was written, of one that was rounded to fp32: 1e-05 of 9.999999747378752e-06."""
    return float(f"{number:.7g}")
