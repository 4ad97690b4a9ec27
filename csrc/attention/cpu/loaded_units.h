// The scales of a call, in the units in which the kernels load the cache; for attend.h and merge_partials_cpu.cpp.
#pragma once

#include "attention/paged_attention.h"
#include "cpu_float8.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Puts the scales of keys and values into these units. The scales are read here, as a CPU graph calls this later.
inline PagedAttentionParams in_loaded_units(PagedAttentionParams params) {
  if (params.key_scale_on_device != nullptr) params.logit_scale *= *params.key_scale_on_device;
  if (params.value_scale_on_device != nullptr) params.value_scale *= *params.value_scale_on_device;
  if (params.cache_dtype == DType::FLOAT8_E4M3) {
    params.logit_scale *= E4M3_UNIT;
    params.value_scale *= E4M3_UNIT;
  }
  return params;
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
