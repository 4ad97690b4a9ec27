// Attention of float16 queries over a cache of the same.
#include "attention/cuda/paged_attention_mma.cuh"

namespace pagedattn::cuda {

template void attend_mma<float16, float16>(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
