// Attention of 16-bit queries over a cache of float8_e4m3, in float16.
#include "attention/cuda/paged_attention_mma.cuh"

namespace pagedattn::cuda {

template void attend_mma<float16, float8_e4m3, CacheLayout::CHUNKED>(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
