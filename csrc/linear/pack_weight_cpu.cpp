// A row of a weight consists of 32-bit words; a packed panel has the first words of its 16 rows, then the second words,
// and so on. Squares of words are transposed in registers, so that memory is read and written in whole vectors.
#include "cpu_memory.h"
#include "cpu_transpose.h"
#include "linear/linear_quantized.h"
#include "linear/pack_weight.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// For the words of a panel's rows: load(feature, i) gives the words of a row from word i on, and store(i, first, words)
// takes word i of the features from `first` on.
template <typename Load, typename Store>
PAGEDATTN_INLINE void transpose_panel(int64_t num_words, const Load& load, const Store& store) {
  for (int64_t i = 0; i < num_words; i += VEC_SIZE) {
    const int64_t count = smaller(num_words - i, VEC_SIZE);
    PAGEDATTN_UNROLL
    for (int first = 0; first < LINEAR_PANEL; first += VEC_SIZE) {
      Vec square[VEC_SIZE];
      PAGEDATTN_UNROLL
      for (int r = 0; r < VEC_SIZE; ++r) square[r] = (Vec)load(first + r, i);
      transpose(square);
      PAGEDATTN_UNROLL
      for (int w = 0; w < VEC_SIZE; ++w) {
        if (w < count) store(i + w, first, (UintVec)square[w]);
      }
    }
  }
}

// Up to sizeof(V) bytes. The other bytes are zero.
template <typename V>
PAGEDATTN_INLINE V load_bytes(const void* source, int64_t count) {
  if (count >= static_cast<int64_t>(sizeof(V))) return load_as<V>(source);
  V vector{};
  if (count > 0) __builtin_memcpy(&vector, source, count);
  return vector;
}

void pack_panel(const PackLinearWeightParams& p, int64_t panel) {
  constexpr int WORD_BYTES = sizeof(uint32_t);
  const int64_t feature = panel * LINEAR_PANEL, num_features = smaller(p.out_features - feature, LINEAR_PANEL);
  const int64_t row_bytes = p.in_features * element_size(p.dtype);
  const int64_t stride_bytes = p.weight_stride * element_size(p.dtype);
  const char* weight = static_cast<const char*>(p.weight) + feature * stride_bytes;
  char* out = static_cast<char*>(p.out) + panel * LINEAR_PANEL * row_bytes;
  const auto load_words = [&](int64_t f, int64_t word) PAGEDATTN_ALWAYS_INLINE {
    const int64_t place = word * WORD_BYTES;
    return load_bytes<UintVec>(weight + f * stride_bytes + place, f < num_features ? row_bytes - place : 0);
  };
  if (p.dtype == DType::FLOAT32) {
    transpose_panel(p.in_features, load_words, [&](int64_t i, int64_t first, UintVec words) PAGEDATTN_ALWAYS_INLINE {
      __builtin_memcpy(out + (i * LINEAR_PANEL + first) * WORD_BYTES, &words, sizeof words);
    });
    return;
  }
  // A word is two elements, one above the other in the panel.
  constexpr int ELEMENT_BYTES = sizeof(uint16_t);
  transpose_panel((p.in_features + 1) / 2, load_words,
                  [&](int64_t i, int64_t first, UintVec words) PAGEDATTN_ALWAYS_INLINE {
                    const ShortVec elements[2] = {narrow(words), narrow_upper(words)};
                    char* target = out + (2 * i * LINEAR_PANEL + first) * ELEMENT_BYTES;
                    __builtin_memcpy(target, &elements[0], sizeof elements[0]);
                    if (2 * i + 1 == p.in_features) return;
                    __builtin_memcpy(target + LINEAR_PANEL * ELEMENT_BYTES, &elements[1], sizeof elements[1]);
                  });
}

void pack_panel(const PackLinearWeightInt8Params& p, int64_t panel) {
  const int64_t feature = panel * LINEAR_PANEL, num_features = smaller(p.out_features - feature, LINEAR_PANEL);
  const int64_t num_quads = (p.in_features + QUAD - 1) / QUAD;
  const int8_t* weight = p.weight + feature * p.weight_stride;
  uint8_t* out = p.out + panel * num_quads * LINEAR_PANEL * QUAD;
  transpose_panel(
      num_quads,
      [&](int64_t f, int64_t quad) PAGEDATTN_ALWAYS_INLINE {
        const int64_t i = quad * QUAD;
        return load_bytes<UintVec>(weight + f * p.weight_stride + i, f < num_features ? p.in_features - i : 0);
      },
      [&](int64_t quad, int64_t first, UintVec words) PAGEDATTN_ALWAYS_INLINE {
        words ^= 0x80808080;  // adds 128 to each
        __builtin_memcpy(out + (quad * LINEAR_PANEL + first) * QUAD, &words, sizeof words);
      });
}

