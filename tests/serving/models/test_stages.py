"""Stages of a model, one after the other, give the bits of the whole model. They are all in this process."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Checkpoint, change_config, make_model
from gguf_files import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from quantized_checkpoints import CONFIGS, save_quantized
from torch import Tensor

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.model_runner import StepInputs
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.models.cache_shape import allocate_caches
from pagedattn_serve.models.causal_lm import AttentionMetadata, CausalLM, KVCache
from pagedattn_serve.models.partition import Partition

BLOCK_SIZE = 16
PROMPTS = [[5, 3, 90, 11, 7], [1], [8] * 20 + [2, 4]]


def partitions(num_stages: int) -> list[Partition]:
    return [Partition(stage=stage, num_stages=num_stages) for stage in range(num_stages)]


@torch.inference_mode()
def logits_of(models: Sequence[CausalLM]) -> list[Tensor]:
    """Of the last row of each prompt, which run together, and of two tokens behind it."""
    caches = []
    for model in models:
        pairs = allocate_caches(model.cache_shapes, 3 * len(PROMPTS), BLOCK_SIZE, model.dtype)
        caches.append([KVCache(*pair) for pair in pairs])
    tables = torch.arange(3 * len(PROMPTS), dtype=torch.int32).view(len(PROMPTS), 3)
    new, computed, logits = PROMPTS, [0] * len(PROMPTS), []
    for _ in range(3):
        counts = torch.tensor([len(tokens) for tokens in new])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        seq = torch.arange(len(new)).repeat_interleave(counts)
        positions = torch.arange(len(seq)) - starts[seq] + torch.tensor(computed)[seq]
        computed = [done + int(count) for done, count in zip(computed, counts, strict=True)]
        metadata = AttentionMetadata(
            slot_mappings=[tables[seq, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE],
            block_tables=[tables],
            seq_lens=torch.tensor(computed, dtype=torch.int32),
            query_start_loc=starts.int(),
            sampling_rows=starts[1:] - 1,
        )
        token_ids = torch.tensor([token for tokens in new for token in tokens])
        for model, kv_caches in zip(models, caches, strict=True):
            carried = model(token_ids, positions, kv_caches, metadata)
            metadata = replace(metadata, carried=carried)
        logits.append(carried)
        new = [[int(token)] for token in carried.argmax(-1)]
    return logits


def expect_same_bits(path: str | Path, num_stages: int, **options: Any) -> list[CausalLM]:
    stages = [load_model(path, partition=partition, **options) for partition in partitions(num_stages)]
    whole = load_model(path, **options)
    for actual, expected in zip(logits_of(stages), logits_of([whole]), strict=True):
        assert torch.equal(actual, expected)
    return stages


@pytest.mark.parametrize(
    "name", ["llama-mqa-tied-bias", "qwen2-sliding", "opt-350m", "opt-125m", "gpt2", "bloom-8-heads"]
)
def test_a_stage_for_each_layer(get_checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    """In bf16, where whatever is rounded once more is seen. Each parameter is in one stage, but for an embedding that
    is the head as well."""
    path = get_checkpoint(name).path
    whole = build_model(path)
    parameters = dict(whole.named_parameters())
    expect_same_bits(path, whole.num_layers, dtype="bfloat16")
    stages = [build_model(path, partition=each) for each in partitions(whole.num_layers)]
    counts = Counter(name for stage in stages for name, _ in stage.named_parameters())
    assert counts.keys() == parameters.keys()
    assert counts.total() == len(parameters) + ("lm_head.weight" not in parameters)


@pytest.mark.parametrize(("num_stages", "sizes"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1])])
def test_unequal_stages(get_checkpoint: Callable[[str], Checkpoint], num_stages: int, sizes: list[int]) -> None:
    """The first stages have more layers."""
    stages = expect_same_bits(get_checkpoint("llama-mqa-tied-bias").path, num_stages)
    assert [len(stage.cache_shapes) for stage in stages] == sizes


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_by_us(get_checkpoint: Callable[[str], Checkpoint], form: str) -> None:
    expect_same_bits(get_checkpoint("llama-gqa").path, 2, quantization=form)


def test_quantized_checkpoints(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama-gqa", CONFIGS["gptq"])
    expect_same_bits(tmp_path, 2)


def test_gguf_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_model("llama-mqa-tied-bias"), "f32")
    expect_same_bits(tmp_path / "m.gguf", 3)


def test_what_cannot_be_split(get_checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    path = get_checkpoint("llama-gqa").path
    partition = Partition(stage=1, num_stages=3)
    with pytest.raises(
        ArgumentError, match=r"^pipeline_parallel_size: expected at most 2, the layers of the model, got 3$"
    ):
        build_model(path, partition=partition)
    make_model("llama-gqa").save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["GemmaForCausalLM"], model_type="gemma")
    with pytest.raises(ArgumentError, match=r"^pipeline_parallel_size: expected 1, as GemmaForCausalLM runs through"):
        build_model(tmp_path, partition=partition)


# ---- steps in pieces ------------------------------------------------------------------------------------------------


@given(st.data())
def test_pieces_of_a_step(data: st.DataObject) -> None:
    """Together they have each token, each sampling row and each table of the step, and a sequence has in a piece the
    length that its tokens so far give it."""
    counts = np.array(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
    before = np.array(data.draw(st.lists(st.integers(0, 20), min_size=len(counts), max_size=len(counts))))
    num_tokens = int(counts.sum())
    rows = data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=9))
    num_pooled = data.draw(st.integers(0, len(rows)))
    sequences = np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    positions = np.arange(num_tokens) - starts[sequences] + before[sequences]
    step = StepInputs(
        token_ids=np.arange(num_tokens),
        positions=positions,
        slot_mappings=np.arange(2 * num_tokens).reshape(2, -1),
        seq_lens=(before + counts).astype(np.int32),
        query_start_loc=None if (counts == 1).all() else starts,
        sampling_rows=np.array(rows, dtype=np.int64),
        max_seq_len=int((before + counts).max()),
        num_pooled=num_pooled,
    )
    inner = data.draw(st.sets(st.integers(1, num_tokens), max_size=4))
    cuts = sorted({0, num_tokens, *inner})
    seen_rows: dict[int, int] = {}
    for begin, end in pairwise(cuts):
        piece, picked = step.between(begin, end)
        assert piece.token_ids.tolist() == list(range(begin, end))
        assert piece.slot_mappings.tolist() == step.slot_mappings[:, begin:end].tolist()
        own_starts = piece.query_start_loc if piece.query_start_loc is not None else np.arange(end - begin + 1)
        of_rows = np.repeat(np.arange(len(own_starts) - 1), np.diff(own_starts)) + piece.first_table
        assert of_rows.tolist() == sequences[begin:end].tolist()
        last_rows = own_starts[1:] - 1
        assert piece.seq_lens.tolist() == (positions[begin:end][last_rows] + 1).tolist()
        assert piece.max_seq_len == piece.seq_lens.max()
        seen_rows |= {int(i): int(row) + begin for i, row in zip(picked, piece.sampling_rows, strict=True)}
        assert piece.num_pooled == sum(i >= len(rows) - num_pooled for i in picked)
    assert seen_rows == dict(enumerate(rows))
