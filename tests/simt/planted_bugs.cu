// Small kernels, each with a bug that can be switched on: what the simt device must catch (test_simt.py).
//   planted_bugs CASE clean|bug     exit status: 0 right result, 1 wrong result, 2 error (its text on stderr)
//   planted_bugs --list
// The clean kernels are right on a GPU too, those with bulk copies or clusters from sm_90 on.
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <vector>

#include "simt/program.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int NUM_THREADS = 128;
constexpr size_t SHARED_BYTES = NUM_THREADS * sizeof(float);

struct Arguments {
  const float* in;  // NUM_THREADS numbers
  float* out;       // as many
};

__device__ inline float* shared_floats() { return reinterpret_cast<float*>(shared_memory); }

// All grids are one block of NUM_THREADS, unless the case says otherwise.

// ---- barriers

template <bool BUG>
__global__ void barrier_kernel(Arguments a) {
  shared_floats()[threadIdx.x] = a.in[threadIdx.x];
  if (!BUG) __syncthreads();
  a.out[threadIdx.x] = shared_floats()[NUM_THREADS - 1 - threadIdx.x];
}

template <bool BUG>
__global__ void warp_barrier_kernel(Arguments a) {
  shared_floats()[threadIdx.x] = a.in[threadIdx.x];
  if (!BUG) __syncwarp();
  a.out[threadIdx.x] = shared_floats()[threadIdx.x ^ (WARP_SIZE - 1)];
}

// A sum in shared memory that nobody set to zero.
template <bool BUG>
__global__ void uninitialised_kernel(Arguments a) {
  if (!BUG && threadIdx.x == 0) shared_floats()[0] = 0.0f;
  __syncthreads();
  atomicAdd(shared_floats(), a.in[threadIdx.x]);
  __syncthreads();
  a.out[threadIdx.x] = shared_floats()[0];
}

template <bool BUG>
__global__ void divergent_barrier_kernel(Arguments a) {
  if (BUG && threadIdx.x < WARP_SIZE) {
    __syncthreads();
    a.out[threadIdx.x] = 0.0f;
  } else {
    __syncthreads();
  }
  a.out[threadIdx.x] = a.in[threadIdx.x];
}

// Each half of the block has a barrier of its own; with the bug, a barrier of half as many threads.
template <bool BUG>
__global__ void named_barrier_kernel(Arguments a) {
  constexpr int HALF = NUM_THREADS / 2;
  const int half = threadIdx.x / HALF;
  shared_floats()[threadIdx.x] = a.in[threadIdx.x];
  ptx::barrier_sync(1 + half, BUG ? HALF / 2 : HALF);
  a.out[threadIdx.x] = shared_floats()[threadIdx.x ^ (HALF - 1)];
}

template <bool BUG>
__global__ void missing_from_named_barrier_kernel(Arguments a) {
  if (!BUG || threadIdx.x < NUM_THREADS / 2) ptx::barrier_sync(3, NUM_THREADS);
  a.out[threadIdx.x] = a.in[threadIdx.x];
}

template <bool BUG>
__global__ void deadlock_kernel(Arguments a) {
  if (BUG && threadIdx.x % WARP_SIZE < 5) __syncthreads();
  const float sum = warp_sum(a.in[threadIdx.x]);
  __syncthreads();
  a.out[threadIdx.x] = sum;
}

template <bool BUG>
__global__ void exited_lanes_kernel(Arguments a) {
  if (BUG && threadIdx.x % WARP_SIZE >= 16) return;
  a.out[threadIdx.x] = warp_sum(a.in[threadIdx.x]);
}

// ---- warp operations

template <bool BUG>
__global__ void shuffle_mask_kernel(Arguments a) {
  const unsigned mask = BUG && threadIdx.x % WARP_SIZE < 16 ? 0xffffu : ALL_LANES;
  const float other = __shfl_xor_sync(mask, a.in[threadIdx.x], 16);
  a.out[threadIdx.x] = other;
}

template <bool BUG>
__global__ void shuffle_source_kernel(Arguments a) {
  float value = a.in[threadIdx.x];
  if (threadIdx.x % WARP_SIZE < 16) value = __shfl_xor_sync(0xffffu, value, BUG ? 16 : 8);
  a.out[threadIdx.x] = value;
}

