// Attention over a cache of float32 in the NHD layout.
#include "attention/cpu/item_walk.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

void attend_nhd_f32(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
                    const AttentionItem* next_item, float* scratch, float* partials) {
  walk_item<float, FloatArithmetic<float>, CacheLayout::NHD>(params, rows, item, next_item, scratch, partials);
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
