#include "cpu_dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string_view>

namespace pagedattn {
namespace {

constexpr CpuCapability ALL_CAPABILITIES[] = {CpuCapability::DEFAULT, CpuCapability::AVX2, CpuCapability::AVX512,
                                              CpuCapability::AVX512_VNNI, CpuCapability::AVX512_BF16};

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
  return __builtin_cpu_supports("avx512bf16") ? CpuCapability::AVX512_BF16 : CpuCapability::AVX512_VNNI;
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
  throw std::runtime_error(
      "PAGEDATTN_CPU_CAPABILITY: expected default, avx2, avx512, avx512_vnni or avx512_bf16, got " + name);
}

struct Choice {
  CpuCapability capability;
  bool was_named;
};

Choice choice_of_the_environment() {
  const char* name = std::getenv("PAGEDATTN_CPU_CAPABILITY");
  if (name == nullptr || *name == '\0') return {best_compiled_capability(), false};
  return {capability_named(name), true};
}

std::atomic<Choice>& choice_in_use() {
  static std::atomic<Choice> choice = choice_of_the_environment();
  return choice;
}

bool is_intel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

}  // namespace

CpuCapability cpu_capability() { return choice_in_use().load(std::memory_order_relaxed).capability; }

bool prefers_pair_dots() {
  static const bool intel = is_intel();
  const Choice choice = choice_in_use().load(std::memory_order_relaxed);
  return choice.capability == CpuCapability::AVX512_BF16 && (choice.was_named || !intel);
}

void set_cpu_capability(const std::string& name) {
  choice_in_use() = name.empty() ? choice_of_the_environment() : Choice{capability_named(name), true};
}

const char* cpu_capability_name(CpuCapability capability) {
  switch (capability) {
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
