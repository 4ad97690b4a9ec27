// Attention of queries in bfloat16 over a cache of bfloat16 in the NHD layout.
#include "attention/cpu/item_walk.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

void attend_nhd_pairs_bf16(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
                           const AttentionItem* next_item, float* scratch, float* partials) {
  walk_item<bfloat16, PairArithmetic<bfloat16>, CacheLayout::NHD>(params, rows, item, next_item, scratch, partials);
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
