// A kernel of attention; for attend.cpp.in.
#pragma once

#include "attention/cpu/attend_kernels.h"
#include "attention/cpu/loaded_units.h"
#include "attention/cpu/row_walk.h"
#if defined(__AMX_TILE__)
#include "attention/cpu/amx_walk.h"
#endif

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

template <Arithmetic ARITHMETIC, typename T, CacheLayout LAYOUT>
void attend(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
            const AttentionItem* next_item, float* scratch, float* partials) {
  const PagedAttentionParams p = in_loaded_units(params);
  const RowWalk<ARITHMETIC, T, LAYOUT> walk(p, rows, item, next_item, scratch);
  walk_item<T>(walk, p, rows, item, partials);
}

#if defined(__AMX_TILE__)
template <Arithmetic ARITHMETIC, typename T, CacheLayout LAYOUT>
  requires(ARITHMETIC == Arithmetic::AMX)
void attend(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
            const AttentionItem* next_item, float* scratch, float* partials) {
  const PagedAttentionParams p = in_loaded_units(params);
  walk_item_with_amx(p, rows, item, next_item, scratch, partials);
}
#endif

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
