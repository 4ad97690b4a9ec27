// The emulated twins of csrc/ptx.cuh, written from the PTX ISA document. What a warp does together is computed once, by
// the last lane to arrive. Layouts of fragments are formulas of lane and register here, as in the document.
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt.h"
#include "types.h"

namespace pagedattn::ptx {

// ---- numbers

inline float to_float(float16 x) {
  if ((x.bits & 0x7fffu) > 0x7c00u) return std::bit_cast<float>(0x7fffffffu);  // NaN, as in arithmetic
  // Exponent and mantissa moved into place; 2^112 corrects the bias, subnormals included.
  const float magnitude = std::bit_cast<float>((x.bits & 0x7fffu) << 13) * 0x1p112f;
  const bool finite = (x.bits & 0x7c00u) != 0x7c00u;
  const uint32_t bits = finite ? std::bit_cast<uint32_t>(magnitude) : 0x7f800000u;
  return std::bit_cast<float>(bits | (x.bits & 0x8000u) << 16);
}

inline float16 to_float16(float x) {
  if (x != x) return {0x7fff};
  return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
}

inline bfloat16 to_bfloat16(float x) {
  if (x != x) return {0x7fff};
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

template <typename T>
inline uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, float16>) {
    return to_float16(low).bits | static_cast<uint32_t>(to_float16(high).bits) << 16;
  } else {
    return to_bfloat16(low).bits | static_cast<uint32_t>(to_bfloat16(high).bits) << 16;
  }
}

// `result` with the error that the document allows: `num_units` in the last place, up or down, as the bits of the
// argument fall.
inline float with_error(float result, int num_units, float argument) {
  if (!std::isnormal(result)) return result;
  const bool is_above = std::bit_cast<uint32_t>(argument) * 0x9e3779b9u >> 31;
  return std::bit_cast<float>(std::bit_cast<int32_t>(result) + (is_above ? num_units : -num_units));
}

// ".ftz": numbers below the normal range are 0.
inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

inline float exp2_approx(float x) { return flushed(x) == 0 ? 1.0f : flushed(with_error(exp2f(x), 2, x)); }

inline float reciprocal_approx(float x) { return flushed(with_error(1.0f / flushed(x), 1, x)); }

// "satfinite": a number beyond the largest becomes the largest. NaN becomes 0x7f, whatever its sign.
template <typename T>
inline uint32_t to_float8(float x) {
  constexpr bool IS_E4M3 = std::is_same_v<T, float8_e4m3>;
  constexpr int MANTISSA_BITS = IS_E4M3 ? 3 : 2, BIAS = IS_E4M3 ? 7 : 15;
  if (x != x) return 0x7f;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fmin(std::fabs(x), IS_E4M3 ? 448.0f : 57344.0f);
  // In steps of the last bit. Below the normal range, the steps stay the same.
  const int exponent = magnitude == 0 ? 1 - BIAS : std::max(std::ilogb(magnitude), 1 - BIAS);
  const float num_steps = std::nearbyint(std::ldexp(magnitude, MANTISSA_BITS - exponent));
  const uint32_t exponent_bits = static_cast<uint32_t>(exponent + BIAS - 1) << MANTISSA_BITS;
  return sign | (exponent_bits + static_cast<uint32_t>(num_steps));
}

template <typename T>
inline uint32_t to_float8x2(float low, float high) {
  return to_float8<T>(low) | to_float8<T>(high) << 8;
}

inline uint32_t e4m3x2_to_f16x2(uint32_t x) {
  const auto convert = [](uint32_t e4m3) -> uint32_t {
    if ((e4m3 & 0x7f) == 0x7f) return 0x7fff;
    // Four exponent bits of bias 7 read as five of bias 15, corrected by 2^8.
    const float magnitude = to_float(float16{static_cast<uint16_t>((e4m3 & 0x7f) << 7)}) * 256.0f;
    return to_float16(magnitude).bits | (e4m3 & 0x80) << 8;
  };
  return convert(x & 0xff) | convert(x >> 8 & 0xff) << 16;
}

// ---- kernels that follow each other

inline void griddepcontrol_launch_dependents() {}

inline void griddepcontrol_wait(simt::Site site = simt::Site::current()) { simt::wait_for_previous_kernel(site); }

// ---- matrices

struct LdmatrixLane {
  uint32_t (&matrices)[4];
  const void* row;
};

// Row r of matrix i is at the address of lane 8 * i + r. Lane l gets element 2 * (l % 4) of row l / 4 and the element
// after it.
inline void ldmatrix_warp(LdmatrixLane* const* lanes, unsigned, simt::Site site) {
  for (unsigned lane = 0; lane < simt::WARP_SIZE; ++lane) {
    simt::check_shared("ldmatrix", lanes[lane]->row, 16, site);
  }
  for (unsigned lane = 0; lane < simt::WARP_SIZE; ++lane) {
    for (unsigned i = 0; i < 4; ++i) {
      const auto* row = static_cast<const unsigned char*>(lanes[8 * i + lane / 4]->row);
      std::memcpy(&lanes[lane]->matrices[i], row + 4 * (lane % 4), 4);
    }
  }
}

