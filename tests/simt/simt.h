// The simt device: runs CUDA kernels on the CPU, one block after the other (the blocks of a cluster in turns), one
// fiber per CUDA thread. The emulated <cuda_runtime.h> and ptx.h are made of these functions; docs/simt.md explains the
// device, simt.cpp holds it.
//
// A thread runs until it waits at a warp operation or a barrier; then another thread runs, drawn from a seeded
// generator. Whatever can only be wrong ends the launch with std::runtime_error, which names the place, the block, who
// waits where, and the seed.
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
  bool is_dependent;  // may begin before the kernel before it has ended: its threads have to wait for that kernel
  void (*run_thread)(const void* arguments);
  const void* arguments;
};

void run(const Launch& launch);

// What kernels have used, counted over all launches of the process, for tests that ask which way a call took.
struct Uses {
  uint64_t dependent_launches, clusters, bulk_copies, wgmma;
  uint64_t questions;  // that the host asked about a kernel or a GPU
};
extern Uses uses;
void allow_shared_bytes(const void* function, int64_t bytes);

// The memory that the next launch waits for, if it is a dependent one. The memory is poisoned for each block until the
// block's threads wait.
void hide_until_wait(void* memory, size_t bytes);

// The GPU that the device stands for, as the environment says: PAGEDATTN_SIMT_MULTIPROCESSORS and PAGEDATTN_SIMT_ARCH.
struct Gpu {
  int num_multiprocessors, architecture;
};
// Gives a number of its own to a GPU that the process has not had before, so that a host that remembers what it was
// told of one GPU does not take it for another.
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

// The architecture of the GPU that the device stands for at this launch, 90 for sm_90.
int architecture();

struct BarrierResult {
  int num_true, num_threads;
};
// Waits for all threads of the block that have not exited.
BarrierResult block_barrier(const char* name, bool predicate, Site site);

// Waits for `num_threads` threads of the block to be at barrier `id`.
void named_barrier(int id, int num_threads, Site site);

// Waits for all threads of all blocks of the cluster, none of which may have exited. `releases`: what they have written
// to shared memory can then be read by load_cluster.
void cluster_sync(bool releases, Site site);

unsigned cluster_size();  // in blocks

// Addresses in shared memory, as PTX has them: of this block, and of the same place in another block of the cluster.
uint32_t shared_address(const void* pointer);
uint32_t map_shared(const void* pointer, unsigned rank, Site site);

// Reads what `address`, from map_shared, held at the last cluster_sync that releases. Fails if there was no
// cluster_sync of any kind, if the other block has written there since, or if it has ended.
void load_cluster(void* target, uint32_t address, size_t bytes, Site site);

// Waits for the kernel before this one to have ended. Then the hidden memory is there.
void wait_for_previous_kernel(Site site);

// Lets other threads run, or not.
void maybe_yield();

// Waits until another thread of the block wakes the threads at `place`. The caller may have to wait again.
void wait_at(const char* name, const void* place, Site site);
void wake(const void* place);

// Fails unless `pointer` is aligned, and `bytes` from there lie in the dynamic shared memory of the launch.
void check_shared(const char* name, const void* pointer, size_t bytes, Site site);

// Where an address of the block's shared memory is.
const void* shared_at(uint32_t address);

// The memory that wgmma reads at `address`. Fails unless the memory is in the shared memory of the launch, and every
// thread that wrote there by cp.async has waited for its copies, and has then called fence_proxy_async, after all else
// that was written there.
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

// fence.proxy.async: bulk copies that this thread starts from here on see what all threads have written to shared
// memory, and wgmma sees what this thread has written.
void fence_proxy_async();

// Called before threads of the `rank`-th block of a cluster run, or go on. The other functions are about that block
// then.
void select_bulk_copies(unsigned rank);
// Called before and after the threads of a block run.
void begin_bulk_copies(size_t shared_bytes);
bool has_bulk_copies_under_way();

// ---- wgmma (wgmma.cpp): operations of a warp

struct WgmmaLane {
  float* d;
  unsigned num_tiles;  // of 8 columns, 4 registers each
  const uint32_t* a;   // 4 registers
  uint64_t b;
  bool is_b_n_major, accumulate, is_float16;
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

// Called before and after the threads of a block run. The second one says what is wrong at the end, or nothing.
void begin_wgmma();
std::string unfinished_wgmma();

}  // namespace pagedattn::simt
