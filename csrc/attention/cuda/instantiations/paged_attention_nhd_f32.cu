// In the NHD layout: attention in fp32, of fp32 queries over a cache of fp32 or 8 bits, and of large heads.
#include "attention/cuda/paged_attention_fma.cuh"

namespace pagedattn::cuda {

template void attend_fma<CacheLayout::NHD>(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
