// What ops on the CPU do past their doors, captured instead of done, and replayed later on the same memory.
#pragma once

#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace pagedattn {

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

  void replay() const {
    for (const auto& node : nodes_) node();
  }

  // Calls node(), unless this thread captures. A copy of `node` outlives the op and the tensors that it has seen.
  template <typename Node>
  static void run_or_capture(Node&& node) {
    if (capturing_ == nullptr) {
      node();
    } else {
      capturing_->nodes_.emplace_back(std::forward<Node>(node));
    }
  }

 private:
  static inline thread_local CpuGraph* capturing_ = nullptr;
  std::vector<std::function<void()>> nodes_;
};

}  // namespace pagedattn
