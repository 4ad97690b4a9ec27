// A slice of a cache in the CHUNKED layout: 16 tokens of one KV head in shared memory, loaded by cp.async and read as
// operands of mma.m16n8k16. nhd_slice.cuh has the other layout.
//
// This layout is made for slices. 8 consecutive elements of a 16-bit key are 16 bytes. The same elements of 8
// consecutive tokens are 128 adjacent bytes: the 8 x 8 matrix that ldmatrix wants. A row of values holds consecutive
// tokens, as the operand of P.V does. Keys and values are copied 16 bytes at a time; a warp copies 512 adjacent bytes
// where a block has 16 tokens or more:
//
//   16 bit   keys   [head_size / 8][16 tokens]     units of 8 elements of a token
//            values [head_size][2]                 units of 8 tokens; the two are swapped where d & 4, so that the 8
//                                                  rows of a matrix lie in all 32 banks
//   8 bit    keys   [head_size / 16][16 tokens]    units of 16 elements of a token; the upper 8 tokens are swapped in
//                                                  pairs, for the same reason
//            values [head_size]                    units of 16 tokens
//
// Bulk copies bring units as they lie in memory, not SWAPPED. A warp then reads half of its matrices (values of 16
// bits, keys of 8 bits) in two steps.
//
// ldmatrix moves 16-bit pairs. With 8-bit elements, a lane gets four neighbours, from 4 * (lane % 4) on. The operand
// has two neighbours from 2 * (lane % 4) on, and two more 8 elements later. The order within a sum does not matter, so
// query and probabilities are arranged in the order that ldmatrix gives (`element_of`, `token_of`).
#pragma once

#include "attention/cuda/paged_attention.cuh"
#include "cuda_vec.cuh"

namespace pagedattn::cuda {

// The blocks that the two halves of a slice lie in. It is the same block, unless blocks have 8 tokens.
struct SliceBlocks {
  int32_t first;
  int32_t second;

  __device__ int64_t of_half(int half) const { return half == 0 ? first : second; }
};

// The blocks of the slice at `token`. 0 for a half that no row of the work sees, as its table entry may be anything.
__device__ inline SliceBlocks find_blocks(const AttentionArguments& a, const Work& work, int token) {
  constexpr int HALF = SLICE_TOKENS / 2;
  const Indices table = a.p.block_table(work.seq);
  const auto block_of = [&](int begin, int num_tokens) -> int32_t {
    const int first = max(begin, work.begin);
    return first < min(begin + num_tokens, work.end) ? table.low(first >> a.block_shift) : 0;
  };
  // Two loads, even of the same entry: a copy of the first result would wait for the first load.
  const bool is_parted = (1 << a.block_shift) == HALF;
  const int num_tokens = is_parted ? HALF : SLICE_TOKENS;
  return {block_of(token, num_tokens), block_of(is_parted ? token + HALF : token, num_tokens)};
}

// A mask for the 16-bit elements of two neighbouring tokens: ones where a row of the work may see the token.
__device__ inline uint32_t visible_pair(const Work& work, int token) {
  const auto visible = [&](int t) { return t >= work.begin && t < work.end; };
  return (visible(token) ? 0x0000ffffu : 0u) | (visible(token + 1) ? 0xffff0000u : 0u);
}

// Copies BYTES (8 or 16) from the cache to shared memory, or writes zeros if not `valid`. As with cp_async, the caller
// waits for the copy.
template <int BYTES, bool ALIGNED>
__device__ inline void copy_async(unsigned char* target, const void* source, bool valid) {
  if constexpr (!ALIGNED) {
#pragma unroll 1
    for (int i = 0; i < BYTES; ++i) target[i] = valid ? static_cast<const unsigned char*>(source)[i] : 0;
  } else if constexpr (BYTES == 16) {
    ptx::cp_async_16(target, source, valid);
  } else {
    ptx::cp_async_8(target, source, valid);
  }
}

// Four 8-bit elements become two registers of pairs of float16, exactly.
__device__ inline void widen(float8_e4m3, uint32_t x, uint32_t& low, uint32_t& high) {
  low = ptx::e4m3x2_to_f16x2(x);
  high = ptx::e4m3x2_to_f16x2(x >> 16);
}
__device__ inline void widen(float8_e5m2, uint32_t x, uint32_t& low, uint32_t& high) {  // the upper bytes of float16
  low = __byte_perm(x, 0, 0x1404);
  high = __byte_perm(x, 0, 0x3424);
}

template <typename CacheT, int HEAD_SIZE, bool SWAPPED = true>
struct CacheSlice {
  static constexpr int ELEMENTS = 16 / sizeof(CacheT);      // in a unit of 16 bytes
  static constexpr int UNITS = HEAD_SIZE * sizeof(CacheT);  // of keys, and of values
  static constexpr int BYTES = 2 * UNITS * 16;
  static constexpr bool IS_FLOAT8 = sizeof(CacheT) == 1;
  static constexpr bool MAY_HOLD_UNSEEN = true;  // a unit of values may hold tokens that no row of the work sees
  static constexpr int HALF = SLICE_TOKENS / 2;

