// The simt device (simt.h): the schedule, warp operations, barriers, cp.async, errors.
//
// All state is one global `device`: a mutex lets one launch run at a time. A thread of the block is in exactly one of
// these states: ready (the running one too), waiting in a group of its warp, at a barrier or at a place in memory, or
// exited. The states are bit masks, with a bit for each lane. A thread that waits switches directly to the next ready
// thread. The host's stack gets its turn when no thread is ready: the block is done, waits for other blocks of its
// cluster, or cannot go on.
//
// The blocks of a cluster take turns at cluster_sync, and nowhere else. There is one array of shared memory: what a
// block has in it is put aside when another block's turn comes.
#include "simt.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fiber.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace pagedattn::cuda {

// Past the launch's size, all of it stays POISON: reads give NaN, writes are found (AddressSanitizer finds both).
inline constexpr size_t MARGIN_BYTES = 4096;
extern unsigned char shared_memory[];
alignas(128) unsigned char shared_memory[simt::MAX_SHARED_BYTES + MARGIN_BYTES];

}  // namespace pagedattn::cuda

namespace pagedattn::simt {

Uses uses;

namespace {

using cuda::MARGIN_BYTES;
using cuda::shared_memory;

constexpr unsigned char POISON = 0xff;  // NaN in every format of floats, -1 in integers
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned MAX_WARPS = MAX_THREADS / WARP_SIZE;
constexpr unsigned MAX_GRID_YZ = 65535;
constexpr int NUM_BARRIERS = 16;

// ---- state

struct Copy {
  void* target;
  const void* source;
  unsigned bytes;
  bool valid;
  unsigned group;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  std::vector<Copy> copies;  // under way, oldest first
  unsigned open_group = 0;   // its number; older ones are closed
  bool has_waited = false;   // for the kernel before this one
  const void* waits_at = nullptr;
  uint64_t num_fences = 0;        // fence_proxy_async, of all blocks
  std::vector<unsigned> written;  // to shared memory by cp.async, in units of 8 bytes
};

// A write by cp.async to 8 bytes of shared memory.
struct Write {
  uint64_t block;  // its number
  unsigned thread;
  uint64_t num_fences;  // of the thread, before
  uint64_t fenced;      // the bytes at the thread's last fence
};

// Lanes that wait for one operation.
struct Group {
  const char* name;
  Compute compute;
  Site site;
  unsigned mask, arrived;
};

struct Warp {
  unsigned live = 0, ready = 0, at_barrier = 0, at_cluster_sync = 0;
  unsigned at_places = 0;  // in wait_at; all lanes wait for the same reason as the last one
  const char* place_name;
  Site place_site;
  unsigned num_groups = 0;
  Group groups[WARP_SIZE];
  void* operands[WARP_SIZE];
};

struct Barrier {
  const char* name;
  Site site;
  unsigned num_arrived = 0;
  int num_true = 0;
  BarrierResult result;
};

struct NamedBarrier {
  Site site;
  int num_threads, num_arrived;
  unsigned waiting[MAX_WARPS];  // lanes
};

struct Block {
  uint3 index;
  uint64_t number;  // counted over all launches
  unsigned num_live = 0, ready_warps = 0;
  Barrier barrier;
  Write writes[MAX_SHARED_BYTES / 8];
  NamedBarrier named_barriers[NUM_BARRIERS];  // 0 is `barrier`
  Warp warps[MAX_WARPS];
  Thread threads[MAX_THREADS];

  // In a cluster: the block's shared memory while other blocks run, and at the last cluster_sync that releases; and how
  // many cluster_syncs of any kind there had been when another block last read it.
  std::vector<unsigned char> memory, seen_memory;
  unsigned was_read_after = 0;
};

struct Cluster {
  unsigned num_blocks = 0;
  unsigned num_syncs = 0;
  unsigned num_arrived = 0;  // threads, at the next cluster_sync
  bool releases = false;     // the next cluster_sync does
  Site site;
};

// Memory that the kernel before a dependent one has written. On a GPU, blocks of the dependent kernel can run before
// that has happened. Here each block begins with the memory poisoned, and gets it back when no thread can go on but the
// threads that have waited for it.
struct Hidden {
  static constexpr size_t MAX_BYTES_OF_LAUNCH = 16 << 20;  // to copy; after that, the rest of the blocks see all memory
  unsigned char* memory = nullptr;
  size_t bytes = 0;
  size_t bytes_left = 0;
  std::vector<unsigned char> content;
  bool is_hidden = false;
};

struct Device {
  std::mutex mutex;
  Hidden hidden;
  std::map<std::pair<int, const void*>, size_t> allowed_shared_bytes;  // of a GPU
  uint64_t num_launches = 0;

  const Launch* launch = nullptr;
  uint64_t seed = 0, random_state = 0;
  int architecture = 0;
  std::string error;

