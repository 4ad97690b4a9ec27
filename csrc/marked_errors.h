// Errors of ops, each as one of Python's types. Torch passes on the text of an exception and nothing else, so the type
// stands behind the text: "rms_norm: weight: expected ..., got ... (ValueError)". `raise_as_marked` of
// src/pagedattn_ext/ops/_call.py takes this mark off, and raises the type.
#pragma once

#include <stdexcept>
#include <string>

namespace pagedattn {

class TypeError : public std::runtime_error {
 public:
  explicit TypeError(const std::string& text) : std::runtime_error(text + " (TypeError)") {}
};

class ValueError : public std::runtime_error {
 public:
  explicit ValueError(const std::string& text) : std::runtime_error(text + " (ValueError)") {}
};

// Not of an argument. An error that ends with a caller's words needs this mark, as they may end with another.
class RuntimeError : public std::runtime_error {
 public:
  explicit RuntimeError(const std::string& text) : std::runtime_error(text + " (RuntimeError)") {}
};

}  // namespace pagedattn
