// Copies the latent and the rotary part of a token at a time. The elements are moved, and nothing is computed with
// them.
#include "cache/concat_and_cache_mla.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

void concat_and_cache_mla(const ConcatAndCacheMlaParams& p, int64_t begin, int64_t end) {
  const int64_t size = element_size(p.dtype);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0) continue;
    const int64_t element = slot / p.block_size * p.block_stride + slot % p.block_size * p.token_stride;
    char* target = static_cast<char*>(p.kv_cache) + element * size;
    const char* latent = static_cast<const char*>(p.kv_c) + token * p.kv_c_stride * size;
    const char* rope = static_cast<const char*>(p.k_pe) + token * p.k_pe_stride * size;
    // One of the two may be empty, and then its pointer may be null.
    if (p.latent_size > 0) __builtin_memcpy(target, latent, p.latent_size * size);
    if (p.rope_size > 0) __builtin_memcpy(target + p.latent_size * size, rope, p.rope_size * size);
  }
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
