// Torch's current CUDA stream, without a CUDA header or a link to CUDA's part of torch.
#pragma once

#include <cstdint>

#include "types.h"

namespace pagedattn {

cudaStream_t current_cuda_stream(int32_t device_index);

}  // namespace pagedattn
