// Run-time choice among the copies of a CPU kernel. A kernel is compiled once for each capability whose instructions
// make a difference to it, into the namespace cpu_<capability>. CMakeLists.txt says which these are. A capability
// without a copy of its own uses the copy of the nearest capability before it.
#pragma once

#include <string>
#include <vector>

namespace pagedattn {

// Each capability has the instructions of all capabilities of its processor before it. DEFAULT is of every processor.
//
// x86-64: AVX512_VNNI has VBMI as well (Intel from Ice Lake on, but for Cooper Lake). AMX has tiles of bf16 and of
// 8-bit integers (Intel from Sapphire Rapids on), and the permission of the kernel to use them.
//
// ARM64: NEON is ARMv8.2 with arithmetic of fp16 and dot products of bytes (every server since Neoverse N1, every Apple
// M). NEON_BF16 has products of bf16 and mixed products of bytes (i8mm) as well (Neoverse V1, N2 and later, Apple from
// M2 on).
enum class CpuCapability { DEFAULT, AVX2, AVX512, AVX512_VNNI, AVX512_BF16, AMX, NEON, NEON_BF16 };

// The capability in use: the best of this build that the machine runs, or the one that the environment variable
// PAGEDATTN_CPU_CAPABILITY names. Throws std::runtime_error if the variable names no capability, or one that the
// machine or the build lacks, and if the machine runs no capability of the build.
CpuCapability cpu_capability();
const char* cpu_capability_name(CpuCapability capability);
// The names of all capabilities that this build has and this machine runs, lowest first.
std::vector<std::string> available_cpu_capabilities();

// For tests, which run every instruction set in one process. Later calls use the named capability. An empty name brings
// back the capability that the process began with. No op may run meanwhile. Throws as cpu_capability() does.
void set_cpu_capability(const std::string& name);

// The copy for the capability in use; a null pointer if the kernel is for higher capabilities alone.
template <typename Function>
Function* choose_cpu_kernel(Function* on_default, Function* on_avx2, Function* on_avx512, Function* on_avx512_vnni,
                            Function* on_avx512_bf16, Function* on_amx, Function* on_neon, Function* on_neon_bf16) {
  Function* const copies[] = {on_default,     on_avx2, on_avx512, on_avx512_vnni,
                              on_avx512_bf16, on_amx,  on_neon,   on_neon_bf16};
  auto i = static_cast<int>(cpu_capability());
  while (i > 0 && copies[i] == nullptr) --i;
  return copies[i];
}

}  // namespace pagedattn

// Declares `void name(args)` in the namespace of every capability; PAGEDATTN_CPU_KERNEL(name) picks one. The functions
// are weak: a copy that the build does not have is a null pointer, so that the files of the ops are the same in every
// build.
#define PAGEDATTN_DECLARE_CPU_KERNEL(name, ...) \
  namespace cpu_default {                       \
  [[gnu::weak]] void name(__VA_ARGS__);         \
  }                                             \
  namespace cpu_avx2 {                          \
  [[gnu::weak]] void name(__VA_ARGS__);         \
  }                                             \
  namespace cpu_avx512 {                        \
  [[gnu::weak]] void name(__VA_ARGS__);         \
  }                                             \
  namespace cpu_avx512_vnni {                   \
  [[gnu::weak]] void name(__VA_ARGS__);         \
  }                                             \
  namespace cpu_avx512_bf16 {                   \
  [[gnu::weak]] void name(__VA_ARGS__);         \
  }                                             \
  namespace cpu_amx {                           \
  [[gnu::weak]] void name(__VA_ARGS__);         \
  }                                             \
  namespace cpu_neon {                          \
  [[gnu::weak]] void name(__VA_ARGS__);         \
  }                                             \
  namespace cpu_neon_bf16 {                     \
  [[gnu::weak]] void name(__VA_ARGS__);         \
  }

#define PAGEDATTN_CPU_KERNEL(name)                                                                                     \
  choose_cpu_kernel(cpu_default::name, cpu_avx2::name, cpu_avx512::name, cpu_avx512_vnni::name, cpu_avx512_bf16::name, \
                    cpu_amx::name, cpu_neon::name, cpu_neon_bf16::name)
