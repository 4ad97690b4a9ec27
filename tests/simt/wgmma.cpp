// wgmma of the simt device. A warp computes its 16 of the 64 rows when its last lane is there, and the results are kept
// back until a wait. As long as a multiplication is under way, its accumulators are poisoned, and what it reads must
// not change: shared memory and registers are compared with what they were. The four warps do not wait for each other.
// Call by call it is checked that each warp comes to the same calls.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "ptx.cuh"

namespace pagedattn::simt {
namespace {

constexpr unsigned char POISON = 0xff;
constexpr unsigned MAX_WARPS = 32, WARPGROUP_WARPS = 4;
constexpr unsigned ROWS = 16, STEPS = 16, MAX_COLUMNS = 128;  // rows of a, of a and b, columns of b
constexpr unsigned PIECE = 8;                                 // rows and columns that are adjacent in shared memory
using MatrixB = uint16_t[MAX_COLUMNS][STEPS];

struct Multiplication {
  unsigned group;
  bool is_last;  // no later multiplication under way has its accumulators
  uint64_t descriptor;
  bool is_b_n_major;
  unsigned num_columns;
  MatrixB b;
  struct Lane {
    float* d;
    float result[MAX_COLUMNS / 2];
    const uint32_t* a;
    uint32_t a_before[4];
  } lanes[WARP_SIZE];