inline void ldmatrix_x4(uint32_t (&matrices)[4], const void* row, simt::Site site = simt::Site::current()) {
  LdmatrixLane mine{matrices, row};
  simt::warp_operation<ldmatrix_warp>("ldmatrix", ~0u, mine, site);
}

// ".trans": lane l gets element l / 4 of row 2 * (l % 4), and of the row after it.
inline void ldmatrix_trans_warp(LdmatrixLane* const* lanes, unsigned, simt::Site site) {
  for (unsigned lane = 0; lane < simt::WARP_SIZE; ++lane) {
    simt::check_shared("ldmatrix", lanes[lane]->row, 16, site);
  }
  for (unsigned lane = 0; lane < simt::WARP_SIZE; ++lane) {
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned first_row = 8 * i + 2 * (lane % 4);
      uint16_t pair[2];
      for (unsigned r = 0; r < 2; ++r) {
        const auto* row = static_cast<const unsigned char*>(lanes[first_row + r]->row);
        std::memcpy(&pair[r], row + 2 * (lane / 4), 2);
      }
      lanes[lane]->matrices[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
  }
}

inline void ldmatrix_x4_trans(uint32_t (&matrices)[4], const void* row, simt::Site site = simt::Site::current()) {
  LdmatrixLane mine{matrices, row};
  simt::warp_operation<ldmatrix_trans_warp>("ldmatrix", ~0u, mine, site);
}

struct MmaLane {
  float (&d)[4];
  const uint32_t (&a)[4];
  uint32_t b[2];
};

// The slow part of a simulation. It reads only its own arrays and the operands of lanes, and sanitizers would make it
// ten times as slow.
#define PAGEDATTN_SIMT_UNCHECKED __attribute__((no_sanitize("address,undefined")))
using Floats = float __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));

// The numbers whose 16 bits are in each word's low half (as to_float).
template <typename T>
PAGEDATTN_SIMT_UNCHECKED inline __attribute__((always_inline)) Floats widen(Words bits) {
  if constexpr (std::is_same_v<T, float16>) {
    const Floats magnitude = reinterpret_cast<Floats>((bits & 0x7fff) << 13) * 0x1p112f;
    const Words not_finite = reinterpret_cast<Words>((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(magnitude) | not_finite | (bits & 0x8000) << 16);
  } else {
    return reinterpret_cast<Floats>(bits << 16);
  }
}

// With group = lane / 4 and member = lane % 4 ("Matrix Fragments for mma.m16n8k16"), element i of a lane is
//   of A (i < 8)  row: group for i in {0, 1, 4, 5}, else group + 8   column: 2 * member + i % 2, + 8 for i >= 4
//   of B (i < 4)  row: 2 * member + i % 2, + 8 for i >= 2            column: group
//   of C, D       row: group for i < 2, else group + 8               column: 2 * member + i % 2
template <typename T>
PAGEDATTN_SIMT_UNCHECKED void mma_warp(MmaLane* const* lanes, unsigned, simt::Site) {
  union {
    uint32_t bits[16][16];
    Words words[16][4];
    Floats floats[16][4];
    float elements[16][16];
  } a;
  union {
    uint32_t bits[16][8];
    Words words[16][2];
    Floats floats[16][2];
  } b;
  union {
    float elements[16][8];
    Floats floats[16][2];
  } d;
  for (int lane = 0; lane < 32; ++lane) {
    const MmaLane& of_lane = *lanes[lane];
    const int group = lane / 4, member = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = group + (i / 2 % 2 == 0 ? 0 : 8), column = 2 * member + i % 2 + (i < 4 ? 0 : 8);
      a.bits[row][column] = of_lane.a[i / 2] >> 16 * (i % 2) & 0xffff;
    }
    for (int i = 0; i < 4; ++i) {
      b.bits[2 * member + i % 2 + (i < 2 ? 0 : 8)][group] = of_lane.b[i / 2] >> 16 * (i % 2) & 0xffff;
    }
    for (int i = 0; i < 4; ++i) d.elements[group + (i < 2 ? 0 : 8)][2 * member + i % 2] = of_lane.d[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int i = 0; i < 4; ++i) a.floats[row][i] = widen<T>(a.words[row][i]);
    for (int i = 0; i < 2; ++i) b.floats[row][i] = widen<T>(b.words[row][i]);
  }
  for (int m = 0; m < 16; ++m) {
    Floats left = d.floats[m][0], right = d.floats[m][1];
    for (int k = 0; k < 16; ++k) {
      left += a.elements[m][k] * b.floats[k][0];
      right += a.elements[m][k] * b.floats[k][1];
    }
    d.floats[m][0] = left;
    d.floats[m][1] = right;
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) lanes[lane]->d[i] = d.elements[lane / 4 + (i < 2 ? 0 : 8)][2 * (lane % 4) + i % 2];
  }
}

