"""What FlashInfer has for DeepSeek-V3: `concat_mla_k`."""

from .concat_ops import concat_mla_k

__all__ = ["concat_mla_k"]
