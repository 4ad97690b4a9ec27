// The memory that the ranks of one machine share, and how the ranks meet in it. The memory holds buffers, a word in
// which each rank says how far it has come, who the ranks are, and whether the group is broken. No torch.
//
// The memory, which a descriptor of memfd_create stands for:
//   Header                                 a page
//   of each rank:  RankWords               a page
//                  buffers                 [2][buffer_bytes]
// The ranks take their steps together. In a step, each rank writes into its buffer, arrives, waits until all ranks have
// arrived, and reads all buffers. A rank's two buffers alternate from step to step, so one meeting in each step is
// enough: a rank that writes a buffer in step s + 2 has seen all ranks arrive in step s + 1, and a rank arrives there
// only after it has read the buffers of step s.
//
// Order of memory: a rank arrives by a store that releases, and waits by loads that acquire. So what a rank has written
// before it arrives is seen by all ranks that wait for it. What a rank reads before it arrives, it has read by then, so
// that no later write of another rank can come before the read. Both hold on CPUs that reorder loads and stores, such
// as those of Arm.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "types.h"

namespace pagedattn {

constexpr int64_t MAX_RANKS = 64;

enum class SharedCall : uint8_t { ALL_REDUCE, ALL_GATHER };

class SharedGroup {
 public:
  // A descriptor of new memory for a group. The memory is sealed against shrinking, since a rank that reads past its
  // end would die of SIGBUS. Throws std::invalid_argument for wrong arguments, std::system_error if there is no memory.
  static int create(int64_t world_size, int64_t max_bytes, double timeout_seconds);

  // Joins as `rank`, and maps the memory; `descriptor` is not needed after that. The group gets a handle for the ops,
  // by which find() finds it until close(). Throws std::invalid_argument if the descriptor is not one of create(), if
  // there is no such rank, or if the rank has joined already; std::system_error if there is no memory.
  static std::shared_ptr<SharedGroup> join(int descriptor, int64_t rank);

  // The group of a handle; nullptr if it is closed.
  static std::shared_ptr<SharedGroup> find(int64_t handle);

  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  // Leaves the group. A rank that waits for this rank is told. A call under way on another thread goes on.
  void close();

  // Breaks the group for all ranks, unless it is broken already. Ranks that wait are woken and throw, and so does every
  // later call.
  void abort(const std::string& reason);
  // Why the group is broken; empty if it is not.
  std::string broken() const;

  int64_t handle() const { return handle_; }
  int64_t rank() const { return rank_; }
  int64_t world_size() const { return world_size_; }
  int64_t buffer_bytes() const { return buffer_bytes_; }

  // ---- for a call, which holds `calls` throughout

  std::mutex calls;  // one call at a time in this process

  // A rank's buffer of the current step.
  char* buffer(int64_t rank) const;
  // Ends the writing of a step: waits until all ranks have arrived. Throws std::runtime_error if the group is broken,
  // or if a rank has died, has left, makes another call, or does not come in time. Each of these breaks the group.
  // width: of a row, where it makes a difference to the call.
  void meet(SharedCall call, DType dtype, int64_t num_elements, int64_t width = 0);
  // Ends the reading of a step. The next step has the other buffers.
  void end_step() { ++step_; }
  void throw_if_broken() const;

 private:
  struct Header;
  struct RankWords;

  SharedGroup(void* memory, int64_t num_bytes, int64_t rank);
  Header& header() const;
  RankWords& words(int64_t rank) const;
  bool has_come(uint32_t arrived) const { return static_cast<int32_t>(arrived - 2 * meeting_) >= 0; }
  void sleep_until_come(int64_t rank);
  void check_missing_ranks(double waited_seconds);
  void check_same_call(int64_t rank, uint64_t call, uint64_t width);
  std::string name_of(int64_t rank) const;

  char* memory_;
  int64_t num_bytes_;
  int64_t rank_;
  int64_t world_size_;
  int64_t buffer_bytes_;
  int64_t handle_ = 0;
  int64_t step_ = 0;      // its parity selects the buffers
  uint32_t meeting_ = 0;  // 2 * meeting_ starts again at 2^31 meetings, which has_come allows
};

}  // namespace pagedattn