template <typename T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         simt::Site site = simt::Site::current()) {
  MmaLane mine{d, a, {b0, b1}};
  simt::warp_operation<mma_warp<T>>("mma_m16n8k16", ~0u, mine, site);
}

// ---- wgmma

inline uint32_t shared_address(const void* pointer) { return simt::shared_address(pointer); }

template <int NUM_TILES, int NUM_STEPS>
simt::WgmmaRegisters wgmma_registers(const float (&d)[NUM_TILES][4], const uint32_t (&a)[NUM_STEPS][4]) {
  return {d, a, sizeof(d), sizeof(a), 0};
}

template <int NUM_TILES, int NUM_STEPS>
void wgmma_fence(float (&d)[NUM_TILES][4], uint32_t (&a)[NUM_STEPS][4], simt::Site site = simt::Site::current()) {
  auto mine = wgmma_registers(d, a);
  simt::warp_operation<simt::wgmma_fence_warp>("wgmma_fence", ~0u, mine, site);
}

template <typename T, Major MAJOR_B, int NUM_TILES>
void wgmma_m64k16(float (&d)[NUM_TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                  simt::Site site = simt::Site::current()) {
  static_assert(NUM_TILES == 8 || NUM_TILES == 16);
  simt::WgmmaLane mine{d[0], NUM_TILES, a, b, MAJOR_B == Major::N, accumulate, std::is_same_v<T, float16>};
  simt::warp_operation<simt::wgmma_warp>("wgmma_m64k16", ~0u, mine, site);
}

inline void wgmma_commit(simt::Site site = simt::Site::current()) {
  simt::WgmmaRegisters none{};
  simt::warp_operation<simt::wgmma_commit_warp>("wgmma_commit", ~0u, none, site);
}

template <int PENDING, int NUM_TILES, int NUM_STEPS>
void wgmma_wait(float (&d)[NUM_TILES][4], uint32_t (&a)[NUM_STEPS][4], simt::Site site = simt::Site::current()) {
  auto mine = wgmma_registers(d, a);
  mine.num_pending = PENDING;
  simt::warp_operation<simt::wgmma_wait_warp>("wgmma_wait", ~0u, mine, site);
}

// ---- barriers

inline void barrier_sync(int id, int num_threads, simt::Site site = simt::Site::current()) {
  simt::named_barrier(id, num_threads, site);
}

// ---- clusters

inline void cluster_sync(simt::Site site = simt::Site::current()) { simt::cluster_sync(true, site); }

inline void cluster_sync_relaxed(simt::Site site = simt::Site::current()) { simt::cluster_sync(false, site); }

inline uint32_t map_shared(const void* pointer, uint32_t rank, simt::Site site = simt::Site::current()) {
  return simt::map_shared(pointer, rank, site);
}

inline void load_cluster(uint32_t (&words)[2], uint32_t address, simt::Site site = simt::Site::current()) {
  simt::load_cluster(words, address, sizeof(words), site);
}
inline void load_cluster(uint32_t (&words)[4], uint32_t address, simt::Site site = simt::Site::current()) {
  simt::load_cluster(words, address, sizeof(words), site);
}

// ---- asynchronous copies

inline void cp_async_16(void* target, const void* source, bool valid, simt::Site site = simt::Site::current()) {
  simt::start_copy("cp_async_16", target, source, 16, valid, site);
}

inline void cp_async_8(void* target, const void* source, bool valid, simt::Site site = simt::Site::current()) {
  simt::start_copy("cp_async_8", target, source, 8, valid, site);
}

inline void cp_async_commit() { simt::close_copy_group(); }

template <int PENDING>
inline void cp_async_wait() {
  simt::wait_for_copy_groups(PENDING);
}

// ---- bulk copies

inline bool is_sm90() { return simt::architecture() >= 90; }

inline void mbarrier_init(uint64_t* barrier, uint32_t num_arrivals, simt::Site site = simt::Site::current()) {
  simt::mbarrier_init(barrier, num_arrivals, site);
}

inline void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes, simt::Site site = simt::Site::current()) {
  simt::mbarrier_arrive_expect(barrier, bytes, site);
}

inline void mbarrier_wait(uint64_t* barrier, uint32_t parity, simt::Site site = simt::Site::current()) {
  simt::mbarrier_wait(barrier, parity != 0, site);
}

struct ElectLane {
  bool is_elected;
};

// The document leaves open which lane is elected.
inline void elect_warp(ElectLane* const* lanes, unsigned, simt::Site) {
  for (unsigned lane = 0; lane < simt::WARP_SIZE; ++lane) lanes[lane]->is_elected = lane == 5;
}

inline bool elect(simt::Site site = simt::Site::current()) {
  ElectLane mine{};
  simt::warp_operation<elect_warp>("elect", ~0u, mine, site);
  return mine.is_elected;
}

inline void bulk_copy(void* target, const void* source, uint32_t bytes, uint64_t* barrier,
                      simt::Site site = simt::Site::current()) {
  simt::start_bulk_copy(target, source, bytes, barrier, site);
}

inline void fence_proxy_async() { simt::fence_proxy_async(); }

}  // namespace pagedattn::ptx
