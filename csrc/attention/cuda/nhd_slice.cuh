// A slice of a cache in the NHD layout, as CacheSlice is of one in the other layout: 16 tokens of one KV head. Blocks
// of 2 and 4 tokens of the other layout are loaded here as well, token by token: chunks of a key, and elements of a
// value, are 1 << block_shift apart.
//
// Elements of a token are adjacent, in keys and in values, and tokens lie wherever their blocks and strides put them.
// So a slice is loaded by tokens: a thread has one token or two, looks up their places, and copies units of 16 bytes.
// Blocks of 1 token are loaded as blocks of 256 are. In shared memory both keys and values are
//
//   [head_size / ELEMENTS][16 tokens]    units of 8 elements (16 bit) or 16 elements (8 bit) of a token
//
// An instruction of a warp copies 4 units of 8 tokens each: 64 adjacent bytes of a token, and in shared memory 4 pieces
// of 128 bytes. 8 units of a piece are the 8 rows of a matrix of ldmatrix, which lie in all 32 banks. Keys are read as
// they lie. Values are transposed by ldmatrix, so that a register holds an element of two tokens, as P.V wants it. With
// 8 bits it holds two elements of two tokens, and makes two operands: of the even elements, and of the odd ones.
#pragma once

#include <type_traits>

#include "attention/cuda/cache_slice.cuh"

namespace pagedattn::cuda {

template <typename CacheT, int HEAD_SIZE>
struct NhdSlice {
  using Units = CacheSlice<CacheT, HEAD_SIZE>;
  static constexpr int ELEMENTS = Units::ELEMENTS;
  static constexpr int UNITS = Units::UNITS;
  static constexpr int BYTES = Units::BYTES;
  static constexpr bool IS_FLOAT8 = Units::IS_FLOAT8;
  static constexpr bool MAY_HOLD_UNSEEN = false;  // tokens that no row of the work sees are zeros
  static constexpr int HALF = SLICE_TOKENS / 2;
  static constexpr int CHUNKS = HEAD_SIZE / ELEMENTS;

  static __device__ int unit(int chunk, int token) { return chunk * SLICE_TOKENS + token; }

  // Where a slice's units lie, as described above.
  struct Places {
    unsigned char* slice;

    __device__ unsigned char* key(int chunk, int token) const { return slice + unit(chunk, token) * 16; }
    __device__ unsigned char* value(int chunk, int token) const { return slice + (UNITS + unit(chunk, token)) * 16; }
  };

  // The tokens of a slice that one of NUM_THREADS threads loads: every 8th token, or one of them.
  template <int NUM_THREADS>
  struct Blocks {
    static constexpr int NUM_TOKENS = NUM_THREADS == WARP_SIZE ? 2 : 1;
    TokenPlace places[NUM_TOKENS];

    static __device__ int token(int thread, int i) {
      return thread % HALF + (NUM_TOKENS == 2 ? i : thread / WARP_SIZE % 2) * HALF;
    }
  };

  template <int NUM_THREADS>
  static __device__ Blocks<NUM_THREADS> find(const AttentionArguments& a, const Work& work, int token, int thread) {
    Blocks<NUM_THREADS> blocks;
#pragma unroll
    for (int i = 0; i < blocks.NUM_TOKENS; ++i) {
      blocks.places[i] = find_token(a, work, token + blocks.token(thread, i));
    }
    return blocks;
  }

  // Thread `thread` of NUM_THREADS copies its share of the slice at `token`. Tokens that no row of the work sees become
  // zeros and cost no memory traffic. So do the elements from head_size to HEAD_SIZE.
  template <int NUM_THREADS, typename PlacesT>
  static __device__ void load(const AttentionArguments& a, const Work& work, int token,
                              const Blocks<NUM_THREADS>& blocks, const PlacesT& places, int thread) {
    if (a.aligned) {
      load<NUM_THREADS, true>(a, work, token, blocks, places, thread);
    } else {
      load<NUM_THREADS, false>(a, work, token, blocks, places, thread);
      __syncwarp();  // loops over bytes may part the lanes; ldmatrix and mma come next, and want all lanes together
    }
  }

  // ---- where a lane's operands lie in the tensors

  static __device__ int element_of(int lane, int step, int half) { return Units::element_of(lane, step, half); }

  // The first of the two tokens of a lane's logits in tile `tile` of 8 tokens, counted from the slice's first token.
  static __device__ int token_of(int lane, int tile) { return lane % 4 * 2 + tile * 8; }

  // The `tile`-th pair of neighbouring elements that a lane has of a row of accumulators, and the first of the two.
  static __device__ int first_of_pair(int lane, int tile) {
    return IS_FLOAT8 ? tile / 2 * 16 + lane % 4 * 4 + tile % 2 * 2 : tile * 8 + lane % 4 * 2;
  }
  static __device__ Floats<2> pair(const float (&values)[HEAD_SIZE / 8][4], int tile, int row) {
    if constexpr (IS_FLOAT8) {
      const int even = tile / 2 * 2, i = 2 * row + tile % 2;
      return {values[even][i], values[even + 1][i]};
    } else {
      return {values[tile][2 * row], values[tile][2 * row + 1]};
    }
  }

