"""A model with a paged cache, as a user of vLLM's ops writes it. On a CPU only the import is another.

    python python/examples/layer_of_vllm_ops.py

A prompt is prefilled beside a longer one, both get a chunk more, and are decoded with sampling: as it is written, as
replays of a CPUGraph, and compiled. The three give the same tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pagedattn_ext import CPUGraph
from pagedattn_ext import vllm_ops as ops  # from vllm import _custom_ops as ops

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 64
HIDDEN_SIZE, VOCAB_SIZE, MAX_LENGTH = 128, 100, 48
BLOCK_SIZE, NUM_BLOCKS = 16, 8
BLOCK_TABLE = torch.tensor([[7, 2, 5], [4, 1, 0]], dtype=torch.int32)  # the blocks of each sequence
TOP_K, NUM_STEPS = 10, 12


class Model(nn.Module):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.norm = nn.Parameter(torch.ones(HIDDEN_SIZE))
        self.qkv = nn.Linear(HIDDEN_SIZE, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
        self.out = nn.Linear(NUM_HEADS * HEAD_SIZE, HIDDEN_SIZE)
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)
        self.key_cache, self.value_cache = torch.zeros(2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
        angles = torch.arange(MAX_LENGTH)[:, None] * 10000 ** -torch.linspace(0, 1, HEAD_SIZE // 2)
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1)

    def forward(self, tokens: Tensor, rows: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        """Flat tokens of all sequences: token i is of sequence rows[i], at positions[i]; those of sequence s begin at
        starts[s]. Returns logits of the last token of each sequence."""
        x = self.embedding(tokens)
        normed = torch.empty_like(x)
        ops.rms_norm(normed, x, self.norm, 1e-6)
        sizes = [heads * HEAD_SIZE for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
        query, key, value = (each.contiguous() for each in self.qkv(normed).split(sizes, dim=-1))
        ops.rotary_embedding(positions, query, key, HEAD_SIZE, self.cos_sin_cache, is_neox=True)
        query, key, value = (each.unflatten(-1, (-1, HEAD_SIZE)) for each in (query, key, value))
        blocks = BLOCK_TABLE[rows, positions // BLOCK_SIZE]
        slot_mapping = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        ops.cpu_attn_reshape_and_cache(key, value, self.key_cache, self.value_cache, slot_mapping, "vec")
        attended = torch.empty_like(query)
        last = starts[1:] - 1
        ops.cpu_attention_with_kv_cache(
            query, self.key_cache, self.value_cache, attended, starts, positions[last].int() + 1,
            scale=HEAD_SIZE**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, block_table=BLOCK_TABLE,
            softcap=0.0, scheduler_metadata=None, s_aux=None,
        )  # fmt: skip
        return self.head((x + self.out(attended.flatten(1)))[last])


def sample(logits: Tensor) -> Tensor:
    values, tokens = logits.topk(TOP_K)
    return tokens.gather(1, torch.multinomial(torch.softmax(values, dim=-1), num_samples=1))[:, 0]


def flat(lengths: list[int], first: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """rows, positions and starts of `lengths` tokens of each sequence behind its `first` ones."""
    rows = torch.repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(begin, begin + n) for begin, n in zip(first, lengths, strict=True)])
    return rows, positions, torch.tensor([0, *lengths]).cumsum(0).int()


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = Model()
    model(torch.randint(VOCAB_SIZE, (29,)), *flat([20, 9], first=[0, 0]))  # prefill
    tokens = sample(model(torch.randint(VOCAB_SIZE, (6,)), *flat([3, 3], first=[20, 9])))  # a chunk more
    rows, positions, starts = flat([1, 1], first=[23, 12])

    def step() -> None:
        """A decode step: appends `tokens`, and samples the next ones."""
        tokens.copy_(sample(model(tokens, rows, positions, starts)))
        positions.add_(1)

    start = tokens.clone(), positions.clone()

    def decode(step: Callable[[], None]) -> list[list[int]]:
        tokens.copy_(start[0])
        positions.copy_(start[1])
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
