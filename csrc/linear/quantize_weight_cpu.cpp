// A row of 8 bits is read twice: for its largest element, and for its codes. The second time, a cache has the row.
//
// Rows of 4 bits are read once, VEC_SIZE groups at a time. The groups are transposed in registers, so that each lane of
// a vector has a group of its own: sums over a group need no shuffles, and their order is the same on every instruction
// set. Products and sums are rounded one by one, so that the results are those of plain arithmetic.
#include "cpu_memory.h"
#include "cpu_transpose.h"
#include "dispatch.h"
#include "linear/linear_quantized.h"
#include "linear/quantize_weight.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr float MAX_INT8_CODE = 127.0f;
constexpr float MAX_INT4_CODE = 15.0f;
// How much of a group's range the 16 levels span. With a span above 1, the rounding of the zero cuts off no end; with a
// span below 1, the steps are finer. The best of the three spans leaves 4% less error than the range itself.
constexpr double SPANS[] = {1.0, 1.07, 0.93};

PAGEDATTN_INLINE Vec round_to_int(Vec value) {  // half to even, below 2^22
  const Vec shift = broadcast(0x1.8p23f);
  return (value + shift) - shift;
}

PAGEDATTN_INLINE Vec clamp(Vec value, float low, float high) {
  return min(max(value, broadcast(low)), broadcast(high));
}

// 1 in place of 0, so that zeros divided by it stay zeros.
PAGEDATTN_INLINE Vec nonzero(Vec divisor) { return select(divisor == 0.0f, broadcast(1.0f), divisor); }

// Ordered as integers, infinity and NaN are larger than any finite magnitude.
PAGEDATTN_INLINE void keep_largest(IntVec& largest, Vec value) {
  const IntVec magnitude = (IntVec)value & 0x7fffffff;
  largest = largest > magnitude ? largest : magnitude;
}

PAGEDATTN_INLINE int32_t largest_of(IntVec magnitudes) {
  int32_t largest = 0;
  for (int i = 0; i < VEC_SIZE; ++i) largest = largest > magnitudes[i] ? largest : magnitudes[i];
  return largest;
}

PAGEDATTN_INLINE bool is_refused(int32_t magnitude) { return magnitude > __builtin_bit_cast(int32_t, MAX_WEIGHT); }

template <typename T>
float first_refused(const T* row, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const float element = load_first(row + i, 1)[0];
    if (is_refused(__builtin_bit_cast(int32_t, element) & 0x7fffffff)) return element;
  }
  return 0.0f;
}

template <typename T>
PAGEDATTN_INLINE const T* row_of(const QuantizeWeightParams& p, int64_t row) {
  return static_cast<const T*>(p.weight) + row * p.weight_stride;
}

template <typename T>
void quantize_row(const QuantizeWeightInt8Params& p, int64_t row) {
  const T* weight = row_of<T>(p, row);
  const int64_t size = p.in_features, whole = size - size % VEC_SIZE;
  if (size == 0) {  // there may be no memory to read
    p.refused[row] = p.scales[row] = 0.0f;
    return;
  }
  IntVec magnitudes{};
  for (int64_t i = 0; i < whole; i += VEC_SIZE) keep_largest(magnitudes, load(weight + i));
  keep_largest(magnitudes, load_first(weight + whole, size - whole));
  const int32_t largest = largest_of(magnitudes);
  p.refused[row] = is_refused(largest) ? first_refused(weight, size) : 0.0f;
  if (is_refused(largest)) return;
  const float scale = __builtin_bit_cast(float, largest) / MAX_INT8_CODE;
  p.scales[row] = scale;
  const Vec divisor = nonzero(broadcast(scale));
  const auto codes_of = [&](Vec value) PAGEDATTN_ALWAYS_INLINE {
    const Vec codes = clamp(round_to_int(value / divisor), -MAX_INT8_CODE, MAX_INT8_CODE);
    return low_bytes((UintVec) __builtin_convertvector(codes, IntVec));
  };
  int8_t* codes = p.codes + row * size;
  for (int64_t i = 0; i < whole; i += VEC_SIZE) {
    const ByteVec bytes = codes_of(load(weight + i));
    __builtin_memcpy(codes + i, &bytes, sizeof bytes);
  }
  const ByteVec rest = codes_of(load_first(weight + whole, size - whole));
  __builtin_memcpy(codes + whole, &rest, size - whole);
}

// A group in each lane.
struct Levels {
  Vec codes[INT4_STEP];
  Vec zeros;
  Vec scales;
  Vec errors;  // squared
};

