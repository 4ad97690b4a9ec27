"""Padded batches to ragged ones, and back, as flash-attn's functions for ragged batches take them."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagedattn_ext.ops._call import check_tensors


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices], of input [rows, ...] and indices [num_indices]."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with `values` [num_indices, ...] in the rows `indices`."""
    output = values.new_zeros(first_axis_dim, *values.shape[1:])
    output[indices] = values
    return output


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and the input itself."""
    return input[indices], input.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch that a mask has, one sequence after the other.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: bool or int [batch, seqlen], 1 for a token.
        unused_mask: the same, 1 for what is kept in the ragged batch but not used.

    Returns:
        hidden_states [total, ...], the index of each of its tokens among batch * seqlen, cu_seqlens int32 [batch + 1],
        the longest length, and of each sequence the number of used tokens, int32 [batch].
    """
    _check_mask("unpad_input", "attention_mask", attention_mask, hidden_states)
    kept = attention_mask
    if unused_mask is not None:
        _check_mask("unpad_input", "unused_mask", unused_mask, hidden_states)
        kept = attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero()[:, 0]
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_offsets(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of rows that hold several sequences, one after the other.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask_in_length: int [batch, seqlen], in each row the lengths of its sequences, and zeros.

    Returns:
        hidden_states [total, ...], the index of each of its tokens among batch * seqlen, cu_seqlens int32
        [num_sequences + 1], and the longest length.
    """
    _check_mask(
        "unpad_input_for_concatenated_sequences", "attention_mask_in_length", attention_mask_in_length, hidden_states
    )
    places = torch.arange(attention_mask_in_length.shape[1], device=hidden_states.device)
    kept = places < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    indices = kept.flatten().nonzero()[:, 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_offsets(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: [total, ...] to [batch, seqlen, ...], with zeros for padding."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])


def _offsets(lengths: Tensor) -> tuple[Tensor, int]:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max()) if len(lengths) else 0


def _check_mask(function: str, name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_tensors(function, hidden_states=hidden_states, **{name: mask})
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(f"{function}: {name}: expected shape {list(hidden_states.shape[:2])}, got {list(mask.shape)}")
