// What op files share, on LibTorch's stable ABI: the checks at an op's door. A failed check throws before any memory
// is touched; the text is always "<op>: <argument>: expected ..., got ...", and the error's type (marked_errors.h).
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "marked_errors.h"
#include "types.h"

namespace pagedattn {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::DeviceType;
using torch::stable::Tensor;

// A size that a check leaves open.
inline constexpr int64_t ANY = -1;

// The text of a `str` argument. Torch leaves it to the op to free the string, so an op calls this once, before anything
// can throw. An op does not take a std::string, because the conversion in the headers of torch 2.10 to 2.13 leaks a
// string at each call.
inline std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

// A tensor seen as rows: every leading dimension collapsed into one.
struct RowView {
  int64_t num_rows;
  int64_t width;   // elements in a row, contiguous
  int64_t stride;  // elements from one row to the next
};

// The dtype of a tensor. tensor.scalar_type() asks torch's library what number each dtype has there, one after the
// other, until one is the tensor's. Here the numbers of the dtypes that ops know are asked for once.
inline ScalarType dtype_of(const Tensor& tensor) {
  constexpr std::array KNOWN{ScalarType::Float,         ScalarType::BFloat16,   ScalarType::Half, ScalarType::Long,
                             ScalarType::Int,           ScalarType::Bool,       ScalarType::Char, ScalarType::Byte,
                             ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};
  static const auto NUMBERS = [&] {
    std::array<int32_t, KNOWN.size()> numbers{};
    for (size_t i = 0; i < KNOWN.size(); ++i) {
      numbers[i] = torch::stable::detail::to<int32_t>(torch::stable::detail::from(KNOWN[i]));
    }
    return numbers;
  }();
  int32_t number = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  for (size_t i = 0; i < KNOWN.size(); ++i) {
    if (NUMBERS[i] == number) return KNOWN[i];
  }
  return tensor.scalar_type();
}

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline std::string sizes_text(IntHeaderOnlyArrayRef sizes) {
  std::ostringstream text;
  const char* separator = "[";
  for (int64_t size : sizes) {
    text << separator;
    if (size == ANY) {
      text << "*";
    } else {
      text << size;
    }
    separator = ", ";
  }
  if (sizes.size() == 0) text << separator;
  text << "]";
  return text.str();
}

inline std::string device_text(const Device& device) {
  if (device.is_cpu()) return "cpu";
  if (device.is_cuda()) return "cuda:" + std::to_string(device.index());
  return "device type " + std::to_string(static_cast<int>(device.type()));
}

// Whether CUDA kernels read and write the tensor. On the simt device (tests/simt) they read and write every tensor.
inline bool is_on_cuda([[maybe_unused]] const Tensor& tensor) {
#if defined(PAGEDATTN_SIMT)
  return true;
#else
  return tensor.defined() && tensor.is_cuda();
#endif
}

inline bool is_on_cuda([[maybe_unused]] const Device& device) {
#if defined(PAGEDATTN_SIMT)
  return true;
#else
  return device.is_cuda();
#endif
}

// The tensor in memory that the CPU can read. Waits for the GPU if the tensor must be copied.
inline Tensor on_host(const Tensor& tensor) {
  return tensor.is_cpu() ? tensor : torch::stable::to(tensor, Device(DeviceType::CPU));
}

// PAGEDATTN_CHECK=1: index tensors on a GPU are fetched and checked. The variable is looked up at every call, in about
// 50 ns.
inline bool values_are_checked_on_cuda() {
  const char* request = std::getenv("PAGEDATTN_CHECK");
  const std::string text = request == nullptr ? "" : request;
  if (text == "1") return true;
  if (text.empty() || text == "0") return false;
  throw std::runtime_error("PAGEDATTN_CHECK: expected 0 or 1, got " + text);
}

// What a tensor holds, in memory that the CPU can read.
struct HostValues {
  bool are_given = false;
  const void* data = nullptr;
  std::optional<Tensor> fetched;  // has `data`, if it comes from a GPU
};

// The checks of one op's arguments. Each question about a tensor is a call of torch's library, and there are dozens. So
// the first question is one whose answer settles the matter for most tensors: are they on the CPU, are they contiguous?
class Door {
 public:
  // The op runs on the device of `first`, and its other tensors must be there.
  Door(const char* op, const Tensor& first)
      : op_(op),
        device_(first.defined() ? first.device() : Device(DeviceType::CPU)),
        runs_on_cuda_(is_on_cuda(device_)) {}

  const Device& device() const { return device_; }
  bool runs_on_cuda() const { return runs_on_cuda_; }

