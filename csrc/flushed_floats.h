// Subnormal numbers as zeros, for the time of a kernel.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <pmmintrin.h>
#endif

namespace pagedattn {

// While an object of this class lives, subnormal numbers of fp32 count as zeros on this thread of an x86-64 or ARM64
// CPU, as operands and as results. Many CPUs take a hundred times as long for an instruction that meets one. The
// instructions that multiply pairs of bf16 and the tiles of AMX know no subnormal numbers at all: with this object, all
// capabilities agree. A kernel must be compiled apart from where the object is: within a function, compilers move
// arithmetic past it.
class FlushedFloats {
 public:
  FlushedFloats() : before_(control()) { set_control(before_ | FLUSH_TO_ZERO); }
  ~FlushedFloats() { set_control(before_); }
  FlushedFloats(const FlushedFloats&) = delete;
  FlushedFloats& operator=(const FlushedFloats&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint32_t FLUSH_TO_ZERO = _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON;
  static uint32_t control() { return _mm_getcsr(); }
  static void set_control(uint32_t control) { _mm_setcsr(control); }
  uint32_t before_;
#elif defined(__aarch64__)
  static constexpr uint64_t FLUSH_TO_ZERO = 1 << 24;  // FZ, operands and results
  static uint64_t control() {
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set_control(uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
  uint64_t before_;
#else
  static constexpr int FLUSH_TO_ZERO = 0;
  static int control() { return 0; }
  static void set_control(int) {}
  int before_;
#endif
};

}  // namespace pagedattn
