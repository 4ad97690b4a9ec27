"""Sampling, and what comes before: `softmax`, and the filters top_k, top_p and min_p.

Probabilities and logits are [batch_size, vocab_size], in fp32, fp16 or bf16. Filters are numbers, or a number for each
row of these, [batch_size]. `indices` (int32 or int64) names a row for each sample; without it sample i is of row i.

The functions that sample compute the same on every device, with any number of threads: a sample depends on its row, on
the filters of this row, on its own place, and on seed and offset (ints, or int64 or uint64 tensors of one element or of
one for each sample). They take the place of the generator. Without a seed the generator gives one. A `CPUGraph` reads
seed and offset anew at each replay if they are tensors.

Taken, and without effect: deterministic, is_deterministic, enable_pdl, top_k_max. All ties of the k-th probability are
kept, and all ties of the least that top_p keeps.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from .. import ops
from .._adapters import call_as, kept, to_fp32
from ..ops._call import LARGEST_FP32, check_tensors

Seed = Tensor | int | None

# What FlashInfer calls the arguments of the ops.
NAMES = {
    "num_accepted": "maybe_output_accepted_token_num",
    "num_emitted": "maybe_output_emitted_draft_token_num",
}


def softmax(logits: Tensor, temperature: Tensor | float | None = None, enable_pdl: bool | None = None) -> Tensor:
    """softmax(logits / temperature), in fp32. At a temperature of 0 all tokens get the same probability."""
    temperature = _floats_of_rows(softmax, "temperature", temperature, logits)
    return call_as(softmax, NAMES, ops.softmax, _rows(logits), temperature)


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
) -> Tensor:
    """A token of each row."""
    if check_nan:
        _check_nan(sampling_from_logits, "logits", logits)
    probs = call_as(sampling_from_logits, NAMES, ops.softmax, _rows(logits))
    return _sample(sampling_from_logits, probs, indices, generator, seed, offset, {})[0]


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Any:
    """A token of each row; with return_valid also whether the row is a distribution: without NaN, infinities and
    negative numbers, and not all zeros. The token of other rows is 0."""
    return _sample_probs(sampling_from_probs, probs, indices, generator, check_nan, seed, offset, return_valid, {})


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Any:
    """A token of each row, among the greatest probabilities whose sum is top_p or more, as few as possible. With
    return_valid as `sampling_from_probs`."""
    filters = {"top_p": _floats_of_rows(top_p_sampling_from_probs, "top_p", top_p, probs)}
    return _sample_probs(
        top_p_sampling_from_probs, probs, indices, generator, check_nan, seed, offset, return_valid, filters
    )


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Any:
    """A token of each row, among the k greatest probabilities. With return_valid as `sampling_from_probs`."""
    filters = {"top_k": _ints_of_rows(top_k_sampling_from_probs, "top_k", top_k, probs)}
    return _sample_probs(
        top_k_sampling_from_probs, probs, indices, generator, check_nan, seed, offset, return_valid, filters
    )


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
) -> Any:
    """A token of each row, among the probabilities from min_p times the greatest on. With return_valid as
    `sampling_from_probs`."""
    filters = {"min_p": _floats_of_rows(min_p_sampling_from_probs, "min_p", min_p, probs)}
    return _sample_probs(
        min_p_sampling_from_probs, probs, indices, generator, check_nan, seed, offset, return_valid, filters
    )


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    top_k_max: int | None = None,
) -> Tensor:
    """A token of each row of softmax(logits), among those that both filters keep. "top_k_first": top_p is of what top_k
    keeps, renormalised; "joint": of the whole row."""
    function = top_k_top_p_sampling_from_logits
    if check_nan:
        _check_nan(function, "logits", logits)
    filters = _top_k_top_p(function, logits, top_k, top_p, filter_apply_order)
    probs = call_as(function, NAMES, ops.softmax, _rows(logits))
    return _sample(function, probs, indices, generator, seed, offset, filters)[0]


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Generator | None = None,
    check_nan: bool = False,
    seed: Seed = None,
    offset: Seed = None,
    return_valid: bool = False,
    top_k_max: int | None = None,
) -> Any:
    """`top_k_top_p_sampling_from_logits` of probabilities; return_valid as in `sampling_from_probs`."""
    function = top_k_top_p_sampling_from_probs
    filters = _top_k_top_p(function, probs, top_k, top_p, filter_apply_order)
    return _sample_probs(function, probs, indices, generator, check_nan, seed, offset, return_valid, filters)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
    """What `top_p_sampling_from_probs` samples from, in fp32."""
    check_tensors("top_p_renorm_probs", probs=probs)
    top_p = _floats_of_rows(top_p_renorm_probs, "top_p", top_p, probs)
    return call_as(
        top_p_renorm_probs, NAMES, ops.renorm_probs, to_fp32(top_p_renorm_probs, "probs", probs), top_p=top_p
    )


def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int, is_deterministic: bool = False) -> Tensor:
    """What `top_k_sampling_from_probs` samples from, in the dtype of probs."""
    top_k = _ints_of_rows(top_k_renorm_probs, "top_k", top_k, probs)
    return call_as(top_k_renorm_probs, NAMES, ops.renorm_probs, probs, top_k)


def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """The k greatest logits of each row, and -inf in the place of the others."""
    top_k = _ints_of_rows(top_k_mask_logits, "top_k", top_k, logits)
    return call_as(top_k_mask_logits, NAMES, ops.top_k_mask_logits, logits, top_k)


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: Generator | None = None,
    seed: Seed = None,
    offset: Seed = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.chain_speculative_sampling`: tokens, and the counts of accepted and of emitted draft tokens, which are added
    to those that are given (int32 [batch_size])."""
    function = chain_speculative_sampling
    check_tensors(function.__name__, draft_probs=draft_probs, target_probs=target_probs)
    seed, offset = _seeds(function, draft_probs, generator, seed, offset)
    return call_as(
        function,
        NAMES,
        ops.chain_speculative_sampling,
        to_fp32(function, "draft_probs", draft_probs),
        draft_token_ids,
        to_fp32(function, "target_probs", target_probs),
        seed=seed,
        offset=offset,
        num_accepted=maybe_output_accepted_token_num,
        num_emitted=maybe_output_emitted_draft_token_num,
    )