  uint64_t num_blocks = 0;
  Block blocks[MAX_CLUSTER_BLOCKS];
  Cluster cluster;
  Block* block = blocks;  // the running one
  unsigned running = 0;   // thread
  unsigned patience = 0;  // a power of two: how many switches a warp is kept for, on average
  Fiber host;
  bool in_block = false;
} device;

uint64_t random_bits() {  // xorshift64*
  uint64_t& state = device.random_state;
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545f4914f6cdd1du >> 16;
}

// One of the bits of `mask`, which is not 0.
unsigned random_bit(unsigned mask, uint64_t random) {
  const int start = random % 32;
  return (std::countr_zero(std::rotr(mask, start)) + start) % 32;
}

// ---- errors

std::ostream& operator<<(std::ostream& out, const Site& site) {
  const char* name = std::strrchr(site.file_name(), '/');
  return out << (name ? name + 1 : site.file_name()) << ":" << site.line();
}

std::ostream& operator<<(std::ostream& out, const dim3& size) {
  return out << "(" << size.x << ", " << size.y << ", " << size.z << ")";
}

unsigned num_blocks_of(const dim3& cluster) { return cluster.x * cluster.y * cluster.z; }

// "0-15,17"
std::string lane_list(unsigned mask) {
  std::ostringstream out;
  for (unsigned begin = 0; begin < WARP_SIZE; ++begin) {
    if (!(mask >> begin & 1)) continue;
    unsigned end = begin;
    while (end + 1 < WARP_SIZE && mask >> (end + 1) & 1) ++end;
    out << (out.tellp() ? "," : "") << begin;
    if (end > begin) out << "-" << end;
    begin = end;
  }
  return out.str();
}

std::string waiting_threads() {
  constexpr unsigned MAX_WARPS_SHOWN = 8;
  std::ostringstream out;
  unsigned num_shown = 0;
  const unsigned num_threads = blockDim.x * blockDim.y * blockDim.z;
  for (unsigned warp_idx = 0; warp_idx * WARP_SIZE < num_threads; ++warp_idx) {
    const Warp& warp = device.block->warps[warp_idx];
    if (!warp.live) continue;
    if (++num_shown > MAX_WARPS_SHOWN) return out.str() + "\n  ...";
    out << "\n  warp " << warp_idx << ":";
    if (warp.at_barrier) {
      out << " lanes " << lane_list(warp.at_barrier) << " wait at " << device.block->barrier.name << " ("
          << device.block->barrier.site << ");";
    }
    if (warp.at_cluster_sync) {
      out << " lanes " << lane_list(warp.at_cluster_sync) << " wait at cluster_sync (" << device.cluster.site << ");";
    }
    for (const NamedBarrier& barrier : device.block->named_barriers) {
      if (const unsigned lanes = barrier.waiting[warp_idx]) {
        out << " lanes " << lane_list(lanes) << " wait at barrier_sync (" << barrier.site << ");";
      }
    }
    for (unsigned i = 0; i < warp.num_groups; ++i) {
      const Group& group = warp.groups[i];
      out << " lanes " << lane_list(group.arrived) << " wait at " << group.name << " (" << group.site << ") for lanes "
          << lane_list(group.mask & ~group.arrived) << ";";
    }
    if (warp.at_places) {
      out << " lanes " << lane_list(warp.at_places) << " wait at " << warp.place_name << " (" << warp.place_site
          << ");";
    }
    if (warp.ready) out << " lanes " << lane_list(warp.ready) << " run;";
    if (~warp.live) out << " lanes " << lane_list(~warp.live) << " have exited, or never were;";
  }
  return out.str();
}

// "a kernel of (RmsNormParams)": what __PRETTY_FUNCTION__ of cudaLaunchKernelEx says of its first list of types.
std::string kernel_name() {
  const std::string signature = device.launch->kernel;
  const size_t begin = signature.find('{') + 1, end = signature.find("}; Args");
  return begin == 0 || end == std::string::npos ? signature
                                                : "a kernel of (" + signature.substr(begin, end - begin) + ")";
}

std::string full_message(const std::string& what) {
  std::ostringstream out;
  out << "simt: " << what << "\n  launch " << device.num_launches << ", " << kernel_name() << ", grid "
      << device.launch->grid << ", block " << device.launch->block << ", " << device.launch->shared_bytes
      << " bytes of shared memory";
  if (num_blocks_of(device.launch->cluster) > 1) out << ", clusters of " << device.launch->cluster;
  if (device.in_block) out << "; block " << dim3(blockIdx.x, blockIdx.y, blockIdx.z);
  out << "\n  the same schedule again: PAGEDATTN_SIMT_SEED=" << device.seed;
  return out.str();
}

[[noreturn]] void fail_launch(const std::string& what) { throw std::runtime_error(full_message(what)); }

// ---- the schedule

// Runs the next ready thread, which may be this one; the host if there is none.
void run_next(bool for_ever = false) {
  Fiber& self = device.block->threads[device.running].fiber;
  if (!device.block->ready_warps) return switch_fiber(self, device.host, for_ever);
  const uint64_t random = random_bits();
  unsigned warp_idx = device.running / WARP_SIZE;
  if (!device.block->warps[warp_idx].ready || !(random & (device.patience - 1))) {
    warp_idx = random_bit(device.block->ready_warps, random >> 32);
  }
  const unsigned next = warp_idx * WARP_SIZE + random_bit(device.block->warps[warp_idx].ready, random >> 40);
  if (next == device.running) return;
  device.running = next;
  threadIdx = device.block->threads[next].index;
  switch_fiber(self, device.block->threads[next].fiber, for_ever);
}

void set_ready(unsigned warp_idx, unsigned lanes) {
  device.block->warps[warp_idx].ready |= lanes;
  device.block->ready_warps |= 1u << warp_idx;
}

void set_waiting(unsigned warp_idx, unsigned lane) {
  Warp& warp = device.block->warps[warp_idx];
  warp.ready &= ~lane;
  if (!warp.ready) device.block->ready_warps &= ~(1u << warp_idx);
}

void open_barrier() {
  Barrier& barrier = device.block->barrier;
  barrier.result = {barrier.num_true, static_cast<int>(barrier.num_arrived)};
  barrier.num_arrived = 0;
  barrier.num_true = 0;
  for (unsigned warp_idx = 0; warp_idx < MAX_WARPS; ++warp_idx) {
    Warp& warp = device.block->warps[warp_idx];
    if (!warp.at_barrier) continue;
    set_ready(warp_idx, warp.at_barrier);
    warp.at_barrier = 0;
  }
}

bool same_site(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || !std::strcmp(a.file_name(), b.file_name()));
}

// The first function on a thread's stack.
void run_thread() {
  arrive_in(device.block->threads[device.running].fiber);
  try {
    device.launch->run_thread(device.launch->arguments);
  } catch (const std::exception& error) {
    device.error = error.what();
  }
  if (!device.error.empty()) switch_fiber(device.block->threads[device.running].fiber, device.host, true);
  const unsigned warp_idx = device.running / WARP_SIZE, lane = 1u << device.running % WARP_SIZE;
  Block& block = *device.block;
  block.warps[warp_idx].live &= ~lane;
  set_waiting(warp_idx, lane);
  --block.num_live;
  if (block.barrier.num_arrived > 0 && block.barrier.num_arrived == block.num_live) open_barrier();
  run_next(true);
  std::abort();  // exited threads are not run
}

// ---- launches

unsigned num_threads() { return blockDim.x * blockDim.y * blockDim.z; }

void prepare_block() {
  constexpr size_t CACHE_LINE = 64;
  Block& block = *device.block;
  for (unsigned i = 0; i < num_threads(); ++i) {
    Thread& thread = block.threads[i];
    if (!thread.fiber.stack) make_stack(thread.fiber);
    // Stacks begin at different places of a page, as they would otherwise compete for the same lines of the cache.
    prepare_fiber(thread.fiber, i * 7 % 64 * CACHE_LINE, run_thread);
    thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    thread.copies.clear();
    thread.written.clear();
    thread.open_group = 0;
    thread.has_waited = false;
  }
  block.number = ++device.num_blocks;
  block.ready_warps = 0;
  block.num_live = num_threads();
  block.barrier.num_arrived = 0;
  block.barrier.num_true = 0;
  std::fill(std::begin(block.named_barriers), std::end(block.named_barriers), NamedBarrier{});
  for (unsigned warp_idx = 0; warp_idx < MAX_WARPS; ++warp_idx) {
    Warp& warp = block.warps[warp_idx];
    const unsigned first = std::min(warp_idx * WARP_SIZE, num_threads());
    const unsigned num_lanes = std::min(num_threads() - first, WARP_SIZE);
    warp.live = num_lanes == WARP_SIZE ? ~0u : (1u << num_lanes) - 1;
    warp.ready = warp.at_barrier = warp.at_cluster_sync = warp.at_places = warp.num_groups = 0;
    if (num_lanes) set_ready(warp_idx, warp.live);
  }
  if (device.cluster.num_blocks > 1) {
    block.memory.assign(device.launch->shared_bytes, POISON);
    block.seen_memory = block.memory;
    block.was_read_after = 0;
  } else {
    std::memset(shared_memory, POISON, device.launch->shared_bytes);
  }
  begin_bulk_copies(device.launch->shared_bytes);
  begin_wgmma();
}

// Needed where AddressSanitizer does not check this.
void check_writes_past_shared_memory([[maybe_unused]] size_t num_bytes) {
#if !defined(__SANITIZE_ADDRESS__)
  const unsigned char* past = shared_memory + device.launch->shared_bytes;
  if (past[0] == POISON && !std::memcmp(past, past + 1, num_bytes - 1)) return;
  while (*past == POISON) ++past;
  fail_launch("a thread of the block wrote byte " + std::to_string(past - shared_memory) +
              " of shared memory, past the end");
#endif
}

void select_block(unsigned rank) {
  device.block = &device.blocks[rank];
  blockIdx = device.block->index;
  select_bulk_copies(rank);
}

void check_end_of_block() {
  for (unsigned i = 0; device.launch->is_dependent && i < num_threads(); ++i) {
    if (device.block->threads[i].has_waited) continue;
    fail_launch("thread " + std::to_string(i) + " of a dependent kernel ended without griddepcontrol_wait");
  }
  if (has_bulk_copies_under_way()) fail_launch("the block has ended, and nobody has waited for its last bulk copies");
  if (const std::string what = unfinished_wgmma(); !what.empty()) fail_launch(what);
  if (device.cluster.num_syncs > 0 && device.block->was_read_after == device.cluster.num_syncs) {
    fail_launch("the block has ended, and no cluster_sync came after another one had read its shared memory");
  }
}

void hide() {
  Hidden& hidden = device.hidden;
  if (!device.launch->is_dependent || hidden.bytes == 0 || hidden.bytes > hidden.bytes_left) return;
  hidden.bytes_left -= hidden.bytes;
  hidden.content.assign(hidden.memory, hidden.memory + hidden.bytes);
  std::memset(hidden.memory, POISON, hidden.bytes);
  hidden.is_hidden = true;
}

void reveal() {
  std::copy(device.hidden.content.begin(), device.hidden.content.end(), device.hidden.memory);
  device.hidden.is_hidden = false;
}

// Runs threads until none is ready. `first` is ready.
void run_threads(unsigned first) {
  device.running = first;
  threadIdx = device.block->threads[first].index;
  switch_fiber(device.host, device.block->threads[first].fiber);
}

// Runs the block until it has ended, or waits for other blocks of its cluster.
void run_block() {
  Block& block = *device.block;
  const size_t shared_bytes = device.launch->shared_bytes;
  if (device.cluster.num_blocks > 1) std::memcpy(shared_memory, block.memory.data(), shared_bytes);
  device.patience = 4u << 2 * (random_bits() % 6);  // up to 4,096: now and then a warp runs far ahead of the others
  if (device.cluster.num_blocks == 1) hide();
  run_threads(random_bits() % num_threads());  // all of them are ready
  if (device.hidden.is_hidden) {
    reveal();
    wake(&device.hidden);
    if (device.error.empty() && block.ready_warps != 0) {
      const unsigned warp_idx = random_bit(block.ready_warps, random_bits());
      run_threads(warp_idx * WARP_SIZE + random_bit(block.warps[warp_idx].ready, random_bits()));
    }
  }
  unsigned num_waiting = 0;
  for (const Warp& warp : block.warps) num_waiting += std::popcount(warp.at_cluster_sync);
  if (device.error.empty() && block.num_live > 0 && num_waiting < num_threads()) {
    device.error = full_message("deadlock: no thread of the block can go on" + waiting_threads());
  }
  if (!device.error.empty()) throw std::runtime_error(std::exchange(device.error, {}));
  check_writes_past_shared_memory(MARGIN_BYTES);
  if (block.num_live == 0) check_end_of_block();
  if (device.cluster.num_blocks > 1) std::memcpy(block.memory.data(), shared_memory, shared_bytes);
}

// All threads of all blocks have come.
void open_cluster_sync() {
  ++device.cluster.num_syncs;
  device.cluster.num_arrived = 0;
  for (unsigned rank = 0; rank < device.cluster.num_blocks; ++rank) {
    select_block(rank);
    if (device.cluster.releases) device.block->seen_memory = device.block->memory;
    for (unsigned warp_idx = 0; warp_idx < MAX_WARPS; ++warp_idx) {
      Warp& warp = device.block->warps[warp_idx];
      if (warp.at_cluster_sync) set_ready(warp_idx, std::exchange(warp.at_cluster_sync, 0));
    }
  }
}

// Runs the blocks in turns: a block runs until it waits for the others, or has ended.
void run_blocks() {
  const unsigned num_blocks = device.cluster.num_blocks;
  unsigned live = (1u << num_blocks) - 1;
  unsigned ready = live;  // to run until the next cluster_sync
  while (live) {
    unsigned rank = 0;
    if (num_blocks > 1) {
      do rank = random_bits() % num_blocks;
      while (!(ready >> rank & 1));
    }
    select_block(rank);
    run_block();
    ready &= ~(1u << rank);
    if (device.block->num_live == 0) live &= ~(1u << rank);
    if (ready || !live) continue;
    if (device.cluster.num_arrived < num_blocks * num_threads()) {
      select_block(std::countr_zero(live));
      fail_launch("deadlock: threads wait at a cluster_sync, and other blocks of their cluster have ended" +
                  waiting_threads());
    }
    open_cluster_sync();
    ready = live;
  }
}

// Runs the blocks [first, first + launch.cluster).
void run_cluster(uint3 first) {
  const dim3& size = device.launch->cluster;
  device.cluster = {};
  device.cluster.num_blocks = num_blocks_of(size);
  uses.clusters += device.cluster.num_blocks > 1;
  device.in_block = true;
  for (unsigned rank = 0; rank < device.cluster.num_blocks; ++rank) {
    device.blocks[rank].index = {first.x + rank % size.x, first.y + rank / size.x % size.y,
                                 first.z + rank / size.x / size.y};
    select_block(rank);
    prepare_block();
  }
  try {
    run_blocks();
  } catch (...) {  // threads are left where they are, their frames forgotten
    for (unsigned rank = 0; rank < device.cluster.num_blocks; ++rank) {
      for (unsigned i = 0; i < num_threads(); ++i) {
        [[maybe_unused]] const Fiber& fiber = device.blocks[rank].threads[i].fiber;
        ASAN_UNPOISON_MEMORY_REGION(fiber.stack, fiber.stack_bytes);
      }
    }
    throw;
  }
  device.in_block = false;
}

void check_limits(const Launch& launch) {
  const dim3 &grid = launch.grid, &cluster = launch.cluster, &block = launch.block;
  const uint64_t num_threads = uint64_t{block.x} * block.y * block.z;
  const auto allowed = device.allowed_shared_bytes.find({current_gpu(), launch.function});
  const size_t max_shared_bytes =
      allowed == device.allowed_shared_bytes.end() ? SHARED_BYTES_WITHOUT_ASKING : allowed->second;
  std::ostringstream what;
  if (num_threads == 0 || num_threads > MAX_THREADS || block.z > 64) {
    what << "expected 1 to " << MAX_THREADS << " threads a block, at most 64 of them in z; got " << num_threads;
  } else if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
    what << "empty grid";
  } else if (grid.x > INT32_MAX || grid.y > MAX_GRID_YZ || grid.z > MAX_GRID_YZ) {
    what << "grid too large: x at most " << INT32_MAX << ", y and z at most " << MAX_GRID_YZ;
  } else if (num_blocks_of(cluster) == 0 || num_blocks_of(cluster) > MAX_CLUSTER_BLOCKS || grid.x % cluster.x ||
             grid.y % cluster.y || grid.z % cluster.z) {
    what << "expected clusters of 1 to " << MAX_CLUSTER_BLOCKS << " blocks that divide the grid, got " << cluster;
  } else if (num_blocks_of(cluster) > 1 && device.architecture < 90) {
    what << "clusters: from sm_90 on, this is sm_" << device.architecture;
  } else if (launch.shared_bytes > max_shared_bytes) {
    what << launch.shared_bytes << " bytes of shared memory: at most " << max_shared_bytes << " for this kernel ("
         << SHARED_BYTES_WITHOUT_ASKING << " unless cudaFuncSetAttribute asked for more)";
  } else {
    return;
  }
  fail_launch(what.str());
}

