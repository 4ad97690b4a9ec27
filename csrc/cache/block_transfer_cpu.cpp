// What a transfer takes of a block is contiguous, so one memcpy copies it. Where the blocks are many, they are copied
// past the caches instead.
#include "cache/block_transfer.h"

#include "cpu_memory.h"
#include "cpu_rows.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Blocks lie in any order, so the hardware would find the start of each block late. Bytes are fetched this far ahead,
// also from the next block.
constexpr int64_t BYTES_AHEAD = 4 << 10;
constexpr int FETCH_TRIES = 4;

// Less than for the outputs of other ops. The next op reads such an output, but a copied block is read only when its
// sequence runs again.
constexpr int64_t MIN_STREAMED_BLOCK_BYTES = 4 << 20;

// `dst` is aligned to a cache line; `next_src` is the block that is copied next.
void stream_block(char* dst, const char* src, const char* next_src, int64_t num_bytes) {
  constexpr int64_t LINE_BYTES = 64, STEP = 4 * LINE_BYTES;
  constexpr int NUM_VECS = STEP / VEC_BYTES;
  int64_t i = 0;
  for (; i + STEP <= num_bytes; i += STEP) {
    const int64_t ahead = i + BYTES_AHEAD;
    const char* fetched = ahead < num_bytes ? src + ahead : next_src + (ahead - num_bytes);
    PAGEDATTN_UNROLL
    for (int64_t line = 0; line < STEP; line += LINE_BYTES) prefetch_line<FETCH_TRIES>(fetched + line);
    UintVec vecs[NUM_VECS];
    PAGEDATTN_UNROLL
    for (int k = 0; k < NUM_VECS; ++k) vecs[k] = load_as<UintVec>(src + i + k * VEC_BYTES);
    PAGEDATTN_UNROLL
    for (int k = 0; k < NUM_VECS; ++k) store_bits<true>(dst + i + k * VEC_BYTES, vecs[k]);
  }
  __builtin_memcpy(dst + i, src + i, num_bytes - i);
}

}  // namespace

void transfer_blocks(const BlockTransferParams& p, int64_t begin, int64_t end) {
  const auto src_of = [&](int64_t pair) { return p.src + p.mapping[2 * pair] * p.src_stride; };
  const auto dst_of = [&](int64_t pair) { return p.dst + p.mapping[2 * pair + 1] * p.dst_stride; };
  // No block is both source and target, so `src` may be the pool of `dst`.
  choose_stream(MIN_STREAMED_BLOCK_BYTES, nullptr, p.dst, p.dst_stride, p.num_pairs, p.block_bytes, [&]<bool STREAM>() {
    for (int64_t i = begin; i < end; ++i) {
      if constexpr (STREAM) {
        stream_block(dst_of(i), src_of(i), src_of(i + 1 < end ? i + 1 : i), p.block_bytes);
      } else {
        __builtin_memcpy(dst_of(i), src_of(i), p.block_bytes);
      }
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
