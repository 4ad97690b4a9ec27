// Computes one item over a cache of type T. Defined in item_walk.h. A file of instantiations/ compiles it for each T,
// as together they take a compiler longer than all other kernels.
#pragma once

#include "attention/paged_attention.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

template <typename T>
void attend_item(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
                 const AttentionItem* next_item, float* scratch, float* partials);

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
