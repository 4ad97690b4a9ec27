// Each function of ptx.cuh, and rounding to float8, against what is documented of it, computed by plain code. It runs
// on the simt device to test the emulated twins (test_simt.py), and on a GPU to test the PTX itself. Exit status: 0
// right, 1 wrong (the reasons on stderr), 2 error.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <random>
#include <vector>

#include "cuda_float8.cuh"
#include "simt/program.cuh"

namespace pagedattn::cuda {
namespace {

int num_wrong = 0;

void expect(bool right, const char* what, double where, double expected, double got) {
  if (right) return;
  if (++num_wrong <= 20) std::fprintf(stderr, "%s at %.9g: expected %.9g, got %.9g\n", what, where, expected, got);
}

void expect_same(float expected, float got, const char* what, double where) {
  expect(expected == got || (std::isnan(expected) && std::isnan(got)), what, where, expected, got);
}

// For an instruction with a relative error, which takes numbers below the normal range for 0.
void expect_near(double exact, float got, double error, const char* what, double where) {
  const double magnitude = std::abs(exact), allowed = magnitude * error;
  const bool may_be_zero = magnitude - allowed < std::numeric_limits<float>::min();
  const bool may_be_infinite = magnitude + allowed > std::numeric_limits<float>::max();
  const bool is_near = std::isnormal(got) && std::abs(got - exact) <= allowed;
  expect(is_near || (may_be_zero && got == 0) || (may_be_infinite && std::isinf(got)), what, where, exact, got);
}

// Whether code for sm_90 has run. On a GPU that has the instructions, it is wrong if the code has not run: nothing is
// known of them then. wgmma is compiled for 9.0 alone.
bool expect_run(bool was_run, const char* what) {
  const bool has_it = std::strstr(what, "wgmma") == nullptr ? compute_capability() >= 90 : compute_capability() == 90;
  expect(was_run || !has_it, what, compute_capability(), 1, 0);
  return was_run;
}

// ---- plain decoders

float decode(uint32_t bits, int num_exponent_bits, int num_mantissa_bits, bool has_infinity) {
  const int mantissa = bits & ((1 << num_mantissa_bits) - 1);
  const int max_exponent = (1 << num_exponent_bits) - 1;
  const int exponent = bits >> num_mantissa_bits & max_exponent;
  const int bias = max_exponent / 2;
  const float sign = bits >> (num_mantissa_bits + num_exponent_bits) & 1 ? -1.0f : 1.0f;
  const int max_mantissa = (1 << num_mantissa_bits) - 1;
  if (exponent == max_exponent && has_infinity) {
    return mantissa ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == max_exponent && mantissa == max_mantissa) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - num_mantissa_bits);
  return sign * std::ldexp(static_cast<float>(mantissa | 1 << num_mantissa_bits), exponent - bias - num_mantissa_bits);
}

float decode(float16 x) { return decode(x.bits, 5, 10, true); }
float decode(bfloat16 x) { return decode(x.bits, 8, 7, true); }
float decode(float8_e4m3 x) { return decode(x.bits, 4, 3, false); }
float decode(float8_e5m2 x) { return decode(x.bits, 5, 2, true); }

// ---- matrices

// One warp. a [16, 16] row-major, b [8][16] (column-major), d [16, 8] row-major.
template <typename T>
__global__ void multiply_kernel(const T* a, const T* b, float* d) {
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, pair = lane % 4 * 2;
  const auto two = [](const T* elements) { return elements[0].bits | static_cast<uint32_t>(elements[1].bits) << 16; };
  const uint32_t a_fragment[4] = {two(a + group * 16 + pair), two(a + (group + 8) * 16 + pair),
                                  two(a + group * 16 + pair + 8), two(a + (group + 8) * 16 + pair + 8)};
  float d_fragment[4];
  for (int i = 0; i < 4; ++i) d_fragment[i] = d[(group + i / 2 * 8) * 8 + pair + i % 2];
  ptx::mma_m16n8k16<T>(d_fragment, a_fragment, two(b + group * 16 + pair), two(b + group * 16 + pair + 8));
  for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + pair + i % 2] = d_fragment[i];
}

