// Turns a run-time dtype into a template argument. No torch.
#pragma once

#include "types.h"

namespace pagedattn {

// Calls function.operator()<T>() with the storage type of `dtype`, a dtype of queries, weights and outputs.
template <typename Function>
inline void dispatch_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::FLOAT32:
      return function.template operator()<float>();
    case DType::FLOAT16:
      return function.template operator()<float16>();
    case DType::BFLOAT16:
      return function.template operator()<bfloat16>();
    default:
      return;  // the op lets no other dtype through
  }
}

// The same for a cache, which may hold 8-bit elements.
template <typename Function>
inline void dispatch_cache_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::FLOAT8_E4M3:
      return function.template operator()<float8_e4m3>();
    case DType::FLOAT8_E5M2:
      return function.template operator()<float8_e5m2>();
    default:
      return dispatch_dtype(dtype, function);
  }
}

}  // namespace pagedattn
