"""A model with a paged cache, as a user of FlashInfer writes it. On a CPU only the import is another.

    python python/examples/layer_of_flashinfer.py

Two prompts are prefilled, both get a chunk more, and are decoded with sampling: as it is written, as replays of a
CPUGraph, and compiled. The three give the same tokens.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_ext import CPUGraph, flashinfer  # import flashinfer

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 64
HIDDEN_SIZE, VOCAB_SIZE = 128, 100
PAGE_SIZE, NUM_PAGES = 16, 8
PAGES_OF_SEQUENCES = [[7, 2, 5], [4, 1, 0]]
TOP_K, TOP_P, SEED, NUM_STEPS = 10, 0.9, 1, 12
SIZES = {"num_qo_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "page_size": PAGE_SIZE, "q_data_type": torch.float32}


class Model(nn.Module):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.norm = nn.Parameter(torch.ones(HIDDEN_SIZE))
        self.qkv = nn.Linear(HIDDEN_SIZE, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
        self.out = nn.Linear(NUM_HEADS * HEAD_SIZE, HIDDEN_SIZE)
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)
        self.cache = torch.zeros(NUM_PAGES, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_SIZE)

    def forward(
        self, tokens: Tensor, rows: Tensor, positions: Tensor, pages: tuple[Tensor, ...], attention: Any
    ) -> Tensor:
        """Flat tokens of all sequences: token i is of sequence rows[i], at positions[i]. Returns the logits of all."""
        x = self.embedding(tokens)
        heads = self.qkv(flashinfer.rmsnorm(x, self.norm)).unflatten(-1, (-1, HEAD_SIZE))
        q, k, v = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        q, k = flashinfer.apply_rope_pos_ids(q, k, positions)
        indptr, indices, last_page_len = pages
        flashinfer.append_paged_kv_cache(k, v, rows, positions, self.cache, indices, indptr, last_page_len)
        return self.head(x + self.out(attention.run(q, self.cache).flatten(1)))


def pages_of(lengths: list[int]) -> tuple[Tensor, ...]:
    """What sequences of these lengths fill: indptr, indices, last_page_len."""
    pages = [pages[: -(-n // PAGE_SIZE)] for pages, n in zip(PAGES_OF_SEQUENCES, lengths, strict=True)]
    indptr = torch.tensor([0, *map(len, pages)]).cumsum(0).int()
    last_page_len = torch.tensor([(n - 1) % PAGE_SIZE + 1 for n in lengths], dtype=torch.int32)
    return indptr, torch.tensor([*itertools.chain(*pages)], dtype=torch.int32), last_page_len


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model, workspace = Model(), torch.empty(0)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
    lengths = [0, 0]
    for new in ([20, 9], [3, 3]):  # prompts, and a chunk more of both
        lengths = [n + more for n, more in zip(lengths, new, strict=True)]
        starts = torch.tensor([0, *new]).cumsum(0).int()
        rows, positions = flashinfer.get_batch_indices_positions(starts, torch.tensor(lengths).int(), sum(new))
        prefill.plan(starts, *pages_of(lengths), head_dim_qk=HEAD_SIZE, causal=True, **SIZES)
        logits = model(torch.randint(VOCAB_SIZE, (sum(new),)), rows, positions, pages_of(lengths), prefill)
    seed, offset = torch.tensor([SEED]), torch.tensor([0])

    def sample(logits: Tensor) -> Tensor:
        return flashinfer.sampling.top_k_top_p_sampling_from_logits(logits, TOP_K, TOP_P, seed=seed, offset=offset)

    # A plan of a decode step writes to these buffers, which the captured step reads.
    pages = (
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(NUM_PAGES, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
    )
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *pages)
    tokens, rows, positions = sample(logits[starts[1:] - 1]), torch.arange(2), torch.tensor(lengths)
    start = tokens.clone(), positions.clone()

    def plan() -> None:
        wrapper.plan(*pages_of((positions + 1).tolist()), head_dim=HEAD_SIZE, **SIZES)

    def step() -> None:
        """A decode step: appends `tokens`, and samples the next ones."""
        offset.add_(1)
        tokens.copy_(sample(model(tokens, rows, positions, pages, wrapper)))
        positions.add_(1)

    def decode(step: Callable[[], None]) -> list[list[int]]:
        tokens.copy_(start[0])
        positions.copy_(start[1])
        offset.zero_()
        sampled = []
        for _ in range(NUM_STEPS):
            plan()
            step()
            sampled.append(tokens.tolist())
        return sampled

    eager = decode(step)
    graph = CPUGraph()
    positions.copy_(start[1])
    plan()
    with graph.capture():
        step()
    captured = decode(graph.replay)
    compiled = decode(torch.compile(step, fullgraph=True))
    for tokens_of_row in zip(*eager, strict=True):
        print(*tokens_of_row)
    print("captured:", captured == eager, "compiled:", compiled == eager)


if __name__ == "__main__":
    main()
