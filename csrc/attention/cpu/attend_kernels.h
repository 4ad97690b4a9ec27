// The kernels of attention on the CPU: the only list. CMakeLists.txt reads the lines below, and makes a source of each
// kernel (attend.cpp.in). Together the kernels take a compiler longer than all other kernels, so each is a source.
#pragma once

#include "attention/paged_attention_plan.h"
#include "cpu_dispatch.h"

namespace pagedattn {

// How queries are multiplied with keys, and weights with values.
enum class Arithmetic {
  AMX,     // pairs of bfloat16, on tile registers
  PAIRS,   // pairs of bfloat16, by vectors
  INT8,    // queries are rounded to int8
  FLOATS,  // keys and values are converted to fp32
};

// KERNEL(name, layout and type of the cache, arithmetic, lowest, highest, highest of ARM64): on x86-64 there are copies
// for the capabilities from `lowest` to `highest`. From a better capability, a compiler would make the same code as
// from `highest`. On ARM64 there are copies from `default` on, or, if that is not the lowest of x86-64, one copy, or
// `none`. Of the kernels for a cache, the first one that suits a call is chosen.
#define PAGEDATTN_ATTEND_KERNELS(KERNEL)                                                   \
  KERNEL(attend_amx_bf16, CHUNKED, bfloat16, AMX, amx, amx, none)                          \
  KERNEL(attend_pairs_bf16, CHUNKED, bfloat16, PAIRS, avx512_bf16, avx512_bf16, neon_bf16) \
  KERNEL(attend_pairs_e4m3, CHUNKED, float8_e4m3, PAIRS, avx512_bf16, avx512_bf16, none)   \
  KERNEL(attend_pairs_e5m2, CHUNKED, float8_e5m2, PAIRS, avx512_bf16, avx512_bf16, none)   \
  KERNEL(attend_nhd_pairs_bf16, NHD, bfloat16, PAIRS, avx512_bf16, avx512_bf16, neon_bf16) \
  KERNEL(attend_nhd_pairs_e4m3, NHD, float8_e4m3, PAIRS, avx512_bf16, avx512_bf16, none)   \
  KERNEL(attend_nhd_pairs_e5m2, NHD, float8_e5m2, PAIRS, avx512_bf16, avx512_bf16, none)   \
  KERNEL(attend_int8, CHUNKED, int8, INT8, default, avx512_vnni, neon)                     \
  KERNEL(attend_f32, CHUNKED, float, FLOATS, default, avx512, neon)                        \
  KERNEL(attend_f16, CHUNKED, float16, FLOATS, default, avx512, neon)                      \
  KERNEL(attend_bf16, CHUNKED, bfloat16, FLOATS, default, avx512, neon)                    \
  KERNEL(attend_e4m3, CHUNKED, float8_e4m3, FLOATS, default, avx512_vnni, neon)            \
  KERNEL(attend_e5m2, CHUNKED, float8_e5m2, FLOATS, default, avx512_vnni, neon)            \
  KERNEL(attend_nhd_f32, NHD, float, FLOATS, default, avx512, neon)                        \
  KERNEL(attend_nhd_f16, NHD, float16, FLOATS, default, avx512, neon)                      \
  KERNEL(attend_nhd_bf16, NHD, bfloat16, FLOATS, default, avx512, neon)                    \
  KERNEL(attend_nhd_e4m3, NHD, float8_e4m3, FLOATS, default, avx512_vnni, neon)            \
  KERNEL(attend_nhd_e5m2, NHD, float8_e5m2, FLOATS, default, avx512_vnni, neon)

#define PAGEDATTN_DECLARE_ATTEND(name, ...)                                                               \
  PAGEDATTN_DECLARE_CPU_KERNEL(name, const PagedAttentionParams& params, const AttentionRow* rows,        \
                               const AttentionItem& item, const AttentionItem* next_item, float* scratch, \
                               float* partials)
PAGEDATTN_ATTEND_KERNELS(PAGEDATTN_DECLARE_ATTEND)
#undef PAGEDATTN_DECLARE_ATTEND

PAGEDATTN_DECLARE_CPU_KERNEL(merge_partials, const PagedAttentionParams& params, const MergeItem& item,
                             const float* partials, float* scratch)

}  // namespace pagedattn
