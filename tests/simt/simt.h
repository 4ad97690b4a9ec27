// The simt device: runs CUDA kernels on the CPU, one block after the other (those of a cluster in turns), one fiber per
// CUDA thread. This is what the emulated <cuda_runtime.h> and ptx.h are made of; docs/simt.md explains it, simt.cpp
// holds it.
//
// A thread runs until it waits at a warp operation or a barrier; then another one runs, drawn from a seeded generator.
// Whatever can only be wrong ends the launch with std::runtime_error: the place, the block, who waits where, the seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>

struct dim3;
struct uint3;

namespace pagedattn::simt {

using Site = std::source_location;  // the call in the kernel

inline constexpr unsigned WARP_SIZE = 32;
inline constexpr size_t MAX_SHARED_BYTES = 227 * 1024;  // of sm_90
inline constexpr size_t SHARED_BYTES_WITHOUT_ASKING = 48 * 1024;
inline constexpr unsigned MAX_CLUSTER_BLOCKS = 8;

// ---- from the host

struct Launch {
  const char* kernel;  // for messages
  const void* function;
  const dim3 &grid, &cluster, &block;
  size_t shared_bytes;
  bool is_dependent;  // it may begin before the kernel before it has ended, so its threads have to wait for that one
  void (*run_thread)(const void* arguments);
  const void* arguments;
};

void run(const Launch& launch);

// What kernels have used, counted over all launches of the process: a test asks which way a call took.
struct Uses {
  uint64_t dependent_launches, clusters, bulk_copies, wgmma;
  uint64_t questions;  // about a kernel or a GPU, of the host
};
extern Uses uses;
void allow_shared_bytes(const void* function, int64_t bytes);

// What the next launch waits for, if it is a dependent one: poisoned for each of its blocks until its threads wait.
void hide_until_wait(void* memory, size_t bytes);

// What the device stands for, as the environment says: PAGEDATTN_SIMT_MULTIPROCESSORS and PAGEDATTN_SIMT_ARCH.
struct Gpu {
  int num_multiprocessors, architecture;
};
// Numbers a GPU that the process has not had before: a host that remembers what it was told of one sees another one.
int current_gpu();
Gpu gpu(int device);

// ---- from a kernel's thread

// Ends the launch with an error.
[[noreturn]] void fail(const std::string& what, Site site);

// Waits for all lanes of `mask` to be here with the same operation; the last one calls `compute` for all of them.
// operands[lane] is what lane gave; lanes outside `mask` have none.
using Compute = void (*)(void* const* operands, unsigned mask, Site site);
void warp_operation(const char* name, unsigned mask, void* operands, Compute compute, Site site);

// The same with operands of a type: COMPUTE(Operands* const* lanes, unsigned mask, Site site).
template <auto COMPUTE, typename Operands>
void warp_operation(const char* name, unsigned mask, Operands& operands, Site site) {
  warp_operation(
      name, mask, &operands,
      [](void* const* lanes, unsigned all, Site where) {
        COMPUTE(reinterpret_cast<Operands* const*>(lanes), all, where);
      },
      site);
}

unsigned lane_idx();
unsigned warp_idx();
unsigned thread_idx();

// Of the GPU that the device stands for at this launch, 90 for sm_90.
int architecture();

struct BarrierResult {
  int num_true, num_threads;
};
// Waits for all threads of the block that have not exited.
BarrierResult block_barrier(const char* name, bool predicate, Site site);

// Waits for `num_threads` threads of the block to be at barrier `id`.
void named_barrier(int id, int num_threads, Site site);

// Waits for all threads of all blocks of the cluster, none of which may have exited. `releases`: what they have written
// to shared memory is there for load_cluster.
void cluster_sync(bool releases, Site site);

unsigned cluster_size();  // in blocks

// As PTX has an address in shared memory: that of this block, and the same place in that of another one of the cluster.
uint32_t shared_address(const void* pointer);
uint32_t map_shared(const void* pointer, unsigned rank, Site site);

// Reads what `address`, from map_shared, held at the last cluster_sync that releases. Fails if there was none of any
// kind, if that block has written there since, or has ended.
void load_cluster(void* target, uint32_t address, size_t bytes, Site site);

// Waits for the kernel before this one to have ended: what was hidden is there then.
void wait_for_previous_kernel(Site site);

// Lets other threads run, or not.
void maybe_yield();

// Waits until another thread of the block wakes those at `place`; it may have to wait again.
void wait_at(const char* name, const void* place, Site site);
void wake(const void* place);

// Fails unless `pointer` is aligned, and `bytes` from there lie in the dynamic shared memory of the launch.
void check_shared(const char* name, const void* pointer, size_t bytes, Site site);

// Where an address of the block's shared memory is.
const void* shared_at(uint32_t address);

// What wgmma reads there. Fails unless it is in the shared memory of the launch, and every cp.async to it has been
// waited for by its thread, which has called fence_proxy_async then, after all else that was written there.
const void* read_as_async_proxy(const char* name, uint32_t address, unsigned bytes, Site site);

// cp.async: the target is poisoned now, and written when a wait covers the copy's group.
void start_copy(const char* name, void* target, const void* source, unsigned bytes, bool valid, Site site);
void close_copy_group();
void wait_for_copy_groups(unsigned num_pending);
void count_fence();  // fence_proxy_async

// ---- mbarriers and bulk copies (bulk_copy.cpp)

void mbarrier_init(void* barrier, unsigned num_arrivals, Site site);
void mbarrier_arrive_expect(void* barrier, unsigned bytes, Site site);
void mbarrier_wait(void* barrier, bool parity, Site site);

// cp.async.bulk: the target is poisoned now, and written when a thread waits for the phase of `barrier`.
void start_bulk_copy(void* target, const void* source, unsigned bytes, void* barrier, Site site);

// fence.proxy.async: what threads have written to shared memory is there for bulk copies that this thread starts from
// here on, and for wgmma what this thread has written.
void fence_proxy_async();

// Before threads of the `rank`-th block of a cluster run, or go on: the other functions are about that block then.
void select_bulk_copies(unsigned rank);
// Before and after the threads of a block have run.
void begin_bulk_copies(size_t shared_bytes);
bool has_bulk_copies_under_way();

// ---- wgmma (wgmma.cpp): operations of a warp

struct WgmmaLane {
  float* d;
  unsigned num_tiles;  // of 8 columns, 4 registers each
  const uint32_t* a;   // 4 registers
  uint64_t b;
  bool accumulate, is_float16;
};
void wgmma_warp(WgmmaLane* const* lanes, unsigned mask, Site site);

struct WgmmaRegisters {
  const void *d, *a;
  size_t d_bytes, a_bytes;
  unsigned num_pending;  // for a wait
};
void wgmma_fence_warp(WgmmaRegisters* const* lanes, unsigned mask, Site site);
void wgmma_commit_warp(WgmmaRegisters* const* lanes, unsigned mask, Site site);
void wgmma_wait_warp(WgmmaRegisters* const* lanes, unsigned mask, Site site);

// Before and after the threads of a block have run. What is wrong at the end, or nothing.
void begin_wgmma();
std::string unfinished_wgmma();

}  // namespace pagedattn::simt
