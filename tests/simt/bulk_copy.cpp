// mbarriers and cp.async.bulk of the simt device.
//
// An mbarrier is 64 bits of shared memory, as on a GPU, and nobody else may write to them. Bulk copies read and write
// shared memory through the "async proxy", which sees what threads have written only after a fence.proxy.async. So
// there is a second array, which holds what this proxy sees. Fences bring it up to date, and it is compared before a
// copy begins. A fence counts for the thread that calls it, so each thread that starts a copy has an array of its own.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "simt.h"

namespace pagedattn::cuda {
extern unsigned char shared_memory[];
}

namespace pagedattn::simt {
namespace {

constexpr unsigned char POISON = 0xff;
constexpr unsigned UNIT = 16;  // bytes: alignment and size of bulk copies are multiples

// A phase ends when all arrivals have come, and as many bytes as they announced. The next phase begins at once.
struct Mbarrier {
  static constexpr unsigned MAGIC = 0xba44;
  uint64_t magic : 16;
  uint64_t phase : 1;
  uint64_t num_arrivals : 11;  // of each phase
  uint64_t num_missing : 11;   // in this phase
  int64_t missing_bytes : 25;
};
static_assert(sizeof(Mbarrier) == 8);

struct BulkCopy {
  void* target;
  const void* source;
  unsigned bytes;
  Mbarrier* barrier;
};

// The fence may be called by the thread that made an mbarrier, or by the thread that starts a copy.
struct Maker {
  unsigned thread;
  bool has_fenced;
};

using Memory = std::vector<unsigned char>;  // as shared memory

struct BlockCopies {
  std::vector<BulkCopy> under_way;
  std::map<const void*, Maker> barriers;
  Memory brought;                   // by bulk copies, and nothing else
  std::map<unsigned, Memory> seen;  // by thread: `brought`, and all that was there at the thread's last fence
  size_t shared_bytes = 0;
} copies_of[MAX_CLUSTER_BLOCKS];
BlockCopies* block = copies_of;  // the running one

size_t offset_of(const void* pointer) { return static_cast<const unsigned char*>(pointer) - cuda::shared_memory; }

Memory& seen_by_thread() {
  if (block->brought.empty()) block->brought.assign(block->shared_bytes, POISON);
  return block->seen.try_emplace(thread_idx(), block->brought).first->second;
}

// Calls change(target) for the target of a copy in all arrays, and in memory.
template <typename Change>
void change_all(void* target, const Change& change) {
  change(static_cast<unsigned char*>(target));
  change(block->brought.data() + offset_of(target));
  for (auto& [thread, memory] : block->seen) change(memory.data() + offset_of(target));
}

Mbarrier& find_barrier(const char* name, void* pointer, Site site) {
  check_shared(name, pointer, sizeof(Mbarrier), site);
  auto& barrier = *static_cast<Mbarrier*>(pointer);
  if (barrier.magic != Mbarrier::MAGIC) {
    fail(std::string(name) + ": no mbarrier: mbarrier_init did not come before, or something was written over it",
         site);
  }
  return barrier;
}

void end_phase_if_complete(Mbarrier& barrier) {
  if (barrier.num_missing > 0 || barrier.missing_bytes != 0) return;
  barrier.phase = !barrier.phase;
  barrier.num_missing = barrier.num_arrivals;
  wake(&barrier);
}

void finish_copies(Mbarrier& barrier) {
  const auto of_barrier = [&](const BulkCopy& copy) { return copy.barrier == &barrier; };
  for (const BulkCopy& copy : block->under_way) {
    if (!of_barrier(copy)) continue;
    change_all(copy.target, [&](unsigned char* bytes) { std::memcpy(bytes, copy.source, copy.bytes); });
    barrier.missing_bytes -= copy.bytes;
  }
  if (std::erase_if(block->under_way, of_barrier) > 0) end_phase_if_complete(barrier);
}

}  // namespace

void mbarrier_init(void* pointer, unsigned num_arrivals, Site site) {
  check_shared("mbarrier_init", pointer, sizeof(Mbarrier), site);
  auto& barrier = *static_cast<Mbarrier*>(pointer);
  if (barrier.magic == Mbarrier::MAGIC) fail("mbarrier_init: there is an mbarrier already", site);
  barrier = {Mbarrier::MAGIC, 0, num_arrivals, num_arrivals, 0};
  block->barriers[pointer] = {thread_idx(), false};
}

void mbarrier_arrive_expect(void* pointer, unsigned bytes, Site site) {
  maybe_yield();
  Mbarrier& barrier = find_barrier("mbarrier_arrive_expect", pointer, site);
  if (barrier.num_missing == 0) fail("mbarrier_arrive_expect: all arrivals of the phase have come", site);
  barrier.missing_bytes += bytes;
  --barrier.num_missing;
  end_phase_if_complete(barrier);
}

// Copies are as late as can be: they are done when a thread waits for them.
void mbarrier_wait(void* pointer, bool parity, Site site) {
  Mbarrier& barrier = find_barrier("mbarrier_wait", pointer, site);
  while (barrier.phase == parity) {
    finish_copies(barrier);
    if (barrier.phase == parity) wait_at("mbarrier_wait", pointer, site);
  }
}

void start_bulk_copy(void* target, const void* source, unsigned bytes, void* pointer, Site site) {
  constexpr const char* NAME = "bulk_copy";
  Mbarrier& barrier = find_barrier(NAME, pointer, site);
  if (bytes == 0 || bytes % UNIT || reinterpret_cast<uintptr_t>(source) % UNIT) {
    fail(std::string(NAME) + ": source and size must be multiples of 16 bytes, got a size of " + std::to_string(bytes),
         site);
  }
  check_shared(NAME, target, UNIT, site);
  check_shared(NAME, static_cast<unsigned char*>(target) + bytes - UNIT, UNIT, site);
  const Memory& seen = seen_by_thread();
  if (!block->barriers[pointer].has_fenced &&
      reinterpret_cast<const Mbarrier*>(seen.data() + offset_of(pointer))->magic != Mbarrier::MAGIC) {
    fail(std::string(NAME) + ": a fence_proxy_async is missing after mbarrier_init, of its thread or of this one",
         site);
  }
  if (std::memcmp(target, seen.data() + offset_of(target), bytes)) {
    fail(std::string(NAME) +
             ": threads have written to the target, and this one has not called fence_proxy_async after it",
         site);
  }
  change_all(target, [&](unsigned char* all) { std::memset(all, POISON, bytes); });
  block->under_way.push_back({target, source, bytes, &barrier});
  ++uses.bulk_copies;
  wake(pointer);
}

void fence_proxy_async() {
  count_fence();
  if (block->barriers.empty()) return;  // no bulk copies yet
  for (auto& [barrier, maker] : block->barriers) maker.has_fenced = maker.has_fenced || maker.thread == thread_idx();
  std::copy_n(cuda::shared_memory, block->shared_bytes, seen_by_thread().data());
}

void select_bulk_copies(unsigned rank) { block = &copies_of[rank]; }

void begin_bulk_copies(size_t shared_bytes) {
  block->under_way.clear();
  block->barriers.clear();
  block->brought.clear();
  block->seen.clear();
  block->shared_bytes = shared_bytes;
}

bool has_bulk_copies_under_way() { return !block->under_way.empty(); }

}  // namespace pagedattn::simt
