// A thread block has a token, and a thread every CONCAT_THREADS-th element. The elements are moved, and nothing is
// computed with them.
#include "cache/concat_and_cache_mla.h"
#include "cuda_utils.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int CONCAT_THREADS = 256;

// Grid: tokens.
template <typename Bits>
__global__ void __launch_bounds__(CONCAT_THREADS) concat_and_cache_mla_kernel(ConcatAndCacheMlaParams p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const Bits* latent = static_cast<const Bits*>(p.kv_c) + token * p.kv_c_stride;
  const Bits* rope = static_cast<const Bits*>(p.k_pe) + token * p.k_pe_stride;
  Bits* target =
      static_cast<Bits*>(p.kv_cache) + slot / p.block_size * p.block_stride + slot % p.block_size * p.token_stride;
  for (int64_t i = threadIdx.x; i < p.latent_size + p.rope_size; i += CONCAT_THREADS) {
    target[i] = i < p.latent_size ? latent[i] : rope[i - p.latent_size];
  }
}

}  // namespace

void concat_and_cache_mla(const ConcatAndCacheMlaParams& params, cudaStream_t stream) {
  const auto kernel =
      element_size(params.dtype) == 4 ? &concat_and_cache_mla_kernel<uint32_t> : &concat_and_cache_mla_kernel<uint16_t>;
  launch(kernel, dim3(grid_size(params.num_tokens)), dim3(CONCAT_THREADS), 0, stream, params);
}

}  // namespace pagedattn::cuda
