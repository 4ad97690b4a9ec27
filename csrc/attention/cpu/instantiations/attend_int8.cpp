// Attention over a cache of int8.
#include "attention/cpu/item_walk.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

void attend_int8(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
                 const AttentionItem* next_item, float* scratch, float* partials) {
  walk_item<int8, Int8Arithmetic>(params, rows, item, next_item, scratch, partials);
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
