"""A model that several ranks share gives what the whole model gives. The ranks are threads here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, Checkpoint, make_model
from thread_ranks import ThreadCommunicator, run_ranks
from torch import Tensor

from pagedattn_ext import allocate_kv_cache, padded_head_size
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.models.metadata import AttentionMetadata, KVCache
from pagedattn_serve.models.partition import Partition

NUM_TOKENS = 16
BLOCK_SIZE = 16


def can_split(name: str, world_size: int) -> bool:
    config = make_model(name).config
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", num_heads)
    return num_heads % world_size == 0 and (num_kv_heads % world_size == 0 or world_size % num_kv_heads == 0)


SPLITS = [(name, world_size) for name in VARIANTS for world_size in (2, 3, 4, 5, 7, 8) if can_split(name, world_size)]


def greedy(model: CausalLM, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> tuple[list[list[int]], Tensor]:
    """The tokens that follow each prompt, and the logits of the prompts' rows and of all decode steps.

    The prompts run together, then the sequences token by token.
    """
    blocks_per_seq = -(-(max(map(len, prompts)) + num_tokens) // BLOCK_SIZE)
    head_size = padded_head_size(model.head_size, model.dtype)
    pairs = allocate_kv_cache(
        len(prompts) * blocks_per_seq,
        model.num_kv_heads,
        head_size,
        BLOCK_SIZE,
        model.dtype,
        num_layers=model.num_layers,
    )
    kv_caches = [KVCache(*pair) for pair in pairs]
    tables = torch.arange(len(prompts) * blocks_per_seq, dtype=torch.int32).view(len(prompts), -1).flip(1).contiguous()
    outputs: list[list[int]] = [[] for _ in prompts]
    new, computed, logits = prompts, [0] * len(prompts), []
    for _ in range(num_tokens):
        counts = [len(tokens) for tokens in new]
        positions = torch.cat([torch.arange(c, c + n) for c, n in zip(computed, counts, strict=True)])
        seq = torch.arange(len(new)).repeat_interleave(torch.tensor(counts))
        computed = [c + n for c, n in zip(computed, counts, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0)
        metadata = AttentionMetadata(
            slot_mapping=tables[seq, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=tables,
            seq_lens=torch.tensor(computed, dtype=torch.int32),
            query_start_loc=None if max(counts) == 1 else starts.int(),
            sampling_rows=torch.arange(len(seq)),
        )
        token_ids = torch.tensor([token for tokens in new for token in tokens])
        rows = model(token_ids, positions, kv_caches, metadata)
        logits.append(rows)
        new = [[int(token)] for token in rows[starts[1:] - 1].argmax(-1)]
        for output, [token] in zip(outputs, new, strict=True):
            output.append(token)
    return outputs, torch.cat(logits)


def on_ranks(
    path: str | Path, world_size: int, prompts: list[list[int]], **options: Any
) -> list[tuple[list[list[int]], Tensor]]:
    """`greedy` of each rank."""

    def run(communicator: ThreadCommunicator) -> tuple[list[list[int]], Tensor]:
        model = load_model(path, partition=Partition(communicator.rank, world_size, communicator), **options)
        return greedy(model, prompts)

    return run_ranks(world_size, run)


def on_one(path: str | Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], Tensor]:
    with torch.inference_mode():
        return greedy(load_model(path, **options), prompts)


# ---- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "world_size"), SPLITS)
def test_tokens_are_those_of_transformers(
    get_checkpoint: Callable[[str], Checkpoint], name: str, world_size: int
) -> None:
    """On every rank, with the same bits on every rank, and logits that differ from the whole model's by rounding."""
    checkpoint = get_checkpoint(name)
    prompts, expected = checkpoint.prompts[:5], [tokens[:NUM_TOKENS] for tokens in checkpoint.expected[:5]]
    _, whole = on_one(checkpoint.path, prompts)
    ranks = on_ranks(checkpoint.path, world_size, prompts)
    for tokens, logits in ranks:
        assert tokens == expected
        assert torch.equal(logits, ranks[0][1])
    torch.testing.assert_close(ranks[0][1], whole, rtol=1e-4, atol=1e-4 * float(whole.std()))
