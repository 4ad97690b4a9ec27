"""Each tensor of a call has strides of its own: an op that takes the strides of one tensor for those of another reads
or writes other elements here."""

from itertools import count

import pytest
import torch
from attention_cases import Case, assert_attention, make_arguments
from cache_layouts import LAYOUTS
from checks import DTYPES, assert_row_gap_untouched, assert_same_bits, tensors_in, to_device, with_row_gap
from op_calls import CALLS, CALLS_ON_CUDA, LINEAR, op_of, optional_tensors, results
from op_calls import make_arguments as make_call
from op_table import OPS

CACHES = {"key_cache": 1, "value_cache": 1}
NHD_CACHES = {"key_cache": 3, "value_cache": 3}
PAGED = CACHES | {"query": 1, "block_tables": 1}
ROWS = {"key": 1, "value": 1}
# The tensors of an op that may have gaps, and in how many dimensions; all other tensors are contiguous.
STRIDED = {
    "paged_attention_v1": PAGED | {"out": 1},
    "paged_attention_v2": PAGED | {"out": 1},
    "paged_attention": PAGED,
    "append_and_attend": PAGED | ROWS,
    "varlen_attention": {"query": 1, "key": 2, "value": 2},
    "mla_attention": {"q_nope": 2, "q_pe": 2, "kv_c_cache": 2, "k_pe_cache": 2, "block_tables": 1},
    "merge_attn_states": {},
    "reshape_and_cache": ROWS | CACHES,
    "reshape_and_cache_flash": ROWS | NHD_CACHES,
    "concat_and_cache_mla": {"kv_c": 1, "k_pe": 1, "kv_cache": 2},
    "gather_cached_kv": ROWS | CACHES,
    "gather_cached_kv of nhd": ROWS | NHD_CACHES,
    "copy_blocks": {"key_caches": 3, "value_caches": 3},
    "swap_blocks": {"src": 3, "dst": 3},
    "batch_positions": {},
    "compute_slot_mapping": {"block_tables": 1},
    "compute_slot_mapping of lists": {},
    "consecutive_block_tables": {},
    **{name: {"out": 1, "input": 1} for name in ("rms_norm", "gemma_rms_norm", "layer_norm")},
    **{name: {"out": 2, "input": 2} for name in ("rms_norm of heads", "layer_norm of heads")},
    **{name: {"input": 1, "residual": 1} for name in ("fused_add_rms_norm", "gemma_fused_add_rms_norm")},
    "fused_add_rms_norm of heads": {"input": 2, "residual": 2},
    "rotary_embedding": {"query": 1, "key": 1},
    "rotary_embedding_neox": {"query": 1, "key": 1},
    "rotary_embedding without key": {"query": 1},
    "rotary_embedding of heads": {"query": 2, "key": 2},
    "rotary_embedding of a batch": {"query": 1, "key": 1},
    **{f"{name}_and_mul": {"out": 1, "input": 1} for name in ("silu", "gelu", "gelu_tanh")},
    **{name: {"out": 1, "input": 1} for name in ("mul_and_silu", "gelu_new", "gelu_fast", "gelu_quick")},
    **{name: {"input": 1} for name in LINEAR},
    **{f"grouped_{name}": {"input": 1} for name in LINEAR},
    "pack_linear_weight": {"weight": 1},
    "pack_linear_weight_int8": {"weight": 1},
    "pack_linear_weight_int4": {"codes": 1, "scales": 1, "zeros": 1},
    "quantize_weight_int4": {"weight": 1},
    "quantize_weight_int8": {"weight": 1},
    "apply_token_bitmask": {"logits": 1, "bitmask": 1},
    "softmax": {"out": 1, "logits": 1},
    "renorm_probs": {"out": 1, "probs": 1},
    "top_k_mask_logits": {"out": 1, "logits": 1},
    "sample_from_probs": {"probs": 1},
    "chain_speculative_sampling": {},
    "causal_conv1d": {"out": 1, "input": 1, "conv_states": 2},
    "gated_delta_rule": dict.fromkeys(("out", "query", "key", "value", "g", "beta", "states"), 1),
    "selective_scan": dict.fromkeys(("out", "input", "dt", "B", "C", "z", "states"), 1),
    "all_reduce_shared": {},
    "all_gather_shared": {},
}