  // What the op checks of the values of an index tensor before it runs (ValueCheck). From a GPU the tensor would have
  // to be fetched, which waits for the GPU, so that nothing is given unless PAGEDATTN_CHECK says so. Memory of the CPU
  // is the tensor's own, where a CPU graph finds the values of each replay.
  HostValues values(const Tensor& tensor) const {
    if (is_on_cuda(tensor) && runs_on_cuda_ && !values_are_checked_on_cuda()) return {};
    if (tensor.is_cpu()) return {true, tensor.const_data_ptr(), std::nullopt};
    const Tensor fetched = on_host(tensor);
    return {true, fetched.const_data_ptr(), fetched};
  }

  // The value of an argument. `text` may hold sizes and dtypes as they are.
  template <typename... Text>
  void check(bool condition, const char* argument, const Text&... text) const {
    if (!condition) [[unlikely]]
      fail<ValueError>(argument, text...);
  }

  // The type of an argument, or the dtype.
  template <typename... Text>
  void check_type(bool condition, const char* argument, const Text&... text) const {
    if (!condition) [[unlikely]]
      fail<TypeError>(argument, text...);
  }

  // None reaches an op as an undefined tensor.
  void defined(const char* argument, const Tensor& tensor) const {
    check_type(tensor.defined(), argument, "expected a tensor, got None");
  }

  // A tensor on the op's device.
  void present(const char* argument, const Tensor& tensor) const {
    defined(argument, tensor);
    if (device_.is_cpu() && tensor.is_cpu()) return;
    const Device device = tensor.device();
    const bool same = device.type() == device_.type() && device.index() == device_.index();
    check(same, argument, "expected a tensor on ", device_, ", got one on ", device);
  }

  // float32, float16 or bfloat16.
  DType float_dtype(const char* argument, const Tensor& tensor) const {
    present(argument, tensor);
    switch (dtype_of(tensor)) {
      case ScalarType::Float:
        return DType::FLOAT32;
      case ScalarType::Half:
        return DType::FLOAT16;
      case ScalarType::BFloat16:
        return DType::BFLOAT16;
      default:
        fail<TypeError>(argument, "expected dtype float32, float16 or bfloat16, got ", dtype_of(tensor));
    }
  }

  void dtype(const char* argument, const Tensor& tensor, ScalarType expected) const {
    present(argument, tensor);
    dtype_anywhere(argument, tensor, expected);
  }

  // The same for a tensor that may be on another device.
  void dtype_anywhere(const char* argument, const Tensor& tensor, ScalarType expected) const {
    defined(argument, tensor);
    const ScalarType dtype = dtype_of(tensor);
    check_type(dtype == expected, argument, "expected dtype ", expected, ", got ", dtype);
  }

  // The elements of a tensor of int32 or int64, which may be on another device.
  Indices indices(const char* argument, const Tensor& tensor) const {
    defined(argument, tensor);
    const ScalarType dtype = dtype_of(tensor);
    const bool are_int64 = dtype == ScalarType::Long;
    check_type(are_int64 || dtype == ScalarType::Int, argument, "expected dtype int32 or int64, got ", dtype);
    return {tensor.const_data_ptr(), are_int64};
  }

  void rank(const char* argument, const Tensor& tensor, int64_t expected) const {
    check(tensor.dim() == expected, argument, "expected ", expected, " dimensions, got ", tensor.dim(), " (shape ",
          tensor.sizes(), ")");
  }

  // A size that is ANY is not checked.
  void shape(const char* argument, const Tensor& tensor, IntHeaderOnlyArrayRef expected) const {
    const auto sizes = tensor.sizes();
    const auto fits = [](int64_t size, int64_t wanted) { return wanted == ANY || size == wanted; };
    check(std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end(), fits), argument, "expected shape ",
          expected, ", got ", sizes);
  }

  void shape(const char* argument, const Tensor& tensor, std::initializer_list<int64_t> expected) const {
    shape(argument, tensor, IntHeaderOnlyArrayRef(expected.begin(), expected.size()));
  }

  // Dimensions from `first_dim` on are contiguous; the dimensions before it may have any stride.
  void contiguous_from(const char* argument, const Tensor& tensor, int64_t first_dim) const {
    if (tensor.is_contiguous() || tensor.numel() == 0) return;
    int64_t expected = 1;
    for (int64_t dim = tensor.dim() - 1; dim >= first_dim; --dim) {
      check(tensor.size(dim) == 1 || tensor.stride(dim) == expected, argument, "expected dimensions from ", first_dim,
            " on to be contiguous, got shape ", tensor.sizes(), " with strides ", tensor.strides());
      expected *= tensor.size(dim);
    }
  }

  void contiguous(const char* argument, const Tensor& tensor) const { contiguous_from(argument, tensor, 0); }

