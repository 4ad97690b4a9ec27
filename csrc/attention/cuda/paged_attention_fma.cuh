// Attention in fp32: multiply-adds on the CUDA cores. For fp32 queries, as tensor cores would round fp32 to 10 bits,
// over a cache of fp32 or 8 bits; and for heads of more than MAX_MMA_HEAD_SIZE of any type.
//
// A block has a tile of 8 packed rows. Its warps share out the tokens, 32 at a time. For query . key, a lane has a
// token, and reads up to 16 bytes at a time of its key; in the CHUNKED layout neighbouring lanes read neighbours. For
// probability . value, a lane has elements of the head. In the CHUNKED layout it reads several tokens of an element at
// a time (one of a large head), and all that is fetched is used. In the NHD layout neighbouring lanes read neighbouring
// elements of a token. K and V are read from device memory once for each tile.
#pragma once

#include <cstring>
#include <type_traits>

#include "attention/cuda/row_results.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int FMA_WARPS = 4;
constexpr int FMA_THREADS = FMA_WARPS * WARP_SIZE;

// An element of the cache, of 4, 2 or 1 bytes. Kernels are compiled for the size of an element alone, as this is not
// the fast path of 16-bit and 8-bit caches: which type of 2 bytes or 1 byte it is, is known when the kernel runs.
template <int BYTES>
using Bits = std::conditional_t<BYTES == 4, uint32_t, std::conditional_t<BYTES == 2, uint16_t, uint8_t>>;

__device__ inline float float_of(DType, uint32_t bits) { return std::bit_cast<float>(bits); }
__device__ inline float float_of(DType dtype, uint16_t bits) {
  return dtype == DType::BFLOAT16 ? to_float(bfloat16{bits}) : to_float(float16{bits});
}
__device__ inline float float_of(DType dtype, uint8_t bits) {
  const uint32_t half = dtype == DType::FLOAT8_E5M2 ? uint32_t{bits} << 8 : ptx::e4m3x2_to_f16x2(bits) & 0xffff;
  return to_float(float16{static_cast<uint16_t>(half)});
}

// What a thread loads at once, of 1 to 16 bytes.
template <int BYTES>
using Word = std::conditional_t<BYTES == 16, uint4, std::conditional_t<BYTES == 8, uint2, Bits<BYTES>>>;

// Loads NUM elements of the cache from `source`: 16 bytes at most, all in one block.
template <typename BitsT, int NUM>
__device__ inline void load_elements(const AttentionArguments& a, const BitsT* source, float (&elements)[NUM]) {
  alignas(16) BitsT loaded[NUM];
  if (a.aligned) {
    const auto word = *reinterpret_cast<const Word<sizeof loaded>*>(source);
    memcpy(loaded, &word, sizeof loaded);
  } else {
#pragma unroll
    for (int i = 0; i < NUM; ++i) loaded[i] = source[i];
  }
#pragma unroll
  for (int i = 0; i < NUM; ++i) elements[i] = float_of(a.p.cache_dtype, loaded[i]);
}

// Calls function.operator()<T>() with the type of query and out.
template <int BYTES, int HEAD_SIZE, typename Function>
__device__ void with_query_type(const AttentionArguments& a, const Function& function) {
  if constexpr (BYTES < 4 && HEAD_SIZE > MAX_MMA_HEAD_SIZE) {
    if (a.p.dtype == DType::FLOAT16) return function.template operator()<float16>();
    if (a.p.dtype == DType::BFLOAT16) return function.template operator()<bfloat16>();
  }
  if constexpr (BYTES != 2) function.template operator()<float>();
}

template <int HEAD_SIZE>
struct FmaShared {
  float query[FMA_ROWS][HEAD_SIZE];
  float probabilities[FMA_WARPS][FMA_ROWS][WARP_SIZE];
  BlockResults<FMA_WARPS, FMA_ROWS, HEAD_SIZE> results;
};