  size_t result_bytes() const { return num_columns / 2 * sizeof(float); }
};

// Registers of a lane as they were at a fence.
struct Fenced {
  const unsigned char* begin;
  std::vector<unsigned char> content;
};

struct Call {
  Site site;
  uint64_t descriptor;
};

struct Warp {
  std::deque<Multiplication> under_way;  // oldest first
  unsigned open_group = 0;               // its number; older ones are closed
  std::vector<Fenced> fenced[WARP_SIZE];
  size_t num_calls = 0;
};

Warp warps[MAX_WARPS];
std::vector<Call> calls[MAX_WARPS / WARPGROUP_WARPS];  // by warpgroup, of the warp that has come farthest

bool is_poisoned(const void* begin, size_t bytes) {
  const auto* all = static_cast<const unsigned char*>(begin);
  return std::all_of(all, all + bytes, [](unsigned char byte) { return byte == POISON; });
}

// ---- what a warpgroup has in common

void check_call(const Call& call) {
  if (cluster_size() > 1) fail("wgmma: not emulated in clusters", call.site);
  const unsigned warp = warp_idx();
  Warp& mine = warps[warp];
  std::vector<Call>& common = calls[warp / WARPGROUP_WARPS];
  if ((warp / WARPGROUP_WARPS + 1) * WARPGROUP_WARPS * WARP_SIZE > blockDim.x * blockDim.y * blockDim.z) {
    fail("wgmma: the warpgroup has less than 128 threads", call.site);
  }
  if (mine.num_calls == common.size()) common.push_back(call);
  const Call& same = common[mine.num_calls++];
  if (same.descriptor != call.descriptor || same.site.line() != call.site.line()) {
    fail("wgmma: another warp of the warpgroup has come to another call, or with another descriptor", call.site);
  }
}

// ---- operands

// "Matrix Descriptor Format", and the layouts without swizzling. A piece has a line of 16 bytes for each column if k is
// the major dimension, and for each k if n is. read(address): where a line is.
template <typename Read>
void read_b(uint64_t descriptor, bool is_n_major, unsigned num_columns, MatrixB& b, Site site, const Read& read) {
  const auto field = [&](int begin) { return static_cast<uint32_t>(descriptor >> begin & 0x3fff) << 4; };
  const uint32_t start = field(0), leading_bytes = field(16), stride_bytes = field(32);
  if (descriptor >> 62 != 0 || (descriptor >> 49 & 7) != 0) {
    fail("wgmma: only matrices that are not swizzled, without a base offset, are emulated", site);
  }
  for (unsigned first_column = 0; first_column < num_columns; first_column += PIECE) {
    for (unsigned first_k = 0; first_k < STEPS; first_k += PIECE) {
      const uint32_t piece = start + first_k / PIECE * leading_bytes + first_column / PIECE * stride_bytes;
      for (unsigned line = 0; line < PIECE; ++line) {
        uint16_t elements[PIECE];
        std::memcpy(elements, read(piece + line * sizeof(elements)), sizeof(elements));
        for (unsigned i = 0; i < PIECE; ++i) {
          b[first_column + (is_n_major ? i : line)][first_k + (is_n_major ? line : i)] = elements[i];
        }
      }
    }
  }
}

void check_fenced(const Warp& warp, unsigned lane, const void* registers, size_t bytes, Site site) {
  const auto* begin = static_cast<const unsigned char*>(registers);
  for (const Fenced& fenced : warp.fenced[lane]) {
    if (begin < fenced.begin || begin + bytes > fenced.begin + fenced.content.size()) continue;
    if (!std::memcmp(begin, fenced.content.data() + (begin - fenced.begin), bytes)) return;
  }
  fail("wgmma: lane " + std::to_string(lane) + " has used registers of a or d since their last wgmma_fence", site);
}

void forget_fence(std::vector<Fenced>& fenced, const void* begin) {
  std::erase_if(fenced, [&](const Fenced& one) { return one.begin == begin; });
}

void fence_lane(std::vector<Fenced>& fenced, const void* registers, size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(registers);
  forget_fence(fenced, begin);
  fenced.push_back({begin, {begin, begin + bytes}});
}

// ---- arithmetic, on copies; sanitizers would make it ten times as slow

using ptx::Floats;
using ptx::Words;

template <typename T>
PAGEDATTN_SIMT_UNCHECKED void multiply(WgmmaLane* const* lanes, Multiplication& m) {
  alignas(16) uint32_t a_bits[ROWS][STEPS], b_bits[STEPS][MAX_COLUMNS];
  alignas(16) float a[ROWS][STEPS], b[STEPS][MAX_COLUMNS], d[ROWS][MAX_COLUMNS];
  const unsigned num_tiles = m.num_columns / 8;
  for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
    const unsigned group = lane / 4, pair = lane % 4 * 2;
    for (unsigned i = 0; i < 8; ++i) {
      a_bits[group + i / 2 % 2 * 8][pair + i % 2 + i / 4 * 8] = lanes[lane]->a[i / 2] >> 16 * (i % 2) & 0xffff;
    }
    for (unsigned i = 0; i < 4 * num_tiles; ++i) {
      d[group + i / 2 % 2 * 8][i / 4 * 8 + pair + i % 2] = m.lanes[lane].result[i];
    }
  }
  for (unsigned k = 0; k < STEPS; ++k) {
    for (unsigned n = 0; n < m.num_columns; ++n) b_bits[k][n] = m.b[n][k];
    for (unsigned n = 0; n < m.num_columns; n += 4) {
      *reinterpret_cast<Floats*>(b[k] + n) = ptx::widen<T>(*reinterpret_cast<const Words*>(b_bits[k] + n));
    }
  }
  for (unsigned row = 0; row < ROWS; ++row) {
    for (unsigned k = 0; k < STEPS; k += 4) {
      *reinterpret_cast<Floats*>(a[row] + k) = ptx::widen<T>(*reinterpret_cast<const Words*>(a_bits[row] + k));
    }
    for (unsigned n = 0; n < m.num_columns; n += 4) {
      Floats sum = *reinterpret_cast<const Floats*>(d[row] + n);
      for (unsigned k = 0; k < STEPS; ++k) sum += a[row][k] * *reinterpret_cast<const Floats*>(b[k] + n);
      *reinterpret_cast<Floats*>(d[row] + n) = sum;
    }
  }
  for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
    const unsigned group = lane / 4, pair = lane % 4 * 2;
    for (unsigned i = 0; i < 4 * num_tiles; ++i) {
      m.lanes[lane].result[i] = d[group + i / 2 % 2 * 8][i / 4 * 8 + pair + i % 2];
    }
  }
}

// ---- the end

void check_unchanged(const Multiplication& m, Site site) {
  MatrixB b;
  read_b(m.descriptor, m.is_b_n_major, m.num_columns, b, site, shared_at);  // as it is now, whoever has written there
  if (std::memcmp(b, m.b, m.num_columns * sizeof(b[0]))) {
    fail("wgmma: shared memory was written while a multiplication that reads it was under way", site);
  }
  for (const auto& lane : m.lanes) {
    if (std::memcmp(lane.a, lane.a_before, sizeof(lane.a_before)) ||
        (m.is_last && !is_poisoned(lane.d, m.result_bytes()))) {
      fail("wgmma: registers were written while a multiplication that uses them was under way", site);
    }
  }
}

}  // namespace

// ---- from a kernel's warp

