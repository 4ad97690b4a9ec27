#include "cache/concat_and_cache_mla.h"

#include "cache/cache_op.h"
#include "ops.h"
#include "run.h"

namespace pagedattn {

void concat_and_cache_mla(const Tensor& kv_c, const Tensor& k_pe, Tensor& kv_cache, const Tensor& slot_mapping) {
  const Door door("concat_and_cache_mla", kv_cache);
  ConcatAndCacheMlaParams params{};
  params.dtype = door.float_dtype("kv_cache", kv_cache);
  params.slot_mapping = check_slots(door, slot_mapping);
  params.num_tokens = slot_mapping.size(0);
  // Frameworks pad batches: the tokens at the end that have no slot are left out.
  const auto check_rows = [&](const char* argument, const Tensor& rows) {
    door.dtype(argument, rows, dtype_of(kv_cache));
    door.shape(argument, rows, {ANY, ANY});
    door.check(rows.size(0) >= params.num_tokens, argument, "expected at least ", params.num_tokens,
               " tokens (as in slot_mapping), got shape ", rows.sizes());
    door.contiguous_from(argument, rows, 1);
  };
  check_rows("kv_c", kv_c);
  check_rows("k_pe", k_pe);
  params.latent_size = kv_c.size(1);
  params.rope_size = k_pe.size(1);
  const int64_t head_size = params.latent_size + params.rope_size;
  door.shape("kv_cache", kv_cache, {ANY, ANY, head_size});
  door.check(kv_cache.size(1) > 0 && head_size > 0, "kv_cache",
             "expected a block size of at least 1, and at least 1 number a token, got shape ", kv_cache.sizes());
  door.contiguous_from("kv_cache", kv_cache, 2);
  door.written_elements("kv_cache", kv_cache);
  params.block_size = kv_cache.size(1);
  params.kv_c = kv_c.const_data_ptr();
  params.kv_c_stride = kv_c.stride(0);
  params.k_pe = k_pe.const_data_ptr();
  params.k_pe_stride = k_pe.stride(0);
  params.kv_cache = kv_cache.mutable_data_ptr();
  params.block_stride = kv_cache.stride(0);
  params.token_stride = kv_cache.stride(1);
  const SlotCheck check{door, door.values(slot_mapping), params.slot_mapping.are_int64, params.num_tokens,
                        kv_cache.size(0) * params.block_size};
  run_rows(door, check, PAGEDATTN_ROW_KERNELS(concat_and_cache_mla), params, params.num_tokens, head_size);
}

}  // namespace pagedattn