// The work of a warp, 32 tokens at a time. HEAD_SIZE is the largest head that a lane's registers hold.
template <int BYTES, int HEAD_SIZE, CacheLayout LAYOUT>
class FmaWarp {
 public:
  __device__ FmaWarp(const AttentionArguments& a, const Work& work, FmaShared<HEAD_SIZE>& shared)
      : a_(a),
        work_(work),
        shared_(shared),
        probabilities_(shared.probabilities[threadIdx.x / WARP_SIZE]),
        lane_(threadIdx.x % WARP_SIZE),
        scale_(logit_scale(a)) {
#pragma unroll
    for (int row = 0; row < FMA_ROWS; ++row) {
      max_[row] = -INFINITY;
      sum_[row] = 0.0f;
#pragma unroll
      for (float& value : values_[row]) value = 0.0f;
    }
  }

  __device__ void attend(int first_token) {
    float logits[FMA_ROWS] = {};
    const int token = first_token + lane_;
    const bool in_range = token >= work_.begin && token < work_.end;
    if (in_range) dot_queries(token, logits);
#pragma unroll
    for (int row = 0; row < FMA_ROWS; ++row) {
      const int packed = work_.tile_begin + row;
      if (packed >= work_.tile_end) break;
      const int position = row_position(a_, work_, packed);
      float logit = logits[row] * scale_;
      if (a_.p.softcap > 0.0f) logit = cap_logit(a_, logit);
      if (a_.p.alibi_slopes != nullptr) {
        const float slope = a_.p.alibi_slope(work_.seq, head_of(a_, work_, packed));
        logit = fmaf(slope, alibi_distance(position, token), logit);
      }
      const bool visible = in_range && is_before_end(a_, position, token) && token >= first_of_window(a_, position) &&
                           (a_.attention_chunk == 0 || is_in_chunk(a_, first_of_chunk(a_, position), token));
      add_logit(row, visible ? logit : -INFINITY);
    }
    __syncwarp();
    add_values(first_token);
    __syncwarp();  // before the next tokens' probabilities
  }