  // ---- operands

  // Loads the keys' elements [32 * step, 32 * step + 32). operands[i][2 * tile + r] is register r for multiplication i
  // (16 elements each) and tile `tile` of 8 tokens.
  static __device__ void load_keys(const unsigned char* slice, int lane, int step, uint32_t (&operands)[2][4]) {
    const int row = lane % 8;
    const int matrix = lane / 8;
    if constexpr (IS_FLOAT8) {  // matrices: (chunk, tile)
      uint32_t matrices[4];
      ptx::ldmatrix_x4(matrices, slice + unit(2 * step + matrix / 2, matrix % 2 * 8 + row) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        widen(CacheT{}, matrices[i], operands[i / 2][i % 2 * 2], operands[i / 2][i % 2 * 2 + 1]);
      }
    } else {
      Units::load_keys(slice, lane, step, operands);
    }
  }

  // Loads the values' elements [32 * step, 32 * step + 32). operands[i] is for the i-th 8 elements; with 8 bits, for
  // the even (i = 0, 2) or odd (1, 3) elements of 16.
  static __device__ void load_values(const unsigned char* slice, int lane, int step, uint32_t (&operands)[4][2]) {
    const unsigned char* values = slice + UNITS * 16;
    const int row = lane % 8;
    const int matrix = lane / 8;
    const int token = matrix % 2 * 8 + row;
    uint32_t matrices[4];
    if constexpr (IS_FLOAT8) {  // matrices: (16 elements, 8 tokens)
      ptx::ldmatrix_x4_trans(matrices, values + unit(2 * step + matrix / 2, token) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t of_elements = __byte_perm(matrices[i], 0, 0x3120);  // from two elements of each of two tokens
        widen(CacheT{}, of_elements, operands[i / 2 * 2][i % 2], operands[i / 2 * 2 + 1][i % 2]);
      }
    } else {  // matrices: (8 elements, 8 tokens)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::ldmatrix_x4_trans(matrices, values + unit(4 * step + 2 * i + matrix / 2, token) * 16);
#pragma unroll
        for (int r = 0; r < 4; ++r) operands[2 * i + r / 2][r % 2] = matrices[r];
      }
    }
  }

 private:
  // Copies a unit of a token's value, from `element` on. Small blocks are never ALIGNED.
  template <bool ALIGNED>
  static __device__ void copy_values(const AttentionArguments& a, unsigned char* target, const CacheT* value,
                                     int element, bool valid) {
    if constexpr (ALIGNED) {
      ptx::cp_async_16(target, value + element, valid);
    } else {
#pragma unroll 1
      for (int i = 0; i < ELEMENTS; ++i) {
        reinterpret_cast<CacheT*>(target)[i] = valid ? value[(element + i) << a.block_shift] : CacheT{};
      }
    }
  }

  // Units are numbered by token % 8 first, then by 4 chunks, then by half, then by chunk / 4.
  template <int NUM_THREADS, bool ALIGNED, typename PlacesT>
  static __device__ void load(const AttentionArguments& a, const Work& work, int token,
                              const Blocks<NUM_THREADS>& blocks, const PlacesT& places, int thread) {
    constexpr int CHUNKS_OF_WARP = WARP_SIZE / HALF;
    constexpr int STEP = CHUNKS_OF_WARP * std::max(1, NUM_THREADS / (2 * WARP_SIZE));
    static_assert(CHUNKS % STEP == 0);
    const auto head_size = static_cast<int>(a.p.head_size);
    const int first_chunk = thread / (2 * WARP_SIZE) * CHUNKS_OF_WARP + thread % WARP_SIZE / HALF;
#pragma unroll
    for (int i = 0; i < blocks.NUM_TOKENS; ++i) {
      const int of_slice = blocks.token(thread, i);
      const bool visible = token + of_slice >= work.begin && token + of_slice < work.end;
      const auto* key = row_of_token<CacheT>(a.p.key_cache, a.p.key_strides, work, blocks.places[i]);
      const auto* value = row_of_token<CacheT>(a.p.value_cache, a.p.value_strides, work, blocks.places[i]);
#pragma unroll(ALIGNED ? CHUNKS / STEP : 1)
      for (int j = 0; j < CHUNKS / STEP; ++j) {
        const int chunk = first_chunk + j * STEP;
        const int element = chunk * ELEMENTS;
        const bool valid = visible && element < head_size;
        copy_async<16, ALIGNED>(places.key(chunk, of_slice), key + (element << a.block_shift), valid);
        copy_values<ALIGNED>(a, places.value(chunk, of_slice), value, element, valid);
      }
    }
  }
};

// A slice of either layout, as cp.async loads it.
template <typename CacheT, int HEAD_SIZE, CacheLayout LAYOUT>
using SliceOf =
    std::conditional_t<LAYOUT == CacheLayout::NHD, NhdSlice<CacheT, HEAD_SIZE>, CacheSlice<CacheT, HEAD_SIZE>>;

}  // namespace pagedattn::cuda