  static __device__ int key_unit(int chunk, int token) {
    return chunk * SLICE_TOKENS + (IS_FLOAT8 && SWAPPED ? token ^ (token >> 3 & 1) << 1 : token);
  }
  static __device__ int value_unit(int d, int half) { return 2 * d + (SWAPPED ? half ^ (d >> 2 & 1) : half); }

  // Where a slice's units lie, as described above.
  struct Places {
    unsigned char* slice;

    __device__ unsigned char* key(int chunk, int token) const { return slice + key_unit(chunk, token) * 16; }
    __device__ unsigned char* value(int d, int half) const {
      return slice + (UNITS + (IS_FLOAT8 ? d : value_unit(d, half))) * 16;
    }
  };

  template <int NUM_THREADS>
  using Blocks = SliceBlocks;
  template <int NUM_THREADS>
  static __device__ SliceBlocks find(const AttentionArguments& a, const Work& work, int token, int) {
    return find_blocks(a, work, token);
  }

  // Thread `thread` of NUM_THREADS copies its share of the slice at `token`. Units that no row of the work sees become
  // zeros and cost no memory traffic. So do the elements from head_size to HEAD_SIZE.
  template <int NUM_THREADS, typename PlacesT>
  static __device__ void load(const AttentionArguments& a, const Work& work, int token, const SliceBlocks& blocks,
                              const PlacesT& places, int thread) {
    if (a.aligned) {
      load<NUM_THREADS, true>(a, work, token, blocks, places, thread);
    } else {
      load<NUM_THREADS, false>(a, work, token, blocks, places, thread);
      __syncwarp();  // loops over bytes may part the lanes; ldmatrix and mma come next, and want all lanes together
    }
  }

  // The values that a thread copies of a slice of 16-bit elements: the unit value_half of rows first_value_row,
  // first_value_row + NUM_THREADS / 2, ...
  static __device__ int value_half(int thread) { return thread % 2; }
  static __device__ int first_value_row(int thread) { return thread / 2; }

  // ---- where a lane's operands lie in the tensors

  // The first of the two elements that the query's operand `step` has in register 2 * half (rows 0 to 7) and in
  // register 2 * half + 1 (rows 8 to 15).
  static __device__ int element_of(int lane, int step, int half) {
    return step * 16 + (IS_FLOAT8 ? lane % 4 * 4 + half * 2 : lane % 4 * 2 + half * 8);
  }

  // The first of the two tokens of a lane's logits in tile `tile` of 8 tokens, counted from the slice's first token.
  static __device__ int token_of(int lane, int tile) {
    return IS_FLOAT8 ? lane % 4 * 4 + tile * 2 : lane % 4 * 2 + tile * 8;
  }

  // The `tile`-th pair of neighbouring elements that a lane has of a row of accumulators, and the first of the two.
  static __device__ int first_of_pair(int lane, int tile) { return tile * 8 + lane % 4 * 2; }
  static __device__ Floats<2> pair(const float (&values)[HEAD_SIZE / 8][4], int tile, int row) {
    return {values[tile][2 * row], values[tile][2 * row + 1]};
  }

  // ---- operands

  // Loads the keys' elements [32 * step, 32 * step + 32). operands[i][2 * tile + r] is register r for multiplication i
  // (16 elements each) and tile `tile` of 8 tokens.
  static __device__ void load_keys(const unsigned char* slice, int lane, int step, uint32_t (&operands)[2][4]) {
    const int row = lane % 8;
    const int matrix = lane / 8;
    if constexpr (IS_FLOAT8) {  // matrices: (chunk, tile)
      const int chunk = 2 * step + matrix / 2;
      const int token = row / 2 * 4 + row % 2 + matrix % 2 * 2;
      uint32_t matrices[4];
      ptx::ldmatrix_x4(matrices, slice + key_unit(chunk, token) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        widen(CacheT{}, matrices[i], operands[i / 2][i % 2 * 2], operands[i / 2][i % 2 * 2 + 1]);
      }
    } else {  // matrices: (tile, chunk)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = 4 * step + 2 * i + matrix % 2;
        const int token = matrix / 2 * 8 + row;
        ptx::ldmatrix_x4(operands[i], slice + key_unit(chunk, token) * 16);
      }
    }
  }