def _sample_probs(
    function: Callable[..., Any],
    probs: Tensor,
    indices: Tensor | None,
    generator: Generator | None,
    check_nan: bool,
    seed: Seed,
    offset: Seed,
    return_valid: bool,
    filters: Mapping[str, Any],
) -> Any:
    if check_nan:
        _check_nan(function, "probs", probs)
    sampled = _sample(function, probs, indices, generator, seed, offset, filters)
    return sampled if return_valid else sampled[0]


def _sample(
    function: Callable[..., Any],
    probs: Tensor,
    indices: Tensor | None,
    generator: Generator | None,
    seed: Seed,
    offset: Seed,
    filters: Mapping[str, Any],  # of the op
) -> tuple[Tensor, Tensor]:
    seed, offset = _seeds(function, probs, generator, seed, offset)
    return call_as(
        function, NAMES, ops.sample_from_probs, _rows(probs), indices=indices, seed=seed, offset=offset, **filters
    )


def _rows(tensor: Tensor) -> Tensor:
    """In a dtype that the ops know. What is no tensor stays, and the ops refuse it."""
    return tensor.float() if isinstance(tensor, Tensor) and tensor.dtype == torch.float64 else tensor


def _device_of(rows: Tensor) -> torch.device:
    return rows.device if isinstance(rows, Tensor) else torch.device("cpu")


def _seeds(
    function: Callable[..., Any],
    rows: Tensor,
    generator: Generator | None,
    seed: Seed,
    offset: Seed,
) -> tuple[Any, Any]:
    """Seed and offset for an op. Without a seed, the generator gives one of 64 bits."""
    if seed is None:
        device = _device_of(rows) if generator is None else generator.device
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator, device=device).to(_device_of(rows))
    elif offset is not None and isinstance(seed, Tensor) != isinstance(offset, Tensor):
        raise ValueError(
            f"{function.__name__}: offset: expected {type(seed).__name__}, as seed and offset must both be tensors or "
            f"both be scalars, got {type(offset).__name__}"
        )
    return _signed(seed), _one(0, torch.int64, _device_of(rows)) if offset is None else _signed(offset)


def _signed(seed: Tensor | int) -> Tensor | int:
    return seed.view(torch.int64) if isinstance(seed, Tensor) and seed.dtype == torch.uint64 else seed


def _top_k_top_p(
    function: Callable[..., Any],
    rows: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    filter_apply_order: str,
) -> dict[str, Any]:
    """The filters for `ops.sample_from_probs`."""
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(
            f"{function.__name__}: filter_apply_order: expected 'top_k_first' or 'joint', got {filter_apply_order!r} "
            "(Invalid filter_apply_order)"
        )
    return {
        "top_k": _ints_of_rows(function, "top_k", top_k, rows),
        "top_p": _floats_of_rows(function, "top_p", top_p, rows),
        "top_k_first": filter_apply_order == "top_k_first",
    }


def _floats_of_rows(function: Callable[..., Any], name: str, value: Tensor | float | None, rows: Tensor) -> Any:
    if not isinstance(value, Tensor):
        is_fp32 = type(value) is float and 0 <= value <= LARGEST_FP32
        return _one(value, torch.float32, _device_of(rows)) if is_fp32 else value
    _check_rows(function, name, value, rows)
    return to_fp32(function, name, value)


def _ints_of_rows(function: Callable[..., Any], name: str, value: Tensor | int, rows: Tensor) -> Any:
    if not isinstance(value, Tensor):
        is_small = type(value) is int and abs(value) < 2**63
        return _one(value, torch.int64, _device_of(rows)) if is_small else value
    _check_rows(function, name, value, rows)
    if value.is_floating_point():
        raise TypeError(f"{function.__name__}: {name}: expected a tensor of ints, got {value.dtype}")
    return value if value.dtype == torch.int32 else value.long()


@kept
def _one(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number of all rows, as the ops take it."""
    return torch.full((1,), value, dtype=dtype, device=device)


def _check_rows(function: Callable[..., Any], name: str, value: Tensor, rows: Tensor) -> None:
    """A number for each row. FlashInfer's callers know these words."""
    if value.dim() == 0:
        raise ValueError(
            f"{function.__name__}: {name}: Expected a 1D tensor of shape (batch_size,) or scalar, got a 0-dimensional "
            "tensor"
        )
    if value.dim() > 1:
        raise ValueError(
            f"{function.__name__}: {name}: Expected a 1D tensor or scalar, got a {value.dim()}D tensor (shape "
            f"{list(value.shape)})"
        )
    if isinstance(rows, Tensor) and rows.dim() > 0 and value.shape[0] != rows.shape[0]:
        raise ValueError(
            f"{function.__name__}: {name}: Sampling parameter tensor batch size mismatch: expected length "
            f"{rows.shape[0]}, got {value.shape[0]}"
        )


def _check_nan(function: Callable[..., Any], name: str, rows: Tensor) -> None:
    check_tensors(function.__name__, **{name: rows})
    if rows.isnan().any():
        raise ValueError(f"{function.__name__}: {name}: expected no NaN, got some: Input {name} contains NaN.")
