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

}  // namespace pagedattn
