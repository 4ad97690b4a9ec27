// A call goes through the buffers in pieces. For a small piece of all_reduce_shared, each rank sums the whole piece,
// which takes one meeting. For a large piece, each rank sums its share of the piece and then copies the other shares
// from their ranks. That takes two meetings and moves fewer bytes.
#include "collectives/collectives.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu_graph.h"
#include "door.h"
#include "ops.h"
#include "parallel.h"

namespace pagedattn {
namespace {

constexpr int64_t LINE_BYTES = 64;
// A piece with so many bytes of all ranks together, or more, is summed by shares. Measured with 2 ranks (Zen 4).
constexpr int64_t MIN_SHARED_BYTES = 1 << 20;

// Makes a call in a group. Its errors name the op.
template <typename Call>
void in_group(const char* op, int64_t handle, Call&& call) {
  const std::shared_ptr<SharedGroup> group = SharedGroup::find(handle);
  if (group == nullptr) throw ValueError(std::string(op) + ": group: expected one that is open, got none");
  const std::lock_guard lock(group->calls);
  try {
    group->throw_if_broken();
    call(*group);
  } catch (const std::runtime_error& error) {
    throw RuntimeError(std::string(op) + ": " + error.what());
  }
}

void copy_elements(void* target, const void* source, int64_t num_elements, DType dtype) {
  const int64_t size = element_size(dtype);
  parallel_for_rows(num_elements, 1, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(target) + begin * size, static_cast<const char*>(source) + begin * size,
                (end - begin) * size);
  });
}

