"""The states of sequences that lie behind each other."""

import torch
from torch import Tensor, nn

from pagedattn_ext._index_checks import check_starts
from pagedattn_ext.ops._call import check_rank, check_tensors, to_int


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last state_len rows of each sequence, the latest last, and zeros before a sequence that has fewer.

    Args:
        x: [num_tokens, dim].
        cu_seqlens: int32 or int64 [num_seqs + 1], where each sequence begins, and the last ends.

    Returns:
        [num_seqs, dim, state_len], with adjacent channels.
    """
    function = causal_conv1d_varlen_states
    check_tensors(function.__qualname__, x=x)
    check_rank(function.__qualname__, "x", x, 2)
    check_starts(function, "cu_seqlens", cu_seqlens, largest=len(x))
    state_len = to_int(function.__qualname__, "state_len", state_len)
    if state_len < 0:
        raise ValueError(f"{function.__qualname__}: state_len: expected 0 or more, got {state_len}")
    rows = cu_seqlens[1:, None] + torch.arange(-state_len, 0, device=x.device)
    states = nn.functional.pad(x, (0, 0, state_len, 0))[rows + state_len]
    return states.masked_fill((rows < cu_seqlens[:-1, None]).unsqueeze(2), 0).transpose(1, 2)