  // A number of fp32 for each head; nullptr if the tensor is not given.
  const float* per_head(const char* argument, const std::optional<Tensor>& tensor, int64_t num_heads) const {
    if (!tensor.has_value()) return nullptr;
    dtype(argument, *tensor, ScalarType::Float);
    shape(argument, *tensor, {num_heads});
    contiguous(argument, *tensor);
    return tensor->const_data_ptr<float>();
  }

  // At least one dimension. The last dimension is a row and contiguous. The leading dimensions collapse into rows of
  // one stride.
  RowView rows(const char* argument, const Tensor& tensor) const {
    check(tensor.dim() >= 1, argument, "expected at least 1 dimension, got 0");
    const int64_t last = tensor.dim() - 1;
    const int64_t width = tensor.size(last);
    if (width > 0 && tensor.is_contiguous()) return {tensor.numel() / width, width, width};
    contiguous_from(argument, tensor, last);
    return rows_before(argument, tensor, last, width);
  }

  // The dimensions before `first_dim` as rows of one stride; the dimensions from `first_dim` on lie within `width`
  // elements.
  RowView rows_before(const char* argument, const Tensor& tensor, int64_t first_dim, int64_t width) const {
    RowView view{1, width, width};
    if (tensor.numel() == 0) {
      view.num_rows = 0;
      return view;
    }
    bool collapses = true;
    for (int64_t dim = first_dim - 1; dim >= 0; --dim) {
      if (tensor.size(dim) == 1) continue;
      if (view.num_rows == 1) view.stride = tensor.stride(dim);
      collapses = collapses && tensor.stride(dim) == view.stride * view.num_rows;
      view.num_rows *= tensor.size(dim);
    }
    check(collapses, argument, "expected evenly spaced rows (one stride for all dimensions before ", first_dim,
          "), got shape ", tensor.sizes(), " with strides ", tensor.strides());
    return view;
  }

  // Rows that are written must not share memory, as the rows of an expanded tensor do.
  RowView written_rows(const char* argument, const Tensor& tensor) const {
    const RowView view = rows(argument, tensor);
    check(view.num_rows <= 1 || view.stride >= view.width, argument, "expected rows that do not overlap, got shape ",
          tensor.sizes(), " with strides ", tensor.strides());
    return view;
  }

  // Contiguous from dimension 1 on; in dimension 0 any stride that keeps the parts apart.
  void written_from_1(const char* argument, const Tensor& tensor) const {
    contiguous_from(argument, tensor, 1);
    check(tensor.numel() == 0 || tensor.size(0) == 1 || tensor.stride(0) >= tensor.numel() / tensor.size(0), argument,
          "expected parts along dimension 0 that do not overlap, got shape ", tensor.sizes(), " with strides ",
          tensor.strides());
  }

  // Any strides that keep all elements apart: the elements along the dimensions of smaller strides lie within a stride.
  void written_elements(const char* argument, const Tensor& tensor) const {
    if (tensor.is_contiguous() || tensor.numel() == 0) return;
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) > 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
    std::sort(dims.begin(), dims.end());
    int64_t extent = 1;
    for (const auto& [stride, size] : dims) {
      check(stride >= extent, argument, "expected elements that do not overlap, got shape ", tensor.sizes(),
            " with strides ", tensor.strides());
      extent += (size - 1) * stride;
    }
  }

  // Two tensors that are written must not share memory. Only tensors that begin at the same place are found: more would
  // cost time.
  void other_memory(const char* argument, const Tensor& tensor, const char* other_argument, const Tensor& other) const {
    check(tensor.numel() == 0 || other.numel() == 0 || tensor.const_data_ptr() != other.const_data_ptr(), argument,
          "expected other memory than that of ", other_argument, ", got the same");
  }

  // Kernels compute in float. A number that is finite only as a double would be infinite in a kernel.
  float finite(const char* argument, double value) const {
    check(std::abs(value) <= std::numeric_limits<float>::max(), argument, "expected a finite number of float32, got ",
          value);
    return static_cast<float>(value);
  }

 private:
  template <typename Error, typename... Text>
  [[noreturn]] void fail(const char* argument, const Text&... text) const {
    std::ostringstream message;
    message << op_ << ": " << argument << ": ";
    (write(message, text), ...);
    throw Error(message.str());
  }

  // Text is put together only for a check that failed.
  static void write(std::ostream& message, IntHeaderOnlyArrayRef sizes) { message << sizes_text(sizes); }
  static void write(std::ostream& message, ScalarType dtype) { message << dtype_name(dtype); }
  static void write(std::ostream& message, const Device& device) { message << device_text(device); }
  template <typename Text>
  static void write(std::ostream& message, const Text& text) {
    message << text;
  }

  const char* op_;
  Device device_;
  bool runs_on_cuda_;
};

}  // namespace pagedattn
