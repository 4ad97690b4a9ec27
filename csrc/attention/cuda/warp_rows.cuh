// The work of a warp on tensor cores. A warp has 16 packed rows: their queries as operands of mma.m16n8k16, their
// weighted values as accumulators, and an online softmax between the two.
#pragma once

#include "attention/cuda/nhd_slice.cuh"
#include "attention/cuda/row_results.cuh"

namespace pagedattn::cuda {

// Turns a row's logits into binary exponents relative to its maximum: (logit - max) * factor.
struct RowExponents {
  float factor;
  float max;  // 0 where the row has seen nothing

  // One instruction. max * factor is rounded, with an error of at most 2^-15 unless it is large.
  __device__ float of_small(float logit) const { return fmaf(logit, factor, -(max * factor)); }
  // Two instructions, with no error but that of the product.
  __device__ float of_large(float logit) const { return (logit - max) * factor; }
  __device__ float of_any(float logit) const { return is_large() ? of_large(logit) : of_small(logit); }
  __device__ bool is_large() const { return fabsf(max * factor) > 1024.0f; }
};

// The 16 packed rows of a warp, from `first_packed` on. A lane holds parts of rows lane / 4 and lane / 4 + 8, which
// have index 0 and 1 below.
template <typename T, typename CacheT, int HEAD_SIZE, typename SliceT = CacheSlice<CacheT, HEAD_SIZE>>
class WarpRows {
 public:
  using Slice = SliceT;

  __device__ WarpRows(const AttentionArguments& a, const Work& work, int first_packed)
      : lane_(threadIdx.x % WARP_SIZE), first_packed_(first_packed) {
    const float scale = logit_scale(a);
    scales_last_ =
        !(a.p.softcap > 0.0f) && a.p.alibi_slopes == nullptr && scale >= MIN_LAST_SCALE && scale <= MAX_LAST_SCALE;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int packed = packed_row(work, i);
      position_[i] = row_position(a, work, packed);
      slope_[i] = a.p.alibi_slope(work.seq, head_of(a, work, packed));
      scale_[i] = scale;
      max_[i] = -INFINITY;
      sum_[i] = 0.0f;
    }
    load_query(a, work);
#pragma unroll
    for (auto& tile : values_) {
      for (float& value : tile) value = 0.0f;
    }
  }

  // Attends to the tokens of `NUM_SLICES` slices, from `token` on.
  template <int NUM_SLICES>
  __device__ void attend(const AttentionArguments& a, const Work& work, const unsigned char* slices, int token) {
    float logits[2 * NUM_SLICES][4] = {};
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 32; ++step) {
#pragma unroll
      for (int slice = 0; slice < NUM_SLICES; ++slice) {
        uint32_t keys[2][4];
        Slice::load_keys(slices + slice * Slice::BYTES, lane_, step, keys);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::mma_m16n8k16<T>(logits[2 * slice], query_[2 * step + i], keys[i][0], keys[i][1]);
          ptx::mma_m16n8k16<T>(logits[2 * slice + 1], query_[2 * step + i], keys[i][2], keys[i][3]);
        }
      }
    }

    finish_logits(a, work, logits, token);
    float weight[2] = {};
    if (raise_max(logits, weight)) scale_values(weight);
    exponentiate(logits);
    if (!Slice::MAY_HOLD_UNSEEN || (work.begin <= token && token + NUM_SLICES * SLICE_TOKENS <= work.end)) {
      add_values<false>(work, slices, logits, token);
    } else {
      add_values<true>(work, slices, logits, token);
    }
  }

  // Called once, after the last token: sums become those of whole rows, and maxima are scaled.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] += __shfl_xor_sync(ALL_LANES, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(ALL_LANES, sum_[i], 2);
      if (scales_last_) max_[i] *= scale_of(i);
    }
  }

  // Writes the rows to the `index`-th results of the block.
  template <typename Results>
  __device__ void write(const Work& work, Results& results, int index) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has_row(work, i)) continue;
      const int row = first_packed_ - work.tile_begin + lane_ / 4 + i * 8;
      if (lane_ % 4 == 0) results.softmax[index][row] = make_float2(max_[i], sum_[i]);
