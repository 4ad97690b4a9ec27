"""The rows that a native model computes: of the last layer those that sample, and in an MLP not all of them at once."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from checkpoints import Checkpoint
from torch import Tensor, nn

from pagedattn_ext import allocate_kv_cache, padded_head_size
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.models import layers
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.models.metadata import AttentionMetadata, KVCache
from pagedattn_serve.models.partition import Partition

LAST_OF_MLP = {
    "llama-gqa": "mlp.down_proj",
    "gpt2": "mlp.c_proj",
    "opt-350m": "fc2",
    "bloom-8-heads": "mlp.dense_4h_to_h",
}
NUM_TOKENS, BLOCK_SIZE = 20, 16  # of two prompts, the first of which has 13


@torch.inference_mode()
def logits_of(model: CausalLM, rows: list[int]) -> Tensor:
    head_size = padded_head_size(model.head_size, model.dtype)
    pairs = allocate_kv_cache(
        2, model.num_kv_heads, head_size, BLOCK_SIZE, model.dtype, "cpu", num_layers=model.num_layers
    )
    positions = torch.cat([torch.arange(13), torch.arange(7)])
    metadata = AttentionMetadata(
        slot_mapping=torch.cat([positions[:13] + BLOCK_SIZE, positions[13:]]),
        block_tables=torch.tensor([[1], [0]], dtype=torch.int32),
        seq_lens=torch.tensor([13, 7], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 13, 20], dtype=torch.int32),
        sampling_rows=torch.tensor(rows, dtype=torch.int64),
    )
    token_ids = torch.arange(NUM_TOKENS) * 7 % 50
    return model(token_ids, positions, [KVCache(*pair) for pair in pairs], metadata)


def count_rows(model: nn.Module, last_of_mlp: str) -> list[int]:
    """The list gets the rows of each call of this module, layer by layer."""
    counts: list[int] = []
    for name, module in model.named_modules():
        if name.endswith(last_of_mlp):
            module.register_forward_hook(lambda module, inputs, output: counts.append(len(output)))
    return counts


@pytest.mark.parametrize("name", LAST_OF_MLP)
def test_the_last_layer_computes_the_rows_that_sample(get_checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    """With the bits that all rows have. A prompt that goes on in the next step has none, and a row can sample twice."""
    model = load_model(get_checkpoint(name).path)
    every = logits_of(model, list(range(NUM_TOKENS)))
    counts = count_rows(model, LAST_OF_MLP[name])
    for rows in ([], [12], [12, 19], [3, 4, 12, 12, 19]):
        counts.clear()
        assert torch.equal(logits_of(model, rows), every[rows])
        assert counts == [NUM_TOKENS] * (model.num_layers - 1) + [len(rows)]


@pytest.mark.parametrize("name", LAST_OF_MLP)
def test_an_mlp_takes_some_rows_at_a_time(
    get_checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = load_model(get_checkpoint(name).path)
    rows = list(range(NUM_TOKENS))
    at_once = logits_of(model, rows)
    counts = count_rows(model, LAST_OF_MLP[name])
    monkeypatch.setattr(layers, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(layers, "MAX_ACTIVATION_BYTES", 0)
    assert torch.equal(logits_of(model, rows), at_once)
    assert counts == [8, 8, 4] * model.num_layers


@pytest.mark.parametrize("name", ["llama-gqa", "opt-350m"])  # of 2 ranks, the slices differ in size
def test_ranks_take_the_same_rows(get_checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    """Or a sum over the ranks would be of different rows."""
    path = get_checkpoint(name).path
    ranks = [build_model(path, partition=Partition(rank, 2, cast(Any, object()))) for rank in range(2)]
    widths = [[module.width for module in model.modules() if hasattr(module, "width")] for model in ranks]
    assert widths[0] == widths[1] != []
