"""What the engine needs of a model, whichever way it runs; and what the families with a file of their own share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_serve.models.metadata import AttentionMetadata, KVCache


class CausalLM(nn.Module):
    """Token ids to logits.

    runs: what computes the model, in words. max_model_len: positions that the model knows.
    head_size: the size of a key in the cache. A narrower value is padded to this size.
    """

    runs: str
    architecture: str
    dtype: torch.dtype
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """token_ids, positions: int64 [num_tokens]. Returns the logits of the rows that sample, [n, vocab_size]."""
        raise NotImplementedError


class NativeCausalLM(CausalLM):
    """A family of this package. Parameters have the names of the checkpoint, except in converted layers.

    PREFIX: what all names but lm_head's begin with: that of the module that computes all rows before the last layer,
        [num_tokens, hidden_size]. Checkpoints of the model without its head leave the prefix out.
    NOT_PARAMETERS: endings of the names of tensors that a checkpoint may hold and the model does not use.

    num_kv_heads: by default as many as query heads. head_size: by default a head's share of hidden_size.

    Raises ValueError if the number of heads does not divide hidden_size, or that of KV heads the number of heads.
    """

    PREFIX: ClassVar[str]
    NOT_PARAMETERS: ClassVar[tuple[str, ...]] = ()

    runs = "native"
    lm_head: nn.Linear

    def __init__(
        self, config: Any, dtype: torch.dtype, num_kv_heads: int | None = None, head_size: int | None = None
    ) -> None:
        super().__init__()
        self.architecture = config.architectures[0]
        self.dtype = dtype
        self.num_layers = config.num_hidden_layers
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = num_kv_heads or self.num_heads
        self.head_size = head_size or config.hidden_size // self.num_heads
        self.vocab_size = config.vocab_size
        if head_size is None and config.hidden_size % self.num_heads:
            raise ValueError(
                f"num_attention_heads: expected a divisor of hidden_size {config.hidden_size}, got {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads {self.num_heads}, "
                f"got {self.num_kv_heads}"
            )

    def make_lm_head(self, config: Any, embedding: nn.Embedding) -> None:
        """The last layer, to the vocabulary; it has the weight of `embedding` if the config ties them."""
        self.lm_head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = embedding.weight

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        trunk = self.get_submodule(self.PREFIX.removesuffix("."))
        hidden = trunk(token_ids, positions, kv_caches, metadata)
        return self.lm_head(hidden[metadata.sampling_rows])


def misfit(directory: Path, architecture: str, problems: list[str]) -> str:
    """The message about weights that are not those of the model."""
    shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
    return f"model: the weights in {directory} do not fit {architecture}: {shown}"
