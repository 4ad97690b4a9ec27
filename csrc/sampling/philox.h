// Random numbers by a counter: Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <cstdint>

namespace pagedattn {
namespace {

// The number of a counter in [0, 1), a multiple of 2^-52. It is the same on every device. A product of such a number
// and a double is less than the double.
constexpr double uniform_number(uint64_t seed, uint64_t offset, uint64_t subsequence) {
  constexpr int NUM_ROUNDS = 10;
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
  uint32_t key[2] = {low(seed), high(seed)};
  uint32_t counter[4] = {low(offset), high(offset), low(subsequence), high(subsequence)};
  for (int round = 0; round < NUM_ROUNDS; ++round) {
    const uint64_t first = uint64_t{0xd2511f53} * counter[0];
    const uint64_t second = uint64_t{0xcd9e8d57} * counter[2];
    counter[0] = high(second) ^ counter[1] ^ key[0];
    counter[1] = low(second);
    counter[2] = high(first) ^ counter[3] ^ key[1];
    counter[3] = low(first);
    key[0] += 0x9e3779b9;
    key[1] += 0xbb67ae85;
  }
  const uint64_t bits = static_cast<uint64_t>(counter[0]) << 32 | counter[1];
  return static_cast<double>(bits >> 12) * 0x1p-52;
}

}  // namespace
}  // namespace pagedattn
