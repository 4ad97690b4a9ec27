#include "cpu_model.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace pagedattn {
namespace {

bool is_zen_5() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx) return false;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  const unsigned base_family = eax >> 8 & 0xf, extended_family = eax >> 20 & 0xff;
  return base_family == 0xf && base_family + extended_family == 0x1a;
}

}  // namespace

const bool IS_ZEN_5 = is_zen_5();

}  // namespace pagedattn
#endif
