// Prefill by wgmma, on sm_90a, for queries and caches of the same 16-bit type and heads of up to 128. There are two
// warpgroups of 64 packed rows, so a tile of keys and values is read twice from shared memory. The eight warps of
// paged_attention_mma.cuh read it eight times. Rows, masks and softmax are the same.
//
//   S = Q K^T     Q in registers; K in pieces of 8 elements of 8 tokens, 128 adjacent bytes, as in the CHUNKED layout
//   O = O + P V   P in registers; V in such pieces, too, whose lines are
//                 in the CHUNKED layout 8 tokens of an element,
//                 in the NHD layout 8 elements of a token (Major::N)
//
// While the values of a tile are multiplied, the softmax of the next tile is computed.
#pragma once

#include "attention/cuda/warp_rows.cuh"

namespace pagedattn::cuda {
namespace {

// A tile in shared memory, in units of 16 bytes:
//   keys    [HEAD_SIZE / 8][TOKENS]        units of 8 elements of a token
//   values  NHD      as keys
//           CHUNKED  [TOKENS / 8][HEAD_SIZE + 4]    units of 8 tokens. 4 units are left empty, so that the 8 units that
//                    neighbours copy at a time, 4 elements of 16 tokens, lie in all 32 banks
template <int HEAD_SIZE, CacheLayout LAYOUT>
struct WgmmaTile {
  static constexpr bool IS_NHD = LAYOUT == CacheLayout::NHD;
  static constexpr ptx::Major MAJOR_OF_VALUES = IS_NHD ? ptx::Major::N : ptx::Major::K;
  static constexpr int TOKENS = HEAD_SIZE <= 64 ? 128 : 64;
  static constexpr int NUM_SLICES = TOKENS / SLICE_TOKENS;
  static constexpr int PIECE_BYTES = 8 * 16;                // 8 x 8 elements of an operand
  static constexpr int CHUNK_BYTES = TOKENS * 16;           // of keys: 8 elements
  static constexpr int OCTET_BYTES = (HEAD_SIZE + 4) * 16;  // of values: 8 tokens
  static constexpr int KEY_BYTES = HEAD_SIZE / 8 * CHUNK_BYTES;
  static constexpr int BYTES = KEY_BYTES + (IS_NHD ? KEY_BYTES : TOKENS / 8 * OCTET_BYTES);
  static constexpr int VALUE_STEP_BYTES = 2 * (IS_NHD ? PIECE_BYTES : OCTET_BYTES);  // 16 tokens

  static __device__ uint64_t keys(const unsigned char* tile) {
    return ptx::wgmma_descriptor(tile, CHUNK_BYTES, PIECE_BYTES);
  }
  static __device__ uint64_t values(const unsigned char* tile) {
    return IS_NHD ? ptx::wgmma_descriptor(tile + KEY_BYTES, PIECE_BYTES, CHUNK_BYTES)
                  : ptx::wgmma_descriptor(tile + KEY_BYTES, OCTET_BYTES, PIECE_BYTES);
  }

  // Where the units of a slice lie.
  struct Places {
    unsigned char* tile;
    int slice;

    __device__ unsigned char* key(int chunk, int token) const {
      return tile + chunk * CHUNK_BYTES + (slice * SLICE_TOKENS + token) * 16;
    }
    // NHD: of a chunk and a token. CHUNKED: of an element and 8 tokens.
    __device__ unsigned char* value(int i, int j) const {
      return IS_NHD ? key(i, j) + KEY_BYTES : tile + KEY_BYTES + (2 * slice + j) * OCTET_BYTES + i * 16;
    }
  };
};

// The 16 rows of a warp, one of four warps that multiply together. A multiplication that multiply_... starts is under
// way until a wait. Until then, its registers are not touched.
template <typename T, int HEAD_SIZE, CacheLayout LAYOUT>
class WarpgroupRows : public WarpRows<T, T, HEAD_SIZE, SliceOf<T, HEAD_SIZE, LAYOUT>> {
 public:
  using Tile = WgmmaTile<HEAD_SIZE, LAYOUT>;
  using Rows = WarpRows<T, T, HEAD_SIZE, SliceOf<T, HEAD_SIZE, LAYOUT>>;
  using Rows::Rows;