// The same with both operands through shared memory and ldmatrix: a's rows and b's columns are 32 bytes each.
template <typename T>
__global__ void load_and_multiply_kernel(const T* a, const T* b, float* d) {
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, pair = lane % 4 * 2;
  auto* a_tile = reinterpret_cast<T*>(shared_memory);
  T* b_tile = a_tile + 16 * 16;
  for (int i = lane; i < 16 * 16; i += WARP_SIZE) a_tile[i] = a[i];
  for (int i = lane; i < 16 * 8; i += WARP_SIZE) b_tile[i] = b[i];
  __syncwarp();
  uint32_t a_fragment[4], b_fragment[4];
  const int row = lane % 8, matrix = lane / 8;
  ptx::ldmatrix_x4(a_fragment, a_tile + (row + matrix % 2 * 8) * 16 + matrix / 2 * 8);
  ptx::ldmatrix_x4(b_fragment, b_tile + row * 16 + matrix % 2 * 8);  // its two matrices, twice
  float d_fragment[4];
  for (int i = 0; i < 4; ++i) d_fragment[i] = d[(group + i / 2 * 8) * 8 + pair + i % 2];
  ptx::mma_m16n8k16<T>(d_fragment, a_fragment, b_fragment[2], b_fragment[3]);
  for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + pair + i % 2] = d_fragment[i];
}

// Small multiples of 1/8: all products and sums are exact, so results are equal whatever the order.
template <typename T>
class Eighths {
 public:
  Eighths() {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const T candidate{static_cast<uint16_t>(bits)};
      const float steps = decode(candidate) * 8;
      if (std::abs(steps) <= MAX && steps == std::nearbyint(steps)) all_.push_back(candidate);
    }
  }

  T draw() { return all_[random_() % all_.size()]; }
  float draw_float() { return decode(draw()); }

 private:
  static constexpr float MAX = 64;
  std::vector<T> all_;
  std::mt19937 random_{1};
};

template <typename T>
void check_mma(const char* name) {
  Eighths<T> eighths;
  Buffer<float> d(16 * 8);
  Buffer<T> a(16 * 16), b(16 * 8);
  for (int round = 0; round < 8; ++round) {
    for (size_t i = 0; i < a.size(); ++i) a[i] = eighths.draw();
    for (size_t i = 0; i < b.size(); ++i) b[i] = eighths.draw();
    float expected[16][8];
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 8; ++n) {
        expected[m][n] = d[m * 8 + n] = eighths.draw_float();
        for (int k = 0; k < 16; ++k) expected[m][n] += decode(a[m * 16 + k]) * decode(b[n * 16 + k]);
      }
    }
    const auto kernel = round % 2 ? load_and_multiply_kernel<T> : multiply_kernel<T>;
    run_kernel(kernel, dim3(1), dim3(WARP_SIZE), (16 * 16 + 16 * 8) * sizeof(T), static_cast<const T*>(a.data()),
               static_cast<const T*>(b.data()), d.data());
    for (int i = 0; i < 16 * 8; ++i) expect_same(expected[i / 8][i % 8], d[i], name, i);
  }
}

constexpr int WGMMA_STEPS = 2;  // of 16

struct WgmmaArguments {
  const void* a;  // [64][WGMMA_STEPS][16]
  const void* b;  // [WGMMA_STEPS][columns][16]
  float* d;       // [128][columns]
  uint32_t leading_bytes, stride_bytes, step_bytes;
  bool accumulate;
  bool* was_run;
};

// Two warpgroups multiply the same, and each adds the product to 64 rows of d. Nothing is stored but on sm_90a.
template <typename T, ptx::Major MAJOR_B, int COLUMNS>
__global__ void wgmma_kernel([[maybe_unused]] WgmmaArguments w) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(PAGEDATTN_SIMT)
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, group = lane / 4, pair = lane % 4 * 2;
  const auto* b = static_cast<const T*>(w.b);
  for (int i = thread; i < WGMMA_STEPS * COLUMNS * 16; i += 256) {
    const int k = i % 16, n = i / 16 % COLUMNS, step = i / 16 / COLUMNS;
    unsigned char* piece = shared_memory + step * w.step_bytes + k / 8 * w.leading_bytes + n / 8 * w.stride_bytes;
    reinterpret_cast<T*>(piece)[MAJOR_B == ptx::Major::K ? n % 8 * 8 + k % 8 : k % 8 * 8 + n % 8] = b[i];
  }
  ptx::fence_proxy_async();
  __syncthreads();

  const int first_row = thread / 32 * 16;  // of d
  uint32_t a[WGMMA_STEPS][4];
  for (int step = 0; step < WGMMA_STEPS; ++step) {
    for (int r = 0; r < 4; ++r) {
      const int row = first_row % 64 + group + r % 2 * 8;
      const T* two = static_cast<const T*>(w.a) + (row * WGMMA_STEPS + step) * 16 + pair + r / 2 * 8;
      a[step][r] = two[0].bits | static_cast<uint32_t>(two[1].bits) << 16;
    }
  }
  float d[COLUMNS / 8][4];
  const auto element = [&](int tile, int i) -> float& {
    return w.d[(first_row + group + i / 2 * 8) * COLUMNS + tile * 8 + pair + i % 2];
  };
  for (int tile = 0; tile < COLUMNS / 8; ++tile) {
    for (int i = 0; i < 4; ++i) d[tile][i] = element(tile, i);
  }
  const uint64_t descriptor = ptx::wgmma_descriptor(shared_memory, w.leading_bytes, w.stride_bytes);
  ptx::wgmma_fence(d, a);
  for (int step = 0; step < WGMMA_STEPS; ++step) {
    ptx::wgmma_m64k16<T, MAJOR_B>(d, a[step], descriptor + step * w.step_bytes / 16, w.accumulate || step > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d, a);
  for (int tile = 0; tile < COLUMNS / 8; ++tile) {
    for (int i = 0; i < 4; ++i) element(tile, i) = d[tile][i];
  }
  *w.was_run = true;
#endif
}

