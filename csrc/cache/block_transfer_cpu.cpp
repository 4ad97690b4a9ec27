// One memcpy a block: blocks are whole in memory.
#include "cache/block_transfer.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

void transfer_blocks(const BlockTransferParams& params, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    __builtin_memcpy(params.dst + params.mapping[2 * i + 1] * params.dst_stride,
                     params.src + params.mapping[2 * i] * params.src_stride, params.block_bytes);
  }
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