// The zero is one of the levels, so that a weight of zero stays zero. When the codes are known, the scale is chosen
// that fits the codes best.
PAGEDATTN_INLINE void find_levels(const Vec (&x)[INT4_STEP], Vec low, Vec high, double span, Levels& levels) {
  const Vec scales = nonzero((high - low) * static_cast<float>(span / MAX_INT4_CODE));
  const Vec zeros = clamp(round_to_int(low / scales * static_cast<float>(-span)), 0.0f, MAX_INT4_CODE);
  Vec products{}, squares{};
  for (int i = 0; i < INT4_STEP; ++i) {
    levels.codes[i] = clamp(round_to_int(x[i] / scales + zeros), 0.0f, MAX_INT4_CODE);
    const Vec steps = levels.codes[i] - zeros;
    products = products + x[i] * steps;
    squares = squares + steps * steps;
  }
  const Vec fit = products / nonzero(squares);
  Vec errors{};
  for (int i = 0; i < INT4_STEP; ++i) {
    const Vec error = (levels.codes[i] - zeros) * fit - x[i];
    errors = errors + error * error;
  }
  levels.zeros = zeros;
  levels.scales = fit;
  levels.errors = errors;
}

// The groups of a row from `group` on, of which `count` are quantized. Folds what the groups hold into `magnitudes`.
template <typename T>
PAGEDATTN_INLINE void quantize_groups(const QuantizeWeightInt4Params& p, int64_t row, int64_t group, int64_t count,
                                      IntVec& magnitudes) {
  const T* weight = row_of<T>(p, row) + group * INT4_STEP;
  Vec x[INT4_STEP];
  for (int i = 0; i < INT4_STEP; i += VEC_SIZE) {
    Vec square[VEC_SIZE];
    PAGEDATTN_UNROLL
    for (int g = 0; g < VEC_SIZE; ++g) square[g] = g < count ? load(weight + g * INT4_STEP + i) : Vec{};
    transpose(square);
    PAGEDATTN_UNROLL
    for (int k = 0; k < VEC_SIZE; ++k) x[i + k] = square[k];
  }
  Vec low{}, high{};
  for (int i = 0; i < INT4_STEP; ++i) {
    keep_largest(magnitudes, x[i]);
    low = min(low, x[i]);
    high = max(high, x[i]);
  }
  Levels best, candidate;
  find_levels(x, low, high, SPANS[0], best);
  for (int s = 1; s < 3; ++s) {
    find_levels(x, low, high, SPANS[s], candidate);
    const IntVec is_better = candidate.errors < best.errors;
    for (int i = 0; i < INT4_STEP; ++i) best.codes[i] = select(is_better, candidate.codes[i], best.codes[i]);
    best.zeros = select(is_better, candidate.zeros, best.zeros);
    best.scales = select(is_better, candidate.scales, best.scales);
    best.errors = select(is_better, candidate.errors, best.errors);
  }
  uint32_t quads[INT4_STEP / QUAD][VEC_SIZE];
  for (int q = 0; q < INT4_STEP / QUAD; ++q) {
    UintVec quad{};
    for (int i = 0; i < QUAD; ++i) quad |= (UintVec) __builtin_convertvector(best.codes[q * QUAD + i], IntVec) << 8 * i;
    __builtin_memcpy(quads[q], &quad, sizeof quad);
  }
  const int64_t num_groups = p.in_features / INT4_STEP;
  uint8_t* codes = p.codes + row * p.in_features + group * INT4_STEP;
  float* scales = p.scales + row * num_groups + group;
  uint8_t* zeros = p.zeros + row * num_groups + group;
  for (int64_t g = 0; g < count; ++g) {
    for (int q = 0; q < INT4_STEP / QUAD; ++q) __builtin_memcpy(codes + g * INT4_STEP + q * QUAD, &quads[q][g], QUAD);
    scales[g] = best.scales[g];
    zeros[g] = static_cast<uint8_t>(best.zeros[g]);
  }
}

template <typename T>
void quantize_row(const QuantizeWeightInt4Params& p, int64_t row) {
  const int64_t num_groups = p.in_features / INT4_STEP;
  IntVec magnitudes{};
  int64_t group = 0;
  for (; group + VEC_SIZE <= num_groups; group += VEC_SIZE) quantize_groups<T>(p, row, group, VEC_SIZE, magnitudes);
  if (group < num_groups) quantize_groups<T>(p, row, group, num_groups - group, magnitudes);
  p.refused[row] = is_refused(largest_of(magnitudes)) ? first_refused(row_of<T>(p, row), p.in_features) : 0.0f;
}

template <typename Params>
void quantize_rows(const Params& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) quantize_row<T>(params, row);
  });
}

}  // namespace

void quantize_weight_int8(const QuantizeWeightInt8Params& params, int64_t begin, int64_t end) {
  quantize_rows(params, begin, end);
}

void quantize_weight_int4(const QuantizeWeightInt4Params& params, int64_t begin, int64_t end) {
  quantize_rows(params, begin, end);
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
