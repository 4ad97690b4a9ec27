"""Small checkpoints with random weights, made with transformers; what these say greedily hangs on all of the model."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 199


def make_model(kind: str = "Qwen3", **fields: Any) -> transformers.PreTrainedModel:
    """A model of <kind>Config, in fp32 and in evaluation mode."""
    shape: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="float32",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**shape | fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 2.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0  # of norms
            std = 0.5 if "q_proj" in name or "k_proj" in name else 0.2
            if "embed" in name and config.tie_word_embeddings:
                std = 0.02  # otherwise the last token is the likeliest
            parameter.normal_(mean, std, generator=generator)
    return model.eval()


def save_model(directory: Path, kind: str = "Qwen3", **fields: Any) -> transformers.PreTrainedModel:
    """The model, saved in the directory without a tokenizer."""
    model = make_model(kind, **fields)
    model.save_pretrained(directory)
    return model


def make_prompts(lengths: list[int], shared: int = 0) -> list[list[int]]:
    """Prompts of random tokens; the first `shared` tokens are the same in all."""
    draw = random.Random(1)
    tokens = lambda count: [draw.randrange(VOCAB_SIZE) for _ in range(count)]  # noqa: E731
    beginning = tokens(shared)
    return [beginning[:length] + tokens(length - shared) for length in lengths]


def generate(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that transformers' `generate` chooses greedily."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    return out[0, len(prompt) :].tolist()