# Beside CALLS: the rows of these tensors are the heads of tokens.
OF_HEADS = ["rms_norm of heads", "layer_norm of heads", "fused_add_rms_norm of heads", "rotary_embedding of heads"]


def make_any_call(call: str, device: torch.device) -> dict:
    arguments = make_call(call, 6)
    if call in OF_HEADS:
        arguments |= {name: arguments[name].unflatten(-1, (-1, 16)).repeat(1, 2, 1) for name in STRIDED[call]}
    return to_device(arguments, device)


def apart(tensor: torch.Tensor, num_dims: int, gap: int) -> torch.Tensor:
    if tensor.dtype.is_floating_point or tensor.element_size() == 1:
        return with_row_gap(tensor, gap, num_dims)
    return torch.nn.functional.pad(tensor, (0, gap), value=-(2**31))[:, : tensor.shape[1]]


def assert_same_with_gaps(call: str, device: torch.device) -> None:
    """The bits are those of contiguous tensors, and what lies between the elements stays."""
    gap = count(16, 80)  # addresses stay multiples of 16 bytes: elsewhere, CUDA kernels add in another order
    strided, strides = make_any_call(call, device), []
    for name, num_dims in STRIDED.get(call, STRIDED[op_of(call)]).items():
        if isinstance(strided[name], list):
            strided[name] = [apart(tensor, num_dims, next(gap)) for tensor in strided[name]]
        else:
            strided[name] = apart(strided[name], num_dims, next(gap))
        strides += [stride for tensor in tensors_in({name: strided[name]}) for stride in tensor.stride()[:num_dims]]
    assert len(set(strides)) == len(strides), "two tensors have a stride in common"
    op = getattr(OPS, op_of(call))
    for actual, expected in zip(results(op, strided), results(op, make_any_call(call, device)), strict=True):
        assert_same_bits(actual.contiguous(), expected)
    for tensor in tensors_in(strided):
        if tensor.dtype not in (torch.int32, torch.int64) and not tensor.is_contiguous():
            assert_row_gap_untouched(tensor)


@pytest.mark.parametrize("call", [*CALLS_ON_CUDA, *OF_HEADS])
def test_each_tensor_of_an_op(device, call):
    assert_same_with_gaps(call, device)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("call", [call for call in CALLS if call not in CALLS_ON_CUDA])
def test_each_tensor_of_an_op_of_the_cpu(device, call):
    assert_same_with_gaps(call, device)


# Beside STRIDED: a state of any strides, and scratch, which the CPU's kernels leave alone.
ANY_STRIDES = [("causal_conv1d", "conv_states")]
ANY_STRIDES += [("paged_attention_v2", name) for name in ("exp_sums", "max_logits", "tmp_out")]


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("call", [*CALLS, *OF_HEADS])
def test_all_other_strides_are_refused(device, call):
    """Of each tensor: a gap behind each element, and behind each row if STRIDED leaves the tensor out."""
    op, arguments = op_of(call), make_any_call(call, device)
    for name, value in (arguments | optional_tensors(op)).items():
        tensor, *others = value if isinstance(value, list) else [value]
        if not torch.is_tensor(tensor) or tensor.dim() == 0 or (op, name) in ANY_STRIDES:
            continue
        refused = []
        if tensor.shape[-1] > 1:
            refused.append(torch.stack([tensor, tensor], dim=-1)[..., 0])
        if tensor.dim() > 1 and len(tensor) > 1 and name not in STRIDED.get(call, STRIDED[op]):
            refused.append(apart(tensor, 1, 16))
        for wrong in refused:
            changed = arguments | {name: [wrong, *others] if isinstance(value, list) else wrong}
            with pytest.raises(RuntimeError, match=f"^{op}: {name}: expected .* contiguous"):
                getattr(OPS, op)(**changed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_of_attention(device, dtype, layout):
    """In each kernel: a decode row of one head, of a few and of many heads, and a chunk of rows."""
    for group_size, block_size in ((1, 16), (3, 8), (20, 32)):
        case = Case(
            ((1, 70), (12, 150)), dtype, None, None, 2, group_size, 72, block_size, layout, row_gap=8, block_gap=24
        )
        arguments = make_arguments(case, device)
        assert arguments["key_cache"].stride(0) != arguments["value_cache"].stride(0) or layout == "interleaved"
        assert_attention(arguments, *OPS.paged_attention(**arguments))
