"""Tiny Hugging Face checkpoints, made in a second.

There are three kinds: random weights (every choice of token depends on the whole model), a model that says a given text
(for streaming and stop strings), and a byte-level BPE tokenizer that leaves characters beyond ASCII in single bytes.
"""

import copy
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

MAX_LEN = 128  # positions of every checkpoint here
VOCAB_SIZE = 97  # of the random ones
TOKENIZER_SIZE = 280
EOS = "</s>"
SMALL: dict[str, Any] = dict(num_blocks=8, block_size=8, max_num_seqs=3, max_num_batched_tokens=9)  # preempts
BEGINNING, SPEECH = "the cat", " sat on the mat 🙂🙂 on the hat é, and on the end."

LLAMA_SHAPE = dict(max_position_embeddings=MAX_LEN, num_hidden_layers=2, intermediate_size=72)
# What the variants of a family share.
SHAPES: dict[type[PreTrainedConfig], dict[str, Any]] = {
    GPT2Config: dict(n_positions=MAX_LEN, n_layer=2),
    OPTConfig: dict(max_position_embeddings=MAX_LEN, num_hidden_layers=2, ffn_dim=72),
    BloomConfig: dict(seq_length=MAX_LEN, n_layer=2),
    LlamaConfig: LLAMA_SHAPE,
    MistralConfig: LLAMA_SHAPE,
    Qwen2Config: LLAMA_SHAPE,
    Qwen3Config: LLAMA_SHAPE,
}
# Head sizes that fill no vector or no 16 bytes, heads that do not add up to hidden_size, every kind of KV heads.
VARIANTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama-gqa": (LlamaConfig, dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=20)),
    "llama-mqa-tied-bias": (
        LlamaConfig,
        dict(
            hidden_size=42,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=12,
            num_hidden_layers=3,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "llama-mha": (LlamaConfig, dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4)),
    "llama-linear": (
        LlamaConfig,
        dict(
            hidden_size=30,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=42,
            rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.5),
        ),
    ),
    "llama-dynamic": (
        LlamaConfig,
        dict(
            hidden_size=56,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=42,  # every prompt is shorter, most outputs end behind it
            rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
        ),
    ),
    "llama-llama3": (
        LlamaConfig,
        dict(
            hidden_size=60,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=26,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
    ),
    "llama-yarn": (
        LlamaConfig,
        dict(
            hidden_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=MAX_LEN // 4
            ),
        ),
    ),
    "llama-yarn-options": (
        LlamaConfig,
        dict(
            hidden_size=40,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=22,
            max_position_embeddings=30,  # the original one, so that the factor alone tells how far it reaches
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=5000.0,
                factor=3.5,
                beta_fast=8.0,
                beta_slow=0.5,
                mscale=1.0,
                mscale_all_dim=0.5,
                truncate=False,
            ),
        ),
    ),
    "llama-longrope": (
        LlamaConfig,
        dict(
            hidden_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                short_factor=[1.0, 1.05, 1.1, 1.2, 1.5, 2.0],
                long_factor=[1.2, 2.0, 3.5, 5.0, 8.0, 12.0],
                original_max_position_embeddings=44,  # every prompt is shorter, some outputs end behind it
            ),
        ),
    ),
    "mistral": (
        MistralConfig,
        dict(hidden_size=54, num_attention_heads=6, num_key_value_heads=2, head_dim=18, sliding_window=35),
    ),
    "mistral-full": (
        MistralConfig,
        dict(hidden_size=40, num_attention_heads=4, num_key_value_heads=1, sliding_window=None),
    ),
    "qwen2-tied": (
        Qwen2Config,
        dict(hidden_size=42, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True),
    ),
    "qwen2-sliding": (
        Qwen2Config,
        dict(
            hidden_size=60,
            num_attention_heads=6,
            num_key_value_heads=3,
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=2,
        ),
    ),
    "qwen3": (Qwen3Config, dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=22)),
    "qwen3-tied-bias-sliding": (
        Qwen3Config,
        dict(
            hidden_size=50,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=6,
            num_hidden_layers=3,
            attention_bias=True,
            tie_word_embeddings=True,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            use_sliding_window=True,
            sliding_window=17,
        ),
    ),
    "gpt2": (GPT2Config, dict(n_embd=48, n_head=4)),
    "gpt2-inner-untied": (
        GPT2Config,
        dict(
            n_embd=51,
            n_head=3,
            n_inner=100,
            n_layer=3,
            scale_attn_by_inverse_layer_idx=True,
            tie_word_embeddings=False,
        ),
    ),
    "opt-125m": (OPTConfig, dict(hidden_size=39, num_attention_heads=3)),
    "opt-350m": (
        OPTConfig,
        dict(hidden_size=48, num_attention_heads=4, word_embed_proj_dim=20, do_layer_norm_before=False),
    ),
    "opt-projected-untied": (
        OPTConfig,
        dict(hidden_size=35, num_attention_heads=5, word_embed_proj_dim=50, tie_word_embeddings=False),
    ),
    "opt-no-bias-no-affine": (  # with gelu: the shape of Galactica, but for its norms
        OPTConfig,
        dict(
            hidden_size=44,
            num_attention_heads=4,
            enable_bias=False,
            layer_norm_elementwise_affine=False,
            activation_function="gelu",
        ),
    ),
    "bloom": (BloomConfig, dict(hidden_size=55, n_head=5)),
    "bloom-post-norm": (
        BloomConfig,
        dict(
            hidden_size=49,
            n_head=7,
            apply_residual_connection_post_layernorm=True,
            tie_word_embeddings=False,
        ),
    ),
    "bloom-8-heads": (BloomConfig, dict(hidden_size=64, n_head=8)),
}
# One of each family, for what takes long.
FAMILIES = ["llama-gqa", "mistral", "qwen2-tied", "qwen3", "gpt2", "opt-350m", "bloom"]