  __device__ void write() const {
    const int warp = threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int row = 0; row < FMA_ROWS; ++row) {
      if (lane_ == 0) shared_.results.softmax[warp][row] = make_float2(max_[row], sum_[row]);
#pragma unroll
      for (int i = 0; i < HEAD_SIZE / WARP_SIZE; ++i) {
        shared_.results.values[warp][row][lane_ + i * WARP_SIZE] = values_[row][i];
      }
    }
  }

 private:
  using BitsT = Bits<BYTES>;
  static constexpr int ELEMENTS = 16 / BYTES;  // of a chunk
  // Elements of a key that are loaded at a time: with large heads there are no registers for 16.
  static constexpr int LOADED = HEAD_SIZE > MAX_MMA_HEAD_SIZE ? std::min(ELEMENTS, 8) : ELEMENTS;

  // CHUNKED: where the KV head's part of a token's block begins.
  __device__ int64_t head_offset(int token, int64_t block_stride) const {
    return a_.p.block_table(work_.seq).low(token >> a_.block_shift) * block_stride +
           (work_.kv_head * a_.p.head_size << a_.block_shift);
  }

  __device__ const BitsT* key_of(int token) const {
    if constexpr (LAYOUT == CacheLayout::NHD) {
      return row_of_token<BitsT>(a_.p.key_cache, a_.p.key_strides, work_, find_token(a_, work_, token));
    }
    return static_cast<const BitsT*>(a_.p.key_cache) + head_offset(token, a_.p.key_strides.block) +
           (token & ((1 << a_.block_shift) - 1)) * ELEMENTS;
  }

  // Where element d of a key lies, counted from its first element.
  __device__ int offset_in_key(int d) const { return (d / ELEMENTS * ELEMENTS << a_.block_shift) + d % ELEMENTS; }

  __device__ void dot_queries(int token, float (&logits)[FMA_ROWS]) const {
    const BitsT* key = key_of(token);
    const auto head_size = static_cast<int>(a_.p.head_size);
#pragma unroll(HEAD_SIZE > MAX_MMA_HEAD_SIZE ? 1 : 16 / LOADED)  // so many loads of 16 bytes under way
    for (int d = 0; d < head_size; d += LOADED) {
      float elements[LOADED];
      load_elements(a_, key + offset_in_key(d), elements);
#pragma unroll
      for (int row = 0; row < FMA_ROWS; ++row) {
#pragma unroll
        for (int i = 0; i < LOADED; i += 4) {
          const float4 query = *reinterpret_cast<const float4*>(&shared_.query[row][d + i]);
          logits[row] = fmaf(query.x, elements[i], logits[row]);
          logits[row] = fmaf(query.y, elements[i + 1], logits[row]);
          logits[row] = fmaf(query.z, elements[i + 2], logits[row]);
          logits[row] = fmaf(query.w, elements[i + 3], logits[row]);
        }
      }
    }
  }

  // One step of the online softmax of a row.
  __device__ void add_logit(int row, float logit) {
    const float max = warp_max(fmaxf(max_[row], logit));
    const float weight = exp_below(max_[row], max);
    const float probability = exp_below(logit, max);
    max_[row] = max;
    sum_[row] = fmaf(sum_[row], weight, warp_sum(probability));
#pragma unroll
    for (float& value : values_[row]) value *= weight;
    probabilities_[row][lane_] = probability;
  }

  // Tokens whose values are added at a time. The sums of large heads take half of the registers and leave none for
  // more.
  static constexpr int STEP = HEAD_SIZE <= MAX_MMA_HEAD_SIZE ? 4 : 1;

  // The values of STEP tokens. A slot that no row sees may hold anything, and is 0 here.
  class Values {
   public:
    __device__ Values(const FmaWarp& warp, int token) : warp_(warp), token_(token) {
      const AttentionArguments& a = warp.a_;
      if constexpr (LAYOUT == CacheLayout::NHD) {
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
          const TokenPlace place = find_token(a, warp.work_, token + i);
          rows_[i] = row_of_token<BitsT>(a.p.value_cache, a.p.value_strides, warp.work_, place);
        }
      } else {
        rows_[0] = static_cast<const BitsT*>(a.p.value_cache) +
                   warp.head_offset(max(token, warp.work_.begin), a.p.value_strides.block) +
                   (token & ((1 << a.block_shift) - 1));
      }
    }

    __device__ void load(int d, float (&values)[STEP]) const {
      const auto seen = [&](int i) { return token_ + i >= warp_.work_.begin && token_ + i < warp_.work_.end; };
      if constexpr (LAYOUT == CacheLayout::NHD) {
#pragma unroll
        for (int i = 0; i < STEP; ++i)
          values[i] = seen(i) ? float_of(warp_.a_.p.cache_dtype, rows_[i][d << warp_.a_.block_shift]) : 0.0f;
      } else {
        load_elements(warp_.a_, rows_[0] + (d << warp_.a_.block_shift), values);
#pragma unroll
        for (int i = 0; i < STEP; ++i) values[i] = seen(i) ? values[i] : 0.0f;
      }
    }

   private:
    const FmaWarp& warp_;
    int token_;
    const BitsT* rows_[LAYOUT == CacheLayout::NHD ? STEP : 1];
  };

  // values += probabilities * V, some tokens at a time.
  __device__ void add_values(int first_token) {
    const auto head_size = static_cast<int>(a_.p.head_size);
    const int begin = max(first_token, work_.begin / STEP * STEP);
    const int end = min(first_token + WARP_SIZE, work_.end);
    for (int token = begin; token < end; token += STEP) {
      alignas(16) float probabilities[FMA_ROWS][STEP];
#pragma unroll
      for (int row = 0; row < FMA_ROWS; ++row) {
        using Floats = std::conditional_t<STEP == 4, float4, float>;
        const auto floats = *reinterpret_cast<const Floats*>(&probabilities_[row][token - first_token]);
        memcpy(probabilities[row], &floats, sizeof floats);
      }
      const Values values(*this, token);
#pragma unroll
      for (int i = 0; i < HEAD_SIZE / WARP_SIZE; ++i) {
        const int d = lane_ + i * WARP_SIZE;
        if (d >= head_size) break;
        float v[STEP];
        values.load(d, v);
#pragma unroll
        for (int row = 0; row < FMA_ROWS; ++row) {
#pragma unroll
          for (int t = 0; t < STEP; ++t) values_[row][i] = fmaf(probabilities[row][t], v[t], values_[row][i]);
        }
      }
    }
  }

  const AttentionArguments& a_;
  const Work& work_;
  FmaShared<HEAD_SIZE>& shared_;
  float (&probabilities_)[FMA_ROWS][WARP_SIZE];
  int lane_;
  float scale_;
  float max_[FMA_ROWS];
  float sum_[FMA_ROWS];
  float values_[FMA_ROWS][HEAD_SIZE / WARP_SIZE];  // elements lane, lane + 32, ... of the head
};