// A variable of the environment: 1 or more, or `otherwise` where it is not set.
int environment_number(const char* name, int otherwise) {
  const char* request = std::getenv(name);
  if (request == nullptr) return otherwise;
  const int number = std::atoi(request);
  if (number < 1) throw std::runtime_error(std::string(name) + ": expected 1 or more, got " + request);
  return number;
}

struct Gpus {
  std::mutex mutex;
  std::vector<Gpu> all;
} gpus;

}  // namespace

int current_gpu() {
  const Gpu current{environment_number("PAGEDATTN_SIMT_MULTIPROCESSORS", 4),  // few: blocks loop over their work
                    environment_number("PAGEDATTN_SIMT_ARCH", 90)};
  const std::lock_guard lock(gpus.mutex);
  for (size_t i = 0; i < gpus.all.size(); ++i) {
    if (gpus.all[i].num_multiprocessors == current.num_multiprocessors &&
        gpus.all[i].architecture == current.architecture) {
      return static_cast<int>(i);
    }
  }
  gpus.all.push_back(current);
  return static_cast<int>(gpus.all.size()) - 1;
}

Gpu gpu(int device) {
  const std::lock_guard lock(gpus.mutex);
  return gpus.all.at(device);
}

void allow_shared_bytes(const void* function, int64_t bytes) {
  const std::lock_guard lock(device.mutex);
  if (bytes < 0 || bytes > static_cast<int64_t>(MAX_SHARED_BYTES)) {
    throw std::runtime_error("simt: cudaFuncSetAttribute: " + std::to_string(bytes) +
                             " bytes of shared memory, at most " + std::to_string(MAX_SHARED_BYTES));
  }
  device.allowed_shared_bytes[{current_gpu(), function}] = bytes;
}