  __device__ void multiply_keys(const unsigned char* tile) {
    const uint64_t keys = Tile::keys(tile);
    ptx::wgmma_fence(logits_, this->query_);
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 16; ++step) {
      ptx::wgmma_m64k16<T, ptx::Major::K>(logits_, this->query_[step], keys + step * 2 * Tile::CHUNK_BYTES / 16,
                                          step > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ void multiply_values(const unsigned char* tile) {
    const uint64_t values = Tile::values(tile);
    ptx::wgmma_fence(this->values_, probabilities_);
#pragma unroll
    for (int slice = 0; slice < Tile::NUM_SLICES; ++slice) {
      ptx::wgmma_m64k16<T, Tile::MAJOR_OF_VALUES>(this->values_, probabilities_[slice],
                                                  values + slice * Tile::VALUE_STEP_BYTES / 16, true);
    }
    ptx::wgmma_commit();
  }

  // NUM_LATER: how many multiplications were started after that of the keys.
  template <int NUM_LATER>
  __device__ void wait_for_logits() {
    ptx::wgmma_wait<NUM_LATER>(logits_, this->query_);
  }
  __device__ void wait_for_values() { ptx::wgmma_wait<0>(this->values_, probabilities_); }

  // The logits of the tile at `token` become probabilities.
  __device__ void exponentiate(const AttentionArguments& a, const Work& work, int token) {
    this->finish_logits(a, work, logits_, token);
    is_raised_ = this->raise_max(logits_, weight_);
    Rows::exponentiate(logits_);
  }

  // Called after wait_for_values. The sums of values become relative to the new maxima, and the probabilities become an
  // operand.
  __device__ void pack_probabilities() {
    if (is_raised_) this->scale_values(weight_);
#pragma unroll
    for (int slice = 0; slice < Tile::NUM_SLICES; ++slice) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float (&pair)[4] = logits_[2 * slice + r / 2];
        probabilities_[slice][r] = ptx::pack<T>(pair[r % 2 * 2], pair[r % 2 * 2 + 1]);
      }
    }
  }

