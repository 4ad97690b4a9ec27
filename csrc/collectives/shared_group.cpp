#include "collectives/shared_group.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unordered_map>

namespace pagedattn {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

constexpr int64_t PAGE_BYTES = 4096;
constexpr int64_t TWO_LINES_BYTES = 128;  // which some CPUs fetch together
constexpr int64_t MAX_BUFFER_BYTES = int64_t{1} << 40;
constexpr uint64_t MAGIC = 0x3150554f52474150;  // "PAGROUP1": the layout of the memory
constexpr int MAX_REASON_BYTES = 1000;

// A wait begins by spinning, for as long as ranks that are about equally fast differ. Then it spins on for as long as
// falling asleep and being woken would take, but yields the CPU, as the missing rank may want it. Then it sleeps, and
// wakes now and then to check the missing ranks.
constexpr auto GREEDY_SPIN_TIME = std::chrono::microseconds(10);
constexpr auto SPIN_TIME = std::chrono::microseconds(50);
constexpr int SPINS_PER_LOOK_AT_THE_CLOCK = 16;
constexpr auto CHECK_INTERVAL = std::chrono::milliseconds(100);
// How long a wait goes on once a signal has come: a rank that is only late should not break the group for, say, the
// signals of a profiler. Python cannot act on Ctrl-C before the call has ended.
constexpr auto INTERRUPTED_TIME = std::chrono::seconds(1);

enum : uint32_t { WHOLE, BEING_BROKEN, BROKEN };

// The lowest bit of a rank's word says that somebody sleeps until the word changes. The other bits count the rank's
// meetings.
constexpr uint32_t SLEEPER = 1;

void pause_spinning() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // on most CPUs, yield does nothing
#endif
}