void hide_until_wait(void* memory, size_t bytes) {
  const std::lock_guard lock(device.mutex);
  device.hidden.memory = static_cast<unsigned char*>(memory);
  device.hidden.bytes = bytes;
  device.hidden.bytes_left = Hidden::MAX_BYTES_OF_LAUNCH;
}

void run(const Launch& launch) {
  const std::lock_guard lock(device.mutex);
  device.launch = &launch;
  ++device.num_launches;
  const char* seed = std::getenv("PAGEDATTN_SIMT_SEED");
  device.seed = seed && *seed ? std::strtoull(seed, nullptr, 10) : device.num_launches;
  device.random_state = (device.seed + 1) * 0x9e3779b97f4a7c15u | 1;
  device.architecture = gpu(current_gpu()).architecture;
  device.in_block = false;
  check_limits(launch);
  uses.dependent_launches += launch.is_dependent;
  blockDim = launch.block;
  gridDim = launch.grid;
  ASAN_UNPOISON_MEMORY_REGION(shared_memory, sizeof(shared_memory));
  std::memset(shared_memory, POISON, sizeof(shared_memory));
  ASAN_POISON_MEMORY_REGION(shared_memory + launch.shared_bytes, sizeof(shared_memory) - launch.shared_bytes);

  // Clusters in a shuffled order: `step` has no factor in common with their number, so each has its turn once.
  const dim3& size = launch.cluster;
  const dim3 num(gridDim.x / size.x, gridDim.y / size.y, gridDim.z / size.z);
  const uint64_t num_clusters = uint64_t{num.x} * num.y * num.z;
  uint64_t step = random_bits() % num_clusters + 1;
  while (std::gcd(step, num_clusters) != 1) ++step;
  uint64_t cluster = random_bits() % num_clusters;
  for (uint64_t i = 0; i < num_clusters; ++i, cluster = (cluster + step) % num_clusters) {
    run_cluster({static_cast<unsigned>(cluster % num.x) * size.x,
                 static_cast<unsigned>(cluster / num.x % num.y) * size.y,
                 static_cast<unsigned>(cluster / num.x / num.y) * size.z});
  }
  check_writes_past_shared_memory(sizeof(shared_memory) - launch.shared_bytes);
}