template <typename T, ptx::Major MAJOR_B, int COLUMNS>
void check_wgmma(const char* name) {
  struct Layout {
    uint32_t leading_bytes, stride_bytes, step_bytes;
  };
  // Pieces of a column after each other; pieces of the same 8 elements of k after each other; the same with a gap.
  constexpr Layout LAYOUTS[] = {
      {128, WGMMA_STEPS * 256, 256}, {COLUMNS * 16, 128, COLUMNS * 32}, {COLUMNS * 16 + 64, 128, COLUMNS * 32 + 128}};
  constexpr size_t SHARED_BYTES = WGMMA_STEPS * (COLUMNS * 32 + 128);
  Eighths<T> eighths;
  Buffer<T> a(64 * WGMMA_STEPS * 16), b(WGMMA_STEPS * COLUMNS * 16);
  Buffer<float> d(128 * COLUMNS);
  std::vector<float> expected(d.size());
  Buffer<bool> was_run(1);
  for (int round = 0; round < 6; ++round) {
    const Layout layout = LAYOUTS[round % 3];
    const bool accumulate = round >= 3;
    for (size_t i = 0; i < a.size(); ++i) a[i] = eighths.draw();
    for (size_t i = 0; i < b.size(); ++i) b[i] = eighths.draw();
    for (int m = 0; m < 128; ++m) {
      for (int n = 0; n < COLUMNS; ++n) {
        float& sum = expected[m * COLUMNS + n];
        d[m * COLUMNS + n] = eighths.draw_float();
        sum = accumulate ? d[m * COLUMNS + n] : 0.0f;
        for (int k = 0; k < WGMMA_STEPS * 16; ++k) {
          sum += decode(a[m % 64 * WGMMA_STEPS * 16 + k]) * decode(b[(k / 16 * COLUMNS + n) * 16 + k % 16]);
        }
      }
    }
    run_kernel(wgmma_kernel<T, MAJOR_B, COLUMNS>, dim3(1), dim3(256), SHARED_BYTES,
               WgmmaArguments{a.data(), b.data(), d.data(), layout.leading_bytes, layout.stride_bytes,
                              layout.step_bytes, accumulate, was_run.data()});
    if (!expect_run(was_run[0], name)) return;
    for (size_t i = 0; i < d.size(); ++i) expect_same(expected[i], d[i], name, i);
  }
}

// One warp. Lane l's row address is row permutation[l] of 32 rows of 16 bytes.
template <bool TRANSPOSED>
__global__ void ldmatrix_kernel(const uint32_t* in, const int* permutation, uint32_t* out) {
  auto* rows = reinterpret_cast<uint32_t*>(shared_memory);
  for (int i = threadIdx.x; i < 32 * 4; i += WARP_SIZE) rows[i] = in[i];
  __syncwarp();
  uint32_t matrices[4];
  const uint32_t* row = rows + permutation[threadIdx.x] * 4;
  TRANSPOSED ? ptx::ldmatrix_x4_trans(matrices, row) : ptx::ldmatrix_x4(matrices, row);
  for (int i = 0; i < 4; ++i) out[i * WARP_SIZE + threadIdx.x] = matrices[i];
}

void check_ldmatrix() {
  std::mt19937 random(2);
  Buffer<uint32_t> in(32 * 4), out(4 * WARP_SIZE);
  Buffer<int> permutation(WARP_SIZE);
  for (size_t i = 0; i < in.size(); ++i) in[i] = random();
  for (int lane = 0; lane < WARP_SIZE; ++lane) permutation[lane] = lane * 13 % WARP_SIZE;
  const auto run = [&](auto kernel, const char* name, const auto& expected_of) {
    run_kernel(kernel, dim3(1), dim3(WARP_SIZE), 512, static_cast<const uint32_t*>(in.data()),
               static_cast<const int*>(permutation.data()), out.data());
    for (int i = 0; i < 4; ++i) {
      for (int lane = 0; lane < WARP_SIZE; ++lane) {
        const uint32_t expected = expected_of(i, lane);
        expect(out[i * WARP_SIZE + lane] == expected, name, lane, expected, out[i * WARP_SIZE + lane]);
      }
    }
  };
  run(ldmatrix_kernel<false>, "ldmatrix",
      [&](int i, int lane) { return in[permutation[8 * i + lane / 4] * 4 + lane % 4]; });
  const auto element = [&](int i, int row, int column) {
    return in[permutation[8 * i + row] * 4 + column / 2] >> 16 * (column % 2) & 0xffff;
  };
  run(ldmatrix_kernel<true>, "ldmatrix, transposed", [&](int i, int lane) {
    return element(i, 2 * (lane % 4), lane / 4) | element(i, 2 * (lane % 4) + 1, lane / 4) << 16;
  });
}