#pragma unroll
      for (int tile = 0; tile < HEAD_SIZE / 8; ++tile) {
        const Floats<2> pair = Slice::pair(values_, tile, i);
        *reinterpret_cast<float2*>(&results.values[index][row][Slice::first_of_pair(lane_, tile)]) =
            make_float2(pair[0], pair[1]);
      }
    }
  }

  // Writes the rows' results as they are to an out of type Out: no other warp has worked on these rows.
  template <typename Out>
  __device__ void store(const AttentionArguments& a, const Work& work) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has_row(work, i)) continue;
      const RowTarget target = begin_row(a, work, packed_row(work, i), max_[i], sum_[i], lane_ % 4 == 0);
#pragma unroll
      for (int tile = 0; tile < HEAD_SIZE / 8; ++tile) {
        const int d = Slice::first_of_pair(lane_, tile);
        if (d >= a.p.head_size) continue;
        target.template store<Out>(a, work, d, Slice::pair(values_, tile, i));
      }
    }
  }

  // Whether no row of this warp sees a token from `token` on, whatever its chunk. The warp may have no row at all.
  __device__ bool is_before(const AttentionArguments& a, const Work& work, int token) const {
    const bool sees = is_before_end(a, position_[0], token) || is_before_end(a, position_[1], token);
    return first_packed_ >= work.tile_end || !__any_sync(ALL_LANES, sees);
  }

 protected:
  __device__ bool has_row(const Work& work, int i) const { return first_packed_ + lane_ / 4 + i * 8 < work.tile_end; }
  // Past the last row of the tile, the last row again: it sees no other tokens, and is not written.
  __device__ int packed_row(const Work& work, int i) const {
    return min(first_packed_ + lane_ / 4 + i * 8, work.tile_end - 1);
  }

  // Calls function(logit, row, token) for all logits of a lane, in tiles of 8 tokens from `token` on. row is 0 or 1.
  template <int NUM_TILES, typename Function>
  __device__ void for_each(float (&logits)[NUM_TILES][4], int token, const Function& function) const {
#pragma unroll
    for (int tile = 0; tile < NUM_TILES; ++tile) {
      const int first = token + tile / 2 * SLICE_TOKENS + Slice::token_of(lane_, tile % 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) function(logits[tile][i], i / 2, first + i % 2);
    }
  }

  // Turns products of query and keys into logits: scaled unless scales_last_, capped and biased. Minus infinity for a
  // token that the row does not see.
  template <int NUM_TILES>
  __device__ void finish_logits(const AttentionArguments& a, const Work& work, float (&logits)[NUM_TILES][4],
                                int token) const {
    if (!scales_last_) {
      for_each(logits, token, [&](float& logit, int i, int) { logit *= scale_of(i); });
      if (a.p.softcap > 0.0f) {
        for_each(logits, token, [&](float& logit, int, int) { logit = cap_logit(a, logit); });
      }
      if (a.p.alibi_slopes != nullptr) {
        for_each(logits, token, [&](float& logit, int i, int key_token) {
          logit = fmaf(slope_[i], alibi_distance(position_[i], key_token), logit);
        });
      }
    }
    if (!windows_have_all(a, work, token, NUM_TILES * 8)) {
      for_each(logits, token, [&](float& logit, int i, int key_token) {
        const bool visible = key_token >= first_of_window(a, position_[i]) &&
                             is_before_end(a, position_[i], key_token) && key_token < work.end;
        logit = visible ? logit : -INFINITY;
      });
    }
    if (a.attention_chunk != 0) {
      for_each(logits, token, [&](float& logit, int i, int key_token) {
        if (!is_in_chunk(a, first_of_chunk(a, position_[i]), key_token)) logit = -INFINITY;
      });
    }
  }

  // Whether the windows of all rows of the warp have all of the tokens.
  __device__ bool windows_have_all(const AttentionArguments& a, const Work& work, int token, int num_tokens) const {
    bool all = token + num_tokens <= work.end;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      all = all && first_of_window(a, position_[i]) <= token && is_before_end(a, position_[i], token + num_tokens - 1);
    }
    return __all_sync(ALL_LANES, all);
  }

  // With an 8-bit cache, bfloat16 queries are multiplied in float16. Each row is divided by a power of two of its own,
  // so that no element overflows. An element that is then below float16's range is 2^-24 of the row's largest element,
  // or less.
  __device__ void load_query(const AttentionArguments& a, const Work& work) {
    const uint16_t* rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int packed = packed_row(work, i);
      rows[i] = static_cast<const uint16_t*>(a.p.query) + row_of(a, work, packed) * a.p.query_stride +
                head_of(a, work, packed) * a.p.head_size;
    }
    if (a.query_in_pairs) {
      load_rows<true>(a, rows);
    } else {
      load_rows<false>(a, rows);
    }
  }

  // IN_PAIRS: two elements at a time.
  template <bool IN_PAIRS>
  __device__ void load_rows(const AttentionArguments& a, const uint16_t* const (&rows)[2]) {
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 16; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int element = Slice::element_of(lane_, step, r / 2);
        uint32_t bits = 0;
        if (element < a.p.head_size) {
          const uint16_t* pair = rows[r % 2] + element;
          bits = IN_PAIRS ? *reinterpret_cast<const uint32_t*>(pair) : pair[0] | static_cast<uint32_t>(pair[1]) << 16;
        }
        query_[step][r] = bits;
        if constexpr (Slice::IS_FLOAT8) {
          largest[r % 2] = fmaxf(largest[r % 2], fmaxf(fabsf(low_bfloat16(bits)), fabsf(high_bfloat16(bits))));
        }
      }
    }
    if constexpr (Slice::IS_FLOAT8) {
      if (a.p.dtype == DType::BFLOAT16) convert_query(largest);
    }
  }

  __device__ void convert_query(float (&largest)[2]) {
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(ALL_LANES, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(ALL_LANES, largest[i], 2));
      // The power of two at or below `largest`, within the powers that have an inverse.
      const uint32_t exponent = min(max(__float_as_uint(largest[i]) >> 23, 1u), 253u);
      scale_[i] *= __uint_as_float(exponent << 23);
      // This changes only a row that is so small that all its logits are 0 in float, give or take 2^-90.
      if (scales_last_) scale_[i] = fmaxf(scale_[i], MIN_LAST_SCALE);
      inverse[i] = __uint_as_float((254 - exponent) << 23);
    }
