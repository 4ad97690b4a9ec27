"""Tiny embedding models as sentence-transformers writes them, and its arithmetic, written out on transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import TOKENIZER_SIZE, Checkpoint, make_model, make_tokenizer
from engine_runs import finish_all, token_ids
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from pagedattn_serve import LLMEngine, PoolingParams, SamplingParams

MODULES = ["Transformer", "Pooling", "Normalize"]


def make_embedder(
    directory: Path,
    name: str,
    mode: str,
    modules: list[str] = MODULES,
    has_head: bool = True,
    **fields: Any,
) -> None:
    """A random model of VARIANTS, pooled by `mode` of sentence-transformers. has_head: whether it could generate."""
    model = make_model(name, **fields)
    (model if has_head else model.base_model).save_pretrained(directory)
    write_modules(directory, mode, modules)


def write_modules(directory: Path, mode: str, modules: list[str] = MODULES) -> None:
    """The files that say how the model of a directory is pooled."""
    places = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(places))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    fields = {"pooling_mode_lasttoken": mode == "lasttoken", f"pooling_mode_{mode}": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(fields))


def make_reranker(directory: Path, name: str, **fields: Any) -> None:
    """A random model of VARIANTS with one label for a pair of texts, and the tokenizer."""
    base = make_model(name, vocab_size=TOKENIZER_SIZE)
    base.config.update({"num_labels": 1, "pad_token_id": 0, **fields})
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(base.config)
    model.base_model.load_state_dict(base.base_model.state_dict())
    model.save_pretrained(directory)
    make_tokenizer(directory)


def reference_scores(directory: Path, firsts: list[str], seconds: list[str]) -> Tensor:
    """The logit of each pair, [num_pairs]."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return reference_scores_of_ids(
        directory, [tokenizer(*pair).input_ids for pair in zip(firsts, seconds, strict=True)]
    )


@torch.inference_mode()
def reference_scores_of_ids(directory: Path, pairs: list[list[int]]) -> Tensor:
    """The same of the token ids of each pair."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    return torch.cat([model(torch.tensor([pair])).logits[0] for pair in pairs])


@torch.inference_mode()
def reference_embeddings(
    directory: Path, prompts: list[list[int]], mode: str = "lasttoken", normalizes: bool = True
) -> Tensor:
    """[num_prompts, hidden_size], prompt by prompt."""
    model = AutoModel.from_pretrained(directory).eval()
    hidden = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    pooled = torch.stack([rows.mean(dim=0) if mode == "mean_tokens" else rows[-1] for rows in hidden])
    return torch.nn.functional.normalize(pooled, dim=1) if normalizes else pooled


def expect_embeddings(engine: LLMEngine, checkpoint: Checkpoint, params: SamplingParams) -> None:
    """Those of transformers, beside a request that generates greedily."""
    prompts, last = checkpoint.prompts, len(checkpoint.prompts)
    for i, prompt in enumerate([*prompts, prompts[7]]):
        engine.add_request(str(i), prompt, PoolingParams() if i < last else params)
    outputs = finish_all(engine)
    actual = torch.tensor([outputs[str(i)][-1].embedding for i in range(last)])
    torch.testing.assert_close(actual, reference_embeddings(Path(checkpoint.path), prompts), rtol=0, atol=1e-5)
    assert token_ids([outputs[str(last)][-1]]) == [checkpoint.expected[7][: params.max_tokens]]
