// Which kernels a call gets, and how large its items and its scratch are.
#include <algorithm>
#include <utility>
#include <vector>

#include "attention/cpu/attend_kernels.h"
#include "attention/cpu/item_scratch.h"
#include "attention/cpu/plan_items.h"

namespace pagedattn {
namespace {

// Whether pairs of bfloat16 are multiplied with the instruction for it, vdpbf16ps or bfdot. An AMD Zen 4 does such a
// dot product in the time of a multiply-add. An Intel CPU with AMX makes two multiply-adds and two conversions of the
// instruction, so that floats that are converted once for many rows are twice as fast.
bool has_fast_pair_dots() {
  return cpu_capability() == CpuCapability::AVX512_BF16 || cpu_capability() == CpuCapability::NEON_BF16;
}

bool suits(Arithmetic arithmetic, const PagedAttentionParams& params) {
  switch (arithmetic) {
    case Arithmetic::AMX:
      return cpu_capability() == CpuCapability::AMX && !has_small_blocks(params);
    case Arithmetic::PAIRS:
      return params.dtype == DType::BFLOAT16 && has_fast_pair_dots();
    default:
      return true;
  }
}

constexpr DType dtype_of(float) { return DType::FLOAT32; }
constexpr DType dtype_of(float16) { return DType::FLOAT16; }
constexpr DType dtype_of(bfloat16) { return DType::BFLOAT16; }
constexpr DType dtype_of(float8_e4m3) { return DType::FLOAT8_E4M3; }
constexpr DType dtype_of(float8_e5m2) { return DType::FLOAT8_E5M2; }
constexpr DType dtype_of(int8) { return DType::INT8; }

struct Chosen {
  AttendKernel* attend;
  Arithmetic arithmetic;
};

Chosen choose_kernel(const PagedAttentionParams& params) {
#define PAGEDATTN_CHOOSE(name, layout_, T, arithmetic_, ...)                          \
  if (params.layout == CacheLayout::layout_ && params.cache_dtype == dtype_of(T{}) && \
      suits(Arithmetic::arithmetic_, params)) {                                       \
    auto* kernel = PAGEDATTN_CPU_KERNEL(name);                                        \
    if (kernel != nullptr) return {kernel, Arithmetic::arithmetic_};                  \
  }
  PAGEDATTN_ATTEND_KERNELS(PAGEDATTN_CHOOSE)
#undef PAGEDATTN_CHOOSE
  return {};  // the op lets no other cache through
}

// The (row, head) pairs of an item of prefill. A tile of tokens is converted once for all pairs: more pairs are better,
// until their queries and sums leave the second-level cache, which has 1 MiB or more where there is AVX512. Pairs of
// bfloat16 on ARM64 are taken as they are: there, more would only take in more tokens that the causal mask hides.
int64_t prefill_results(Arithmetic arithmetic) {
  if (cpu_capability() >= CpuCapability::AVX512 && cpu_capability() <= CpuCapability::AMX) return 256;
  return cpu_capability() == CpuCapability::NEON_BF16 && arithmetic == Arithmetic::PAIRS ? 64 : 128;
}

// Room for the largest item, and for a merge.
int64_t scratch_floats(const PagedAttentionParams& params, Arithmetic arithmetic,
                       const std::vector<AttentionItem>& items) {
  int64_t floats = partial_floats(params.num_heads, params.head_size);
  for (const AttentionItem& item : items) {
    floats = std::max(floats, arithmetic == Arithmetic::AMX ? amx_floats(params, item) : RowScratch(params, item).size);
  }
  return floats;
}

}  // namespace

AttentionPlan plan_attention(const PagedAttentionParams& params, int64_t num_threads) {
  const Chosen chosen = choose_kernel(params);
  ItemPlan plan = plan_items(params, num_threads, prefill_results(chosen.arithmetic));
  const int64_t floats = scratch_floats(params, chosen.arithmetic, plan.items);
  return {chosen.attend,
          PAGEDATTN_CPU_KERNEL(merge_partials),
          std::move(plan.rows),
          std::move(plan.items),
          std::move(plan.merges),
          plan.num_partials * partial_floats(params.num_heads, params.head_size),
          floats,
          plan.multiply_adds};
}

}  // namespace pagedattn