void sum_elements(const RankSumParams& params, int64_t num_elements) {
  const auto kernel = PAGEDATTN_CPU_KERNEL(sum_ranks);
  parallel_for_rows(num_elements, 1, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

// The sum of the elements at `input`, which begin at `offset` bytes of every other rank's buffer. It goes to `input`.
RankSumParams sum_of(const SharedGroup& group, DType dtype, char* input, int64_t offset) {
  RankSumParams params{};
  params.dtype = dtype;
  params.world_size = group.world_size();
  for (int64_t rank = 0; rank < group.world_size(); ++rank) {
    params.of_rank[rank] = rank == group.rank() ? input : group.buffer(rank) + offset;
  }
  params.out = input;
  return params;
}

struct Range {
  int64_t begin, end;
};

// The elements of a piece that a rank sums: whole lines, so that no two ranks write to the same line.
Range share_of(int64_t rank, const SharedGroup& group, int64_t num_elements, DType dtype) {
  const int64_t line = LINE_BYTES / element_size(dtype), lines = group.world_size() * line;
  const int64_t share = (num_elements + lines - 1) / lines * line;
  return {std::min(rank * share, num_elements), std::min((rank + 1) * share, num_elements)};
}

void run_all_reduce(const AllReduceParams& p) {
  in_group("all_reduce_shared", p.group, [&](SharedGroup& group) {
    if (group.world_size() == 1) return;
    const int64_t size = element_size(p.dtype);
    const int64_t most = group.buffer_bytes() / size;
    int64_t done = 0;
    do {  // once without elements, too: the other ranks wait
      const int64_t num_elements = std::min(most, p.num_elements - done);
      char* input = static_cast<char*>(p.input) + done * size;
      char* mine = group.buffer(group.rank());
      if (group.world_size() * num_elements * size < MIN_SHARED_BYTES) {
        copy_elements(mine, input, num_elements, p.dtype);
        group.meet(SharedCall::ALL_REDUCE, p.dtype, p.num_elements);
        sum_elements(sum_of(group, p.dtype, input, 0), num_elements);
      } else {
        const auto for_other_shares = [&](auto&& body) {
          for (int64_t rank = 0; rank < group.world_size(); ++rank) {
            if (rank == group.rank()) continue;
            const Range share = share_of(rank, group, num_elements, p.dtype);
            body(rank, share.begin * size, share.end - share.begin);
          }
        };
        for_other_shares([&](int64_t, int64_t offset, int64_t length) {
          copy_elements(mine + offset, input + offset, length, p.dtype);
        });
        group.meet(SharedCall::ALL_REDUCE, p.dtype, p.num_elements);
        const Range share = share_of(group.rank(), group, num_elements, p.dtype);
        RankSumParams sum = sum_of(group, p.dtype, input + share.begin * size, share.begin * size);
        sum.copy = mine + share.begin * size;
        sum_elements(sum, share.end - share.begin);
        group.meet(SharedCall::ALL_REDUCE, p.dtype, p.num_elements);
        for_other_shares([&](int64_t rank, int64_t offset, int64_t length) {
          copy_elements(input + offset, group.buffer(rank) + offset, length, p.dtype);
        });
      }
      group.end_step();
      done += most;
    } while (done < p.num_elements);
  });
}

void run_all_gather(const AllGatherParams& p) {
  in_group("all_gather_shared", p.group, [&](SharedGroup& group) {
    const int64_t size = element_size(p.dtype), world_size = group.world_size();
    const int64_t num_elements = p.num_rows * p.width, most = group.buffer_bytes() / size;
    // Puts elements [begin, begin + length) of a rank's input, from `source`, where they belong in `out`.
    const auto put = [&](int64_t rank, const char* source, int64_t begin, int64_t length) {
      for (const int64_t end = begin + length; begin < end;) {
        const int64_t row = begin / p.width, column = begin % p.width;
        const int64_t step = std::min(p.width - column, end - begin);
        char* target = static_cast<char*>(p.out) + ((row * world_size + rank) * p.width + column) * size;
        std::memcpy(target, source, step * size);
        source += step * size;
        begin += step;
      }
    };
    int64_t done = 0;
    do {  // once without elements, too: the other ranks wait
      const int64_t length = std::min(most, num_elements - done);
      const char* input = static_cast<const char*>(p.input) + done * size;
      if (world_size > 1) copy_elements(group.buffer(group.rank()), input, length, p.dtype);
      group.meet(SharedCall::ALL_GATHER, p.dtype, num_elements, p.width);
      for (int64_t rank = 0; rank < world_size; ++rank) {
        put(rank, rank == group.rank() ? input : group.buffer(rank), done, length);
      }
      group.end_step();
      done += most;
    } while (done < num_elements);
  });
}

DType check_input(const Door& door, const Tensor& input) {
  const DType dtype = door.float_dtype("input", input);
  door.check(input.dim() > 0, "input", "expected at least 1 dimension, got 0");
  door.contiguous("input", input);
  return dtype;
}

// Checks that the group is open, so that no closed group is captured.
std::shared_ptr<SharedGroup> check_group(const Door& door, int64_t handle) {
  std::shared_ptr<SharedGroup> group = SharedGroup::find(handle);
  door.check(group != nullptr, "group", "expected one that is open, got none");
  return group;
}

}  // namespace

void all_reduce_shared(Tensor& input, int64_t group) {
  const Door door("all_reduce_shared", input);
  AllReduceParams params{};
  params.dtype = check_input(door, input);
  check_group(door, group);
  params.group = group;
  params.num_elements = input.numel();
  params.input = input.mutable_data_ptr();
  CpuGraph::run_or_capture(AnyValues{}, run_all_reduce, params);
}

void all_gather_shared(Tensor& out, const Tensor& input, int64_t group) {
  const Door door("all_gather_shared", input);
  AllGatherParams params{};
  params.dtype = check_input(door, input);
  const std::shared_ptr<SharedGroup> opened = check_group(door, group);
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  params.width = sizes.back();
  params.num_rows = params.width == 0 ? 0 : input.numel() / params.width;
  sizes.back() *= opened->world_size();
  door.dtype("out", out, dtype_of(input));
  door.shape("out", out, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
  door.contiguous("out", out);
  door.other_memory("out", out, "input", input);
  params.group = group;
  params.input = input.const_data_ptr();
  params.out = out.mutable_data_ptr();
  CpuGraph::run_or_capture(AnyValues{}, run_all_gather, params);
}

}  // namespace pagedattn
