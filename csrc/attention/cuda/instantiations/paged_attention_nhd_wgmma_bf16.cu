// In the NHD layout: prefill of bfloat16 queries over a bfloat16 cache, for sm_90a alone.
#include "attention/cuda/paged_attention_wgmma.cuh"

namespace pagedattn::cuda {

template void prefill_wgmma<bfloat16, CacheLayout::NHD>(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
