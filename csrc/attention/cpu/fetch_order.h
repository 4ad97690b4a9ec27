// In which order, and how far ahead, this machine fetches best what a walk comes to; for prefetcher.h,
// nhd_prefetcher.h, fetch_ahead.h and row_walk.h. All numbers are measured (docs/cpu-kernels-lab-book.md).
#pragma once

#include <cstdint>

#include "attention/cpu/tile.h"
#include "cpu_model.h"
#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int MAX_RUNS = 2 * TILE_TOKENS / LOCATED_TOKENS<CacheLayout::CHUNKED>;

struct FetchOrder {
  // CHUNKED: a part has as many heads of a block as run_bytes hold, and runs_in_turns blocks take turns.
  int64_t run_bytes;
  int runs_in_turns;
  // Whether many rows ask again for what they fetch into the second-level cache. In the first, where a Zen 5 has it,
  // their own operands have to stay.
  bool columns_ask_again;

  // NHD: lines are fetched so far ahead of the walk. Few rows of several heads multiply so many bytes of keys or values
  // at a time.
  int64_t nhd_lead_bytes;
  int64_t nhd_bytes_at_once;

  // NHD: lines of smaller tokens are asked for again, as the CPU drops some requests (prefetch_line). Of larger tokens
  // the hardware foresees the lines that follow, and asking again takes longer than it saves; on a Zen 5 it always
  // pays.
  int64_t foreseen_token_bytes;

  // NHD: nothing is fetched of tokens that are as large. With 8 of them at a time, head by head, the hardware follows 8
  // streams in pages of their own, and reads faster than one stream in the order of memory is fetched.
  int64_t hardware_token_bytes;
};

inline FetchOrder fetch_order() {
  constexpr int64_t KIB = 1 << 10;
  if constexpr (VEC_SIZE == 16) {
    if (IS_ZEN_5) {
      return {.run_bytes = 8 * KIB,
              .runs_in_turns = 2,
              .columns_ask_again = false,
              .nhd_lead_bytes = 192 * KIB,
              .nhd_bytes_at_once = 128 * KIB,
              .foreseen_token_bytes = INT64_MAX,
              .hardware_token_bytes = INT64_MAX};
    }
    // A second-level cache of 1 MiB or more: all blocks of a tile take turns.
    return {.run_bytes = 16 * KIB,
            .runs_in_turns = MAX_RUNS,
            .columns_ask_again = true,
            .nhd_lead_bytes = 64 * KIB,
            .nhd_bytes_at_once = 32 * KIB,
            .foreseen_token_bytes = 0,
            .hardware_token_bytes = INT64_MAX};
  }
  // In the 512 KiB of other CPUs, two such parts would push each other out. Also, as measured on a Zen 3, more than
  // four blocks in turns are slower beside arithmetic.
  constexpr bool IS_AVX2 = VEC_SIZE == 8;
  return {.run_bytes = 8 * KIB,
          .runs_in_turns = 4,
          .columns_ask_again = true,
          .nhd_lead_bytes = 64 * KIB,
          .nhd_bytes_at_once = 32 * KIB,
          .foreseen_token_bytes = IS_AVX2 ? 2 * KIB : 0,
          .hardware_token_bytes = IS_AVX2 ? 8 * KIB : INT64_MAX};
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