#pragma unroll
    for (auto& registers : query_) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t bits = registers[r];
        registers[r] = ptx::pack<T>(low_bfloat16(bits) * inverse[r % 2], high_bfloat16(bits) * inverse[r % 2]);
      }
    }
  }

  static __device__ float low_bfloat16(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ float high_bfloat16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

  // Raises the rows' maxima to the maxima of the logits, and makes their sums relative to the new maxima. False: no
  // maximum of the warp's rows has grown. True: the rows' values are to be multiplied with `weight`.
  template <int NUM_TILES>
  __device__ bool raise_max(float (&logits)[NUM_TILES][4], float (&weight)[2]) {
    float max[2] = {max_[0], max_[1]};
    for_each(logits, 0, [&](float& logit, int i, int) { max[i] = fmaxf(max[i], logit); });
    bool larger = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max[i] = fmaxf(max[i], __shfl_xor_sync(ALL_LANES, max[i], 1));
      max[i] = fmaxf(max[i], __shfl_xor_sync(ALL_LANES, max[i], 2));
      larger = larger || max[i] > max_[i];
    }
    if (!__any_sync(ALL_LANES, larger)) return false;
    bool is_large = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float old_max = max_[i];
      max_[i] = max[i];
      const RowExponents row = exponents(i);
      weight[i] = ptx::exp2_approx(KNOWS_LARGE ? row.of_any(old_max) : row.of_large(old_max));
      sum_[i] *= weight[i];
      is_large = is_large || row.is_large();
    }
    if constexpr (KNOWS_LARGE) has_large_ = __any_sync(ALL_LANES, is_large);
    return true;
  }

  __device__ void scale_values(const float (&weight)[2]) {
#pragma unroll
    for (auto& tile : values_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[i] *= weight[i / 2];
    }
  }

  __device__ float scale_of(int i) const { return scale_[Slice::IS_FLOAT8 ? i : 0]; }

  __device__ RowExponents exponents(int i) const {
    return {scales_last_ ? scale_of(i) * LOG2_E : LOG2_E, max_[i] == -INFINITY ? 0.0f : max_[i]};
  }

  // The logits become probabilities, e^(logit - max), and are added to the sums.
  template <int NUM_TILES>
  __device__ void exponentiate(float (&logits)[NUM_TILES][4]) {
    const RowExponents rows[2] = {exponents(0), exponents(1)};
    const auto add = [&](float& logit, int i, float exponent) {
      logit = ptx::exp2_approx(exponent);
      sum_[i] += logit;
    };
    if constexpr (!KNOWS_LARGE) {
      for_each(logits, 0, [&](float& logit, int i, int) { add(logit, i, rows[i].of_large(logit)); });
    } else if (has_large_) {
      for_each(logits, 0, [&](float& logit, int i, int) { add(logit, i, rows[i].of_any(logit)); });
    } else {
      for_each(logits, 0, [&](float& logit, int i, int) { add(logit, i, rows[i].of_small(logit)); });
    }
  }

  // values += probabilities * V. At an edge of the tokens that the work sees, the values of all other tokens are
  // masked: they may be anything, and 0 * NaN is NaN.
  template <bool AT_EDGE, int NUM_TILES>
  __device__ void add_values(const Work& work, const unsigned char* slices, const float (&p)[NUM_TILES][4], int token) {
#pragma unroll
    for (int slice = 0; slice < NUM_TILES / 2; ++slice) {
      uint32_t probabilities[4];
      uint32_t mask[2] = {~0u, ~0u};
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float (&four)[4] = p[2 * slice + tile];
        probabilities[2 * tile] = ptx::pack<T>(four[0], four[1]);
        probabilities[2 * tile + 1] = ptx::pack<T>(four[2], four[3]);
        if constexpr (AT_EDGE) {
          mask[tile] = visible_pair(work, token + slice * SLICE_TOKENS + Slice::token_of(lane_, tile));
        }
      }
#pragma unroll
      for (int step = 0; step < HEAD_SIZE / 32; ++step) {
        uint32_t operands[4][2];
        Slice::load_values(slices + slice * Slice::BYTES, lane_, step, operands);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ptx::mma_m16n8k16<T>(values_[4 * step + i], probabilities, operands[i][0] & mask[0],
                               operands[i][1] & mask[1]);
        }
      }
    }
  }

  // Scales for which neither scale * log2(e) nor what this is multiplied with leaves the range of float, also with a
  // power of two from convert_query.
  static constexpr float MIN_LAST_SCALE = 0x1p-126f;
  static constexpr float MAX_LAST_SCALE = 2.0f;
  // Larger heads and 8-bit caches leave no register for has_large_.
  static constexpr bool KNOWS_LARGE = HEAD_SIZE <= 128 && !Slice::IS_FLOAT8;

  int lane_;
  int first_packed_;
  int position_[2];
  float slope_[2];          // of ALiBi
  float scale_[2];          // the same for both rows, unless convert_query scales them
  bool scales_last_;        // logits are the unscaled products of query and keys, and exponents are scaled
  bool has_large_ = false;  // one of the warp's rows has a large maximum
  float max_[2];
  float sum_[2];  // of this lane's logits
  uint32_t query_[HEAD_SIZE / 16][4];
  float values_[HEAD_SIZE / 8][4];
};

}  // namespace pagedattn::cuda
