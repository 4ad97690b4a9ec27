"""Every op with small valid arguments, for tests of what holds for every op."""

from inspect import signature
from itertools import takewhile

import torch
from checks import ONE_RANK, for_wrapper, only, tensors_in

from pagedattn_ext import ops

OPS = torch.ops.pagedattn_ext

SCHEMAS = """
paged_attention_v1(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, SymInt num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, SymInt block_size, SymInt max_seq_len, Tensor? alibi_slopes=None, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
paged_attention_v2(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, Tensor query, Tensor key_cache, Tensor value_cache, SymInt num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, SymInt block_size, SymInt max_seq_len, Tensor? alibi_slopes=None, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, *, Tensor? query_start_loc=None, float scale, SymInt? max_seq_len=None, Tensor? alibi_slopes=None, SymInt? sliding_window=None, float softcap=0.0, Tensor? sinks=None, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None, bool causal=True, SymInt? right_window=None, SymInt attention_chunk=0) -> (Tensor, Tensor)
varlen_attention(Tensor query, Tensor key, Tensor value, Tensor query_start_loc, Tensor key_start_loc, *, float scale, SymInt? max_seq_len=None, Tensor? alibi_slopes=None, SymInt? sliding_window=None, float softcap=0.0, Tensor? sinks=None, bool causal=True, SymInt? right_window=None, SymInt attention_chunk=0) -> (Tensor, Tensor)
append_and_attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor block_tables, Tensor cached_lens, *, Tensor? query_start_loc=None, Tensor? key_start_loc=None, float scale, Tensor? alibi_slopes=None, SymInt? sliding_window=None, float softcap=0.0, Tensor? sinks=None, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None, bool causal=True, SymInt? right_window=None, SymInt attention_chunk=0, Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_is_neox=True, Tensor? rotary_lens=None) -> (Tensor, Tensor)
mla_attention(Tensor q_nope, Tensor q_pe, Tensor kv_c_cache, Tensor k_pe_cache, Tensor block_tables, Tensor seq_lens, *, Tensor? query_start_loc=None, float scale, bool causal=True) -> (Tensor, Tensor)
merge_attn_states(Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse, *, float lse_base=2.7182818284590451) -> ()
reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()
concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()
gather_cached_kv(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping) -> ()
copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()
swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()
batch_positions(Tensor? start_loc, Tensor first_positions, SymInt num_tokens) -> (Tensor, Tensor)
compute_slot_mapping(Tensor positions, Tensor block_tables, SymInt block_size, SymInt num_blocks, *, Tensor? batch_indices=None, Tensor? block_start_loc=None, Tensor? last_block_lens=None) -> Tensor
consecutive_block_tables(Tensor first_blocks, Tensor end_blocks, Tensor seq_lens, SymInt max_num_blocks_per_seq, SymInt num_blocks, *, Tensor? left_padding=None) -> Tensor
rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()
fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()
gemma_rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()
gemma_fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()
layer_norm(Tensor(a!) out, Tensor input, Tensor weight, Tensor bias, float epsilon) -> ()
rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, SymInt head_size, Tensor cos_sin_cache, bool is_neox, *, Tensor? sin_cache=None) -> ()
rotary_embedding_neox(Tensor positions, Tensor(a!) query, Tensor(b!) key, SymInt head_size, Tensor cos_sin_cache) -> ()
silu_and_mul(Tensor(a!) out, Tensor input) -> ()
mul_and_silu(Tensor(a!) out, Tensor input) -> ()
gelu_and_mul(Tensor(a!) out, Tensor input) -> ()
gelu_tanh_and_mul(Tensor(a!) out, Tensor input) -> ()
gelu_new(Tensor(a!) out, Tensor input) -> ()
gelu_fast(Tensor(a!) out, Tensor input) -> ()
gelu_quick(Tensor(a!) out, Tensor input) -> ()
linear_int4(Tensor input, Tensor packed_weight, SymInt group_size, SymInt out_features, Tensor? bias=None, ScalarType? scale_dtype=None) -> Tensor
linear_int8(Tensor input, Tensor packed_weight, Tensor weight_scales, Tensor? bias=None) -> Tensor
apply_token_bitmask(Tensor(a!) logits, Tensor bitmask, Tensor? indices=None) -> ()
softmax(Tensor(a!) out, Tensor logits, Tensor? temperature=None) -> ()
renorm_probs(Tensor(a!) out, Tensor probs, Tensor? top_k=None, Tensor? top_p=None) -> ()
top_k_mask_logits(Tensor(a!) out, Tensor logits, Tensor top_k) -> ()
sample_from_probs(Tensor(a!) out, Tensor(b!) valid, Tensor probs, Tensor? indices, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor seed, Tensor offset, bool top_k_first=True, Tensor? subsequence=None) -> ()
chain_speculative_sampling(Tensor(a!) out, Tensor(b!) num_accepted, Tensor(c!) num_emitted, Tensor draft_probs, Tensor draft_token_ids, Tensor target_probs, Tensor seed, Tensor offset) -> ()
causal_conv1d(Tensor(a!) out, Tensor input, Tensor(b!) conv_states, Tensor weight, Tensor? bias=None, bool silu=False, *, Tensor? query_start_loc=None, Tensor? state_indices=None, Tensor? has_initial_state=None) -> ()
gated_delta_rule(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(b!) states, float? scale=None, bool use_qk_l2norm=False, *, Tensor? query_start_loc=None, Tensor? state_indices=None, Tensor? has_initial_state=None) -> ()
selective_scan(Tensor(a!) out, Tensor input, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(b!) states, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, float dt_min=0.0, float? dt_max=None, *, Tensor? query_start_loc=None, Tensor? state_indices=None, Tensor? has_initial_state=None) -> ()
linear_packed(Tensor input, Tensor packed_weight, SymInt out_features, Tensor? bias=None) -> Tensor
grouped_linear_packed(Tensor input, Tensor offsets, Tensor packed_weight, SymInt out_features, Tensor? bias=None) -> Tensor
grouped_linear_int4(Tensor input, Tensor offsets, Tensor packed_weight, SymInt group_size, SymInt out_features, Tensor? bias=None, ScalarType? scale_dtype=None) -> Tensor
grouped_linear_int8(Tensor input, Tensor offsets, Tensor packed_weight, Tensor weight_scales, Tensor? bias=None) -> Tensor
pack_linear_weight(Tensor(a!) out, Tensor weight) -> ()
pack_linear_weight_int4(Tensor(a!) out, Tensor codes, Tensor scales, Tensor zeros) -> ()
pack_linear_weight_int8(Tensor(a!) out, Tensor weight) -> ()
quantize_weight_int4(Tensor(a!) codes, Tensor(b!) scales, Tensor(c!) zeros, Tensor weight) -> ()
quantize_weight_int8(Tensor(a!) codes, Tensor(b!) scales, Tensor weight) -> ()
all_reduce_shared(Tensor(a!) input, int group) -> ()
all_gather_shared(Tensor(a!) out, Tensor input, int group) -> ()
"""  # noqa: E501
SCHEMA_OF = {line.partition("(")[0]: line for line in SCHEMAS.strip().splitlines()}
COLLECTIVES = ["all_reduce_shared", "all_gather_shared"]
PACKING = ["pack_linear_weight", "pack_linear_weight_int4", "pack_linear_weight_int8"]
SAMPLING = ["sample_from_probs", "chain_speculative_sampling"]  # write no floating-point numbers
QUANTIZING = ["quantize_weight_int4", "quantize_weight_int8"]
LINEAR = ["linear_packed", "linear_int4", "linear_int8"]
# Those without CUDA kernels.
CPU_OPS = [*LINEAR, *(f"grouped_{name}" for name in LINEAR), *PACKING, *QUANTIZING, *COLLECTIVES]
ATTENTION = ["paged_attention_v1", "paged_attention_v2", "paged_attention"]
INT8_CALLS = ["paged_attention int8", "reshape_and_cache int8"]
FP8_CALLS = [f"{name} fp8" for name in [*ATTENTION, "append_and_attend", "reshape_and_cache"]]
CALLS = [
    *SCHEMA_OF,
    *FP8_CALLS,
    *INT8_CALLS,
    "append_and_attend with rotation",
    "gather_cached_kv of nhd",
    "compute_slot_mapping of lists",
    "rotary_embedding without key",
    "rotary_embedding of a batch",
    "apply_token_bitmask of every row",
]


