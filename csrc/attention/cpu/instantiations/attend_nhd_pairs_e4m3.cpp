// Attention of queries in bfloat16 over a cache of float8_e4m3 in the NHD layout.
#include "attention/cpu/item_walk.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

void attend_nhd_pairs_e4m3(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
                           const AttentionItem* next_item, float* scratch, float* partials) {
  walk_item<float8_e4m3, PairArithmetic<float8_e4m3>, CacheLayout::NHD>(params, rows, item, next_item, scratch,
                                                                        partials);
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