// out[16 rows][8 columns] = in (its 128 numbers as 8 rows, twice) * identity: the first 8 columns of `in`'s rows.
template <bool BUG>
__global__ void fragment_kernel(Arguments a) {
  if (threadIdx.x >= WARP_SIZE) return;
  const int lane = threadIdx.x, group = lane / 4, pair = lane % 4 * 2;
  const auto in = [&](int row, int column) { return a.in[(row % 8) * 16 + column]; };
  const auto identity = [](int row, int column) { return row == column ? 1.0f : 0.0f; };
  const int second = BUG ? 0 : 8;  // the second half of the columns is forgotten
  const uint32_t fragment[4] = {
      ptx::pack<float16>(in(group, pair), in(group, pair + 1)),
      ptx::pack<float16>(in(group + 8, pair), in(group + 8, pair + 1)),
      ptx::pack<float16>(in(group, pair + 8), in(group, pair + 9)),
      ptx::pack<float16>(in(group + 8, pair + 8), in(group + 8, pair + 9)),
  };
  const uint32_t b0 = ptx::pack<float16>(identity(pair, group), identity(pair + 1, group));
  const uint32_t b1 = ptx::pack<float16>(identity(pair + second, group), identity(pair + second + 1, group));
  float d[4] = {};
  ptx::mma_m16n8k16<float16>(d, fragment, b0, b1);
  for (int i = 0; i < 4; ++i) a.out[(group + i / 2 * 8) * 8 + pair + i % 2] = d[i];
}

template <bool BUG>
__global__ void divergent_mma_kernel(Arguments a) {
  const uint32_t zeros[4] = {};
  float d[4] = {a.in[threadIdx.x]};
  if (BUG && threadIdx.x % 2) {
    ptx::mma_m16n8k16<bfloat16>(d, zeros, 0, 0);
  } else {
    ptx::mma_m16n8k16<bfloat16>(d, zeros, 0, 0);
  }
  a.out[threadIdx.x] = d[0];
}

// The four matrices are bytes 0 to 511 in order; lane `lane` holds the 4 bytes at 4 * lane of each.
template <bool BUG>
__global__ void ldmatrix_alignment_kernel(Arguments a) {
  shared_floats()[threadIdx.x] = a.in[threadIdx.x];
  __syncthreads();
  if (threadIdx.x >= WARP_SIZE) return;
  uint32_t matrices[4];
  const int begin = BUG && threadIdx.x < 31 ? 8 : 0;
  ptx::ldmatrix_x4(matrices, shared_memory + threadIdx.x * 16 + begin);
  for (int i = 0; i < 4; ++i) a.out[i * WARP_SIZE + threadIdx.x] = __uint_as_float(matrices[i]);
}

template <bool BUG>
__global__ void ldmatrix_outside_kernel(Arguments a) {
  shared_floats()[threadIdx.x] = a.in[threadIdx.x];
  __syncthreads();
  if (threadIdx.x >= WARP_SIZE) return;
  uint32_t matrices[4];
  ptx::ldmatrix_x4(matrices, shared_memory + (threadIdx.x + BUG) * 16);
  for (int i = 0; i < 4; ++i) a.out[i * WARP_SIZE + threadIdx.x] = __uint_as_float(matrices[i]);
}

// ---- asynchronous copies: each thread brings 4 floats of a tile, and sums what another thread brought

template <bool BUG>
__global__ void wait_kernel(Arguments a) {
  if (threadIdx.x < WARP_SIZE) ptx::cp_async_16(shared_floats() + threadIdx.x * 4, a.in + threadIdx.x * 4, true);
  ptx::cp_async_commit();
  if (!BUG) ptx::cp_async_wait<0>();
  __syncthreads();
  a.out[threadIdx.x] = shared_floats()[threadIdx.x];
}