// Sleeps on a word that processes share. Returns when the word is woken or has another value, at a signal, or after
// CHECK_INTERVAL at the latest. The result: whether this thread has handled a signal.
bool sleep_while(const Word& word, uint32_t value) {
  const timespec timeout{0, std::chrono::nanoseconds(CHECK_INTERVAL).count()};
  return syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0) != 0 && errno == EINTR;
}
void wake_all(const Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

template <typename... Text>
std::string text_of(const Text&... text) {
  std::ostringstream stream;
  (stream << ... << text);
  return stream.str();
}

template <typename... Text>
void check(bool condition, const Text&... text) {
  if (!condition) throw std::invalid_argument(text_of(text...));
}

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

struct Process {
  char state;
  uint64_t start_time;  // tells the process from a later one with the same pid
};

// A process that has not ended. A zombie has ended.
std::optional<Process> running_process(int32_t pid) {
  const int file = open(text_of("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  char text[1024];
  const ssize_t length = read(file, text, sizeof text - 1);
  ::close(file);
  if (length <= 0) return {};
  text[length] = 0;
  const char* name_end = std::strrchr(text, ')');  // the second field, which may hold anything, ends here
  Process process{};
  unsigned long long start_time = 0;  // field 22
  if (name_end == nullptr || std::sscanf(name_end + 1,
                                         " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
                                         "%llu",
                                         &process.state, &start_time) != 2) {
    return {};
  }
  process.start_time = start_time;
  if (process.state == 'Z' || process.state == 'X') return {};
  return process;
}

// What statx says of a file: of `descriptor` itself, if `path` is empty. stat and fstat would ask for glibc 2.33.
struct statx status_of(int descriptor, const char* path, const char* what) {
  struct statx status{};
  if (statx(descriptor, path, AT_EMPTY_PATH, STATX_INO | STATX_SIZE, &status) != 0) fail(errno, what);
  return status;
}

// A pid means another process in another namespace.
uint64_t pid_namespace() { return status_of(AT_FDCWD, "/proc/self/ns/pid", "/proc/self/ns/pid").stx_ino; }

int64_t rank_bytes(int64_t buffer_bytes) { return PAGE_BYTES + 2 * buffer_bytes; }
int64_t group_bytes(int64_t world_size, int64_t buffer_bytes) {
  return PAGE_BYTES + world_size * rank_bytes(buffer_bytes);
}

struct OpenGroups {
  std::mutex mutex;
  std::unordered_map<int64_t, std::weak_ptr<SharedGroup>> by_handle;
  int64_t last_handle = 0;  // no handle is given twice
};
OpenGroups& open_groups() {
  static auto& groups = *new OpenGroups;  // never destroyed, as calls may be under way when the process ends
  return groups;
}

// A call as a number, which the ranks compare.
uint64_t call_of(SharedCall call, DType dtype, int64_t num_elements) {
  return static_cast<uint64_t>(num_elements) << 8 | static_cast<uint64_t>(call) << 4 | static_cast<uint64_t>(dtype);
}
std::string call_text(uint64_t call, uint64_t width) {
  constexpr const char* CALLS[] = {"all_reduce_shared", "all_gather_shared"};
  constexpr const char* DTYPES[] = {"float32", "float16", "bfloat16"};
  const std::string text = text_of(CALLS[call >> 4 & 1], " of ", call >> 8, " elements of ", DTYPES[(call & 15) % 3]);
  return width == 0 ? text : text_of(text, " in rows of ", width);
}

}  // namespace

struct SharedGroup::Header {
  uint64_t magic;
  int64_t world_size;
  int64_t buffer_bytes;
  double timeout_seconds;
  uint64_t pid_namespace;
  alignas(TWO_LINES_BYTES) Word state;
  char reason[MAX_REASON_BYTES + 1];
};

struct SharedGroup::RankWords {
  alignas(TWO_LINES_BYTES) Word arrived;  // twice the number of meetings, and SLEEPER
  std::atomic<uint64_t> calls[2];         // of this meeting and of the one before, by the meeting's parity
  std::atomic<uint64_t> widths[2];
  alignas(TWO_LINES_BYTES) Word is_taken;
  std::atomic<int32_t> pid;  // 0: the rank has not joined
  std::atomic<uint64_t> start_time;
  Word has_left;
};

int SharedGroup::create(int64_t world_size, int64_t max_bytes, double timeout_seconds) {
  static_assert(sizeof(Header) <= PAGE_BYTES && sizeof(RankWords) <= PAGE_BYTES);
  check(1 <= world_size && world_size <= MAX_RANKS, "world_size: expected 1 to ", MAX_RANKS, ", got ", world_size);
  check(1 <= max_bytes && max_bytes <= MAX_BUFFER_BYTES, "max_bytes: expected 1 to ", MAX_BUFFER_BYTES, ", got ",
        max_bytes);
  check(std::isfinite(timeout_seconds) && timeout_seconds > 0,
        "timeout_seconds: expected a finite number above 0, got ", timeout_seconds);
  Header header{};
  header.magic = MAGIC;
  header.world_size = world_size;
  header.buffer_bytes = (max_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
  header.timeout_seconds = timeout_seconds;
  header.pid_namespace = pid_namespace();
  const int descriptor = memfd_create("pagedattn_ext", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) fail(errno, "memfd_create");
  const bool is_done = ftruncate(descriptor, group_bytes(world_size, header.buffer_bytes)) == 0 &&
                       pwrite(descriptor, &header, sizeof header, 0) == sizeof header &&
                       fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  if (!is_done) {
    const int error = errno;
    ::close(descriptor);
    fail(error, "the memory of the group");
  }
  return descriptor;
}

std::shared_ptr<SharedGroup> SharedGroup::join(int descriptor, int64_t rank) {
  const int64_t size = status_of(descriptor, "", "descriptor").stx_size;
  Header header{};
  const int seals = fcntl(descriptor, F_GET_SEALS);  // -1 for a file without seals
  const bool is_ours = seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
                       pread(descriptor, &header, sizeof header, 0) == sizeof header && header.magic == MAGIC &&
                       size == group_bytes(header.world_size, header.buffer_bytes);
  check(is_ours, "descriptor: expected one from SharedMemoryGroup.create, got ", descriptor, ", which is another's");
  check(0 <= rank && rank < header.world_size, "rank: expected 0 to ", header.world_size - 1, ", got ", rank);
  check(header.pid_namespace == pid_namespace(),
        "descriptor: expected memory of a process in this PID namespace, got that of another one");
  const std::optional<Process> self = running_process(getpid());
  if (!self) fail(ENOENT, "/proc/self/stat");
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) fail(errno, "the memory of the group");
  const std::shared_ptr<SharedGroup> group(new SharedGroup(memory, size, rank));
  // Allocates the pages, so that a lack of memory is an error here and not a signal later. Each rank allocates the
  // pages that it writes, so they are on its NUMA node.
  int error = EINTR;
  while (error == EINTR) {
    error = posix_fallocate(descriptor, PAGE_BYTES + rank * rank_bytes(header.buffer_bytes),
                            rank_bytes(header.buffer_bytes));
  }
  if (error != 0) fail(error, "the memory of the group");
  RankWords& words = group->words(rank);
  check(words.is_taken.exchange(1) == 0, "rank: expected one that has not joined yet, got ", group->name_of(rank));
  words.start_time.store(self->start_time, std::memory_order_relaxed);
  words.pid.store(getpid(), std::memory_order_release);

  OpenGroups& groups = open_groups();
  const std::lock_guard lock(groups.mutex);
  group->handle_ = ++groups.last_handle;
  groups.by_handle.emplace(group->handle_, group);
  return group;
}

std::shared_ptr<SharedGroup> SharedGroup::find(int64_t handle) {
  OpenGroups& groups = open_groups();
  const std::lock_guard lock(groups.mutex);
  const auto found = groups.by_handle.find(handle);
  return found == groups.by_handle.end() ? nullptr : found->second.lock();
}

SharedGroup::SharedGroup(void* memory, int64_t num_bytes, int64_t rank)
    : memory_(static_cast<char*>(memory)),
      num_bytes_(num_bytes),
      rank_(rank),
      world_size_(header().world_size),
      buffer_bytes_(header().buffer_bytes) {}

SharedGroup::~SharedGroup() {
  close();
  munmap(memory_, num_bytes_);
}

void SharedGroup::close() {
  {
    OpenGroups& groups = open_groups();
    const std::lock_guard lock(groups.mutex);
    if (groups.by_handle.erase(handle_) == 0) return;
  }
  // A child that the rank has forked is not the rank.
  if (words(rank_).pid.load(std::memory_order_relaxed) == getpid()) {
    words(rank_).has_left.store(1, std::memory_order_release);
  }
}

SharedGroup::Header& SharedGroup::header() const { return *reinterpret_cast<Header*>(memory_); }
SharedGroup::RankWords& SharedGroup::words(int64_t rank) const {
  return *reinterpret_cast<RankWords*>(memory_ + PAGE_BYTES + rank * rank_bytes(buffer_bytes_));
}
char* SharedGroup::buffer(int64_t rank) const {
  return reinterpret_cast<char*>(&words(rank)) + PAGE_BYTES + (step_ & 1) * buffer_bytes_;
}

std::string SharedGroup::name_of(int64_t rank) const {
  const int32_t pid = words(rank).pid.load(std::memory_order_acquire);
  return pid == 0 ? text_of("rank ", rank) : text_of("rank ", rank, " (process ", pid, ")");
}

// ---- a broken group

void SharedGroup::abort(const std::string& reason) {
  Header& shared = header();
  uint32_t expected = WHOLE;
  if (!shared.state.compare_exchange_strong(expected, BEING_BROKEN)) return;
  size_t length = std::min<size_t>(reason.size(), MAX_REASON_BYTES);
  const auto continues_a_character = [&](size_t i) { return (static_cast<uint8_t>(reason[i]) & 0xc0) == 0x80; };
  while (length > 0 && length < reason.size() && continues_a_character(length)) --length;
  std::memcpy(shared.reason, reason.data(), length);
  shared.state.store(BROKEN, std::memory_order_release);
  for (int64_t rank = 0; rank < world_size_; ++rank) wake_all(words(rank).arrived);
}

std::string SharedGroup::broken() const {
  const Header& shared = header();
  if (shared.state.load(std::memory_order_acquire) == WHOLE) return {};
  // A rank that breaks the group writes the reason, unless it is killed meanwhile.
  for (int i = 0; i < 100 && shared.state.load(std::memory_order_acquire) != BROKEN; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return shared.state.load(std::memory_order_acquire) == BROKEN ? shared.reason : "a rank died as it broke the group";
}

void SharedGroup::throw_if_broken() const {
  if (header().state.load(std::memory_order_acquire) == WHOLE) [[likely]]
    return;
  throw std::runtime_error("the group is broken: " + broken());
}

// ---- a meeting

void SharedGroup::meet(SharedCall call, DType dtype, int64_t num_elements, int64_t width) {
  if (world_size_ == 1) return;
  const uint64_t my_call = call_of(call, dtype, num_elements), my_width = static_cast<uint64_t>(width);
  RankWords& mine = words(rank_);
  ++meeting_;
  mine.calls[meeting_ & 1].store(my_call, std::memory_order_relaxed);
  mine.widths[meeting_ & 1].store(my_width, std::memory_order_relaxed);
  const uint32_t before = mine.arrived.exchange(2 * meeting_, std::memory_order_acq_rel);
  if (before & SLEEPER) wake_all(mine.arrived);

  std::optional<Clock::time_point> start;
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    if (rank == rank_) continue;
    const Word& theirs = words(rank).arrived;
    while (!has_come(theirs.load(std::memory_order_acquire))) {
      const Clock::time_point now = Clock::now();
      if (!start) start = now;
      if (now - *start >= SPIN_TIME) {
        sleep_until_come(rank);
        break;
      }
      if (now - *start >= GREEDY_SPIN_TIME) std::this_thread::yield();
      for (int i = 0; i < SPINS_PER_LOOK_AT_THE_CLOCK && !has_come(theirs.load(std::memory_order_relaxed)); ++i) {
        pause_spinning();
      }
    }
    check_same_call(rank, my_call, my_width);
  }
}

// A rank that arrives sees SLEEPER and wakes the sleeper. If it arrives before SLEEPER is set, the word no longer has
// the value to sleep by.
void SharedGroup::sleep_until_come(int64_t rank) {
  Word& word = words(rank).arrived;
  Clock::time_point last = Clock::now();
  Clock::duration waited{};  // while this process ran: of a time for which it was stopped itself, it blames nobody
  Clock::duration next_check = CHECK_INTERVAL;
  std::optional<Clock::duration> interrupted;
  for (;;) {
    uint32_t value = word.load(std::memory_order_acquire);
    if (has_come(value)) return;
    throw_if_broken();
    if (!(value & SLEEPER) && !word.compare_exchange_strong(value, value | SLEEPER, std::memory_order_relaxed))
      continue;
    const bool has_signal = sleep_while(word, value | SLEEPER);
    const Clock::time_point now = Clock::now();
    waited += std::min<Clock::duration>(now - last, 2 * CHECK_INTERVAL);
    last = now;
    if (has_signal && !interrupted) interrupted = waited;
    if (waited >= next_check && !has_come(word.load(std::memory_order_acquire))) {
      check_missing_ranks(std::chrono::duration<double>(waited).count());
      if (interrupted && waited - *interrupted >= INTERRUPTED_TIME) {
        abort(name_of(rank_) + " was interrupted as it waited for " + name_of(rank));
      }
      next_check = waited + CHECK_INTERVAL;
    }
  }
}

void SharedGroup::check_missing_ranks(double waited_seconds) {
  const double timeout_seconds = header().timeout_seconds;
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    RankWords& theirs = words(rank);
    // Before `arrived`, as a rank leaves after its last arrival.
    const bool has_left = theirs.has_left.load(std::memory_order_acquire) != 0;
    if (has_come(theirs.arrived.load(std::memory_order_acquire))) continue;
    const int32_t pid = theirs.pid.load(std::memory_order_acquire);
    const std::optional<Process> process = running_process(pid);
    const bool lives = process && process->start_time == theirs.start_time.load(std::memory_order_relaxed);
    if (has_left) {
      abort(name_of(rank) + " has left the group");
    } else if (pid != 0 && !lives) {
      if (!has_come(theirs.arrived.load(std::memory_order_acquire))) abort(name_of(rank) + " died");
    } else if (waited_seconds >= timeout_seconds) {
      const char* what = pid == 0 ? " has not joined within " : " has not come within ";
      const char* why = pid != 0 && process->state == 'T' ? " seconds: it is stopped" : " seconds";
      abort(text_of(name_of(rank), what, timeout_seconds, why));
    }
  }
}

void SharedGroup::check_same_call(int64_t rank, uint64_t my_call, uint64_t my_width) {
  const uint64_t call = words(rank).calls[meeting_ & 1].load(std::memory_order_relaxed);
  const uint64_t width = words(rank).widths[meeting_ & 1].load(std::memory_order_relaxed);
  if (call == my_call && width == my_width) [[likely]]
    return;
  const std::string mine = call_text(my_call, my_width), theirs = call_text(call, width);
  const int64_t first = std::min(rank, rank_);  // all ranks word the error alike
  abort(text_of(name_of(first), " calls ", rank < rank_ ? theirs : mine, ", and ", name_of(std::max(rank, rank_)),
                " calls ", rank < rank_ ? mine : theirs));
  throw_if_broken();
}

}  // namespace pagedattn