// ---- barriers

// One block of 128. Pairs of warps turn their halves around, a few times, at barriers of their own.
__global__ void barrier_kernel(const int* in, int* out) {
  constexpr int TEAM = 64, NUM_ROUNDS = 5;
  const int thread = static_cast<int>(threadIdx.x), team = thread / TEAM;
  int* numbers = reinterpret_cast<int*>(shared_memory);
  int number = in[thread];
  for (int round = 0; round < NUM_ROUNDS; ++round) {
    numbers[thread] = number;
    ptx::barrier_sync(1 + team, TEAM);
    number = numbers[thread ^ (TEAM - 1)] + 1;
    ptx::barrier_sync(1 + team, TEAM);
  }
  out[thread] = number;
}

void check_barriers() {
  Buffer<int> in(128), out(128);
  for (int i = 0; i < 128; ++i) in[i] = i * i;
  run_kernel(barrier_kernel, dim3(1), dim3(128), 512, static_cast<const int*>(in.data()), out.data());
  for (int i = 0; i < 128; ++i) {
    const int other = i ^ 63;
    expect(out[i] == other * other + 5, "barrier_sync", i, other * other + 5, out[i]);
  }
}

// ---- clusters

// Clusters of 3 blocks of 32 along y. Lane l of a block reads what lane 31 - l of other blocks of its cluster put
// there: 8 bytes of the next block, and 16 of the block after that. Twice, with other numbers. Nothing is stored before
// sm_90.
constexpr int CLUSTER_BLOCKS = 3, CLUSTER_ROUNDS = 2, CLUSTER_WORDS = 6;  // words that a lane stores in a round

__global__ void cluster_kernel(uint32_t* out) {
  if (!ptx::is_sm90()) return;
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t block = blockIdx.y * gridDim.x + blockIdx.x;
  auto* numbers = reinterpret_cast<uint32_t*>(shared_memory);  // [32][4]
  for (int round = 0; round < CLUSTER_ROUNDS; ++round) {
    for (uint32_t i = 0; i < 4; ++i) numbers[lane * 4 + i] = block * 1000 + round * 500 + lane * 4 + i;
    ptx::cluster_sync();
    uint32_t two[2], four[4];
    const uint32_t* other = numbers + (31 - lane) * 4;
    ptx::load_cluster(two, ptx::map_shared(other + 2, (blockIdx.y + 1) % CLUSTER_BLOCKS));
    ptx::load_cluster(four, ptx::map_shared(other, (blockIdx.y + 2) % CLUSTER_BLOCKS));
    uint32_t* words = out + ((block * CLUSTER_ROUNDS + round) * 32 + lane) * CLUSTER_WORDS;
    for (int i = 0; i < 2; ++i) words[i] = two[i];
    for (int i = 0; i < 4; ++i) words[2 + i] = four[i];
    ptx::cluster_sync_relaxed();
  }
}

void check_clusters() {
  const dim3 grid(2, 2 * CLUSTER_BLOCKS);
  if (!expect_run(runs_code_of_sm90(cluster_kernel), "clusters")) return;
  Buffer<uint32_t> out(grid.x * grid.y * CLUSTER_ROUNDS * 32 * CLUSTER_WORDS);
  run_to_end(
      [&] { launch_in_clusters(cluster_kernel, grid, dim3(1, CLUSTER_BLOCKS), dim3(32), 512, nullptr, out.data()); });
  for (size_t i = 0; i < out.size(); ++i) {
    const auto word = static_cast<unsigned>(i % CLUSTER_WORDS), lane = static_cast<unsigned>(i / CLUSTER_WORDS % 32);
    const auto round = static_cast<unsigned>(i / CLUSTER_WORDS / 32 % CLUSTER_ROUNDS);
    const auto block = static_cast<unsigned>(i / CLUSTER_WORDS / 32 / CLUSTER_ROUNDS);
    const unsigned y = block / grid.x, first_y = y / CLUSTER_BLOCKS * CLUSTER_BLOCKS;
    const unsigned other_y = first_y + (y + (word < 2 ? 1 : 2)) % CLUSTER_BLOCKS;
    const unsigned other_block = other_y * grid.x + block % grid.x;
    const unsigned expected = other_block * 1000 + round * 500 + (31 - lane) * 4 + (word < 2 ? 2 + word : word - 2);
    expect(out[i] == expected, "load_cluster", static_cast<double>(i), expected, out[i]);
  }
}

