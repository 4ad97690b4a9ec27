#include "cpu_dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)
// Defined by tests/amx/emulate_tiles.cpp, a library to be loaded first, and null without that library.
extern "C" [[gnu::weak, gnu::visibility("default")]] void pagedattn_emulates_tiles();
#endif

namespace pagedattn {
namespace {

// Of this processor, lowest first.
#if defined(__aarch64__)
constexpr CpuCapability ALL_CAPABILITIES[] = {CpuCapability::DEFAULT, CpuCapability::NEON, CpuCapability::NEON_BF16};
constexpr char ALL_NAMES[] = "default, neon or neon_bf16";
#else
constexpr CpuCapability ALL_CAPABILITIES[] = {CpuCapability::DEFAULT,     CpuCapability::AVX2,
                                              CpuCapability::AVX512,      CpuCapability::AVX512_VNNI,
                                              CpuCapability::AVX512_BF16, CpuCapability::AMX};
constexpr char ALL_NAMES[] = "default, avx2, avx512, avx512_vnni, avx512_bf16 or amx";
#endif

#if defined(__x86_64__)
// Whether the CPU has tiles of bf16 and of 8-bit integers, and the kernel lets this process use them. The kernel is
// asked once, and allows them for all threads and all later children by fork. A kernel before Linux 5.16 refuses, and
// so does a sandbox that knows no tiles.
bool may_use_tiles() {
  static const bool may = [] {
    constexpr unsigned AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25;  // bits of EDX
    constexpr unsigned ALL = AMX_BF16 | AMX_TILE | AMX_INT8;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & ALL) != ALL) {
      return pagedattn_emulates_tiles != nullptr;
    }
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;  // of Linux, whose older headers lack them
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  }();
  return may;
}
#elif defined(__aarch64__) && defined(__APPLE__)
// Whether the CPU has all of these features; the names are those of sysctl.
bool has_features(std::initializer_list<const char*> names) {
  return std::all_of(names.begin(), names.end(), [](const char* name) {
    int value = 0;
    std::size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  });
}
#endif

CpuCapability best_cpu_capability() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) {
    return CpuCapability::DEFAULT;
  }
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))) {
    return CpuCapability::AVX2;
  }
  if (!(__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi"))) return CpuCapability::AVX512;
  if (!__builtin_cpu_supports("avx512bf16")) return CpuCapability::AVX512_VNNI;
  return may_use_tiles() ? CpuCapability::AMX : CpuCapability::AVX512_BF16;
#elif defined(__aarch64__) && defined(__APPLE__)
  if (!has_features({"hw.optional.arm.FEAT_FP16", "hw.optional.arm.FEAT_DotProd"})) return CpuCapability::DEFAULT;
  const bool has_bf16 = has_features({"hw.optional.arm.FEAT_BF16", "hw.optional.arm.FEAT_I8MM"});
  return has_bf16 ? CpuCapability::NEON_BF16 : CpuCapability::NEON;
#elif defined(__aarch64__)
  // Bits that Linux sets; its older headers lack some of them. ARMv8.2 and later have the two kinds of fp16 together.
  constexpr unsigned long FPHP = 1 << 9, ASIMDHP = 1 << 10, ASIMDDP = 1 << 20, NEON = FPHP | ASIMDHP | ASIMDDP;
  constexpr unsigned long I8MM = 1 << 13, BF16 = 1 << 14, NEON_BF16 = I8MM | BF16;
  if ((getauxval(AT_HWCAP) & NEON) != NEON) return CpuCapability::DEFAULT;
  return (getauxval(AT_HWCAP2) & NEON_BF16) == NEON_BF16 ? CpuCapability::NEON_BF16 : CpuCapability::NEON;
#else
  return CpuCapability::DEFAULT;
#endif
}

// The capabilities that the kernels of this build were compiled for. CMake defines the list.
constexpr std::string_view COMPILED[] = {PAGEDATTN_CPU_CAPABILITIES};

bool is_compiled(CpuCapability capability) {
  return std::find(std::begin(COMPILED), std::end(COMPILED), cpu_capability_name(capability)) != std::end(COMPILED);
}

std::string compiled_names() {
  std::string names;
  for (std::string_view name : COMPILED) names.append(names.empty() ? "" : ", ").append(name);
  return names;
}

CpuCapability best_compiled_capability() {
  const CpuCapability best = best_cpu_capability();
  for (auto it = std::rbegin(ALL_CAPABILITIES); it != std::rend(ALL_CAPABILITIES); ++it) {
    if (*it <= best && is_compiled(*it)) return *it;
  }
  throw std::runtime_error("pagedattn_ext: this build is for machines with " + compiled_names() +
                           ", the best that this machine runs is " + cpu_capability_name(best) +
                           ": build it with PAGEDATTN_CPU_CAPABILITIES=all");
}

CpuCapability capability_named(const std::string& name) {
  const CpuCapability best = best_cpu_capability();
  for (CpuCapability capability : ALL_CAPABILITIES) {
    if (name != cpu_capability_name(capability)) continue;
    if (capability > best) {
      throw std::runtime_error("PAGEDATTN_CPU_CAPABILITY: this machine does not run " + name + ", its best is " +
                               cpu_capability_name(best));
    }
    if (is_compiled(capability)) return capability;
    throw std::runtime_error("PAGEDATTN_CPU_CAPABILITY: expected one that this build has (" + compiled_names() +
                             "), got " + name + ": `make build` compiles all");
  }
  throw std::runtime_error(std::string("PAGEDATTN_CPU_CAPABILITY: expected ") + ALL_NAMES + ", got " + name);
}

CpuCapability capability_of_the_environment() {
  const char* name = std::getenv("PAGEDATTN_CPU_CAPABILITY");
  return name == nullptr || *name == '\0' ? best_compiled_capability() : capability_named(name);
}

std::atomic<CpuCapability>& capability_in_use() {
  static std::atomic<CpuCapability> capability = capability_of_the_environment();
  return capability;
}

}  // namespace

CpuCapability cpu_capability() { return capability_in_use().load(std::memory_order_relaxed); }

void set_cpu_capability(const std::string& name) {
  capability_in_use() = name.empty() ? capability_of_the_environment() : capability_named(name);
}

const char* cpu_capability_name(CpuCapability capability) {
  switch (capability) {
    case CpuCapability::NEON_BF16:
      return "neon_bf16";
    case CpuCapability::NEON:
      return "neon";
    case CpuCapability::AMX:
      return "amx";
    case CpuCapability::AVX512_BF16:
      return "avx512_bf16";
    case CpuCapability::AVX512_VNNI:
      return "avx512_vnni";
    case CpuCapability::AVX512:
      return "avx512";
    case CpuCapability::AVX2:
      return "avx2";
    default:
      return "default";
  }
}

std::vector<std::string> available_cpu_capabilities() {
  const CpuCapability best = best_cpu_capability();
  std::vector<std::string> names;
  for (CpuCapability capability : ALL_CAPABILITIES) {
    if (capability <= best && is_compiled(capability)) names.emplace_back(cpu_capability_name(capability));
  }
  return names;
}

}  // namespace pagedattn
