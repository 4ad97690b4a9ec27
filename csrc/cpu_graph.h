// What ops on the CPU do past their doors, captured instead of done, and replayed later on the same memory.
#pragma once

#include <functional>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace pagedattn {

// A copy of `Params` is all that a call takes which is made when the op has long returned. An aggregate is no closure;
// one that can be assigned has neither a reference in it nor a closure that captured something. What is left are
// values, tensors, and pointers to the memory of tensors that the op was given: who captures keeps that memory.
template <typename Params>
concept KeptByValue = std::is_aggregate_v<Params> && std::is_copy_assignable_v<Params>;

class CpuGraph {
 public:
  CpuGraph() = default;
  CpuGraph(const CpuGraph&) = delete;
  CpuGraph& operator=(const CpuGraph&) = delete;
  ~CpuGraph() { end_capture(); }

  // Until end_capture, ops that this thread calls check their arguments and return, and the graph takes what is left to
  // do. Throws std::runtime_error if the thread captures one already.
  void begin_capture() {
    if (capturing_ != nullptr) throw std::runtime_error("CPUGraph: expected no other capture under way on this thread");
    capturing_ = this;
  }
  void end_capture() {
    if (capturing_ == this) capturing_ = nullptr;
  }
  // Whether this thread captures.
  static bool is_capturing() { return capturing_ != nullptr; }

  void replay() const {
    for (const auto& node : nodes_) node();
  }

  // Calls function(params); if this thread captures, the graph keeps a copy of `params` for that. A plain function has
  // nothing but its parameters.
  template <KeptByValue Params>
  static void run_or_capture(std::type_identity_t<void (*)(const Params& params)> function, const Params& params) {
    if (capturing_ == nullptr) {
      function(params);
    } else {
      capturing_->nodes_.emplace_back([function, params] { function(params); });
    }
  }

 private:
  static inline thread_local CpuGraph* capturing_ = nullptr;
  std::vector<std::function<void()>> nodes_;
};

}  // namespace pagedattn