// The codes of VEC_SIZE pairs of quads, two in each byte: one of the first quad in the lower half, one of the second in
// the upper. `count` bytes are there to be read.
PAGEDATTN_INLINE UintVec load_pairs(const uint8_t* codes, int64_t count) {
  const Vec a = load_bytes<Vec>(codes, count), b = load_bytes<Vec>(codes + VEC_BYTES, count - VEC_BYTES);
  const UintVec first = (UintVec)shuffle(a, b, [](int i) { return 2 * i; });
  const UintVec second = (UintVec)shuffle(a, b, [](int i) { return 2 * i + 1; });
  return first | second << 4;
}

// The four nibbles of the lower 16 bits, a byte each.
PAGEDATTN_INLINE UintVec spread_nibbles(UintVec words) {
  const UintVec bytes = (words | words << 8) & 0x00ff00ff;
  return (bytes | bytes << 4) & 0x0f0f0f0f;
}

// The same of codes that are nibbles already, in order from the lowest on: a word is a pair of quads.
PAGEDATTN_INLINE UintVec load_pairs_of_nibbles(const uint8_t* codes, int64_t count) {
  const UintVec words = load_bytes<UintVec>(codes, count);
  return spread_nibbles(words & 0xffff) | spread_nibbles(words >> 16) << 4;
}

template <typename T>
void pack_scales_and_zeros(const PackLinearWeightInt4Params& p, int64_t feature, int64_t num_features, int64_t group,
                           uint8_t* out) {
  T scales[LINEAR_PANEL] = {};
  uint8_t zeros[LINEAR_PANEL] = {};
  for (int64_t f = 0; f < num_features; ++f) {
    scales[f] = static_cast<const T*>(p.scales)[(feature + f) * p.scales_stride + group];
    zeros[f] = p.zeros[(feature + f) * p.zeros_stride + group];
  }
  __builtin_memcpy(out, scales, sizeof scales);
  __builtin_memcpy(out + sizeof scales, zeros, sizeof zeros);
}

void pack_panel(const PackLinearWeightInt4Params& p, int64_t panel) {
  constexpr int PAIR_BYTES = LINEAR_PANEL * QUAD;
  const int64_t feature = panel * LINEAR_PANEL, num_features = smaller(p.out_features - feature, LINEAR_PANEL);
  const int64_t pairs_per_group = p.in_features / p.num_groups / (2 * QUAD);
  const int64_t group_bytes = int4_group_bytes(p.in_features / p.num_groups, p.scale_dtype);
  const uint8_t* codes = p.codes + feature * p.codes_stride;
  uint8_t* out = p.out + panel * p.num_groups * group_bytes;
  const int64_t num_pairs = p.in_features / (2 * QUAD);
  const auto load_codes = [&](int64_t f, int64_t pair) PAGEDATTN_ALWAYS_INLINE {
    const int64_t place = pair * 2 * QUAD;
    return load_pairs(codes + f * p.codes_stride + place, f < num_features ? p.in_features - place : 0);
  };
  const auto load_nibbles = [&](int64_t f, int64_t pair) PAGEDATTN_ALWAYS_INLINE {
    const int64_t place = pair * QUAD;
    return load_pairs_of_nibbles(codes + f * p.codes_stride + place, f < num_features ? num_pairs * QUAD - place : 0);
  };
  const auto store = [&](int64_t pair, int64_t first, UintVec words) PAGEDATTN_ALWAYS_INLINE {
    const int64_t group = pair / pairs_per_group;
    const int64_t place = group * group_bytes + (pair - group * pairs_per_group) * PAIR_BYTES;
    __builtin_memcpy(out + place + first * QUAD, &words, sizeof words);
  };
  if (p.codes_are_nibbles) {
    transpose_panel(num_pairs, load_nibbles, store);
  } else {
    transpose_panel(num_pairs, load_codes, store);
  }
  for (int64_t group = 0; group < p.num_groups; ++group) {
    uint8_t* behind_codes = out + group * group_bytes + pairs_per_group * PAIR_BYTES;
    if (p.scale_dtype == DType::FLOAT32) {
      pack_scales_and_zeros<float>(p, feature, num_features, group, behind_codes);
    } else {
      pack_scales_and_zeros<float16>(p, feature, num_features, group, behind_codes);
    }
  }
}

}  // namespace

void pack_linear_weight(const PackLinearWeightParams& params, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel) pack_panel(params, panel);
}

void pack_linear_weight_int8(const PackLinearWeightInt8Params& params, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel) pack_panel(params, panel);
}

void pack_linear_weight_int4(const PackLinearWeightInt4Params& params, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel) pack_panel(params, panel);
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