// ---- kernels that follow each other

constexpr int NUM_STEPS = 10'000;  // of a chain: time enough for a dependent kernel to begin

__global__ void slow_kernel(int* numbers) {
  ptx::griddepcontrol_launch_dependents();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  int number = i;
  for (int step = 0; step < NUM_STEPS; ++step) number = (number * 75 + 74) % 65537;
  numbers[i] = number;
}

__global__ void dependent_kernel(const int* numbers, int* out) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int other = static_cast<int>(gridDim.x * blockDim.x) - 1 - i;
  ptx::griddepcontrol_wait();
  out[i] = numbers[other];
}

void check_dependent_launch() {
  constexpr int NUM_NUMBERS = 4 * 64;
  Buffer<int> numbers(NUM_NUMBERS), out(NUM_NUMBERS);
  run_to_end([&] {
    launch(slow_kernel, dim3(4), dim3(64), 0, nullptr, numbers.data());
    launch_dependent(dependent_kernel, dim3(4), dim3(64), 0, nullptr, Memory{numbers.data(), NUM_NUMBERS * sizeof(int)},
                     static_cast<const int*>(numbers.data()), out.data());
  });
  for (int i = 0; i < NUM_NUMBERS; ++i) {
    int expected = NUM_NUMBERS - 1 - i;
    for (int step = 0; step < NUM_STEPS; ++step) expected = (expected * 75 + 74) % 65537;
    expect(out[i] == expected, "a dependent kernel", i, expected, out[i]);
  }
}

// ---- asynchronous copies

// One block of 64. Each thread copies 16 bytes, then 8, of a source of its own, or zeros.
__global__ void copy_kernel(const unsigned char* in, unsigned char* out) {
  const int thread = static_cast<int>(threadIdx.x);
  const bool valid = thread % 3 != 0;
  ptx::cp_async_16(shared_memory + thread * 16, valid ? in + thread * 16 : nullptr, valid);
  ptx::cp_async_commit();
  ptx::cp_async_8(shared_memory + 1024 + thread * 8, valid ? in + thread * 8 : nullptr, valid);
  ptx::cp_async_commit();
  ptx::cp_async_wait<1>();
  __syncthreads();
  const int other = 63 - thread;
  for (int i = 0; i < 16; ++i) out[other * 16 + i] = shared_memory[other * 16 + i];
  ptx::cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 8; ++i) out[1024 + other * 8 + i] = shared_memory[1024 + other * 8 + i];
}

void check_copies() {
  Buffer<unsigned char> in(1024), out(1024 + 512);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i * 7 + 1);
  run_kernel(copy_kernel, dim3(1), dim3(64), 1024 + 512, static_cast<const unsigned char*>(in.data()), out.data());
  for (int i = 0; i < 1024; ++i) expect_same(i / 16 % 3 ? in[i] : 0, out[i], "cp_async_16", i);
  for (int i = 0; i < 512; ++i) expect_same(i / 8 % 3 ? in[i] : 0, out[1024 + i], "cp_async_8", i);
}

constexpr int BULK_BYTES = 2048, BULK_ROUNDS = 5;

// One block of 64. In every round one thread of each warp copies a half, the last 16 bytes of it alone, and all
// threads wait; then the halves are stored. Nothing is stored before sm_90.
__global__ void bulk_copy_kernel(const unsigned char* in, unsigned char* out, bool* was_run) {
  if (!ptx::is_sm90()) return;
  constexpr int HALF = BULK_BYTES / 2;
  const int thread = static_cast<int>(threadIdx.x);
  auto* barrier = reinterpret_cast<uint64_t*>(shared_memory + BULK_BYTES);
  if (thread == 0) {
    ptx::mbarrier_init(barrier, 2);
    ptx::fence_proxy_async();
  }
  __syncthreads();
  for (int round = 0; round < BULK_ROUNDS; ++round) {
    if (ptx::elect()) {
      const int begin = thread / WARP_SIZE * HALF;
      const unsigned char* source = in + round * BULK_BYTES + begin;
      ptx::mbarrier_arrive_expect(barrier, HALF);
      ptx::bulk_copy(shared_memory + begin, source, HALF - 16, barrier);
      ptx::bulk_copy(shared_memory + begin + HALF - 16, source + HALF - 16, 16, barrier);
    }
    __syncwarp();
    ptx::mbarrier_wait(barrier, round % 2);
    for (int i = thread; i < BULK_BYTES; i += 64) out[round * BULK_BYTES + i] = shared_memory[i];
    __syncthreads();
  }
  *was_run = true;
}

