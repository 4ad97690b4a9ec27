// In the NHD layout: attention of float16 queries over a float16 cache.
#include "attention/cuda/paged_attention_mma.cuh"

namespace pagedattn::cuda {

template void attend_mma<float16, float16, CacheLayout::NHD>(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