template <int BYTES, int HEAD_SIZE, CacheLayout LAYOUT>
__device__ void attend_with_fma(const AttentionArguments& a, const Work& work) {
  auto& shared = *reinterpret_cast<FmaShared<HEAD_SIZE>*>(shared_memory);
  const auto head_size = static_cast<int>(a.p.head_size);
  with_query_type<BYTES, HEAD_SIZE>(a, [&]<typename T>() {
    for (int i = threadIdx.x; i < FMA_ROWS * head_size; i += FMA_THREADS) {
      const int row = i / head_size;
      const int packed = work.tile_begin + row;
      float element = 0.0f;
      if (packed < work.tile_end) {
        element = to_float(static_cast<const T*>(a.p.query)[row_of(a, work, packed) * a.p.query_stride +
                                                            head_of(a, work, packed) * a.p.head_size + i % head_size]);
      }
      shared.query[row][i % head_size] = element;
    }
  });
  __syncthreads();

  FmaWarp<BYTES, HEAD_SIZE, LAYOUT> warp(a, work, shared);
  const int first_token = work.begin / WARP_SIZE * WARP_SIZE + static_cast<int>(threadIdx.x) / WARP_SIZE * WARP_SIZE;
  for (int token = first_token; token < work.end; token += FMA_THREADS) warp.attend(token);
  warp.write();
  __syncthreads();
  with_query_type<BYTES, HEAD_SIZE>(a, [&]<typename T>() { shared.results.template store<T, FMA_WARPS>(a, work); });
}

// Blocks of a multiprocessor. Values of larger heads take all registers.
template <int HEAD_SIZE>
constexpr int FMA_BLOCKS = HEAD_SIZE > MAX_MMA_HEAD_SIZE ? 1 : 2;

// Both kinds of work in one kernel, as most of what a compiler does is for attend_with_fma. Grid: prefill_grid if
// `prefill`, else decode_grid.
template <int BYTES, int HEAD_SIZE, CacheLayout LAYOUT>
__global__ void __launch_bounds__(FMA_THREADS, FMA_BLOCKS<HEAD_SIZE>)
    fma_kernel(const __grid_constant__ AttentionArguments a, bool prefill, int64_t num_works) {
  if (!prefill) ptx::griddepcontrol_launch_dependents();  // see decode_kernel
  for_each_work(a, prefill, num_works, [&](const Work& work) { attend_with_fma<BYTES, HEAD_SIZE, LAYOUT>(a, work); });
}

template <int BYTES, int HEAD_SIZE, CacheLayout LAYOUT>
void launch_fma(const AttentionArguments& a, cudaStream_t stream) {
  const auto launch_with = [&](dim3 grid, bool prefill, int64_t num_works) {
    launch(fma_kernel<BYTES, HEAD_SIZE, LAYOUT>, grid, dim3(FMA_THREADS), sizeof(FmaShared<HEAD_SIZE>), stream, a,
           prefill, num_works);
  };
  launch_with(decode_grid(a), false, num_decode_works(a));
  if (!may_have_prefill(a)) return;
  const dim3 grid = prefill_grid(a);
  launch_with(grid, true, grid.x);
}

// Heads of a size that has a kernel on tensor cores come here with fp32 queries alone.
template <int BYTES, CacheLayout LAYOUT>
void attend_fma(const AttentionArguments& a, cudaStream_t stream) {
  if constexpr (BYTES != 2) {
    if (a.p.head_size <= 128) return launch_fma<BYTES, 128, LAYOUT>(a, stream);
    if (a.p.head_size <= 256) return launch_fma<BYTES, 256, LAYOUT>(a, stream);
  }
  launch_fma<BYTES, MAX_HEAD_SIZE, LAYOUT>(a, stream);
}

}  // namespace

template <CacheLayout LAYOUT>
void attend_fma(const AttentionArguments& a, cudaStream_t stream) {
  switch (element_size(a.p.cache_dtype)) {
    case 4:
      return attend_fma<4, LAYOUT>(a, stream);
    case 2:
      return attend_fma<2, LAYOUT>(a, stream);
    case 1:
      return attend_fma<1, LAYOUT>(a, stream);
  }
}

}  // namespace pagedattn::cuda
