"""What `plan` says of the batches that `run` gets, and what `run` returns."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from .._adapters import check_memory, check_scales, kept, refuse_bools, window_of
from ..ops._call import check_bool, check_tensors, given, to_int
from ._positions import POS_ENCODING_MODES, alibi_slopes, check_positive

Scale = float | Tensor | None
Dtype = str | torch.dtype

# What FlashInfer calls the arguments of the ops.
NAMES = {"query": "q", "key": "k", "value": "v", "key_cache": "paged_kv_cache", "value_cache": "paged_kv_cache"}
NAMES |= {"scale": "sm_scale", "sliding_window": "window_left", "softcap": "logits_soft_cap"}
NAMES |= {"query_start_loc": "qo_indptr", "key_start_loc": "kv_indptr"}


@kept
def _log2_of_e(device: torch.device) -> Tensor:
    """In a tensor, because torch makes one of a float at each call."""
    return torch.full((), math.log2(math.e), dtype=torch.float32, device=device)


LSE_BASES, LSE_LAYOUTS = ("log2", "ln"), ("NH", "HN")


def refusal(function: Callable[..., Any], argument: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{function.__qualname__}: {argument}: expected {expected}, got {got}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `plan`, or a function without a plan, says of its rows and keys."""

    function: Callable[..., Any]  # whose arguments these are
    query_shape: tuple[int, int]  # num_qo_heads, head_dim
    key_shape: tuple[int, ...]  # of a page [page_size, num_kv_heads, head_dim], or of a ragged batch without page_size
    value_shape: tuple[int, ...]  # like key_shape; values may have another width
    causal: bool
    has_mask: bool = False
    pos_encoding_mode: str = "NONE"
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    rope_scale: float | None = None
    rope_theta: float | None = None
    o_data_type: Dtype | None = None  # of the results; None: that of the queries
    _options: dict[str, Any] = field(init=False)  # of the ops, those that the plan alone says

    def __post_init__(self) -> None:
        name = self.function.__qualname__
        rope = given({"rope_scale": self.rope_scale, "rope_theta": self.rope_theta})
        check_scales(
            self.function, **given({"sm_scale": self.sm_scale, "logits_soft_cap": self.logits_soft_cap}), **rope
        )
        sizes = {"num_qo_heads": self.query_shape[0], "head_dim": self.query_shape[1]}
        sizes |= {"num_kv_heads": self.key_shape[-2], "head_dim_vo": self.value_shape[-1]}
        for size, value in sizes.items():
            if type(value) is not int:
                has_other_name = size == "head_dim" and size not in signature(self.function).parameters
                to_int(name, "head_dim_qk" if has_other_name else size, value)
        check_bool(name, "causal", self.causal)
        if self.window_left is not None:
            to_int(name, "window_left", self.window_left)
        if len(self.key_shape) == 3 and to_int(name, "page_size", self.key_shape[0]) < 1:
            raise refusal(self.function, "page_size", "1 or more", self.key_shape[0])
        mode, head_dim = self.pos_encoding_mode, self.query_shape[1]
        if mode not in POS_ENCODING_MODES:
            raise refusal(self.function, "pos_encoding_mode", f"one of {', '.join(POS_ENCODING_MODES)}", repr(mode))
        if mode == "ROPE_LLAMA":
            check_positive(self.function, **rope)
            if head_dim % 2:
                raise refusal(self.function, "pos_encoding_mode", "'NONE' or 'ALIBI' for an odd head_dim", repr(mode))
        if mode == "ALIBI" and self.logits_soft_cap:
            raise refusal(self.function, "logits_soft_cap", "None with 'ALIBI'", self.logits_soft_cap)
        if mode == "ALIBI" and self.has_mask:
            raise refusal(self.function, "pos_encoding_mode", "'NONE' or 'ROPE_LLAMA' with a mask", repr(mode))
        check_dtype(self.function, "o_data_type", self.o_data_type)

        scale = max(head_dim, 1) ** -0.5 if self.sm_scale is None else self.sm_scale
        options = {"scale": scale, "causal": self.causal, "softcap": self.logits_soft_cap or 0.0}
        window = given({"sliding_window": window_of(self.window_left)})
        object.__setattr__(self, "_options", options | window)

    @property
    def biases_future(self) -> bool:
        """Whether rows see keys after their own with ALiBi. FlashInfer's bias goes on to grow there, while that of the
        ops falls to both sides."""
        return self.pos_encoding_mode == "ALIBI" and not self.causal

    def options(
        self, function: Callable[..., Any], q_scale: Scale, k_scale: Scale, sinks: Tensor | None, device: torch.device
    ) -> dict[str, Any]:
        """Keyword arguments of the attention ops. Those that are None are left out."""
        if q_scale is None and k_scale is None and sinks is None and self.pos_encoding_mode != "ALIBI":
            return self._options
        if sinks is not None and self.pos_encoding_mode == "ALIBI":  # the bias of the ops has another constant
            raise refusal(function, "sinks", "None with 'ALIBI'", "a tensor")
        scale = self._options["scale"]
        if q_scale is not None:
            scale *= one_factor(function, "q_scale", q_scale)
        if k_scale is not None:
            scale *= one_factor(function, "k_scale", k_scale)
        slopes = alibi_slopes(self.query_shape[0], device) if self.pos_encoding_mode == "ALIBI" else None
        return {**self._options, "scale": scale, **given({"alibi_slopes": slopes, "sinks": sinks})}

    def check_tensors(self, function: Callable[..., Any], names: tuple[str, str, str], *tensors: Tensor) -> None:
        """tensors: queries, keys and values, under the function's names."""
        check_planned(function, names, tensors, (self.query_shape, self.key_shape, self.value_shape))


