// Works on runs: tokens that follow each other and go to slots that follow each other in one block, as the tokens of a
// prompt do. A key goes to the cache in 16-byte chunks. A value is transposed: element d of the run's tokens is
// contiguous in the cache, so a run is written row by row, while the tokens it reads from stay in the nearest cache.
#include "cache/reshape_and_cache.h"

#include "cpu_vec.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

struct Run {
  int64_t token;
  int64_t length;
  int64_t block;
  int64_t offset;  // of the first token in the block
};

Run find_run(const ReshapeAndCacheParams& p, int64_t token, int64_t end) {
  const int64_t slot = p.slot_mapping[token];
  Run run{token, 1, slot / p.block_size, slot % p.block_size};
  const int64_t longest = p.block_size - run.offset;
  while (run.length < longest && token + run.length < end && p.slot_mapping[token + run.length] == slot + run.length) {
    ++run.length;
  }
  return run;
}

template <typename T>
void store_key(const ReshapeAndCacheParams& p, const Run& run, int64_t head) {
  constexpr int X = ELEMENTS_PER_CHUNK<T>;
  const T* source = static_cast<const T*>(p.key) + run.token * p.key_stride + head * p.head_size;
  T* target = static_cast<T*>(p.key_cache) + run.block * p.key_block_stride + head * p.head_size * p.block_size +
              run.offset * X;
  for (int64_t i = 0; i < run.length; ++i) {
    for (int64_t d = 0; d < p.head_size; d += X) {
      __builtin_memcpy(target + d * p.block_size + i * X, source + i * p.key_stride + d, 16);
    }
  }
}

template <typename T>
void store_value(const ReshapeAndCacheParams& p, const Run& run, int64_t head) {
  const T* source = static_cast<const T*>(p.value) + run.token * p.value_stride + head * p.head_size;
  T* target = static_cast<T*>(p.value_cache) + run.block * p.value_block_stride + head * p.head_size * p.block_size +
              run.offset;
  for (int64_t d = 0; d < p.head_size; ++d) {
    for (int64_t i = 0; i < run.length; ++i) target[d * p.block_size + i] = source[i * p.value_stride + d];
  }
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t token = begin; token < end;) {
      if (params.slot_mapping[token] < 0) {
        ++token;
        continue;
      }
      const Run run = find_run(params, token, end);
      for (int64_t head = 0; head < params.num_kv_heads; ++head) {
        store_key<T>(params, run, head);
        store_value<T>(params, run, head);
      }
      token += run.length;
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