 private:
  float logits_[Tile::TOKENS / 8][4] = {};
  uint32_t probabilities_[Tile::NUM_SLICES][4] = {};
  float weight_[2];
  bool is_raised_;
};

template <int HEAD_SIZE, CacheLayout LAYOUT>
struct WgmmaPrefill {
  using Tile = WgmmaTile<HEAD_SIZE, LAYOUT>;
  static constexpr int NUM_THREADS = PREFILL_WARPS * WARP_SIZE;
  static constexpr int THREADS_PER_SLICE = NUM_THREADS / Tile::NUM_SLICES;
  // One tile is multiplied with queries and one with probabilities; one comes next, and one is on its way.
  static constexpr int NUM_STAGES = 4;
  static constexpr int SHARED_BYTES = NUM_STAGES * Tile::BYTES;
};

// At an edge of the tokens that the work sees, clears the values of all other tokens in the units that this thread has
// copied. Such values may be anything, and 0 * NaN is NaN.
template <typename T, int HEAD_SIZE, typename Shape>
__device__ void clear_unseen_values(const Work& work, int token, const typename Shape::Tile::Places& places,
                                    int thread) {
  using Slice = CacheSlice<T, HEAD_SIZE>;
  const int half = Slice::value_half(thread);
  const int first = token + half * Slice::HALF;
  if (work.begin <= first && first + Slice::HALF <= work.end) return;
  for (int d = Slice::first_value_row(thread); d < HEAD_SIZE; d += Shape::THREADS_PER_SLICE / 2) {
    auto& unit = *reinterpret_cast<uint4*>(places.value(d, half));
    unit.x &= visible_pair(work, first);
    unit.y &= visible_pair(work, first + 2);
    unit.z &= visible_pair(work, first + 4);
    unit.w &= visible_pair(work, first + 6);
  }
}

// Grid: prefill_grid.
template <typename T, int HEAD_SIZE, CacheLayout LAYOUT>
__global__ void __launch_bounds__(WgmmaPrefill<HEAD_SIZE, LAYOUT>::NUM_THREADS)
    prefill_wgmma_kernel(const __grid_constant__ AttentionArguments a) {
  using Slice = SliceOf<T, HEAD_SIZE, LAYOUT>;
  using Shape = WgmmaPrefill<HEAD_SIZE, LAYOUT>;
  using Tile = typename Shape::Tile;
  Work work;
  if (!find_prefill_work(a, work)) return;

  const int slice = threadIdx.x / Shape::THREADS_PER_SLICE;  // that this thread loads
  const int thread = threadIdx.x % Shape::THREADS_PER_SLICE;
  const auto tile_at = [](int token) { return shared_memory + token / Tile::TOKENS % Shape::NUM_STAGES * Tile::BYTES; };
  int token = work.begin / Tile::TOKENS * Tile::TOKENS;  // so that no tile lies in two partitions
  const auto find = [&](int first) {
    return Slice::template find<Shape::THREADS_PER_SLICE>(a, work, first + slice * SLICE_TOKENS, thread);
  };
  auto next_blocks = find(token);
  // Loads the tile at `first`, whose blocks were looked up one tile before.
  const auto load = [&](int first) {
    if (first < work.end) {
      const typename Tile::Places places{tile_at(first), slice};
      Slice::template load<Shape::THREADS_PER_SLICE>(a, work, first + slice * SLICE_TOKENS, next_blocks, places,
                                                     thread);
      next_blocks = find(first + Tile::TOKENS);
    }
    ptx::cp_async_commit();
  };
  for (int i = 0; i < Shape::NUM_STAGES - 2; ++i) load(token + i * Tile::TOKENS);

  const auto wait_for_tile = [&] {
    ptx::cp_async_wait<Shape::NUM_STAGES - 3>();
    if constexpr (Slice::MAY_HOLD_UNSEEN) {
      clear_unseen_values<T, HEAD_SIZE, Shape>(work, token + slice * SLICE_TOKENS, {tile_at(token), slice}, thread);
    }
    ptx::fence_proxy_async();
    __syncthreads();  // the tile is there for all threads, and all are done with the tile two before it
  };
  const auto load_ahead = [&] { load(token + (Shape::NUM_STAGES - 2) * Tile::TOKENS); };

  WarpgroupRows<T, HEAD_SIZE, LAYOUT> rows(a, work, work.tile_begin + threadIdx.x / WARP_SIZE * MMA_ROWS);
  if (token < work.end) {
    wait_for_tile();
    rows.multiply_keys(tile_at(token));
    load_ahead();
    rows.template wait_for_logits<0>();
    for (;;) {
      rows.exponentiate(a, work, token);
      token += Tile::TOKENS;
      if (token >= work.end) break;  // here: without a branch, ptxas would put the wait before the exponentials
      rows.wait_for_values();
      rows.pack_probabilities();
      wait_for_tile();
      rows.multiply_keys(tile_at(token));
      rows.multiply_values(tile_at(token - Tile::TOKENS));
      load_ahead();
      rows.template wait_for_logits<1>();
    }
    rows.wait_for_values();
    rows.pack_probabilities();
    rows.multiply_values(tile_at(token - Tile::TOKENS));
    rows.wait_for_values();
  }
  rows.finish();
  rows.template store<T>(a, work);
}

template <typename T, int HEAD_SIZE, CacheLayout LAYOUT>
void launch_prefill_wgmma(const AttentionArguments& a, cudaStream_t stream) {
  using Shape = WgmmaPrefill<HEAD_SIZE, LAYOUT>;
  launch(prefill_wgmma_kernel<T, HEAD_SIZE, LAYOUT>, prefill_grid(a), dim3(Shape::NUM_THREADS), Shape::SHARED_BYTES,
         stream, a);
}

}  // namespace

template <typename T, CacheLayout LAYOUT>
void prefill_wgmma(const AttentionArguments& a, cudaStream_t stream) {
  if (a.p.head_size <= 64) {
    launch_prefill_wgmma<T, 64, LAYOUT>(a, stream);
  } else {
    launch_prefill_wgmma<T, 128, LAYOUT>(a, stream);
  }
}

}  // namespace pagedattn::cuda