// ---- from a kernel's thread

void fail(const std::string& what, Site site) {
  std::ostringstream full;
  full << what << "\n  thread " << dim3(threadIdx.x, threadIdx.y, threadIdx.z) << " at " << site << ", in "
       << site.function_name() << waiting_threads();
  fail_launch(full.str());
}

void wait_for_previous_kernel(Site site) {
  if (device.hidden.is_hidden) wait_at("griddepcontrol_wait", &device.hidden, site);
  device.block->threads[device.running].has_waited = true;
}

int architecture() { return device.architecture; }

unsigned lane_idx() { return device.running % WARP_SIZE; }

unsigned warp_idx() { return device.running / WARP_SIZE; }

unsigned thread_idx() { return device.running; }

void maybe_yield() {
  if (random_bits() % 2) run_next();
}

void warp_operation(const char* name, unsigned mask, void* operands, Compute compute, Site site) {
  const unsigned warp_idx = device.running / WARP_SIZE, lane = 1u << lane_idx();
  Warp& warp = device.block->warps[warp_idx];
  if (!(mask & lane)) fail(std::string(name) + ": this lane is not in its own mask", site);
  warp.operands[lane_idx()] = operands;

  Group* group = warp.groups;
  Group* const end = warp.groups + warp.num_groups;
  while (group != end && group->mask != mask) ++group;
  if (group == end) {
    *group = {name, compute, site, mask, 0};
    ++warp.num_groups;
  } else if (group->compute != compute || !same_site(group->site, site)) {
    fail("divergence: one lane is at " + std::string(name) + " while others of its mask are at another operation",
         site);
  }
  group->arrived |= lane;

  if (group->arrived == mask) {
    compute(warp.operands, mask, site);
    *group = warp.groups[--warp.num_groups];
    set_ready(warp_idx, mask);
    if (!(random_bits() % 8)) run_next();
  } else {
    set_waiting(warp_idx, lane);
    run_next();
  }
}

