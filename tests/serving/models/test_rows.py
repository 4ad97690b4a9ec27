"""The rows that a native model computes: of the last layer those that sample, and in an MLP not all of them at once."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from checkpoints import Checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.execution.model_runner import StepInputs, StepRunner
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.models import layers
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.models.partition import Partition
from pagedattn_serve.scheduling.sequence import TableArray

LAST_OF_MLP = {
    "llama-gqa": "mlp.down_proj",
    "mistral": "mlp.down_proj",
    "gpt2": "mlp.c_proj",
    "opt-350m": "fc2",
    "bloom-8-heads": "mlp.dense_4h_to_h",
}
# Two prompts. The first 6 tokens of the first one run in a step before, and sample nothing.
PROMPTS = [[i * 7 % 50 for i in range(19)], [i * 11 % 50 for i in range(7)]]
CACHED, NUM_TOKENS = 6, 20
BLOCK_SIZE, BLOCK_TABLES = 16, np.array([[2, 0], [1, 3]], dtype=np.int32)


def step_inputs(chunks: list[tuple[int, int]], rows: list[int]) -> StepInputs:
    """chunks: of each prompt, the positions [begin, end) that run."""
    counts = [end - begin for begin, end in chunks]
    positions = np.concatenate([np.arange(*chunk) for chunk in chunks])
    blocks = BLOCK_TABLES[np.repeat(np.arange(len(chunks)), counts), positions // BLOCK_SIZE]
    tokens = [prompt[begin:end] for prompt, (begin, end) in zip(PROMPTS, chunks, strict=False)]
    return StepInputs(
        token_ids=np.concatenate(tokens),
        positions=positions,
        slot_mappings=(blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE)[None],
        seq_lens=np.array([end for _, end in chunks], dtype=np.int32),
        query_start_loc=np.cumsum([0, *counts], dtype=np.int32),
        sampling_rows=np.array(rows, dtype=np.int64),
        max_seq_len=max(end for _, end in chunks),
    )


@torch.inference_mode()
def logits_of(model: CausalLM, rows: list[int]) -> Tensor:
    cache_config = CacheConfig(num_blocks=4, block_size=BLOCK_SIZE)
    tables = TableArray(SchedulerConfig(max_model_len=32), cache_config)
    for row, blocks in enumerate(BLOCK_TABLES.tolist()):
        tables.write(0, row, 0, blocks)
    runner = StepRunner(model, cache_config, tables, "cpu")
    assert len(runner.run_model(step_inputs([(0, CACHED)], [])).logits) == 0
    return runner.run_model(step_inputs([(CACHED, 19), (0, 7)], rows)).logits


def count_rows(monkeypatch: pytest.MonkeyPatch, model: CausalLM, last_of_mlp: str) -> tuple[list[int], list[int]]:
    """The lists get the rows of each attention and of each call of this module, layer by layer."""
    attended: list[int] = []
    in_mlp: list[int] = []

    def paged_attention(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        attended.append(len(query))
        return attend(query, *args, **kwargs)

    attend = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", paged_attention)
    for name, module in model.named_modules():
        if name.endswith(last_of_mlp):
            module.register_forward_hook(lambda module, inputs, output: in_mlp.append(len(output)))
    return attended, in_mlp


# Rows that sample, and how many the last layer computes: of each prompt those from the first that samples on.
LAST_ROWS: dict[tuple[int, ...], int] = {
    (): 0,  # both prompts go on in the next step
    (12,): 1,
    (19,): 1,  # of the second prompt alone
    (12, 19): 2,
    (12, 12, 12, 19): 2,  # parallel samples
    (9, 10, 11, 12, 19): 5,  # drafts
    (12, 19, 3, 4, 5, 6, 7, 8, 9, 10, 11): 11,  # prompt_logprobs
    (3, 14): 16,
    tuple(range(20)): 20,
}


@pytest.mark.parametrize("name", LAST_OF_MLP)
def test_the_last_layer_computes_the_rows_that_sample(
    get_checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the bits that all rows have. Other rows leave only their keys and values in its cache."""
    checkpoint = get_checkpoint(name)
    model = load_model(checkpoint.path)
    every = logits_of(model, list(range(NUM_TOKENS)))
    with torch.inference_mode():
        expected = [checkpoint.model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    torch.testing.assert_close(every, torch.cat([expected[0][CACHED:], expected[1]]), rtol=1e-4, atol=1e-4)

    attended, in_mlp = count_rows(monkeypatch, model, LAST_OF_MLP[name])
    for rows, num_rows in LAST_ROWS.items():
        attended.clear()
        in_mlp.clear()
        assert torch.equal(logits_of(model, list(rows)), every[list(rows)]), rows
        before = model.num_layers - 1
        assert attended == in_mlp == [CACHED] * before + [0] + [NUM_TOKENS] * before + [num_rows], rows


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    samples=st.lists(st.integers(0, 99), max_size=9),
)
def test_rows_of_the_last_layer_are_found(counts: list[int], samples: list[int]) -> None:
    """In any order, several times the same, of any of the sequences; against plain lists."""
    num_tokens = sum(counts)
    sampling = [sample % num_tokens for sample in samples]
    rows: list[int] = []
    starts = [0]
    for begin, end in zip(np.cumsum([0, *counts]).tolist(), np.cumsum(counts).tolist(), strict=False):
        own = [row for row in sampling if begin <= row < end]
        rows += range(min(own), end) if own else []
        starts.append(len(rows))

    unused: Any = None
    inputs = StepInputs(
        np.arange(num_tokens),
        *[unused] * 3,
        np.cumsum([0, *counts], dtype=np.int32),
        np.array(sampling, dtype=np.int64),
        unused,
    )
    found = inputs.rows_of_last_layer()
    if len(rows) == num_tokens or len(sampling) >= num_tokens:  # then a search costs more than it saves
        assert found is None
        return
    assert found is not None
    assert [array.tolist() for array in found] == [rows, starts, [rows.index(row) for row in sampling]]
    assert [array.dtype for array in found] == [np.int64, np.int32, np.int64]


@pytest.mark.parametrize("name", LAST_OF_MLP)
def test_an_mlp_takes_some_rows_at_a_time(
    get_checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = load_model(get_checkpoint(name).path)
    rows = list(range(NUM_TOKENS))
    at_once = logits_of(model, rows)
    _, in_mlp = count_rows(monkeypatch, model, LAST_OF_MLP[name])
    monkeypatch.setattr(layers, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(layers, "MAX_ACTIVATION_BYTES", 0)
    assert torch.equal(logits_of(model, rows), at_once)
    assert in_mlp == [CACHED] * (model.num_layers - 1) + [0] + [8, 8, 4] * model.num_layers


@pytest.mark.parametrize("name", ["llama-gqa", "opt-350m"])  # of 2 ranks, the slices differ in size
def test_ranks_take_the_same_rows(get_checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    """Or a sum over the ranks would be of different rows."""
    path = get_checkpoint(name).path
    ranks = [build_model(path, partition=Partition(rank, 2, cast(Any, object()))) for rank in range(2)]
    widths = [[module.width for module in model.modules() if hasattr(module, "width")] for model in ranks]
    assert widths[0] == widths[1] != []