void check_bulk_copies() {
  Buffer<unsigned char> in(BULK_BYTES * BULK_ROUNDS), out(BULK_BYTES * BULK_ROUNDS);
  Buffer<bool> was_run(1);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i * 7 + i / 256);
  run_kernel(bulk_copy_kernel, dim3(1), dim3(64), BULK_BYTES + sizeof(uint64_t),
             static_cast<const unsigned char*>(in.data()), out.data(), was_run.data());
  if (!expect_run(was_run[0], "bulk_copy")) return;
  for (size_t i = 0; i < in.size(); ++i) expect_same(in[i], out[i], "bulk_copy", i);
}

// ---- numbers

struct Numbers {
  const float* in;
  int num;
  float16* as_float16;
  bfloat16* as_bfloat16;
  uint32_t *packed_float16, *packed_bfloat16;  // (x, -x)
  float *exp2, *reciprocal;
};

// Blocks of 128; a thread takes one number.
__global__ void numbers_kernel(Numbers n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n.num) return;
  const float x = n.in[i];
  n.as_float16[i] = ptx::to_float16(x);
  n.as_bfloat16[i] = ptx::to_bfloat16(x);
  n.packed_float16[i] = ptx::pack<float16>(x, -x);
  n.packed_bfloat16[i] = ptx::pack<bfloat16>(x, -x);
  n.exp2[i] = ptx::exp2_approx(x);
  n.reciprocal[i] = ptx::reciprocal_approx(x);
}

// Blocks of 256, a pattern a thread. e4m3 has 256 of them, as low and as high half.
__global__ void widen_kernel(float* from_float16, uint32_t* from_e4m3) {
  const unsigned bits = blockIdx.x * blockDim.x + threadIdx.x;
  from_float16[bits] = ptx::to_float(float16{static_cast<uint16_t>(bits)});
  if (bits < 256) from_e4m3[bits] = ptx::e4m3x2_to_f16x2(bits | (255 - bits) << 8);
}

void check_widening() {
  Buffer<float> from_float16(65536);
  Buffer<uint32_t> from_e4m3(256);
  run_kernel(widen_kernel, dim3(256), dim3(256), 0, from_float16.data(), from_e4m3.data());
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    expect_same(decode(float16{static_cast<uint16_t>(bits)}), from_float16[bits], "to_float(float16)", bits);
  }
  for (uint32_t bits = 0; bits < 256; ++bits) {
    const float16 low{static_cast<uint16_t>(from_e4m3[bits])}, high{static_cast<uint16_t>(from_e4m3[bits] >> 16)};
    expect_same(decode(float8_e4m3{static_cast<uint8_t>(bits)}), decode(low), "e4m3, low", bits);
    expect_same(decode(float8_e4m3{static_cast<uint8_t>(255 - bits)}), decode(high), "e4m3, high", bits);
  }
}

struct Rounding {
  float x;
  uint16_t expected;
};

// For each number of T and the next: itself, the middle (goes to the even one), and just off the middle.
template <typename T>
std::vector<Rounding> roundings(uint16_t infinity) {
  std::vector<Rounding> all;
  for (uint16_t bits = 0; bits < infinity; ++bits) {
    const auto next = static_cast<uint16_t>(bits + 1);
    const double x = decode(T{bits});
    const double above = next == infinity ? 2 * x - decode(T{static_cast<uint16_t>(bits - 1)}) : decode(T{next});
    const auto middle = static_cast<float>((x + above) / 2);  // exact
    const float huge = std::numeric_limits<float>::infinity();
    all.push_back({static_cast<float>(x), bits});
    all.push_back({middle, bits % 2 ? next : bits});
    all.push_back({std::nextafter(middle, 0.0f), bits});
    all.push_back({std::nextafter(middle, huge), next});
  }
  all.push_back({std::numeric_limits<float>::infinity(), infinity});
  return all;
}

