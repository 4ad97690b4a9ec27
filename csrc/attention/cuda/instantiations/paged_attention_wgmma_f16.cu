// Prefill of float16 queries over a float16 cache, for sm_90a alone.
#include "attention/cuda/paged_attention_wgmma.cuh"

namespace pagedattn::cuda {

template void prefill_wgmma<float16, CacheLayout::CHUNKED>(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
