// A CPU graph captures what ops on the CPU do past their doors, and replays it later on the same memory.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace pagedattn {

// A captured call runs long after its op has returned, and has nothing but a copy of `Params`. An aggregate is no
// closure. An aggregate that can be assigned holds no reference, and no closure that captured something. So it holds
// values, tensors, and pointers to the memory of the op's tensors. Who captures keeps that memory.
template <typename Params>
concept KeptByValue = std::is_aggregate_v<Params> && std::is_copy_assignable_v<Params>;

// What becomes of a call while a CPU graph is captured. A call that computes indices runs at the capture as well,
// because the ops behind it check these values there.
enum class AtCapture { KEPT, KEPT_AND_RUN };

// The check of what an op's index tensors hold, which may be other values at each replay. It throws if a value is not
// as the op's kernel takes for granted. Its `values` say whether there are values to check (Door::values).
template <typename Check>
concept ValueCheck = KeptByValue<Check> && std::invocable<const Check&> && requires(const Check& check) {
  { check.values.are_given } -> std::convertible_to<bool>;
};

// Of an op that takes no value for granted.
struct AnyValues {
  struct {
    bool are_given = false;
  } values;
  void operator()() const {}
};

// Scales are checked apart: they may be on the CPU when all index tensors are on a GPU.
template <ValueCheck Check>
void check_values(const Check& check) {
  if constexpr (requires { check.scales(); }) check.scales();
  if (check.values.are_given) check();
}

class CpuGraph {
 public:
  CpuGraph() = default;
  CpuGraph(const CpuGraph&) = delete;
  CpuGraph& operator=(const CpuGraph&) = delete;
  ~CpuGraph() { end_capture(); }

  // Until end_capture, the ops that this thread calls check their arguments and return, and the graph keeps the rest of
  // their work. Throws std::runtime_error if this thread captures already.
  void begin_capture() {
    if (capturing_ != nullptr) throw std::runtime_error("CPUGraph: expected no other capture under way on this thread");
    capturing_ = this;
  }
  void end_capture() {
    if (capturing_ == this) capturing_ = nullptr;
  }
  // Whether this thread captures.
  static bool is_capturing() { return capturing_ != nullptr; }

  // If this thread captures, the graph keeps the value: a tensor that an op makes for its own calls, which nobody else
  // has when they are replayed.
  template <typename T>
  static void keep(const T& value) {
    if (capturing_ != nullptr) capturing_->kept_.push_back(std::make_shared<T>(value));
  }

  // Throws what the check of a call throws, before this call is made. All calls before it have been made.
  void replay() const {
    for (const auto& node : nodes_) node();
  }

  // Calls check_values(check), then function(params). If this thread captures, function(params) is called for
  // AtCapture::KEPT_AND_RUN alone. The graph then keeps a copy of `check` and `params`, and makes both calls when it is
  // replayed. A plain function has nothing but its parameters.
  template <AtCapture AT_CAPTURE = AtCapture::KEPT, ValueCheck Check, KeptByValue Params>
  static void run_or_capture(const Check& check, std::type_identity_t<void (*)(const Params& params)> function,
                             const Params& params) {
    check_values(check);
    if (capturing_ == nullptr || AT_CAPTURE == AtCapture::KEPT_AND_RUN) function(params);
    if (capturing_ != nullptr) {
      capturing_->nodes_.emplace_back([check, function, params] {
        check_values(check);
        function(params);
      });
    }
  }

 private:
  static inline thread_local CpuGraph* capturing_ = nullptr;
  std::vector<std::function<void()>> nodes_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace pagedattn