template <bool BUG>
__global__ void wait_barrier_kernel(Arguments a) {
  if (threadIdx.x < WARP_SIZE) ptx::cp_async_16(shared_floats() + threadIdx.x * 4, a.in + threadIdx.x * 4, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  if (!BUG) __syncthreads();
  a.out[threadIdx.x] = shared_floats()[threadIdx.x];
}

// A pipeline of two stages of 16 floats over eight tiles; a warp each brings and reads all of a tile.
template <int PENDING, bool REUSE_BARRIER>
__device__ void pipeline(Arguments a) {
  constexpr int TILE = 16, NUM_TILES = NUM_THREADS / TILE;
  const auto start = [&](int tile) {
    if (tile < NUM_TILES && threadIdx.x < TILE / 4) {
      ptx::cp_async_16(shared_floats() + tile % 2 * TILE + threadIdx.x * 4, a.in + tile * TILE + threadIdx.x * 4, true);
    }
    ptx::cp_async_commit();
  };
  float sum = 0.0f;
  start(0);
  for (int tile = 0; tile < NUM_TILES; ++tile) {
    start(tile + 1);
    ptx::cp_async_wait<PENDING>();
    __syncthreads();
    for (int i = 0; i < TILE; ++i) sum += shared_floats()[tile % 2 * TILE + i];
    if (REUSE_BARRIER) __syncthreads();
  }
  a.out[threadIdx.x] = sum;
}

template <bool BUG>
__global__ void wait_count_kernel(Arguments a) {
  pipeline<BUG ? 2 : 1, true>(a);
}

template <bool BUG>
__global__ void reuse_kernel(Arguments a) {
  pipeline<1, !BUG>(a);
}

template <bool BUG>
__global__ void copy_alignment_kernel(Arguments a) {
  float* target = shared_floats() + threadIdx.x * 4 + (BUG && threadIdx.x == 3 ? 2 : 0);
  if (threadIdx.x < WARP_SIZE) ptx::cp_async_16(target, a.in + threadIdx.x * 4, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  a.out[threadIdx.x] = shared_floats()[threadIdx.x];
}

// ---- bulk copies: a stage of 32 floats, filled four times by the first thread, in phases of one barrier

enum class BulkBug {
  NONE,
  INIT,
  INIT_FENCE,
  INIT_FENCE_THREAD,
  PHASE,
  WAIT,
  BYTES,
  REUSE,
  FENCE,
  FENCE_THREAD,
  ALIGNMENT
};

template <BulkBug BUG>
__global__ void bulk_kernel(Arguments a) {
  constexpr int STAGE = 32;
  constexpr uint32_t BYTES = STAGE * sizeof(float);
  float* stage = shared_floats();
  auto* barrier = reinterpret_cast<uint64_t*>(stage + STAGE);
  if (threadIdx.x == 0) {
    if (BUG != BulkBug::INIT) ptx::mbarrier_init(barrier, 1);
    if (BUG != BulkBug::INIT_FENCE && BUG != BulkBug::INIT_FENCE_THREAD) ptx::fence_proxy_async();
  }
  __syncthreads();
  if (BUG == BulkBug::INIT_FENCE_THREAD) {
    if (threadIdx.x == 1) ptx::fence_proxy_async();
    __syncthreads();
  }
  constexpr unsigned NUM_ROUNDS = NUM_THREADS / STAGE;
  for (unsigned round = 0; round < NUM_ROUNDS; ++round) {
    if (threadIdx.x == 0) {
      if (BUG != BulkBug::FENCE && BUG != BulkBug::FENCE_THREAD && round > 0) ptx::fence_proxy_async();
      ptx::mbarrier_arrive_expect(barrier, BYTES + (BUG == BulkBug::BYTES ? 16 : 0));
      ptx::bulk_copy(stage, a.in + round * STAGE + (BUG == BulkBug::ALIGNMENT ? 1 : 0), BYTES, barrier);
    }
    const unsigned phase = BUG == BulkBug::PHASE ? 0 : round;
    if (BUG != BulkBug::WAIT || round + 1 < NUM_ROUNDS) ptx::mbarrier_wait(barrier, phase % 2);
    if (threadIdx.x / STAGE == round) a.out[threadIdx.x] = stage[threadIdx.x % STAGE];
    if (BUG == BulkBug::REUSE) continue;
    __syncthreads();
    if (threadIdx.x < STAGE) stage[threadIdx.x] = 0.0f;  // used for something else
    __syncthreads();
    if (BUG == BulkBug::FENCE_THREAD) {  // which has not written, and starts no copy
      if (threadIdx.x == STAGE) ptx::fence_proxy_async();
      __syncthreads();
    }
  }
}

// ---- clusters of 4 blocks with the same numbers each. A block has a quarter of out, and reads it from all of them

enum class ClusterBug { NONE, FIRST_SYNC, SYNC, RELAXED, LAST_SYNC, READ, EXIT, THREADS, RANK, ALIGNMENT };

constexpr unsigned CLUSTER_BLOCKS = 4;

template <ClusterBug BUG>
__global__ void cluster_kernel(Arguments a) {
  constexpr unsigned QUARTER = NUM_THREADS / CLUSTER_BLOCKS;
  if (BUG == ClusterBug::EXIT && blockIdx.x == 3) return;
  shared_floats()[threadIdx.x] = BUG == ClusterBug::SYNC ? 0.0f : a.in[threadIdx.x];
  if (BUG == ClusterBug::THREADS && threadIdx.x / WARP_SIZE == blockIdx.x) return;
  if (BUG == ClusterBug::RELAXED) {
    ptx::cluster_sync_relaxed();
  } else if (BUG != ClusterBug::FIRST_SYNC) {
    ptx::cluster_sync();
  }
  if (BUG == ClusterBug::SYNC) {
    shared_floats()[threadIdx.x] = a.in[threadIdx.x];
    __syncthreads();
  }
  if (BUG == ClusterBug::READ && blockIdx.x > 0) return;
  if (threadIdx.x / QUARTER == blockIdx.x) {
    const unsigned rank = threadIdx.x % CLUSTER_BLOCKS + (BUG == ClusterBug::RANK ? 1 : 0);
    const float* pair = shared_floats() + (BUG == ClusterBug::ALIGNMENT ? threadIdx.x : threadIdx.x / 2 * 2);
    uint32_t words[2];
    ptx::load_cluster(words, ptx::map_shared(pair, rank));
    a.out[threadIdx.x] = __uint_as_float(words[threadIdx.x % 2]);
  }
  if (BUG != ClusterBug::LAST_SYNC && BUG != ClusterBug::READ) ptx::cluster_sync_relaxed();
}

template <ClusterBug BUG>
void launch_cluster_kernel(unsigned cluster_blocks, Arguments a) {
  run_to_end([&] {
    launch_in_clusters(cluster_kernel<BUG>, dim3(CLUSTER_BLOCKS), dim3(cluster_blocks), dim3(NUM_THREADS), SHARED_BYTES,
                       nullptr, a);
  });
}

template <ClusterBug BUG>
void run_cluster(bool bug, Arguments a) {
  bug ? launch_cluster_kernel<BUG>(CLUSTER_BLOCKS, a) : launch_cluster_kernel<ClusterBug::NONE>(CLUSTER_BLOCKS, a);
}

// ---- wgmma: out[row] is the sum of in[row + k] * (4 * k + 1) over k < 16, for 64 rows, twice

enum class WgmmaBug {
  NONE,
  FENCE,
  PROXY_FENCE,
  PROXY_FENCE_THREAD,
  WRITE_AFTER_FENCE,
  WAIT,
  D_READ,
  PENDING,
  STRIDES,
  DESCRIPTOR,
  LEFT_OUT,
  SHARED_WRITE,
  A_WRITE,
  D_WRITE
};

template <WgmmaBug BUG>
__global__ void wgmma_kernel(Arguments a) {
  constexpr int COLUMNS = 64, LEADING_BYTES = COLUMNS * 16, STRIDE_BYTES = 128;
  const int thread = threadIdx.x, lane = thread % WARP_SIZE, pair = lane % 4 * 2;
  const int row = thread / WARP_SIZE * 16 + lane / 4;

  // b is 1 at (k, 4 * k), else zeros, which come by cp_async.
  unsigned char* unit = shared_memory + thread * 16;
  ptx::cp_async_16(unit, nullptr, false);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  const int column = thread % COLUMNS, k = column / 4;
  if (BUG == WgmmaBug::WRITE_AFTER_FENCE) ptx::fence_proxy_async();
  if (column % 4 == 0 && thread / COLUMNS == k / 8) {
    reinterpret_cast<uint16_t*>(unit)[k % 8] = static_cast<uint16_t>(ptx::pack<float16>(1.0f, 0.0f));
  }
  // A fence for all: of the first thread, after a barrier.
  if (BUG == WgmmaBug::PROXY_FENCE_THREAD) __syncthreads();
  const bool has_fence = BUG != WgmmaBug::PROXY_FENCE && BUG != WgmmaBug::WRITE_AFTER_FENCE;
  if (has_fence && (BUG != WgmmaBug::PROXY_FENCE_THREAD || thread == 0)) ptx::fence_proxy_async();
  __syncthreads();

  uint32_t operand[1][4];
  for (int r = 0; r < 4; ++r) {
    const float* two = a.in + row + r % 2 * 8 + pair + r / 2 * 8;
    operand[0][r] = ptx::pack<float16>(two[0], two[1]);
  }
  float d[COLUMNS / 8][4] = {};
  if (BUG != WgmmaBug::FENCE) ptx::wgmma_fence(d, operand);
  const bool is_first_warp = thread < WARP_SIZE;
  const bool is_swapped = BUG == WgmmaBug::STRIDES;
  const uint32_t leading_bytes = BUG == WgmmaBug::DESCRIPTOR && is_first_warp ? STRIDE_BYTES : LEADING_BYTES;
  const uint64_t descriptor = ptx::wgmma_descriptor(shared_memory, is_swapped ? STRIDE_BYTES : leading_bytes,
                                                    is_swapped ? LEADING_BYTES : STRIDE_BYTES);
  if (BUG != WgmmaBug::LEFT_OUT || !is_first_warp)
    ptx::wgmma_m64k16<float16, ptx::Major::K>(d, operand[0], descriptor, true);
  ptx::wgmma_commit();
  if (BUG == WgmmaBug::SHARED_WRITE && thread == 0) shared_memory[0] = 1;
  if (BUG == WgmmaBug::A_WRITE) operand[0][0] = 0;
  if (BUG == WgmmaBug::D_WRITE) d[0][0] = 0.0f;
  const float moved = d[0][0];  // to another register, where it stays what it was
  if (BUG != WgmmaBug::WAIT) ptx::wgmma_wait<BUG == WgmmaBug::PENDING>(d, operand);
  if (BUG == WgmmaBug::D_READ) d[0][0] = moved;

  for (int i = 0; i < 2; ++i) {
    float sum = 0.0f;
    for (int tile = 0; tile < COLUMNS / 8; ++tile) {
      for (int j = 0; j < 2; ++j) sum += d[tile][2 * i + j] * static_cast<float>(tile * 8 + pair + j + 1);
    }
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    if (pair < 4) a.out[pair / 2 * COLUMNS + row + i * 8] = sum;
  }
}

// ---- out of bounds by one element, and unaligned

template <bool BUG>
__device__ inline unsigned maybe_past_the_end() {
  return BUG && threadIdx.x == NUM_THREADS - 1 ? threadIdx.x + 1 : threadIdx.x;
}

template <bool BUG>
__global__ void shared_read_kernel(Arguments a) {
  shared_floats()[threadIdx.x] = a.in[threadIdx.x];
  __syncthreads();
  a.out[threadIdx.x] = shared_floats()[maybe_past_the_end<BUG>()];
}

template <bool BUG>
__global__ void shared_write_kernel(Arguments a) {
  shared_floats()[maybe_past_the_end<BUG>()] = a.in[threadIdx.x];
  a.out[threadIdx.x] = a.in[threadIdx.x];
}

template <bool BUG>
__global__ void global_read_kernel(Arguments a) {
  a.out[threadIdx.x] = a.in[maybe_past_the_end<BUG>()];
}

template <bool BUG>
__global__ void global_write_kernel(Arguments a) {
  a.out[maybe_past_the_end<BUG>()] = a.in[threadIdx.x];
}

template <bool BUG>
__global__ void copy_source_kernel(Arguments a) {
  const unsigned chunk = threadIdx.x % (NUM_THREADS / 4);
  const bool past_the_end = BUG && threadIdx.x == NUM_THREADS - 1;
  ptx::cp_async_16(shared_floats() + chunk * 4, a.in + (chunk + past_the_end) * 4, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  a.out[threadIdx.x] = shared_floats()[threadIdx.x];
}

template <bool BUG>
__global__ void vector_alignment_kernel(Arguments a) {
  if (threadIdx.x >= NUM_THREADS / 4) return;
  const float* source = a.in + threadIdx.x * 4 - (BUG && threadIdx.x == 1 ? 1 : 0);
  const uint2 low = *reinterpret_cast<const uint2*>(source), high = *reinterpret_cast<const uint2*>(source + 2);
  *reinterpret_cast<uint4*>(a.out + threadIdx.x * 4) = make_uint4(low.x, low.y, high.x, high.y);
}

// ---- kernels that follow each other

template <bool BUG>
__global__ void dependent_kernel(Arguments a) {
  if (BUG && threadIdx.x == NUM_THREADS - 1) return;
  ptx::griddepcontrol_wait();
  a.out[threadIdx.x] = a.in[threadIdx.x];
}

void run_dependent(bool bug, Arguments a) {
  const Memory nothing{};
  run_to_end([&] {
    launch_dependent(bug ? dependent_kernel<true> : dependent_kernel<false>, dim3(1), dim3(NUM_THREADS), 0, nullptr,
                     nothing, a);
  });
}

__global__ void first_kernel(Arguments a) {
  ptx::griddepcontrol_launch_dependents();
  a.out[threadIdx.x] = a.in[threadIdx.x];
}

// Turns around what the kernel before it has written; with the bug, it reads too early.
template <bool BUG>
__global__ void second_kernel(Arguments a) {
  const float* other = a.out + NUM_THREADS - 1 - threadIdx.x;
  float number = BUG ? *other : 0.0f;
  ptx::griddepcontrol_wait();
  if (!BUG) number = *other;
  __syncthreads();
  a.out[threadIdx.x] = number;
}

void run_two_kernels(bool bug, Arguments a) {
  const Memory awaited{a.out, NUM_THREADS * sizeof(float)};
  run_to_end([&] {
    launch(first_kernel, dim3(1), dim3(NUM_THREADS), 0, nullptr, a);
    launch_dependent(bug ? second_kernel<true> : second_kernel<false>, dim3(1), dim3(NUM_THREADS), 0, nullptr, awaited,
                     a);
  });
}

// ---- limits

// Threads past the first NUM_THREADS, and blocks past the first, have nothing to do.
__global__ void copy_kernel(Arguments a) {
  const bool first_block = blockIdx.x == 0 && blockIdx.y == 0;
  if (first_block && threadIdx.x < NUM_THREADS) a.out[threadIdx.x] = a.in[threadIdx.x];
}

// As many bytes as a launch gets that does not ask.
__global__ void not_asking_kernel(Arguments a) { a.out[threadIdx.x] = a.in[threadIdx.x]; }

void launch_not_asking(size_t shared_bytes, Arguments a) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(NUM_THREADS);
  config.dynamicSmemBytes = shared_bytes;
  run_to_end([&] { PAGEDATTN_CUDA_CHECK(cudaLaunchKernelEx(&config, not_asking_kernel, a)); });
}

// ---- the cases

using Expected = std::function<float(const float* in, int i)>;

struct Case {
  const char* name;
  std::function<void(bool bug, Arguments)> run;
  Expected expected;
};

float same(const float* in, int i) { return in[i]; }

float sum_of(const float* in, int begin, int end) {
  float sum = 0.0f;
  for (int i = begin; i < end; ++i) sum += in[i];
  return sum;
}
float sum_of_all(const float* in, int) { return sum_of(in, 0, NUM_THREADS); }
float sum_of_warp(const float* in, int i) {
  const int begin = i / WARP_SIZE * WARP_SIZE;
  return sum_of(in, begin, begin + WARP_SIZE);
}

using Kernel = void (*)(Arguments);

Case make_case(const char* name, Kernel clean, Kernel bug, Expected expected) {
  const auto run = [=](bool with_bug, Arguments a) {
    run_kernel(with_bug ? bug : clean, dim3(1), dim3(NUM_THREADS), SHARED_BYTES, a);
  };
  return {name, run, expected};
}

float weighted_sum(const float* in, int i) {
  float sum = 0.0f;
  for (int k = 0; k < 16; ++k) sum += in[i % 64 + k] * static_cast<float>(4 * k + 1);
  return sum;
}

Case make_wgmma_case(const char* name, Kernel bug) {
  const auto run = [=](bool with_bug, Arguments a) {
    run_kernel(with_bug ? bug : wgmma_kernel<WgmmaBug::NONE>, dim3(1), dim3(NUM_THREADS), 64 * 16 * sizeof(float16), a);
  };
  return {name, run, weighted_sum};
}

Case make_bulk_case(const char* name, Kernel bug) { return make_case(name, bulk_kernel<BulkBug::NONE>, bug, same); }

#define CASE(name, expected) make_case(#name, name##_kernel<false>, name##_kernel<true>, expected)

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      CASE(barrier, [](const float* in, int i) { return in[NUM_THREADS - 1 - i]; }),
      CASE(warp_barrier, [](const float* in, int i) { return in[i ^ (WARP_SIZE - 1)]; }),
      CASE(uninitialised, sum_of_all),
      CASE(divergent_barrier, same),
      CASE(named_barrier, [](const float* in, int i) { return in[i ^ (NUM_THREADS / 2 - 1)]; }),
      CASE(missing_from_named_barrier, same),
      CASE(deadlock, sum_of_warp),
      CASE(exited_lanes, sum_of_warp),
      CASE(shuffle_mask, [](const float* in, int i) { return in[i ^ 16]; }),
      CASE(shuffle_source, [](const float* in, int i) { return in[i % WARP_SIZE < 16 ? i ^ 8 : i]; }),
      CASE(fragment, [](const float* in, int i) { return in[i / 8 % 8 * 16 + i % 8]; }),
      CASE(divergent_mma, same),
      CASE(ldmatrix_alignment, same),
      CASE(ldmatrix_outside, same),
      CASE(wait, same),
      CASE(wait_barrier, same),
      CASE(wait_count, sum_of_all),
      CASE(reuse, sum_of_all),
      CASE(copy_alignment, same),
      make_bulk_case("bulk_init", bulk_kernel<BulkBug::INIT>),
      make_bulk_case("bulk_init_fence", bulk_kernel<BulkBug::INIT_FENCE>),
      make_bulk_case("bulk_init_fence_thread", bulk_kernel<BulkBug::INIT_FENCE_THREAD>),
      make_bulk_case("bulk_phase", bulk_kernel<BulkBug::PHASE>),
      make_bulk_case("bulk_wait", bulk_kernel<BulkBug::WAIT>),
      make_bulk_case("bulk_bytes", bulk_kernel<BulkBug::BYTES>),
      make_bulk_case("bulk_reuse", bulk_kernel<BulkBug::REUSE>),
      make_bulk_case("bulk_fence", bulk_kernel<BulkBug::FENCE>),
      make_bulk_case("bulk_fence_thread", bulk_kernel<BulkBug::FENCE_THREAD>),
      make_bulk_case("bulk_alignment", bulk_kernel<BulkBug::ALIGNMENT>),
      {"cluster_first_sync", run_cluster<ClusterBug::FIRST_SYNC>, same},
      {"cluster_sync", run_cluster<ClusterBug::SYNC>, same},
      {"cluster_relaxed", run_cluster<ClusterBug::RELAXED>, same},
      {"cluster_last_sync", run_cluster<ClusterBug::LAST_SYNC>, same},
      {"cluster_read", run_cluster<ClusterBug::READ>, same},
      {"cluster_exit", run_cluster<ClusterBug::EXIT>, same},
      {"cluster_threads", run_cluster<ClusterBug::THREADS>, same},
      {"cluster_rank", run_cluster<ClusterBug::RANK>, same},
      {"cluster_alignment", run_cluster<ClusterBug::ALIGNMENT>, same},
      {"cluster_size", [](bool bug, Arguments a) { launch_cluster_kernel<ClusterBug::NONE>(CLUSTER_BLOCKS - bug, a); },
       same},
      make_wgmma_case("wgmma_fence", wgmma_kernel<WgmmaBug::FENCE>),
      make_wgmma_case("wgmma_proxy_fence", wgmma_kernel<WgmmaBug::PROXY_FENCE>),
      make_wgmma_case("wgmma_proxy_fence_thread", wgmma_kernel<WgmmaBug::PROXY_FENCE_THREAD>),
      make_wgmma_case("wgmma_write_after_fence", wgmma_kernel<WgmmaBug::WRITE_AFTER_FENCE>),
      make_wgmma_case("wgmma_d_read", wgmma_kernel<WgmmaBug::D_READ>),
      make_wgmma_case("wgmma_wait", wgmma_kernel<WgmmaBug::WAIT>),
      make_wgmma_case("wgmma_pending", wgmma_kernel<WgmmaBug::PENDING>),
      make_wgmma_case("wgmma_strides", wgmma_kernel<WgmmaBug::STRIDES>),
      make_wgmma_case("wgmma_descriptor", wgmma_kernel<WgmmaBug::DESCRIPTOR>),
      make_wgmma_case("wgmma_left_out", wgmma_kernel<WgmmaBug::LEFT_OUT>),
      make_wgmma_case("wgmma_shared_write", wgmma_kernel<WgmmaBug::SHARED_WRITE>),
      make_wgmma_case("wgmma_a_write", wgmma_kernel<WgmmaBug::A_WRITE>),
      make_wgmma_case("wgmma_d_write", wgmma_kernel<WgmmaBug::D_WRITE>),
      CASE(shared_read, same),
      CASE(shared_write, same),
      CASE(global_read, same),
      CASE(global_write, same),
      CASE(copy_source, same),
      CASE(vector_alignment, same),
      {"dependent", run_dependent, same},
      {"dependent_read", run_two_kernels, [](const float* in, int i) { return in[NUM_THREADS - 1 - i]; }},
      {"threads", [](bool bug, Arguments a) { run_kernel(copy_kernel, dim3(1), dim3(1024 + bug), 0, a); }, same},
      {"shared_bytes",
       [](bool bug, Arguments a) { run_kernel(copy_kernel, dim3(1), dim3(NUM_THREADS), 227 * 1024 + bug, a); }, same},
      {"shared_bytes_not_asked", [](bool bug, Arguments a) { launch_not_asking(48 * 1024 + bug, a); }, same},
      {"grid_y", [](bool bug, Arguments a) { run_kernel(copy_kernel, dim3(1, 65535 + bug), dim3(NUM_THREADS), 0, a); },
       same},
  };
  return all;
}

int run_case(const Case& c, bool bug) {
  Buffer<float> in(NUM_THREADS), out(NUM_THREADS);
  for (int i = 0; i < NUM_THREADS; ++i) in[i] = static_cast<float>(i + 1);
  try {
    c.run(bug, {in.data(), out.data()});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return ERROR;
  }
  for (int i = 0; i < NUM_THREADS; ++i) {
    if (out[i] == c.expected(in.host(), i)) continue;
    std::fprintf(stderr, "%s: element %d: expected %g, got %g\n", c.name, i, c.expected(in.host(), i), out[i]);
    return WRONG;
  }
  return RIGHT;
}

}  // namespace
}  // namespace pagedattn::cuda

int main(int argc, char** argv) {
  using namespace pagedattn::cuda;
  if (argc == 2 && !std::strcmp(argv[1], "--list")) {
    for (const Case& c : cases()) std::puts(c.name);
    return RIGHT;
  }
  int status = ERROR;
  for (int i = 1; i + 1 < argc; i += 2) {  // one case, or several: the status is the last one's
    for (const Case& c : cases()) {
      if (!std::strcmp(argv[i], c.name)) status = run_case(c, !std::strcmp(argv[i + 1], "bug"));
    }
  }
  return status;
}
