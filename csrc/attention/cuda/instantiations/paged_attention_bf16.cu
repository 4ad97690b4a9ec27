// Attention of bfloat16 queries over a bfloat16 cache.
#include "attention/cuda/paged_attention_mma.cuh"

namespace pagedattn::cuda {

template void attend_mma<bfloat16, bfloat16, CacheLayout::CHUNKED>(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