void check_rounding() {
  const auto to_float16 = roundings<float16>(0x7c00), to_bfloat16 = roundings<bfloat16>(0x7f80);
  const size_t num = to_float16.size() + to_bfloat16.size() + 4000 + 1;
  Buffer<float> in(num), exp2(num), reciprocal(num);
  Buffer<float16> as_float16(num);
  Buffer<bfloat16> as_bfloat16(num);
  Buffer<uint32_t> packed_float16(num), packed_bfloat16(num);
  size_t i = 0;
  for (const Rounding& r : to_float16) in[i++] = r.x;
  for (const Rounding& r : to_bfloat16) in[i++] = r.x;
  for (int step = 0; step < 4000; ++step) in[i++] = static_cast<float>(step) * -0.05f + 20.0f;
  in[i] = std::numeric_limits<float>::quiet_NaN();
  run_kernel(numbers_kernel, dim3(static_cast<unsigned>(ceil_div<size_t>(num, 128))), dim3(128), 0,
             Numbers{in.data(), static_cast<int>(num), as_float16.data(), as_bfloat16.data(), packed_float16.data(),
                     packed_bfloat16.data(), exp2.data(), reciprocal.data()});

  const auto check = [&](const Rounding& r, uint16_t got, uint32_t packed, const char* name) {
    expect(r.expected == got, name, r.x, r.expected, got);
    expect(packed == (r.expected | (r.expected ^ 0x8000u) << 16), "packed", r.x, r.expected, packed);
  };
  i = 0;
  for (const Rounding& r : to_float16) {
    check(r, as_float16[i].bits, packed_float16[i], "to_float16");
    ++i;
  }
  for (const Rounding& r : to_bfloat16) {
    check(r, as_bfloat16[i].bits, packed_bfloat16[i], "to_bfloat16");
    ++i;
  }
  for (i = 0; i + 1 < num; ++i) {
    const double x = in[i], divisor = std::abs(x) < std::numeric_limits<float>::min() ? 0.0 : x;
    expect_near(std::exp2(x), exp2[i], 0x1p-21, "exp2_approx", x);
    expect_near(1.0 / divisor, reciprocal[i], 0x1p-22, "reciprocal_approx", x);
  }
  expect(std::isnan(decode(as_float16[i])), "to_float16", in[i], in[i], decode(as_float16[i]));
  expect(std::isnan(decode(as_bfloat16[i])), "to_bfloat16", in[i], in[i], decode(as_bfloat16[i]));
  expect(std::isnan(exp2[i]), "exp2_approx", in[i], in[i], exp2[i]);
  expect(std::isnan(reciprocal[i]), "reciprocal_approx", in[i], in[i], reciprocal[i]);
}

// One thread a quotient.
__global__ void divide_kernel(const float* dividends, const float* divisors, uint32_t* bits) {
  bits[threadIdx.x] = __float_as_uint(__fdiv_rn(dividends[threadIdx.x], divisors[threadIdx.x]));
}

// Which NaN is computed in float, the PTX ISA leaves open; the simt device gives one without a sign.
void check_computed_nan() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float cases[][2] = {{nan, 1.0f}, {-nan, 1.0f}, {1.0f, -nan}, {-nan, -nan}, {0.0f, 0.0f}};
  const size_t num = std::size(cases);
  Buffer<float> dividends(num), divisors(num);
  Buffer<uint32_t> bits(num);
  for (size_t i = 0; i < num; ++i) {
    dividends[i] = cases[i][0];
    divisors[i] = cases[i][1];
  }
  run_kernel(divide_kernel, dim3(1), dim3(static_cast<unsigned>(num)), 0, static_cast<const float*>(dividends.data()),
             static_cast<const float*>(divisors.data()), bits.data());
  for (size_t i = 0; i < num; ++i) {
#if defined(PAGEDATTN_SIMT)
    expect(bits[i] == 0x7fffffffu, "quotient", i, 0x7fffffffu, bits[i]);
#endif
    expect((bits[i] & 0x7fffffffu) > 0x7f800000u, "quotient", i, 0x7fffffffu, bits[i]);
  }
}

// ---- float8

constexpr uint32_t NOT_RUN = ~0u;

struct Float8Numbers {
  const float* in;
  int num;
  uint32_t* by_ptx;  // (x, -x); NOT_RUN before sm_89
  uint32_t* alone;
  uint32_t* in_pairs;  // (x, -x)
};

// Blocks of 128; a thread takes one number.
template <typename T>
__global__ void float8_kernel(Float8Numbers n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n.num) return;
  const float x = n.in[i];
#if __CUDA_ARCH__ >= 890 || defined(PAGEDATTN_SIMT)
  n.by_ptx[i] = ptx::to_float8x2<T>(x, -x);
#else
  n.by_ptx[i] = NOT_RUN;
#endif
  n.alone[i] = to_float8<T>(x);
  n.in_pairs[i] = to_float8x2<T>(x, -x, __float_as_uint(x) >> 31 ? 0x80 : 0x8000);
}

