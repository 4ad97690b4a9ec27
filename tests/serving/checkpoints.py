"""Tiny Hugging Face checkpoints, made in a second, and the way the tests run an engine to its end.

Three kinds: random weights (every choice of token hangs on all of the model), a model that says a given text (what
streaming and stop strings need), and a byte-level BPE tokenizer that leaves characters beyond ASCII in single bytes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams

MAX_LEN = 128  # positions of every checkpoint here
VOCAB_SIZE = 97  # of the random ones
TOKENIZER_SIZE = 280
EOS = "</s>"

# Head sizes that are a multiple of 4 and not of 8, heads that do not add up to hidden_size, every kind of KV heads.
LLAMAS: dict[str, dict[str, Any]] = {
    "llama-gqa": dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=20),
    "llama-mqa-tied-bias": dict(
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
    "llama-mha": dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4),
}
GPT2S: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_embd=48, n_head=4),
    "gpt2-inner-untied": dict(
        n_embd=60, n_head=3, n_inner=100, n_layer=3, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False
    ),
}


def make_model(name: str, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model of LLAMAS or GPT2S: no EOS token, logits well apart, biases and norms random as well."""
    shared = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config: LlamaConfig | GPT2Config
    if name in LLAMAS:
        shape = dict(vocab_size=VOCAB_SIZE, intermediate_size=72, num_hidden_layers=2, max_position_embeddings=MAX_LEN)
        config = LlamaConfig(**{**shared, **shape, **LLAMAS[name], **overrides})
        model: PreTrainedModel = LlamaForCausalLM(config)
    else:
        config = GPT2Config(
            **{**shared, **dict(vocab_size=VOCAB_SIZE, n_positions=MAX_LEN, n_layer=2), **GPT2S[name], **overrides}
        )
        model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and parameter_name.endswith("weight")
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.3, generator=generator)
    return model.eval()


@dataclass(slots=True)
class Checkpoint:
    """A random model in a directory, prompts for it, and what Hugging Face answers to each of them alone, greedily."""

    path: str
    model: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]


def make_checkpoint(name: str, directory: Path) -> Checkpoint:
    """One of LLAMAS or GPT2S, with prompts from 1 token up and 24 tokens of output each."""
    model = make_model(name)
    if name == "gpt2":
        save_without_prefix(model, directory)
    else:
        model.save_pretrained(directory, max_shard_size="20KB" if name == "llama-mha" else "1GB")
    draw = random.Random(name)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 7, 16, 17, 33, 5, 40)]
    return Checkpoint(str(directory), model, prompts, [greedy_reference(model, prompt, 24) for prompt in prompts])


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


def save_without_prefix(model: GPT2LMHeadModel, directory: Path) -> None:
    """As the published GPT-2 checkpoints are: names of the model without its head, and the causal mask among them."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    mask = torch.ones(MAX_LEN, MAX_LEN).tril()[None, None]
    tensors |= {f"h.{i}.attn.bias": mask.clone() for i in range(model.config.n_layer)}
    save_file(tensors, file, metadata={"format": "pt"})


def make_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Byte-level BPE with a few English merges: an emoji is four tokens, and any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=["<s>", EOS],
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


def make_text_model(directory: Path) -> PreTrainedTokenizerBase:
    """A random LLaMA and the tokenizer; its greedy output is mostly broken bytes."""
    tokenizer = make_tokenizer(directory)
    make_model("llama-gqa", vocab_size=TOKENIZER_SIZE).save_pretrained(directory)
    return tokenizer


def make_speaking_model(directory: Path, text: str) -> PreTrainedTokenizerBase:
    """A GPT-2 that goes on with `text`, then EOS for ever, after any prompt: the position alone decides.

    A prompt of n tokens is followed by token n of the text, so a beginning of the text is followed by the rest.
    """
    tokenizer = make_tokenizer(directory)
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


def finish_all(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left: all outputs of each request, in order. Checks what must hold whatever the load."""
    outputs: dict[str, list[RequestOutput]] = {}
    manager = engine.scheduler.block_manager
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        manager.check_integrity()
    for steps in outputs.values():
        assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
        final = steps[-1].outputs[0]
        for step in steps:  # nothing is taken back
            assert final.token_ids[: len(step.outputs[0].token_ids)] == step.outputs[0].token_ids
            assert final.text.startswith(step.outputs[0].text)
    assert manager.num_free_blocks == manager.num_blocks
    return outputs


def run(
    engine: LLMEngine, prompts: Sequence[str | list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """The finished requests, in order. One params for all, or one each."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, param) in enumerate(zip(prompts, each, strict=True)):
        if isinstance(prompt, str):
            engine.add_request(str(i), prompt, param)
        else:
            engine.add_request(str(i), sampling_params=param, prompt_token_ids=prompt)
    outputs = finish_all(engine)
    return [outputs[str(i)][-1] for i in range(len(prompts))]


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]
