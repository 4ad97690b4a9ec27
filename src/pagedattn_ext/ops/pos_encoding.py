"""Rotary position embedding."""

from torch import Tensor

from ._call import call, check_bool


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    *,
    sin_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding, in place (Su et al., "RoFormer", 2021).

    (x, y) -> (x cos - y sin, y cos + x sin) within a head's first rot_dim elements. With is_neox, x is element i of the
    first half and y element i of the second half (GPT-NeoX, LLaMA). Without is_neox, x and y are elements 2i and 2i + 1
    (GPT-J).

    Args:
        positions: int64 [num_tokens] or [batch, seq_len].
        query: the dimensions of positions, then [num_heads, head_size] or [num_heads * head_size]. Tokens are evenly
            spaced with any stride, and so are heads.
        key: likewise, with num_kv_heads; or None.
        cos_sin_cache: [max_position, rot_dim], rot_dim / 2 cosines, then as many sines; rot_dim <= head_size. fp32, or
            of query's dtype.
        sin_cache: the sines, like cos_sin_cache, which has the cosines alone then: [max_position, rot_dim / 2] each.

    Returns:
        (query, key).
    """
    check_bool("rotary_embedding", "is_neox", is_neox)
    optional = {} if sin_cache is None else {"sin_cache": sin_cache}
    call("rotary_embedding", positions, query, key, head_size, cos_sin_cache, is_neox, **optional)
    return query, key


def rotary_embedding_neox(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """`rotary_embedding` with is_neox, and a key."""
    call("rotary_embedding_neox", positions, query, key, head_size, cos_sin_cache)
    return query, key
