// Attention of queries in bfloat16 over a cache of bfloat16, on the tile registers of AMX.
#include "attention/cpu/amx_walk.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

void attend_amx_bf16(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
                     const AttentionItem* next_item, float* scratch, float* partials) {
  walk_item_with_amx(params, rows, item, next_item, scratch, partials);
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
