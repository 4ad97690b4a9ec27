// A thread block has one row and HEADS heads, and walks all tokens that the row sees, a tile at a time. The tile's keys
// are in shared memory, in fp32, for all of these heads. A warp computes the logits of one head; then each thread adds
// the weighted values of its columns for all heads. The kernel is plain: it divides no sequence among thread blocks,
// and uses no tensor cores.
#include <cmath>

#include "attention/mla_attention.h"
#include "cuda_vec.cuh"
#include "dispatch.h"

namespace pagedattn::cuda {
namespace {

constexpr int HEADS = 8;
constexpr int MLA_THREADS = HEADS * WARP_SIZE;
constexpr int TILE_TOKENS = 16;
constexpr int COLUMNS = MAX_HEAD_SIZE / MLA_THREADS;  // of a thread, at most
static_assert(TILE_TOKENS <= WARP_SIZE);

// The sequence of a row. Sequences without rows are left out.
__device__ int64_t sequence_of(const MlaAttentionParams& p, int64_t row) {
  int64_t begin = 0;
  for (int64_t end = p.num_seqs; end - begin > 1;) {
    const int64_t middle = (begin + end) / 2;
    if (p.row_begin(middle) <= row) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Grid: rows x groups of HEADS heads.
template <typename T>
__global__ void __launch_bounds__(MLA_THREADS) mla_attention_kernel(MlaAttentionParams p) {
  const auto warp = static_cast<int>(threadIdx.x / WARP_SIZE), lane = static_cast<int>(threadIdx.x % WARP_SIZE);
  const auto latent_size = static_cast<int>(p.latent_size), rope_size = static_cast<int>(p.rope_size);
  const int head_size = latent_size + rope_size;
  const int64_t row = blockIdx.x;
  const int64_t first_head = int64_t{blockIdx.y} * HEADS;
  const int64_t head = first_head + warp;
  const int64_t seq = sequence_of(p, row);
  const int64_t end = p.visible_end(seq, row);
  const Indices table = p.block_table(seq);

  float* const queries = reinterpret_cast<float*>(shared_memory);  // [HEADS, head_size]
  float* const keys = queries + HEADS * head_size;                 // [TILE_TOKENS, head_size]
  float* const weights = keys + TILE_TOKENS * head_size;           // [HEADS, TILE_TOKENS]
  float* const factors = weights + HEADS * TILE_TOKENS;            // [HEADS]

  float* const query = queries + warp * head_size;
  if (head < p.num_heads) {
    const T* nope = static_cast<const T*>(p.q_nope) + row * p.q_nope_strides.token + head * p.q_nope_strides.head;
    const T* pe = static_cast<const T*>(p.q_pe) + row * p.q_pe_strides.token + head * p.q_pe_strides.head;
    for (int d = lane; d < latent_size; d += WARP_SIZE) query[d] = to_float(nope[d]);
    for (int d = lane; d < rope_size; d += WARP_SIZE) query[latent_size + d] = to_float(pe[d]);
  } else {
    for (int d = lane; d < head_size; d += WARP_SIZE) query[d] = 0.0f;
  }

  float max = -INFINITY, sum = 0.0f;  // of the warp's head
  float results[HEADS][COLUMNS] = {};
  for (int64_t token = 0; token < end; token += TILE_TOKENS) {
    const int count = end - token < TILE_TOKENS ? static_cast<int>(end - token) : TILE_TOKENS;
    __syncthreads();  // the tile before has been read
    for (int t = warp; t < count; t += HEADS) {
      const int64_t block = table[(token + t) / p.block_size], slot = (token + t) % p.block_size;
      const T* latent =
          static_cast<const T*>(p.kv_c_cache) + block * p.kv_c_strides.block + slot * p.kv_c_strides.token;
      const T* rope = static_cast<const T*>(p.k_pe_cache) + block * p.k_pe_strides.block + slot * p.k_pe_strides.token;
      float* const key = keys + t * head_size;
      for (int d = lane; d < latent_size; d += WARP_SIZE) key[d] = to_float(latent[d]);
      for (int d = lane; d < rope_size; d += WARP_SIZE) key[latent_size + d] = to_float(rope[d]);
    }
    __syncthreads();

    float logit = -INFINITY;  // of token `lane`
    for (int t = 0; t < count; ++t) {
      float product = 0.0f;
      for (int d = lane; d < head_size; d += WARP_SIZE) product = fmaf(query[d], keys[t * head_size + d], product);
      product = warp_sum(product);
      if (t == lane) logit = product * p.scale;
    }
    const float new_max = fmaxf(max, warp_max(logit));
    const float base = new_max == -INFINITY ? 0.0f : new_max;
    const float weight = expf(logit - base);
    const float factor = expf(max - base);
    sum = fmaf(sum, factor, warp_sum(weight));
    max = new_max;
    if (lane < TILE_TOKENS) weights[warp * TILE_TOKENS + lane] = weight;
    if (lane == 0) factors[warp] = factor;
    __syncthreads();

#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int column = c * MLA_THREADS + static_cast<int>(threadIdx.x);
      if (column >= latent_size) break;
#pragma unroll
      for (int h = 0; h < HEADS; ++h) results[h][c] *= factors[h];
      for (int t = 0; t < count; ++t) {
        const float value = keys[t * head_size + column];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) results[h][c] = fmaf(weights[h * TILE_TOKENS + t], value, results[h][c]);
      }
    }
  }

  if (lane == 0 && head < p.num_heads) {
    const float base = max == -INFINITY ? 0.0f : max;
    p.lse[row * p.num_heads + head] = sum == 0.0f ? -INFINITY : base + logf(sum);
  }
  __syncthreads();  // the factors have been read
  if (lane == 0) factors[warp] = sum == 0.0f ? 0.0f : 1.0f / sum;
  __syncthreads();
  T* const out = static_cast<T*>(p.out) + (row * p.num_heads + first_head) * latent_size;
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (first_head + h >= p.num_heads) break;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int column = c * MLA_THREADS + static_cast<int>(threadIdx.x);
      if (column < latent_size) out[h * latent_size + column] = from_float<T>(results[h][c] * factors[h]);
    }
  }
}

}  // namespace

void mla_attention(const MlaAttentionParams& params, cudaStream_t stream) {
  const int64_t head_size = params.latent_size + params.rope_size;
  const int64_t floats = (HEADS + TILE_TOKENS) * head_size + HEADS * TILE_TOKENS + HEADS;
  const dim3 grid(grid_size(params.num_tokens), grid_height(ceil_div<int64_t>(params.num_heads, HEADS)));
  dispatch_dtype(params.dtype, [&]<typename T>() {
    launch(mla_attention_kernel<T>, grid, dim3(MLA_THREADS), floats * sizeof(float), stream, params);
  });
}

}  // namespace pagedattn::cuda
