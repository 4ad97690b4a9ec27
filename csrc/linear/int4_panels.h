// What the kernels of linear_int4 share: how the panels of a packed weight lie in memory, and how sums are written.
#pragma once

#include "cpu_rows.h"
#include "linear/linear_quantized.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int QUADS_PER_STEP = INT4_STEP / QUAD;
constexpr int BYTES_PER_PAIR = LINEAR_PANEL * QUAD;  // of quads
constexpr int BYTES_PER_STEP = QUADS_PER_STEP / 2 * BYTES_PER_PAIR;

PAGEDATTN_INLINE int64_t scale_bytes(const LinearInt4Params& p) { return int4_scale_bytes(p.scale_dtype); }
PAGEDATTN_INLINE int64_t bytes_per_group(const LinearInt4Params& p) {
  return int4_group_bytes(p.group_size, p.scale_dtype);
}

// Calls body(block, element, size) for each block of a row: its number, its first element and how many it has.
template <typename Body>
PAGEDATTN_INLINE void for_each_block(const LinearInt4Params& p, const Body& body) {
  int64_t left = p.group_size;  // of the group
  for (int64_t block = 0, element = 0; element < p.in_features; ++block) {
    const int64_t size = smaller(left, INT4_BLOCK);
    body(block, element, size);
    element += size;
    left = left > size ? left - size : p.group_size;
  }
}

// Adjacent blocks of up to RANGE_STEPS steps, which are unpacked at a time.
constexpr int RANGE_STEPS = 8;
struct BlockRange {
  int64_t first_block = 0;
  int64_t first_step = 0;
  int num_blocks = 0;
  int num_steps = 0;
  int block_steps[RANGE_STEPS];  // of each block

  PAGEDATTN_INLINE bool has_room(int steps) const { return num_steps + steps <= RANGE_STEPS; }
  PAGEDATTN_INLINE void add(int steps) {
    block_steps[num_blocks++] = steps;
    num_steps += steps;
  }
  // Without a block, behind those that there were.
  PAGEDATTN_INLINE void go_on() {
    first_block += num_blocks;
    first_step += num_steps;
    num_blocks = num_steps = 0;
  }
};

// Of VEC_SIZE features of a panel, from `feature` on. scales: what follows the blocks of a group.
PAGEDATTN_INLINE Vec load_scales(const LinearInt4Params& p, const uint8_t* scales, int feature) {
  return p.scale_dtype == DType::FLOAT16 ? load(reinterpret_cast<const float16*>(scales) + feature)
                                         : load(reinterpret_cast<const float*>(scales) + feature);
}
PAGEDATTN_INLINE UintVec load_zeros(const LinearInt4Params& p, const uint8_t* scales, int feature) {
  return widen(widen(load_as<ByteVec>(scales + LINEAR_PANEL * element_size(p.scale_dtype) + feature)));
}

// Writes PANELS panels, or what of them the weight has. sums: [num_rows][PANELS * LINEAR_PANEL].
template <int PANELS, typename T>
void write_out(const LinearInt4Params& p, int64_t first_feature, const float* sums) {
  constexpr int64_t FEATURES = PANELS * LINEAR_PANEL;
  const int64_t count = smaller(p.out_features - first_feature, FEATURES);
  float bias[FEATURES] = {};
  if (p.bias != nullptr) __builtin_memcpy(bias, p.bias + first_feature, count * sizeof(float));
  for (int64_t row = 0; row < p.num_rows; ++row) {
    T* out = static_cast<T*>(p.out) + row * p.out_features + first_feature;
    for_each_vector(count, [&](int64_t i, auto, auto store) PAGEDATTN_ALWAYS_INLINE {
      store(out + i, load(sums + row * FEATURES + i) + load(bias + i));
    });
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
