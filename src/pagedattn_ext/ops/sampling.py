"""What comes between a model's logits and the choice of a token."""

import torch
from torch import Tensor

from ._call import LARGEST_FP32, call, check_bool, check_rank, check_tensors, to_int64


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


def softmax(logits: Tensor, temperature: Tensor | float | None = None, *, out: Tensor | None = None) -> Tensor:
    """out = softmax(logits / temperature) over the last dimension, in fp32.

    Args:
        logits: [num_rows, vocab_size], any stride in dimension 0.
        temperature: a number from 0 on, or fp32 [num_rows] or [1]; None is 1. At 0 all tokens whose logit is not -inf
            get the same probability, as in FlashInfer.
        out: fp32, like logits; allocated by default.

    Returns:
        out. A row that has NaN, inf or nothing but -inf gives NaN.
    """
    check_tensors("softmax", logits=logits)
    if out is None:
        out = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
    call("softmax", out, logits, _floats("softmax", "temperature", temperature, logits.device, LARGEST_FP32))
    return out


def renorm_probs(
    probs: Tensor,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Probabilities of which the greatest are kept and divided by their sum; the others become 0.

    top_k keeps the k greatest, and all that equal the k-th. Of what is left, divided by its sum, top_p keeps the
    greatest whose sum is top_p or more, as few as possible, and all that equal the least of these (Holtzman et al.,
    "The curious case of neural text degeneration", 2020). At least one probability is kept.

    Args:
        probs: [num_rows, vocab_size], any stride in dimension 0. For top_p without top_k, rows that sum to 1.
        top_k: from 1 on, or int32 or int64 [num_rows] or [1].
        top_p: from 0 to 1, or fp32 [num_rows] or [1].
        out: like probs (it may be probs); allocated by default.

    Returns:
        out. A row of zeros stays, and a row with NaN, infinities or negative numbers gives NaN.
    """
    check_tensors("renorm_probs", probs=probs)
    if out is None:
        out = torch.empty_like(probs, memory_format=torch.contiguous_format)
    call(
        "renorm_probs",
        out,
        probs,
        _ints("renorm_probs", "top_k", top_k, probs.device),
        _floats("renorm_probs", "top_p", top_p, probs.device),
    )
    return out


def top_k_mask_logits(logits: Tensor, top_k: Tensor | int, *, out: Tensor | None = None) -> Tensor:
    """Logits of which the k greatest are kept, and all that equal the k-th; the others become -inf. NaN stays.

    Args:
        logits: [num_rows, vocab_size], any stride in dimension 0.
        top_k: from 1 on, or int32 or int64 [num_rows] or [1].
        out: like logits (it may be logits); allocated by default.

    Returns:
        out.
    """
    check_tensors("top_k_mask_logits", logits=logits)
    if out is None:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    call("top_k_mask_logits", out, logits, _ints("top_k_mask_logits", "top_k", top_k, logits.device))
    return out


def sample_from_probs(
    probs: Tensor,
    *,
    seed: Tensor | int,
    offset: Tensor | int = 0,
    indices: Tensor | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    top_k_first: bool = True,
    subsequence: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """A token of each row, drawn with its probability among the tokens that top_k, top_p and min_p keep.

    Result i depends on its distribution, its filters, seed, offset and subsequence, and on nothing else: neither on
    other rows nor on the number of threads. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
    3", 2011) makes of seed, offset and subsequence the number whose place in the cumulative sum is the token. So each
    call needs another seed or another offset. Rows need not sum to 1, but for top_p.

    Args:
        probs: [num_distributions, vocab_size], any stride in dimension 0.
        seed, offset: numbers of 64 bits, or int64 [num_rows] or [1].
        indices: int32 or int64 [num_rows], the distribution of each result; by default result i is of distribution i.
            Results of a distribution that lie side by side share most of the work.
        top_k, top_p: as in `renorm_probs`, with a number for each distribution.
        min_p: from 0 to 1, or fp32 [num_distributions] or [1]: tokens are kept whose probability is min_p times the
            greatest or more (Nguyen et al., "Turning up the heat: min-p sampling", 2024).
        top_k_first: whether top_p is of what top_k keeps, divided by its sum, or of the whole distribution.
        subsequence: as seed; by default i. With numbers of its own, a row draws the same token at any place in a batch.

    Returns:
        tokens: [num_rows], of the dtype of indices; int32 without.
        valid: bool [num_rows], False for a distribution with NaN, infinities, negative numbers or nothing but zeros,
            whose token is 0.
    """
    op = "sample_from_probs"
    check_tensors(op, probs=probs)
    check_bool(op, "top_k_first", top_k_first)
    check_rank(op, "probs", probs, 2)
    num_rows, dtype, device = probs.shape[0], torch.int32, probs.device
    if indices is not None:
        check_tensors(op, indices=indices)
        check_rank(op, "indices", indices, 1)
        num_rows, dtype = indices.shape[0], indices.dtype
    tokens = torch.empty(num_rows, dtype=dtype, device=device)
    valid = torch.empty(num_rows, dtype=torch.bool, device=device)
    call(
        op,
        tokens,
        valid,
        probs,
        indices,
        _ints(op, "top_k", top_k, device),
        _floats(op, "top_p", top_p, device),
        _floats(op, "min_p", min_p, device),
        _seeds(op, "seed", seed, device),
        _seeds(op, "offset", offset, device),
        top_k_first,
        _seeds(op, "subsequence", subsequence, device),
    )
    return tokens, valid


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    *,
    seed: Tensor | int,
    offset: Tensor | int = 0,
    num_accepted: Tensor | None = None,
    num_emitted: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies drafts so that the tokens are distributed as the target's (Chen et al., "Accelerating large language
    model decoding with speculative sampling", 2023).

    A draft token is accepted with probability min(1, target / draft). At the first that is not, a token is drawn from
    max(target - draft, 0), and the rest of the row is -1. If all are accepted, one more token is drawn from the target.
    Random numbers are those of `sample_from_probs`; row i uses num_draft_tokens + 1 offsets from `offset` on.

    Args:
        draft_probs: [num_rows, num_draft_tokens, vocab_size].
        draft_token_ids: int32 or int64 [num_rows, num_draft_tokens].
        target_probs: [num_rows, num_draft_tokens + 1, vocab_size].
        seed, offset: numbers of 64 bits, or int64 [num_rows] or [1].
        num_accepted, num_emitted: int32 [num_rows]; grow. Allocated as zeros by default.

    Returns:
        tokens: int32 [num_rows, num_draft_tokens + 1].
        num_accepted: the draft tokens of each row that would be accepted if each were alone.
        num_emitted: the draft tokens of each row that are accepted before the first that is not.
    """
    op = "chain_speculative_sampling"
    check_tensors(op, draft_probs=draft_probs, draft_token_ids=draft_token_ids)
    check_rank(op, "draft_token_ids", draft_token_ids, 2)
    device = draft_probs.device
    num_rows, num_draft_tokens = draft_token_ids.shape
    tokens = torch.empty(num_rows, num_draft_tokens + 1, dtype=torch.int32, device=device)
    if num_accepted is None:
        num_accepted = torch.zeros(num_rows, dtype=torch.int32, device=device)
    if num_emitted is None:
        num_emitted = torch.zeros(num_rows, dtype=torch.int32, device=device)
    seeds = _seeds(op, "seed", seed, device), _seeds(op, "offset", offset, device)
    call(op, tokens, num_accepted, num_emitted, draft_probs, draft_token_ids, target_probs, *seeds)
    return tokens, num_accepted, num_emitted


def _floats(op: str, name: str, value: Tensor | float | None, device: torch.device, most: float = 1.0) -> Tensor | None:
    """The numbers of rows as an op takes them: of one number from 0 to `most` a tensor of one element. The op would see
    the number rounded to fp32, in which -1e-60 is 0, and 1e39 is none."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{op}: {name}: expected a number or a tensor, got {type(value).__name__}")
    if isinstance(value, (float, int)):
        if not 0 <= value <= most:
            raise ValueError(f"{op}: {name}: expected {'0 to 1' if most == 1 else '0 or more, finite'}, got {value}")
        value = float(value)  # an int may have more than 64 bits
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _ints(op: str, name: str, value: Tensor | int | None, device: torch.device) -> Tensor | None:
    """The same for integers."""
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((1,), to_int64(op, name, value), dtype=torch.int64, device=device)


def _seeds(op: str, name: str, value: Tensor | int | None, device: torch.device) -> Tensor | None:
    """The same for integers of 64 bits with a sign or without: the bits count."""
    if isinstance(value, int) and 2**63 <= value < 2**64:
        value -= 2**64
    return _ints(op, name, value, device)