void wgmma_fence_warp(WgmmaRegisters* const* lanes, unsigned, Site) {
  Warp& warp = warps[warp_idx()];
  for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
    fence_lane(warp.fenced[lane], lanes[lane]->d, lanes[lane]->d_bytes);
    fence_lane(warp.fenced[lane], lanes[lane]->a, lanes[lane]->a_bytes);
  }
}

void wgmma_warp(WgmmaLane* const* lanes, unsigned, Site site) {
  const WgmmaLane& first = *lanes[0];
  Warp& warp = warps[warp_idx()];
  for (unsigned lane = 1; lane < WARP_SIZE; ++lane) {
    if (lanes[lane]->b != first.b || lanes[lane]->accumulate != first.accumulate) {
      fail("wgmma: lanes of a warp differ in the descriptor, or in whether they accumulate", site);
    }
  }
  check_call({site, first.b});
  ++uses.wgmma;

  const auto newest = std::find_if(warp.under_way.rbegin(), warp.under_way.rend(), [&](const Multiplication& other) {
    return other.is_last && other.lanes[0].d == first.d;
  });
  Multiplication* const before = newest == warp.under_way.rend() ? nullptr : &*newest;
  Multiplication& m = warp.under_way.emplace_back();  // a deque: `before` stays where it is
  m.group = warp.open_group;
  m.is_last = true;
  m.descriptor = first.b;
  m.is_b_n_major = first.is_b_n_major;
  m.num_columns = first.num_tiles * 8;
  read_b(m.descriptor, m.is_b_n_major, m.num_columns, m.b, site,
         [&](uint32_t address) { return read_as_async_proxy("wgmma", address, PIECE * sizeof(uint16_t), site); });
  for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
    Multiplication::Lane& mine = m.lanes[lane];
    mine.d = lanes[lane]->d;
    mine.a = lanes[lane]->a;
    check_fenced(warp, lane, mine.a, sizeof(mine.a_before), site);
    std::memcpy(mine.a_before, mine.a, sizeof(mine.a_before));
    if (before == nullptr) {
      check_fenced(warp, lane, mine.d, m.result_bytes(), site);
      std::memcpy(mine.result, mine.d, m.result_bytes());
      std::memset(mine.d, POISON, m.result_bytes());
    } else if (before->lanes[lane].d != mine.d || before->num_columns != m.num_columns) {
      fail("wgmma: accumulators of another shape are under way in the same registers", site);
    } else {
      std::memcpy(mine.result, before->lanes[lane].result, m.result_bytes());
    }
    if (!first.accumulate) std::memset(mine.result, 0, m.result_bytes());
  }
  if (before != nullptr) before->is_last = false;
  first.is_float16 ? multiply<float16>(lanes, m) : multiply<bfloat16>(lanes, m);
}

void wgmma_commit_warp(WgmmaRegisters* const*, unsigned, Site) { ++warps[warp_idx()].open_group; }

void wgmma_wait_warp(WgmmaRegisters* const* lanes, unsigned, Site site) {
  Warp& warp = warps[warp_idx()];
  while (!warp.under_way.empty() && warp.under_way.front().group + lanes[0]->num_pending < warp.open_group) {
    const Multiplication& m = warp.under_way.front();
    check_unchanged(m, site);
    for (unsigned lane = 0; m.is_last && lane < WARP_SIZE; ++lane) {
      std::memcpy(m.lanes[lane].d, m.lanes[lane].result, m.result_bytes());
      forget_fence(warp.fenced[lane], m.lanes[lane].d);
    }
    warp.under_way.pop_front();
  }
  for (const Multiplication& m : warp.under_way) {
    if (m.lanes[0].d == lanes[0]->d) fail("wgmma_wait: these accumulators are still under way", site);
  }
}

// ---- before and after the threads of a block

void begin_wgmma() {
  for (Warp& warp : warps) {
    if (warp.num_calls > 0 || !warp.fenced[0].empty()) warp = {};
  }
  for (auto& common : calls) common.clear();
}

std::string unfinished_wgmma() {
  for (unsigned warp = 0; warp < MAX_WARPS; ++warp) {
    if (!warps[warp].under_way.empty()) return "the block has ended, and nobody has waited for its last wgmma";
    if (warps[warp].num_calls < calls[warp / WARPGROUP_WARPS].size()) {
      return "the block has ended, and warp " + std::to_string(warp) + " has left out a wgmma of its warpgroup";
    }
  }
  return {};
}

}  // namespace pagedattn::simt
