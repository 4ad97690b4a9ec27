// Fibers: functions with stacks of their own, between which one OS thread switches. On x86-64 a switch is a dozen
// instructions; elsewhere it is ucontext's, which calls the kernel of the OS. AddressSanitizer is told of each switch.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace pagedattn::simt {

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  const void* stack = nullptr;  // its lowest byte; for the OS thread's own stack, only AddressSanitizer sets it
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

// Takes address space now, and pages when they are touched. The page below the stack cannot be touched.
inline void make_stack(Fiber& fiber) {
  constexpr size_t STACK_BYTES = 256 * 1024, GUARD_BYTES = 4096;
  void* memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, GUARD_BYTES, PROT_NONE);
  fiber.stack = static_cast<unsigned char*>(memory) + GUARD_BYTES;
  fiber.stack_bytes = STACK_BYTES;
}

#if defined(__x86_64__)
// Pushes what a function must preserve, stores rsp, loads the rsp of the other fiber, pops. Nobody changes the
// floating-point modes. An indirect jump is predicted better than a `ret` that goes elsewhere than to its call.
__attribute__((naked, noinline)) inline void switch_stacks(void** /*from: rdi*/, void* /*to: rsi*/) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
      "popq %rcx\n jmp *%rcx\n");
}
#endif

// The next switch to the fiber calls `entry`, which must call arrive_in first and never return. Its stack begins
// `offset` bytes (a multiple of 16) below the top.
inline void prepare_fiber(Fiber& fiber, size_t offset, void (*entry)()) {
  fiber.fake_stack = nullptr;
#if defined(__x86_64__)
  auto* top = static_cast<unsigned char*>(const_cast<void*>(fiber.stack)) + fiber.stack_bytes - offset;
  auto** words = reinterpret_cast<void**>(top) - 8;  // six registers, where to jump, a return address that is not used
  std::memset(words, 0, 8 * sizeof(void*));
  words[6] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = words;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = const_cast<void*>(fiber.stack);
  fiber.context.uc_stack.ss_size = fiber.stack_bytes - offset;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#endif
}

inline Fiber* came_from = nullptr;  // at the last switch

inline void arrive_in([[maybe_unused]] Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &came_from->stack, &came_from->stack_bytes);
#endif
}

// Returns when something switches back; `for_ever`: nothing will.
inline void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool for_ever = false) {
#if defined(__SANITIZE_ADDRESS__)
  came_from = &from;
  __sanitizer_start_switch_fiber(for_ever ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(__x86_64__)
  switch_stacks(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
  arrive_in(from);
}

}  // namespace pagedattn::simt