  // Loads the values' elements [32 * step, 32 * step + 32). operands[i] is for the i-th 8 elements.
  static __device__ void load_values(const unsigned char* slice, int lane, int step, uint32_t (&operands)[4][2]) {
    const unsigned char* values = slice + UNITS * 16;
    const int row = lane % 8;
    const int matrix = lane / 8;
    uint32_t matrices[4];
    if constexpr (IS_FLOAT8) {  // matrices: 8 elements each
      ptx::ldmatrix_x4(matrices, values + (step * 32 + matrix * 8 + row) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) widen(CacheT{}, matrices[i], operands[i][0], operands[i][1]);
    } else {  // matrices: (8 elements, 8 tokens)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int d = step * 32 + i * 16 + matrix / 2 * 8 + row;
        ptx::ldmatrix_x4(matrices, values + value_unit(d, matrix % 2) * 16);
#pragma unroll
        for (int r = 0; r < 4; ++r) operands[2 * i + r / 2][r % 2] = matrices[r];
      }
    }
  }

 private:
  template <int NUM_THREADS, bool ALIGNED, typename PlacesT>
  static __device__ void load(const AttentionArguments& a, const Work& work, int token, const SliceBlocks& blocks,
                              const PlacesT& places, int thread) {
    static_assert(UNITS % NUM_THREADS == 0 && NUM_THREADS % SLICE_TOKENS == 0);
    const auto head_size = static_cast<int>(a.p.head_size);
    const int block_mask = (1 << a.block_shift) - 1;
    const int64_t head_offset = work.kv_head * a.p.head_size << a.block_shift;

    const int key_token = token + thread % SLICE_TOKENS;
    const bool key_visible = key_token >= work.begin && key_token < work.end;
    const CacheT* keys = static_cast<const CacheT*>(a.p.key_cache) +
                         blocks.of_half(thread % SLICE_TOKENS / HALF) * a.p.key_strides.block + head_offset +
                         (key_token & block_mask) * ELEMENTS;
#pragma unroll(ALIGNED ? UNITS / NUM_THREADS : 1)
    for (int i = 0; i < UNITS / NUM_THREADS; ++i) {
      const int chunk = (thread + i * NUM_THREADS) / SLICE_TOKENS;
      const int element = chunk * ELEMENTS;
      copy_async<16, ALIGNED>(places.key(chunk, thread % SLICE_TOKENS), keys + (element << a.block_shift),
                              key_visible && element < head_size);
    }

    const auto values_at = [&](int half) {
      return static_cast<const CacheT*>(a.p.value_cache) + blocks.of_half(half) * a.p.value_strides.block +
             head_offset + ((token + half * HALF) & block_mask);
    };
    const auto visible = [&](int half, int num_tokens) {
      const int begin = token + half * HALF;
      return begin + num_tokens > work.begin && begin < work.end;
    };
    if constexpr (!IS_FLOAT8) {
      const int half = value_half(thread);
      const CacheT* values = values_at(half);
      const bool half_visible = visible(half, HALF);
#pragma unroll(ALIGNED ? UNITS / NUM_THREADS : 1)
      for (int i = 0; i < UNITS / NUM_THREADS; ++i) {
        const int d = first_value_row(thread) + i * (NUM_THREADS / 2);
        copy_async<16, ALIGNED>(places.value(d, half), values + (d << a.block_shift), half_visible && d < head_size);
      }
    } else if (block_mask >= HALF) {
      const CacheT* values = values_at(0);
      const bool slice_visible = visible(0, SLICE_TOKENS);
#pragma unroll(ALIGNED ? UNITS / NUM_THREADS : 1)
      for (int i = 0; i < UNITS / NUM_THREADS; ++i) {
        const int d = thread + i * NUM_THREADS;
        copy_async<16, ALIGNED>(places.value(d, 0), values + (d << a.block_shift), slice_visible && d < head_size);
      }
    } else {  // a row of values is 8 bytes in each of two blocks
      for (int d = thread; d < UNITS; d += NUM_THREADS) {
        for (int half = 0; half < 2; ++half) {
          copy_async<8, ALIGNED>(places.value(d, 0) + half * 8, values_at(half) + (d << a.block_shift),
                                 visible(half, HALF) && d < head_size);
        }
      }
    }
  }
};

}  // namespace pagedattn::cuda
