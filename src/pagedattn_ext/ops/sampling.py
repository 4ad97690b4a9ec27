"""What comes between a model's logits and the choice of a token."""

from torch import Tensor

from ._call import call


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, indices: Tensor | None = None) -> Tensor:
    """Logits of tokens that a grammar does not allow become -inf, in place; all others keep their bits, NaN included.

    Token t of mask i is allowed where bit t % 32 of bitmask[i, t // 32] is set: the layout of llguidance and xgrammar.

    Args:
        logits: [num_rows, vocab_size], any stride in dimension 0; updated.
        bitmask: int32 [num_masks, at least ceil(vocab_size / 32)], any stride in dimension 0; bits past the vocabulary
            mean nothing.
        indices: int64 [num_masks], the row of logits that each mask is for, every row at most once. Rows without a mask
            stay as they are. By default mask i is for row i, and there are as many masks as rows.

    Returns:
        logits.
    """
    call("apply_token_bitmask", logits, bitmask, indices)
    return logits
