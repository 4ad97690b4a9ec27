// The memory that the ranks of one machine share, and how they meet in it: buffers, a word in which each rank says how
// far it has come, who the ranks are, and whether the group is broken. No torch.
//
// The memory, which a descriptor of memfd_create stands for:
//   Header                                 a page
//   of each rank:  RankWords               a page
//                  buffers                 [2][buffer_bytes]
// The ranks take their steps together. In a step each rank writes into its buffer, arrives, waits until all have
// arrived, and reads all buffers. The buffers of a rank alternate from step to step. So one meeting a step will do: who
// writes a buffer in step s + 2 has seen all ranks arrive in step s + 1, and a rank arrives there when it has read what
// step s was about.
//
// Order of memory: a rank arrives by a store that releases, and waits by loads that acquire. What a rank has written
// before it arrives is seen by all who wait for it. And what it has read before then it has read, so that a later write
// of another rank cannot come in between. Both hold on CPUs that reorder loads and stores, such as those of Arm.
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
  // A descriptor of new memory for a group, sealed against shrinking, since a rank that reads past the end would die of
  // SIGBUS. Throws std::invalid_argument for wrong arguments, std::system_error if there is no memory.
  static int create(int64_t world_size, int64_t max_bytes, double timeout_seconds);

  // Joins as `rank`, and maps the memory; `descriptor` is no longer needed then. A handle for the ops is given away, by
  // which find() finds the group until close(). Throws std::invalid_argument if the descriptor is of anything else, if
  // there is no such rank, and if it has joined already; std::system_error if there is no memory.
  static std::shared_ptr<SharedGroup> join(int descriptor, int64_t rank);

  // The group of a handle; nullptr if it is closed.
  static std::shared_ptr<SharedGroup> find(int64_t handle);

  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  // Leaves the group: a rank that waits for this one is told. A call under way on another thread goes on.
  void close();

  // Breaks the group for all ranks, unless it is broken: who waits is woken and throws, and so does every later call.
  void abort(const std::string& reason);
  // Why the group is broken; empty if it is not.
  std::string broken() const;

  int64_t handle() const { return handle_; }
  int64_t rank() const { return rank_; }
  int64_t world_size() const { return world_size_; }
  int64_t buffer_bytes() const { return buffer_bytes_; }

  // ---- for a call, which holds `calls` throughout

  std::mutex calls;  // of this process's threads

  // The buffer of a rank in the step that comes.
  char* buffer(int64_t rank) const;
  // Ends the writing of a step: waits until all ranks have arrived in it. Throws std::runtime_error if the group is
  // broken, or if a rank has died, has left, makes another call, or does not come in time; each breaks the group.
  void meet(SharedCall call, DType dtype, int64_t num_elements);
  // Ends the reading of a step, whose buffers then alternate.
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
  void check_same_call(int64_t rank, uint64_t call);
  std::string name_of(int64_t rank) const;

  char* memory_;
  int64_t num_bytes_;
  int64_t rank_;
  int64_t world_size_;
  int64_t buffer_bytes_;
  int64_t handle_ = 0;
  int64_t step_ = 0;      // says which buffers
  uint32_t meeting_ = 0;  // counts up to 2^31 and starts again
};

}  // namespace pagedattn