BarrierResult block_barrier(const char* name, bool predicate, Site site) {
  const unsigned warp_idx = device.running / WARP_SIZE, lane = 1u << lane_idx();
  Barrier& barrier = device.block->barrier;
  if (barrier.num_arrived == 0) {
    barrier.name = name;
    barrier.site = site;
  } else if (!same_site(barrier.site, site)) {
    fail("divergent barrier: one thread is at " + std::string(name) + " while others of its block are at another one",
         site);
  }
  ++barrier.num_arrived;
  barrier.num_true += predicate;
  device.block->warps[warp_idx].at_barrier |= lane;
  set_waiting(warp_idx, lane);
  if (barrier.num_arrived == device.block->num_live) open_barrier();
  run_next();
  return barrier.result;  // the next barrier cannot open before this thread is there
}

void named_barrier(int id, int num_threads, Site site) {
  if (id < 1 || id >= NUM_BARRIERS || num_threads < 1 || num_threads % static_cast<int>(WARP_SIZE)) {
    fail("barrier_sync: expected a barrier of 1 to 15 and whole warps, got barrier " + std::to_string(id) + " and " +
             std::to_string(num_threads) + " threads",
         site);
  }
  const unsigned warp_idx = device.running / WARP_SIZE, lane = 1u << lane_idx();
  NamedBarrier& barrier = device.block->named_barriers[id];
  if (barrier.num_arrived == 0) {
    barrier.site = site;
    barrier.num_threads = num_threads;
  } else if (barrier.num_threads != num_threads || !same_site(barrier.site, site)) {
    fail("divergent barrier: one thread is at barrier_sync while others of its barrier are at another one", site);
  }
  barrier.waiting[warp_idx] |= lane;
  set_waiting(warp_idx, lane);
  if (++barrier.num_arrived == num_threads) {
    for (unsigned i = 0; i < MAX_WARPS; ++i) {
      if (const unsigned lanes = std::exchange(barrier.waiting[i], 0)) set_ready(i, lanes);
    }
    barrier.num_arrived = 0;
  }
  run_next();
}

