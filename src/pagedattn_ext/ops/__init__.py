"""Documented functions for the ops in `torch.ops.pagedattn_ext`.

The functions allocate outputs and fill in what follows from the arguments. The ops themselves, with the field's order
of arguments (outputs first), are in `torch.ops.pagedattn_ext`. All work under `torch.compile(fullgraph=True)`. If an op
writes to a view, torch.compile's default backend can lose where the view begins; docs/ops.md has the cases, and ways
around them.

Paged cache, for x = 16 / element size (4 for fp32, 8 for fp16 and bf16):
    key_cache    [num_blocks, num_kv_heads, head_size / x, block_size, x]
    value_cache  [num_blocks, num_kv_heads, head_size, block_size]
Token t of a sequence is in block `block_table[t // block_size]` at offset `t % block_size`; its slot is
`block * block_size + offset`. Caches may be strided in dimension 0. dtypes are fp32, fp16 and bf16; a cache and all
data tensors of a call have the same dtype. block_size is a power of two up to 256.
head_size is a multiple of x up to 512.

The attention ops, `reshape_and_cache` and `gather_cached_kv` also take caches of [num_blocks, block_size, num_kv_heads,
head_size], both 4-D, with any block_size, the last dimension contiguous and any other strides.

An fp8 cache (x = 16) holds value / scale, rounded to nearest and saturating, and meets tensors of any of the three
dtypes. kv_cache_dtype is "auto" (the cache tensor's own dtype, torch.float8_e4m3fn and torch.float8_e5m2 included),
"fp8" or "fp8_e4m3", or "fp8_e5m2" (these for uint8 tensors too). k_scale and v_scale are fp32 tensors of one element;
None is 1. If the cache is not fp8, nothing is scaled, and the values of the scales are ignored.

An int8 cache (x = 16; on the CPU, in the first layout, in blocks of 8 tokens and more; kv_cache_dtype "auto" or "int8")
has a scale for each token and KV head, the largest magnitude / 127, and holds element / scale, rounded to nearest. The
scales are fp32 and lie in the value cache, which is [num_blocks, num_kv_heads, head_size + 8, block_size]: behind a
head's elements 4 rows with the keys' scales of the block's tokens, then 4 rows with the values'.

Arithmetic is fp32, rounded once on store. No op has a derivative: where gradients are recorded, a tensor that requires
grad raises RuntimeError. `pack_linear_weight` alone takes such a tensor, and records nothing. A tensor that carries a
tangent of forward mode always raises. (The raw ops let both pass.)

Linear layers and collectives run on the CPU only.

Devices: CPU, and CUDA where the build has CUDA kernels, which have not run on a GPU yet. An op runs where its tensors
are, on the current stream, and does not wait for the GPU. All tensors must be on one device, but k_scale and v_scale
may be on the CPU, and block_mapping anywhere. With PAGEDATTN_CHECK=1 in the environment an op checks what index tensors
on a GPU hold; to do this it waits for the GPU.

Errors: ValueError for a wrong shape, stride or value, TypeError for a wrong dtype or a wrong type. Both are raised
before any memory is touched. The message names the argument, what was expected and what came. The ops themselves raise
RuntimeError with the same text, and the type behind: "... (ValueError)".
"""

from ._call import add_ops
from .activation import gelu_and_mul, gelu_fast, gelu_new, gelu_quick, gelu_tanh_and_mul, mul_and_silu, silu_and_mul
from .attention import (
    append_and_attend,
    merge_attn_states,
    mla_attention,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    varlen_attention,
)
from .cache import (
    batch_positions,
    compute_slot_mapping,
    concat_and_cache_mla,
    consecutive_block_tables,
    copy_blocks,
    gather_cached_kv,
    reshape_and_cache,
    reshape_and_cache_flash,
    swap_blocks,
)
from .collectives import all_gather_shared, all_reduce_shared
from .layernorm import fused_add_rms_norm, gemma_fused_add_rms_norm, gemma_rms_norm, layer_norm, rms_norm
from .linear import (
    grouped_linear_int4,
    grouped_linear_int8,
    grouped_linear_packed,
    linear_int4,
    linear_int8,
    linear_packed,
    pack_linear_weight,
    pack_linear_weight_int4,
    pack_linear_weight_int8,
    quantize_weight_int4,
    quantize_weight_int8,
)
from .pos_encoding import rotary_embedding, rotary_embedding_neox
from .sampling import (
    apply_token_bitmask,
    chain_speculative_sampling,
    renorm_probs,
    sample_from_probs,
    softmax,
    top_k_mask_logits,
)
from .state import causal_conv1d, gated_delta_rule, selective_scan

__all__ = [
    "all_gather_shared",
    "all_reduce_shared",
    "append_and_attend",
    "apply_token_bitmask",
    "batch_positions",
    "causal_conv1d",
    "chain_speculative_sampling",
    "compute_slot_mapping",
    "concat_and_cache_mla",
    "consecutive_block_tables",
    "copy_blocks",
    "fused_add_rms_norm",
    "gated_delta_rule",
    "gather_cached_kv",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rms_norm",
    "gemma_rms_norm",
    "grouped_linear_int4",
    "grouped_linear_int8",
    "grouped_linear_packed",
    "layer_norm",
    "linear_int4",
    "linear_int8",
    "linear_packed",
    "merge_attn_states",
    "mla_attention",
    "mul_and_silu",
    "pack_linear_weight",
    "pack_linear_weight_int4",
    "pack_linear_weight_int8",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "quantize_weight_int4",
    "quantize_weight_int8",
    "renorm_probs",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_neox",
    "sample_from_probs",
    "selective_scan",
    "silu_and_mul",
    "softmax",
    "swap_blocks",
    "top_k_mask_logits",
    "varlen_attention",
]

add_ops(__all__)