def check_planned(
    function: Callable[..., Any], names: Iterable[str], tensors: Iterable[Tensor], shapes: Iterable[tuple[int, ...]]
) -> None:
    """shapes: of the tensors behind their first dimension."""
    for name, tensor, shape in zip(names, tensors, shapes, strict=True):
        if not isinstance(tensor, Tensor):
            check_tensors(function.__qualname__, **{name: tensor})
        if tensor.shape[1:] != shape:
            planned = ", ".join(map(str, ("*", *shape)))
            raise refusal(function, name, f"shape [{planned}], as planned", list(tensor.shape))


def check_dtype(function: Callable[..., Any], name: str, dtype: Dtype | None) -> None:
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(named, torch.dtype):
        raise refusal(function, name, "a dtype of torch, or its name", repr(dtype))


def check_result_dtype(function: Callable[..., Any], name: str, dtype: torch.dtype | None) -> None:
    """None is that of the queries."""
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise refusal(function, name, "torch.float32, torch.float16 or torch.bfloat16", repr(dtype))


def in_dtype(out: Tensor, o_data_type: Dtype | None) -> Tensor:
    """Rounded from the dtype of the queries, in which the ops compute it."""
    dtype = getattr(torch, o_data_type) if isinstance(o_data_type, str) else o_data_type
    return out if dtype is None or dtype == out.dtype else out.to(dtype)


def one_factor(function: Callable[..., Any], name: str, scale: float | Tensor) -> float:
    refuse_bools(function, **{name: scale})
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise refusal(function, name, "one number for all heads", f"shape {list(scale.shape)}")
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"{function.__qualname__}: {name}: expected a number, got {type(scale).__name__}") from None


def results_of(
    function: Callable[..., Any],
    attended: Tensor,
    natural_lse: Tensor,
    v_scale: Scale,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
    lse_base: str = "log2",
    lse_layout: str = "NH",
) -> Any:
    """What `run` returns, of the results of the op. Memory for the lse is written whether or not it is returned."""
    if lse_base not in LSE_BASES:
        raise refusal(function, "lse_base", "'log2' or 'ln'", repr(lse_base))
    if lse_layout not in LSE_LAYOUTS:
        raise refusal(function, "lse_layout", "'NH' or 'HN'", repr(lse_layout))
    if lse_layout == "HN":
        natural_lse = natural_lse.t().contiguous()
    check_memory(function, "out", out, attended.shape, None, attended.device)
    check_memory(function, "lse", lse, natural_lse.shape, None, natural_lse.device)
    if v_scale is not None:
        attended = attended.mul_(one_factor(function, "v_scale", v_scale))
    attended = attended if out is None else out.copy_(attended)
    if not return_lse and lse is None:
        return attended
    result = natural_lse if lse_base == "ln" else natural_lse.mul_(_log2_of_e(natural_lse.device))
    result = result if lse is None else lse.copy_(result)
    return (attended, result) if return_lse else attended
