"""What the runner and the loader need of a model, whatever its family."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagedattn_serve.models.metadata import AttentionMetadata, KVCache


class CausalLM(nn.Module):
    """Token ids to logits. The names of the parameters are those of the checkpoint, but for converted layers.

    PREFIX: of all names but that of lm_head; checkpoints of the model without its head leave it out.
    NOT_PARAMETERS: endings of the names of tensors that a checkpoint may hold and the model does not use.
    max_model_len: positions that the model knows.
    """

    PREFIX: ClassVar[str]
    NOT_PARAMETERS: ClassVar[tuple[str, ...]] = ()

    max_model_len: int
    lm_head: nn.Linear

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.architecture: str = config.architectures[0]
        self.dtype = dtype
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or self.num_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads

    def make_lm_head(self, config: Any, embedding: nn.Embedding) -> None:
        """The last layer, to the vocabulary; it has the weight of `embedding` if the config ties them."""
        self.lm_head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = embedding.weight

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """token_ids, positions: int64 [num_tokens]. Returns hidden states, [num_tokens, hidden_size]."""
        raise NotImplementedError

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size]."""
        return self.lm_head(hidden)