CALLS_ON_CUDA = [call for call in CALLS if call not in [*CPU_OPS, *INT8_CALLS]]


def op_of(call: str) -> str:
    return call.partition(" ")[0]


def int4_weight(out_features: int = 20) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(0, 16, (out_features, n), dtype=torch.uint8, generator=generator) for n in (64, 2))
    return {"codes": codes, "scales": torch.randn(out_features, 2, generator=generator), "zeros": zeros}


def packed_int4(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """By the raw op: on the simt device, `ops` calls the ops that simt has."""
    out = torch.zeros(2, 2, 336, dtype=torch.uint8)
    torch.ops.pagedattn_ext.pack_linear_weight_int4(out, codes, scales, zeros)
    return out


def make_arguments(call: str, num_tokens: int = 3) -> dict:
    """Small valid arguments of the raw op of one of CALLS, for at least 3 tokens or rows, with 3 more blocks of 16.
    Each row belongs to a sequence of its own; the sequences have 5, 17, 32, 5, ... tokens."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    n, num_blocks = num_tokens, num_tokens + 3
    every_third = torch.arange(n) % 3
    offsets = torch.tensor([0, 1, 1, n], dtype=torch.int32)  # of 3 experts
    start_loc = torch.tensor([0, 1, 1, *range(3, n + 1)], dtype=torch.int32)  # the second sequence has no rows
    paged = {
        "query": normal(n, 4, 16),
        "key_cache": normal(num_blocks, 2, 4, 16, 4),
        "value_cache": normal(num_blocks, 2, 16, 16),
        "block_tables": torch.tensor([[3, 0], [1, 5], [0, 2]], dtype=torch.int32)[every_third],
        "seq_lens": torch.tensor([5, 17, 32], dtype=torch.int32)[every_third],
        "scale": 0.25,
    }
    v1 = paged | {"out": torch.zeros(n, 4, 16), "num_kv_heads": 2, "block_size": 16, "max_seq_len": 32}
    partitions = {"exp_sums": torch.zeros(n, 4, 1), "max_logits": torch.zeros(n, 4, 1)}
    fp8 = {
        "key_cache": normal(num_blocks, 2, 1, 16, 16).to(torch.float8_e4m3fn).view(torch.uint8),
        "value_cache": normal(num_blocks, 2, 16, 16).to(torch.float8_e4m3fn).view(torch.uint8),
        "kv_cache_dtype": "fp8",
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(0.25),
    }
    scales_of_codes = torch.full((num_blocks, 2, 32), 0.01).view(torch.int8).view(num_blocks, 2, 8, 16)
    int8 = {
        "key_cache": torch.randint(-127, 128, (num_blocks, 2, 1, 16, 16), dtype=torch.int8, generator=generator),
        "value_cache": torch.cat([normal(num_blocks, 2, 16, 16).mul(40).to(torch.int8), scales_of_codes], dim=2),
        "kv_cache_dtype": "int8",
    }
    caches = {
        "key_caches": [normal(num_blocks, 2, 4, 16, 4) for _ in range(2)],
        "value_caches": [normal(num_blocks, 2, 16, 16) for _ in range(2)],
    }
    cache, mapping = normal(num_blocks, 2, 16, 16), torch.tensor([[2, 1], *([0, block] for block in range(3, n + 3))])
    key_value = {"key": normal(n, 2, 16), "value": normal(n, 2, 16)}
    rotary = {
        "positions": torch.tensor([0, 7, 7])[every_third],
        "query": normal(n, 64),
        "key": normal(n, 32),
        "head_size": 16,
        "cos_sin_cache": normal(8, 16),
    }
    one_cache = {name: paged[name] for name in ("key_cache", "value_cache")}
    one_cache["slot_mapping"] = torch.tensor([7, -1, *range(90, 90 - n + 2, -1)])
    nhd = {name: normal(num_blocks, 16, 2, 16) for name in ("key_cache", "value_cache")}
    gated = {"out": torch.zeros(n, 8), "input": normal(n, 16)}
    plain = {"out": torch.zeros(n, 16), "input": normal(n, 16)}
    norm = {"input": normal(n, 16), "weight": normal(16), "epsilon": 1e-6}
    sequences = {  # the last is padding
        "query_start_loc": start_loc,
        "state_indices": torch.tensor([*range(n, 1, -1), -1]),
        "has_initial_state": every_third > 0,
    }
    arguments = {
        "paged_attention_v1": v1,
        "paged_attention_v2": v1 | partitions | {"tmp_out": torch.zeros(n, 4, 1, 16)},
        "paged_attention": paged | {"query_start_loc": start_loc, "max_seq_len": 32},
        "varlen_attention": {
            "query": paged["query"],
            **{name: normal(2 * n, 2, 16) for name in ("key", "value")},
            "query_start_loc": start_loc,
            "key_start_loc": torch.tensor([0, 2, 4, *range(6, 2 * n + 1, 2)], dtype=torch.int32),
            "scale": 0.25,
            "max_seq_len": 6,
        },
        "append_and_attend": {
            **{name: tensor for name, tensor in paged.items() if name != "seq_lens"},
            "block_tables": torch.tensor(
                [[3, 0], [1, 5], [4, 2], *([block, 0] for block in range(6, n + 3))], dtype=torch.int32
            ),
            "cached_lens": paged["seq_lens"] - torch.tensor([1, 0, 2], dtype=torch.int32)[every_third],
            **key_value,
            "query_start_loc": start_loc,
            "key_start_loc": start_loc.clone(),
        },
        "mla_attention": {
            **{name: paged[name] for name in ("block_tables", "seq_lens", "scale")},
            "q_nope": normal(n, 4, 16),
            "q_pe": normal(n, 4, 4),
            "kv_c_cache": normal(num_blocks, 16, 16),
            "k_pe_cache": normal(num_blocks, 16, 4),
            "query_start_loc": start_loc,
        },
        "merge_attn_states": {
            "output": torch.zeros(n, 4, 16),
            "output_lse": torch.zeros(n, 4),
            "prefix_output": normal(n, 4, 16),
            "prefix_lse": normal(n, 4),
            "suffix_output": normal(n, 4, 16),
            "suffix_lse": normal(n, 4),
        },
        "reshape_and_cache": key_value | one_cache,
        "reshape_and_cache_flash": key_value | one_cache | nhd,
        "concat_and_cache_mla": {
            "kv_c": normal(n, 16),
            "k_pe": normal(n, 4),
            "kv_cache": normal(num_blocks, 16, 20),
            "slot_mapping": one_cache["slot_mapping"],
        },
        "gather_cached_kv": key_value | one_cache,
        "copy_blocks": caches | {"block_mapping": mapping},
        "swap_blocks": {"src": cache, "dst": normal(num_blocks, 2, 16, 16), "block_mapping": mapping},
        "batch_positions": {
            "start_loc": start_loc,
            "first_positions": paged["seq_lens"],
            "num_tokens": n + 1,
        },
        "compute_slot_mapping": {
            "positions": paged["seq_lens"] - 1,
            "block_tables": paged["block_tables"],
            "block_size": 16,
            "num_blocks": 12,
        },
        "consecutive_block_tables": {
            "first_blocks": torch.arange(0, 4 * n, 4),
            "end_blocks": torch.arange(4, 4 * n + 1, 4),
            "seq_lens": torch.tensor([4, 2, 1], dtype=torch.int32)[every_third],
            "max_num_blocks_per_seq": 5,
            "num_blocks": 40,
            "left_padding": torch.tensor([1, 0, 1])[every_third],
        },
        **{name: norm | {"out": torch.zeros(n, 16)} for name in ("rms_norm", "gemma_rms_norm")},
        **{name: norm | {"residual": normal(n, 16)} for name in ("fused_add_rms_norm", "gemma_fused_add_rms_norm")},
        "layer_norm": norm | {"out": torch.zeros(n, 16), "bias": normal(16)},
        "rotary_embedding": rotary | {"is_neox": False},
        "rotary_embedding_neox": rotary,
        **{name: gated for name in ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul")},
        **{name: plain for name in ("gelu_new", "gelu_fast", "gelu_quick")},
        "linear_int4": {
            "input": normal(n, 64),
            "packed_weight": packed_int4(**int4_weight()),
            "group_size": 32,
            "out_features": 20,
            "bias": normal(20),
            "scale_dtype": torch.float32,
        },
        "linear_int8": {
            "input": normal(n, 14),
            "packed_weight": torch.randint(1, 256, (2, 4, 16, 4), dtype=torch.uint8, generator=generator),
            "weight_scales": normal(20),
            "bias": normal(20),
        },
        "apply_token_bitmask": {
            "logits": normal(n + 1, 70),
            "bitmask": torch.randint(-(2**31), 2**31, (n, 3), dtype=torch.int32, generator=generator),
            "indices": torch.arange(n, 0, -1),
        },
        "softmax": {"out": torch.zeros(n, 70), "logits": normal(n, 70), "temperature": torch.tensor([0.7])},
        "renorm_probs": {
            "out": torch.zeros(n, 70),
            "probs": normal(n, 70).softmax(-1),
            "top_k": torch.tensor([20]),
            "top_p": torch.full((n,), 0.7),
        },
        "top_k_mask_logits": {"out": torch.zeros(n, 70), "logits": normal(n, 70), "top_k": torch.tensor([20])},
        "sample_from_probs": {
            "out": torch.zeros(n, dtype=torch.int32),
            "valid": torch.zeros(n, dtype=torch.bool),
            "probs": normal(n, 70).softmax(-1),
            "indices": torch.arange(n - 1, -1, -1, dtype=torch.int32),
            "top_k": torch.full((n,), 20),
            "top_p": torch.tensor([0.9]),
            "min_p": torch.tensor([0.01]),
            "seed": torch.tensor([1]),
            "offset": torch.arange(n),
            "subsequence": torch.arange(0, -n, -1),
        },
        "chain_speculative_sampling": {
            "out": torch.zeros(n, 3, dtype=torch.int32),
            "num_accepted": torch.zeros(n, dtype=torch.int32),
            "num_emitted": torch.zeros(n, dtype=torch.int32),
            "draft_probs": normal(n, 2, 70).softmax(-1),
            "draft_token_ids": torch.randint(0, 70, (n, 2), generator=generator),
            "target_probs": normal(n, 3, 70).softmax(-1),
            "seed": torch.tensor([1]),
            "offset": torch.tensor([0]),
        },
        "causal_conv1d": {
            "out": torch.zeros(n, 14),
            "input": normal(n, 14),
            "conv_states": normal(num_blocks, 14, 3),
            "weight": normal(14, 4),
            "bias": normal(14),
            **sequences,
        },
        "gated_delta_rule": {
            "out": torch.zeros(n, 4, 13),
            "query": normal(n, 2, 11),
            "key": normal(n, 2, 11),
            "value": normal(n, 4, 13),
            "g": -normal(n, 4).abs(),
            "beta": normal(n, 4).sigmoid(),
            "states": normal(num_blocks, 4, 11, 13),
            "use_qk_l2norm": True,
            **sequences,
        },
        "selective_scan": {
            "out": torch.zeros(n, 4, 3),
            "input": normal(n, 4, 3),
            "dt": normal(n, 4),
            "A": -normal(4).abs(),
            "B": normal(n, 2, 11),
            "C": normal(n, 2, 11),
            "states": normal(num_blocks, 4, 3, 11),
            "D": normal(4),
            "z": normal(n, 4, 3),
            "dt_bias": normal(4),
            "dt_softplus": True,
            **sequences,
        },
        "linear_packed": {
            "input": normal(n, 14),
            "packed_weight": normal(2, 14, 16),
            "out_features": 20,
            "bias": normal(20),
        },
        "grouped_linear_packed": {
            "input": normal(n, 14),
            "offsets": offsets,
            "packed_weight": normal(3, 2, 14, 16),
            "out_features": 20,
            "bias": normal(3, 20),
        },
        "grouped_linear_int4": {
            "input": normal(n, 64),
            "offsets": offsets,
            "packed_weight": packed_int4(**int4_weight()).repeat(3, 1, 1, 1),
            "group_size": 32,
            "out_features": 20,
            "bias": normal(3, 20),
            "scale_dtype": torch.float32,
        },
        "grouped_linear_int8": {
            "input": normal(n, 14),
            "offsets": offsets,
            "packed_weight": torch.randint(1, 256, (3, 2, 4, 16, 4), dtype=torch.uint8, generator=generator),
            "weight_scales": normal(3, 20),
            "bias": normal(3, 20),
        },
        "pack_linear_weight": {"out": torch.zeros(1, 14, 16), "weight": normal(n, 14)},
        "pack_linear_weight_int4": int4_weight(n) | {"out": torch.zeros(1, 2, 336, dtype=torch.uint8)},
        "pack_linear_weight_int8": {
            "out": torch.zeros(1, 4, 16, 4, dtype=torch.uint8),
            "weight": torch.randint(-127, 128, (n, 14), dtype=torch.int8, generator=generator),
        },
        "quantize_weight_int4": {
            "codes": torch.zeros(n, 64, dtype=torch.uint8),
            "scales": torch.zeros(n, 2),
            "zeros": torch.zeros(n, 2, dtype=torch.uint8),
            "weight": normal(n, 64),
        },
        "quantize_weight_int8": {
            "codes": torch.zeros(n, 14, dtype=torch.int8),
            "scales": torch.zeros(n),
            "weight": normal(n, 14),
        },
        "all_reduce_shared": {"input": normal(n, 8), "group": ONE_RANK.handle},
        "all_gather_shared": {"out": torch.zeros(n, 8), "input": normal(n, 8), "group": ONE_RANK.handle},
    }[op_of(call)]
    batch = {"positions": rotary["positions"].view(n, 1), "query": normal(n, 1, 64), "key": normal(n, 1, 2, 16)}
    every_row = {"logits": normal(n, 70), "indices": None}
    lists = {  # of two blocks for each of the first three sequences, and of one for all others
        "positions": torch.tensor([4, 16, 31, *[0] * (n - 3), -1], dtype=torch.int32),
        "batch_indices": torch.tensor([*range(n), -1], dtype=torch.int32),
        "block_tables": torch.tensor([3, 0, 1, 5, 0, 2, *range(n - 3)], dtype=torch.int32),
        "block_start_loc": torch.tensor([0, 2, 4, *range(6, n + 4)]),
        "last_block_lens": torch.tensor([5, 1, 16])[every_third],
    }
    changes = {
        "of lists": lists,
        "fp8": fp8,
        "int8": int8,
        "of nhd": nhd,
        "without key": {"key": None},
        "with rotation": {
            **{name: normal(40, 3) for name in ("rotary_cos", "rotary_sin")},
            "rotary_is_neox": False,
            "rotary_lens": torch.tensor([0, 3, 7])[every_third],
        },
        "of a batch": batch,
        "of every row": every_row,
    }
    return arguments | changes.get(call.partition(" ")[2], {})


def optional_tensors(name: str) -> dict:
    alibi_slopes, sinks = {"alibi_slopes": torch.ones(4)}, {"sinks": torch.ones(4)}
    if name in ("paged_attention", "append_and_attend", "varlen_attention"):
        return alibi_slopes | sinks
    return alibi_slopes if name in ATTENTION else {}


def require_grad(arguments: dict) -> dict:
    for tensor in tensors_in(arguments):
        tensor.requires_grad_(tensor.is_floating_point())
    return arguments


def positional(name: str, arguments: dict) -> tuple[tuple, dict]:
    """The same arguments, those before the `*` of the schema by position: what opcheck wants to see."""
    by_position = [arg.name for arg in getattr(OPS, name).default._schema.arguments if not arg.kwarg_only]
    names = list(takewhile(lambda name: name in arguments, by_position))
    return tuple(arguments[name] for name in names), {k: v for k, v in arguments.items() if k not in names}


# Arguments of the raw ops that the wrappers do not take: a wrapper allocates or infers them.
INFERRED = {"out", "num_kv_heads", "block_size", "exp_sums", "max_logits", "tmp_out", "output", "output_lse", "valid"}


def inferred_by_wrapper(name: str) -> set[str]:
    if name == "compute_slot_mapping":
        return set()
    more = {"gather_cached_kv": {"key", "value"}} | {key: {"codes", "scales", "zeros"} for key in QUANTIZING}
    return INFERRED | more.get(name, set())


def call_wrapper(name: str, arguments: dict):
    given = {k: v for k, v in arguments.items() if k not in inferred_by_wrapper(name)}
    return getattr(ops, name)(**for_wrapper(name, given))


def raw_op(call: str):
    return lambda **arguments: getattr(OPS, op_of(call))(**arguments)


def wrapper(call: str):
    """The wrapper as a function of the raw op's arguments. What it takes is looked up beforehand: in a function that is
    compiled, a default that `signature` has read becomes a tensor (torch 2.13)."""
    name = op_of(call)
    function = getattr(ops, name)
    taken = signature(function).parameters.keys() - inferred_by_wrapper(name)
    return lambda **arguments: function(**only(taken, arguments))


def results(function, arguments: dict) -> list[torch.Tensor]:
    """Everything the call returns and everything it may have written."""
    returned = function(**arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [*(tensor for tensor in returned if tensor is not None), *tensors_in(arguments)]
