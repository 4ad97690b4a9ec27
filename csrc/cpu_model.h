// What the capability of a CPU does not say of its model.
#pragma once

namespace pagedattn {

#if defined(__x86_64__)
// Whether this is a Zen 5: AMD's family 1Ah, which has Zen 6 as well, where nobody has measured. It does not change in
// a process; static initialisation may see false.
extern const bool IS_ZEN_5;
#else
constexpr bool IS_ZEN_5 = false;
#endif

}  // namespace pagedattn
