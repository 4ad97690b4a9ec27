// How fast a CPU reads memory. probes.py compiles this file for the CPU that it runs on.
#include <cstdint>

namespace {

#ifdef __AVX512F__
constexpr int VECTOR_SIZE = 16;
#else
constexpr int VECTOR_SIZE = 8;
#endif
using Vector = float __attribute__((vector_size(VECTOR_SIZE * sizeof(float))));

template <int NUM_STREAMS>
float sum(const float* data, int64_t size) {
  constexpr int PER_LINE = 16 / VECTOR_SIZE;
  Vector sums[4] = {};
  const Vector* vectors = reinterpret_cast<const Vector*>(data);
  const int64_t length = size / (VECTOR_SIZE * NUM_STREAMS);
  for (int64_t begin = 0; begin < length; begin += PER_LINE) {
#pragma GCC unroll 16
    for (int stream = 0; stream < NUM_STREAMS; ++stream) {
#pragma GCC unroll 2
      for (int i = 0; i < PER_LINE; ++i) sums[(stream + 2 * i) % 4] += vectors[stream * length + begin + i];
    }
  }
  const Vector all = sums[0] + sums[1] + sums[2] + sums[3];
  return all[0];
}

}  // namespace

// Reads `size` floats, a multiple of 256 at an address that is a multiple of 64, as 8 or 16 streams side by side:
// hardware fetches ahead in each. Returns one lane of the sum, so that no read is left out.
extern "C" float read_streams(const float* data, int64_t size, int64_t num_streams) {
  return num_streams == 8 ? sum<8>(data, size) : sum<16>(data, size);
}