def make_model(name: str, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model of VARIANTS: no EOS token, logits well apart, biases and norms random as well."""
    config_class, fields = VARIANTS[name]
    shared = dict(vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = config_class(**{**shared, **SHAPES[config_class], **copy.deepcopy(fields), **overrides})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and parameter_name.endswith("weight")
            std = 0.3 if is_norm else standard_deviation(config_class, parameter_name)
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=std, generator=generator)
    return model.eval()


def standard_deviation(config_class: type[PreTrainedConfig], parameter_name: str) -> float:
    """Of a weight or bias. OPT and BLOOM repeat one token for ever, unless they look around and constants are small."""
    if config_class in (OPTConfig, BloomConfig):
        if parameter_name.endswith("bias"):
            return 0.15
        if "mlp" in parameter_name or ".fc" in parameter_name:
            return 0.2
        if any(layer in parameter_name for layer in ("q_proj", "k_proj", "query_key_value")):
            return 1.0
    return 0.3


@dataclass(slots=True)
class Checkpoint:
    """A random model in a directory, prompts for it, and what Hugging Face answers to each of them, greedily."""

    path: str
    model: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]


def make_checkpoint(name: str, directory: Path, vocab_size: int = VOCAB_SIZE) -> Checkpoint:
    """One of VARIANTS, with prompts from 1 token up and 24 tokens of output each."""
    model = make_model(name, vocab_size=vocab_size)
    model.save_pretrained(directory, max_shard_size="20KB" if name == "llama-mha" else "1GB")
    if name in ("gpt2", "opt-350m", "bloom"):
        remove_prefix(model, directory)
    if name in ("opt-350m", "bloom-8-heads"):
        convert_to_bin(directory)
    draw = random.Random(name)
    prompts = [[draw.randrange(vocab_size) for _ in range(length)] for length in (1, 2, 7, 16, 17, 33, 5, 40)]
    return Checkpoint(str(directory), model, prompts, greedy_references(model, prompts, 24))


def greedy_reference(model: PreTrainedModel, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """What Hugging Face `generate` adds to one prompt."""
    token_ids = torch.tensor([prompt])
    out = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return out[0, len(prompt) :].tolist()


def greedy_references(model: PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What Hugging Face `generate` adds to each prompt. The prompts run as one batch, padded on the left: a batch takes
    as long as one prompt. Where the rotary embedding of a row depends on the longest one, the prompts run one by one.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return [greedy_reference(model, prompt, max_tokens) for prompt in prompts]
    length = max(map(len, prompts))
    padding = [length - len(prompt) for prompt in prompts]
    out = model.generate(
        torch.tensor([[0] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * n + [1] * (length - n) for n in padding]),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[:, length:].tolist()


def remove_prefix(model: PreTrainedModel, directory: Path) -> None:
    """As many published checkpoints are: names of the model without its head, and GPT-2's causal mask among them."""
    file = directory / "model.safetensors"
    prefix = f"{model.base_model_prefix}."
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    if isinstance(model, GPT2LMHeadModel):
        mask = torch.ones(MAX_LEN, MAX_LEN).tril()[None, None]
        tensors |= {f"h.{i}.attn.bias": mask.clone() for i in range(model.config.n_layer)}
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(directory: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes one."""
    config = {**json.loads((directory / "config.json").read_text()), **fields}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def convert_to_bin(directory: Path) -> None:
    """Every file of weights, and their index if there is one, in the format before safetensors."""
    for file in directory.glob("*.safetensors"):
        torch.save(load_file(file), directory / bin_name(file.name))
        file.unlink()
    for index in directory.glob("*.safetensors.index.json"):
        fields = json.loads(index.read_text())
        fields["weight_map"] = {name: bin_name(file) for name, file in fields["weight_map"].items()}
        (directory / bin_name(index.name)).write_text(json.dumps(fields))
        index.unlink()


def bin_name(name: str) -> str:
    """pytorch_model.bin for model.safetensors, and so on."""
    return f"pytorch_{name}".replace(".safetensors", ".bin")


def make_tokenizer(directory: Path, *special_tokens: str) -> PreTrainedTokenizerBase:
    """Byte-level BPE with a few English merges: an emoji is four tokens, and any text can be written. Special tokens
    beside <s> and </s> have the ids from 2 on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=["<s>", EOS, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the hat sat on the mat; the end of the other story"] * 4, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    assert tokenizer.get_vocab_size() == TOKENIZER_SIZE
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
    )
    return AutoTokenizer.from_pretrained(directory)


def make_metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As LLaMA-2's: "▁" for a space, one put before every text and dropped from the first decoded token; unknown
    characters in bytes, of which an incomplete run decodes to a replacement character for each."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehmnost"]
    merges = []
    for word in ("▁the", "▁cat", "▁sat", "▁on", "▁mat"):
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            pieces.append(word[: end + 1])
    pieces = list(dict.fromkeys(pieces))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=list(dict.fromkeys(merges)),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def put_bos_first(directory: Path) -> None:
    """Let the tokenizer put <s>, token 0, before every text, unless it is told to add no special tokens."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))


def make_text_model(directory: Path) -> PreTrainedTokenizerBase:
    """A random LLaMA and the tokenizer; its greedy output is mostly broken bytes."""
    tokenizer = make_tokenizer(directory)
    make_model("llama-gqa", vocab_size=TOKENIZER_SIZE).save_pretrained(directory)
    return tokenizer


def make_speaking_model(directory: Path, text: str, *special_tokens: str) -> PreTrainedTokenizerBase:
    """A GPT-2 that goes on with `text`, then EOS for ever, after any prompt: the position alone decides.

    A prompt of n tokens is followed by token n of the text, so a beginning of the text is followed by the rest.
    """
    tokenizer = make_tokenizer(directory, *special_tokens)
    script = tokenizer(text).input_ids
    assert len(script) < MAX_LEN
    eos = tokenizer.convert_tokens_to_ids(EOS)
    config = GPT2Config(
        vocab_size=TOKENIZER_SIZE,
        n_positions=MAX_LEN,
        n_embd=MAX_LEN,
        n_layer=1,
        n_head=8,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0)
        model.transformer.wpe.weight.copy_(torch.eye(MAX_LEN))
        for position in range(MAX_LEN):
            model.lm_head.weight[script[position + 1] if position + 1 < len(script) else eos, position] = 10.0
    model.save_pretrained(directory)
    return tokenizer