// The finite element of T that is nearest to x, which is not NaN; of two, the even one.
template <typename T>
uint32_t nearest_float8(float x, uint32_t largest) {
  const double magnitude = std::min<double>(std::fabs(x), decode(T{static_cast<uint8_t>(largest)}));
  const auto distance = [&](uint32_t bits) { return std::abs(decode(T{static_cast<uint8_t>(bits)}) - magnitude); };
  uint32_t nearest = 0;
  for (uint32_t bits = 1; bits <= largest; ++bits) {
    const double nearer = distance(nearest) - distance(bits);
    if (nearer > 0 || (nearer == 0 && bits % 2 == 0)) nearest = bits;
  }
  return nearest | (std::signbit(x) ? 0x80 : 0);
}

// Each element, the middle between it and the next, numbers beside both; and numbers far beyond the largest.
template <typename T>
void check_float8(const char* name, uint32_t largest) {
  const float huge = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> numbers = {huge, -huge, 1e30f, std::numeric_limits<float>::denorm_min()};
  for (uint32_t bits = 0; bits <= largest; ++bits) {
    const float x = decode(T{static_cast<uint8_t>(bits)});
    const float step =
        bits < largest ? decode(T{static_cast<uint8_t>(bits + 1)}) - x : x - decode(T{static_cast<uint8_t>(bits - 1)});
    for (const float center : {x, x + step / 2}) {
      for (const float y : {center, std::nextafter(center, 0.0f), std::nextafter(center, huge)}) {
        numbers.push_back(y);
        numbers.push_back(-y);
      }
    }
  }
  const size_t num_finite = numbers.size();
  numbers.push_back(nan);
  numbers.push_back(-nan);
  Buffer<float> in(numbers.size());
  Buffer<uint32_t> by_ptx(in.size()), alone(in.size()), in_pairs(in.size());
  std::copy(numbers.begin(), numbers.end(), in.host());
  run_kernel(float8_kernel<T>, dim3(static_cast<unsigned>(ceil_div<size_t>(in.size(), 128))), dim3(128), 0,
             Float8Numbers{in.data(), static_cast<int>(in.size()), by_ptx.data(), alone.data(), in_pairs.data()});

  for (size_t i = 0; i < in.size(); ++i) {
    const uint32_t nan_bits = std::signbit(in[i]) ? 0xff : 0x7f;
    const uint32_t bits = i < num_finite ? nearest_float8<T>(in[i], largest) : nan_bits;
    const uint32_t pair = bits | (bits ^ 0x80) << 8;
    expect(in_pairs[i] == pair, name, in[i], pair, in_pairs[i]);
    if (i < num_finite) {
      expect(alone[i] == bits, name, in[i], bits, alone[i]);
      expect(by_ptx[i] == pair || by_ptx[i] == NOT_RUN, name, in[i], pair, by_ptx[i]);
    } else if (by_ptx[i] != NOT_RUN) {  // the instruction's NaN may have any sign
      for (const uint32_t byte : {by_ptx[i] & 0xff, by_ptx[i] >> 8}) {
        expect(std::isnan(decode(T{static_cast<uint8_t>(byte)})), name, in[i], nan_bits, byte);
      }
    }
  }
}

}  // namespace
}  // namespace pagedattn::cuda

int main() {
  using namespace pagedattn;
  try {
    cuda::check_mma<float16>("mma of float16");
    cuda::check_mma<bfloat16>("mma of bfloat16");
    cuda::check_wgmma<float16, ptx::Major::K, 64>("wgmma of float16, 64 columns");
    cuda::check_wgmma<float16, ptx::Major::K, 128>("wgmma of float16, 128 columns");
    cuda::check_wgmma<bfloat16, ptx::Major::K, 64>("wgmma of bfloat16, 64 columns");
    cuda::check_wgmma<bfloat16, ptx::Major::K, 128>("wgmma of bfloat16, 128 columns");
    cuda::check_wgmma<float16, ptx::Major::N, 64>("wgmma of float16, 64 columns, n-major");
    cuda::check_wgmma<float16, ptx::Major::N, 128>("wgmma of float16, 128 columns, n-major");
    cuda::check_wgmma<bfloat16, ptx::Major::N, 64>("wgmma of bfloat16, 64 columns, n-major");
    cuda::check_wgmma<bfloat16, ptx::Major::N, 128>("wgmma of bfloat16, 128 columns, n-major");
    cuda::check_ldmatrix();
    cuda::check_barriers();
    cuda::check_clusters();
    cuda::check_dependent_launch();
    cuda::check_copies();
    cuda::check_bulk_copies();
    cuda::check_widening();
    cuda::check_rounding();
    cuda::check_computed_nan();
    cuda::check_float8<float8_e4m3>("float8_e4m3", 0x7e);
    cuda::check_float8<float8_e5m2>("float8_e5m2", 0x7b);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return cuda::ERROR;
  }
  return cuda::num_wrong == 0 ? cuda::RIGHT : cuda::WRONG;
}