void cluster_sync(bool releases, Site site) {
  const unsigned warp_idx = device.running / WARP_SIZE, lane = 1u << lane_idx();
  Cluster& cluster = device.cluster;
  if (cluster.num_arrived == 0) {
    cluster.releases = releases;
    cluster.site = site;
  } else if (!same_site(cluster.site, site)) {
    fail("divergent barrier: one thread is at cluster_sync while others of its cluster are at another one", site);
  }
  ++cluster.num_arrived;
  device.block->warps[warp_idx].at_cluster_sync |= lane;
  set_waiting(warp_idx, lane);
  run_next();
}

unsigned cluster_size() { return device.cluster.num_blocks; }

void wait_at(const char* name, const void* place, Site site) {
  const unsigned warp_idx = device.running / WARP_SIZE, lane = 1u << lane_idx();
  Warp& warp = device.block->warps[warp_idx];
  device.block->threads[device.running].waits_at = place;
  warp.at_places |= lane;
  warp.place_name = name;
  warp.place_site = site;
  set_waiting(warp_idx, lane);
  run_next();
}

void wake(const void* place) {
  for (unsigned warp_idx = 0; warp_idx < MAX_WARPS; ++warp_idx) {
    Warp& warp = device.block->warps[warp_idx];
    for (unsigned lanes = warp.at_places; lanes; lanes &= lanes - 1) {
      const unsigned lane_idx = std::countr_zero(lanes);
      if (device.block->threads[warp_idx * WARP_SIZE + lane_idx].waits_at != place) continue;
      warp.at_places &= ~(1u << lane_idx);
      set_ready(warp_idx, 1u << lane_idx);
    }
  }
}

void check_shared(const char* name, const void* pointer, size_t bytes, Site site) {
  const auto offset = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(shared_memory);
  if (offset + bytes > device.launch->shared_bytes || offset > device.launch->shared_bytes) {
    fail(std::string(name) + ": the address is not in the dynamic shared memory of the launch (byte " +
             std::to_string(static_cast<int64_t>(offset)) + ")",
         site);
  }
  if (offset % bytes) {
    fail(std::string(name) + ": byte " + std::to_string(offset) + " of shared memory is not aligned to " +
             std::to_string(bytes),
         site);
  }
}

// The first kilobyte is the system's, as on sm_90.
constexpr uint32_t FIRST_ADDRESS = 1024;

uint32_t shared_address(const void* pointer) {
  return FIRST_ADDRESS + static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - shared_memory);
}

// The rank lies above the address in a block's shared memory, which has less than 24 bits.
constexpr unsigned RANK_SHIFT = 24;

uint32_t map_shared(const void* pointer, unsigned rank, Site site) {
  check_shared("map_shared", pointer, 1, site);
  if (rank >= device.cluster.num_blocks) {
    fail("map_shared: there is no block " + std::to_string(rank) + " in a cluster of " +
             std::to_string(device.cluster.num_blocks),
         site);
  }
  return shared_address(pointer) | rank << RANK_SHIFT;
}

