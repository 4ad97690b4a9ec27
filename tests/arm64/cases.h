// What the cases share: numbers to compute with, and the judge of results. No torch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "types.h"

namespace cases {

using pagedattn::DType;

#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

// The same numbers on each processor: xorshift.
inline uint64_t next_random() {
  static uint64_t state = 0x9e3779b97f4a7c15;
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}
inline double uniform() { return static_cast<double>(next_random() >> 40) * 0x1p-23 - 1.0; }  // -1 to 1
inline int64_t below(int64_t end) { return static_cast<int64_t>(next_random() % static_cast<uint64_t>(end)); }

// A float of 8 bits: sign, exponent, mantissa.
inline double float8_value(uint8_t bits, int mantissa_bits, int bias) {
  if ((bits & 0x7f) > (mantissa_bits == 2 ? 0x7c : 0x7e)) return NAN;
  if (mantissa_bits == 2 && (bits & 0x7f) == 0x7c) return bits & 0x80 ? -INFINITY : INFINITY;
  const int exponent = (bits & 0x7f) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return bits & 0x80 ? -magnitude : magnitude;
}

// Elements of a type, in memory that ends behind them with room that kernels may read.
class Tensor {
 public:
  // Random numbers of up to `scale`.
  Tensor(DType dtype, int64_t size, double scale) : Tensor(dtype, size) {
    for (int64_t i = 0; i < size; ++i) set(i, scale * uniform());
  }
  // Zeros.
  Tensor(DType dtype, int64_t size)
      : dtype(dtype), size(size), bytes_(static_cast<size_t>(size * pagedattn::element_size(dtype) + 128)) {}

  template <typename T = void>
  T* data() {
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes_.data()) + 63) & ~uintptr_t{63});
  }

  // The nearest number of the type; of types of 8 bits, a number whose bits come from `value` somehow.
  void set(int64_t i, double value) {
    const auto single = static_cast<float>(value);
    if (dtype == DType::FLOAT32) {
      data<float>()[i] = single;
    } else if (dtype == DType::FLOAT16) {
      data<Half>()[i] = static_cast<Half>(single);
    } else if (dtype == DType::BFLOAT16) {
      const auto bits = __builtin_bit_cast(uint32_t, single);
      data<uint16_t>()[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else if (dtype == DType::INT8) {
      data<int8_t>()[i] = static_cast<int8_t>(below(255) - 127);
    } else {  // from 2^-7 to 2 or to 4, and a denormal
      const int64_t codes = dtype == DType::FLOAT8_E4M3 ? 0x40 : 0x3c,
                    least = dtype == DType::FLOAT8_E4M3 ? 0x00 : 0x20;
      data<uint8_t>()[i] = static_cast<uint8_t>((least + below(codes - least)) | (value < 0 ? 0x80 : 0));
    }
  }

  double operator[](int64_t i) {
    switch (dtype) {
      case DType::FLOAT32:
        return data<float>()[i];
      case DType::FLOAT16:
        return static_cast<float>(data<Half>()[i]);
      case DType::BFLOAT16:
        return __builtin_bit_cast(float, uint32_t{data<uint16_t>()[i]} << 16);
      case DType::FLOAT8_E4M3:
        return float8_value(data<uint8_t>()[i], 3, 7);
      case DType::FLOAT8_E5M2:
        return float8_value(data<uint8_t>()[i], 2, 15);
      default:
        return data<int8_t>()[i];
    }
  }

  const DType dtype;
  const int64_t size;

 private:
  std::vector<char> bytes_;
};

inline const char* name_of(DType dtype) {
  constexpr const char* NAMES[] = {"f32", "f16", "bf16", "e4m3", "e5m2", "int8"};
  return NAMES[static_cast<int>(dtype)];
}

constexpr DType FLOATS[] = {DType::FLOAT32, DType::FLOAT16, DType::BFLOAT16};

// The step from a number to the next of the type, relative to the number; of fp32 what a few roundings give.
inline double step_of(DType dtype) {
  switch (dtype) {
    case DType::FLOAT32:
      return 2e-6;
    case DType::FLOAT16:
      return 0x1p-10;
    case DType::BFLOAT16:
      return 0x1p-7;
    case DType::FLOAT8_E4M3:
      return 0x1p-3;
    default:
      return 0x1p-2;
  }
}

// Writes results to a file, or compares them with such a file.
class Judge {
 public:
  enum class Mode { WRITE, SAME, CLOSE };

  Judge(const char* path, Mode mode) : file_(std::fopen(path, mode == Mode::WRITE ? "wb" : "rb")), mode_(mode) {}
  ~Judge() {
    if (file_ != nullptr) std::fclose(file_);
  }
  bool is_open() const { return file_ != nullptr; }

  // Results as the file has them. Where they are to be close, they may be `steps` steps of the type apart, and
  // `tolerance` of the greatest result beside this. NaN is like NaN.
  void operator()(const std::string& name, Tensor& results, double steps = 1.0, double tolerance = 2e-6) {
    const std::vector<double> values = values_of(results);
    std::vector<double> expected = values;
    if (mode_ == Mode::WRITE) {
      std::fwrite(values.data(), sizeof(double), values.size(), file_);
    } else if (std::fread(expected.data(), sizeof(double), expected.size(), file_) != expected.size()) {
      return fail(name, "the file ends");
    }
    const bool exact = mode_ == Mode::SAME || steps == 0.0;
    compare(name, values, expected, exact ? 0.0 : steps * step_of(results.dtype), exact ? 0.0 : tolerance);
  }

  // Results as fp64 has them, rounded to their type, and `tolerance` of the greatest result apart.
  void near(const std::string& name, Tensor& results, const std::vector<double>& expected, double tolerance) {
    compare(name + ", beside fp64", values_of(results), expected, 0.51 * step_of(results.dtype), tolerance);
  }

  int num_comparisons() const { return num_comparisons_; }
  int num_failures() const { return num_failures_; }

 private:
  static std::vector<double> values_of(Tensor& results) {
    std::vector<double> values(static_cast<size_t>(results.size));
    for (int64_t i = 0; i < results.size; ++i) values[static_cast<size_t>(i)] = results[i];
    return values;
  }

  void compare(const std::string& name, const std::vector<double>& values, const std::vector<double>& expected,
               double relative, double of_greatest) {
    ++num_comparisons_;
    double greatest = 0.0;
    for (const double value : expected) {
      if (std::isfinite(value)) greatest = std::fmax(greatest, std::fabs(value));
    }
    for (size_t i = 0; i < values.size(); ++i) {
      const double a = values[i], b = expected[i];
      if (a == b || (std::isnan(a) && std::isnan(b))) continue;
      if (std::fabs(a - b) <= relative * std::fabs(b) + of_greatest * greatest) continue;
      char text[120];
      std::snprintf(text, sizeof text, "element %zu: %.9g, expected %.9g (greatest %.3g)", i, a, b, greatest);
      return fail(name, text);
    }
  }
  void fail(const std::string& name, const char* what) {
    ++num_failures_;
    std::printf("FAILED %s: %s\n", name.c_str(), what);
  }

  std::FILE* file_;
  Mode mode_;
  int num_comparisons_ = 0, num_failures_ = 0;
};

void attention_cases(Judge& judge);
void linear_cases(Judge& judge);
void other_cases(Judge& judge);

}  // namespace cases
