"""A model with a paged cache, as a user of flash-attn writes it. On a CPU only the import is another.

    python python/examples/layer_of_flash_attn.py

Two prompts are prefilled, both get a chunk more, and are decoded with sampling: as it is written, as replays of a
CPUGraph, and compiled. The three give the same tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pagedattn_ext import CPUGraph
from pagedattn_ext.flash_attn import flash_attn_with_kvcache  # from flash_attn import flash_attn_with_kvcache

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 64
HIDDEN_SIZE, VOCAB_SIZE, MAX_LENGTH = 128, 100, 48
PAGE_SIZE, NUM_PAGES = 16, 8
BLOCK_TABLE = torch.tensor([[7, 2, 5], [4, 1, 0]], dtype=torch.int32)  # the pages of each sequence
TEMPERATURE, NUM_STEPS = 0.8, 12


class Model(nn.Module):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.qkv = nn.Linear(HIDDEN_SIZE, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
        self.out = nn.Linear(NUM_HEADS * HEAD_SIZE, HIDDEN_SIZE)
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)
        self.k_cache, self.v_cache = torch.zeros(2, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        frequencies = 10000 ** -torch.linspace(0, 1, HEAD_SIZE // 2)
        angles = torch.arange(MAX_LENGTH)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, lengths: Tensor, block_table: Tensor) -> Tensor:
        """tokens [batch, n] come behind the `lengths` [batch] in the cache. Returns logits [batch, VOCAB_SIZE]."""
        x = self.embedding(tokens)
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_SIZE))
        q, k, v = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=2)
        attended = flash_attn_with_kvcache(
            q, self.k_cache, self.v_cache, k, v, self.cos, self.sin,
            cache_seqlens=lengths, block_table=block_table, causal=True, rotary_interleaved=False,
        )  # fmt: skip
        return self.head((x + self.out(attended.flatten(2)))[:, -1])


def sample(logits: Tensor) -> Tensor:
    return torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=-1), num_samples=1)[:, 0]


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = Model()
    lengths = torch.zeros(2, dtype=torch.int32)
    for row, length in enumerate((20, 9)):  # prefill
        prompt = torch.randint(VOCAB_SIZE, (1, length))
        model(prompt, lengths[row : row + 1], BLOCK_TABLE[row : row + 1])
        lengths[row] = length
    tokens = sample(model(torch.randint(VOCAB_SIZE, (2, 3)), lengths, BLOCK_TABLE))  # a chunk more
    lengths += 3

    def step() -> None:
        """A decode step: appends `tokens`, and samples the next ones."""
        tokens.copy_(sample(model(tokens[:, None], lengths, BLOCK_TABLE)))
        lengths.add_(1)

    start = tokens.clone(), lengths.clone()

    def decode(step: Callable[[], None]) -> list[list[int]]:
        tokens.copy_(start[0])
        lengths.copy_(start[1])
        torch.manual_seed(1)
        sampled = []
        for _ in range(NUM_STEPS):
            step()
            sampled.append(tokens.tolist())
        return sampled

    eager = decode(step)
    graph = CPUGraph()
    with graph.capture():
        step()
    captured = decode(graph.replay)
    compiled = decode(torch.compile(step, fullgraph=True))
    for tokens_of_row in zip(*eager, strict=True):
        print(*tokens_of_row)
    print("captured:", captured == eager, "compiled:", compiled == eager)


if __name__ == "__main__":
    main()