void load_cluster(void* target, uint32_t address, size_t bytes, Site site) {
  const unsigned rank = address >> RANK_SHIFT;
  const int64_t offset = int64_t{address} - (int64_t{rank} << RANK_SHIFT) - FIRST_ADDRESS;
  check_shared("load_cluster", shared_memory + offset, bytes, site);
  const std::string other = "load_cluster: block " + std::to_string(rank) + " of the cluster ";
  Block& block = device.blocks[rank];
  if (&block == device.block) {
    std::memcpy(target, shared_memory + offset, bytes);
  } else if (device.cluster.num_syncs == 0) {
    fail(other + "may not have begun: no cluster_sync came before", site);
  } else if (block.num_live == 0) {
    fail(other + "has ended", site);
  } else if (std::memcmp(block.memory.data() + offset, block.seen_memory.data() + offset, bytes)) {
    fail(other + "has written there since the last cluster_sync", site);
  } else {
    std::memcpy(target, block.seen_memory.data() + offset, bytes);
    block.was_read_after = device.cluster.num_syncs;
  }
}

const void* shared_at(uint32_t address) { return shared_memory + (int64_t{address} - FIRST_ADDRESS); }

const void* read_as_async_proxy(const char* name, uint32_t address, unsigned bytes, Site site) {
  const auto* pointer = static_cast<const unsigned char*>(shared_at(address));
  check_shared(name, pointer, bytes, site);
  const Write* const writes = device.block->writes + (pointer - shared_memory) / 8;
  for (unsigned i = 0; i < bytes / 8; ++i) {
    const Write& write = writes[i];
    if (write.block != device.block->number) continue;
    const std::string thread = "thread " + std::to_string(write.thread);
    if (write.num_fences == device.block->threads[write.thread].num_fences) {
      fail(std::string(name) + ": " + thread +
               " has copied to shared memory that is read here, and not called fence_proxy_async after its wait",
           site);
    }
    if (std::memcmp(pointer + i * 8, &write.fenced, 8)) {
      fail(std::string(name) + ": something was written to shared memory that is read here after " + thread +
               ", which has copied to it, called fence_proxy_async",
           site);
    }
  }
  return pointer;
}

void count_fence() {
  Thread& thread = device.block->threads[device.running];
  ++thread.num_fences;
  for (const unsigned unit : thread.written) {
    Write& write = device.block->writes[unit];
    if (write.thread == device.running) std::memcpy(&write.fenced, shared_memory + unit * size_t{8}, 8);
  }
}

// Notes the begin or the end of a copy of the running thread.
void note_write(const void* target, unsigned bytes) {
  const auto first = static_cast<unsigned>((static_cast<const unsigned char*>(target) - shared_memory) / 8);
  Thread& thread = device.block->threads[device.running];
  for (unsigned unit = first; unit < first + bytes / 8; ++unit) {
    Write& write = device.block->writes[unit];
    if (write.block != device.block->number || write.thread != device.running) thread.written.push_back(unit);
    write = {device.block->number, device.running, thread.num_fences, 0};
  }
}

void start_copy(const char* name, void* target, const void* source, unsigned bytes, bool valid, Site site) {
  check_shared(name, target, bytes, site);
  if (valid && reinterpret_cast<uintptr_t>(source) % bytes) {
    fail(std::string(name) + ": the source is not aligned to " + std::to_string(bytes), site);
  }
  Thread& thread = device.block->threads[device.running];
  std::memset(target, POISON, bytes);
  note_write(target, bytes);
  thread.copies.push_back({target, source, bytes, valid, thread.open_group});
}

void close_copy_group() { ++device.block->threads[device.running].open_group; }

void wait_for_copy_groups(unsigned num_pending) {
  Thread& thread = device.block->threads[device.running];
  auto copy = thread.copies.begin();
  for (; copy != thread.copies.end() && copy->group + num_pending < thread.open_group; ++copy) {
    if (copy->valid) {
      std::memcpy(copy->target, copy->source, copy->bytes);
    } else {
      std::memset(copy->target, 0, copy->bytes);
    }
    note_write(copy->target, copy->bytes);
  }
  thread.copies.erase(thread.copies.begin(), copy);
}

}  // namespace pagedattn::simt

// For a test with a wrong result, which names the seeds of its launches: launches are numbered through.
extern "C" __attribute__((visibility("default"))) uint64_t pagedattn_simt_num_launches() {
  return pagedattn::simt::device.num_launches;
}

// For a test of which way a call takes.
extern "C" __attribute__((visibility("default"))) pagedattn::simt::Uses pagedattn_simt_uses() {
  return pagedattn::simt::uses;
}
