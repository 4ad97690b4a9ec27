// The PTX instructions that kernels use, with a function for each, and nothing else ("PTX ISA", NVIDIA).
// tests/simt/ptx.h holds the emulated twin of each function; both are called the same way.
#pragma once

#include <cstdint>
#include <type_traits>

#include "types.h"

namespace pagedattn::ptx {

// Which elements of a matrix b of wgmma are adjacent in shared memory: those of a column (along k), or those of a row
// (along n). The numbers are those of the instruction.
enum class Major { K = 0, N = 1 };

}  // namespace pagedattn::ptx

#if defined(PAGEDATTN_SIMT)
#include "simt/ptx.h"
#else

namespace pagedattn::ptx {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- matrices, spread over the lanes of a warp. All 32 lanes take part

// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8 * i + r holds the address of row r of matrix
// i: 16 bytes, aligned to 16. matrices[i] becomes element (lane / 4, 2 * (lane % 4)) of matrix i and the element after
// it.
__device__ inline void ldmatrix_x4(uint32_t (&matrices)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(row))
               : "memory");
}

// As ldmatrix_x4, with each matrix transposed: matrices[i] becomes element (2 * (lane % 4), lane / 4) of matrix i and
// the element below it.
__device__ inline void ldmatrix_x4_trans(uint32_t (&matrices)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(row))
               : "memory");
}

// d += a * b: a is 16 x 16 (row-major), b 16 x 8 (column-major), both of T (float16 or bfloat16); d is 16 x 8 of float.
// With group = lane / 4 and pair = 2 * (lane % 4), a lane holds the following. Two elements of T share a register, the
// first in its low half:
//   a[0] (group, pair...)  a[1] (group + 8, pair...)  a[2] (group, pair + 8...)  a[3] (group + 8, pair + 8...)
//   b[0] (pair..., group)  b[1] (pair + 8..., group)
//   d[0], d[1] (group, pair...)  d[2], d[3] (group + 8, pair...)
template <typename T>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void mma_m16n8k16<float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma_m16n8k16<bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- matrices, spread over a warpgroup: four warps, of which the first one's index is a multiple of four. sm_90a

// Makes the compiler compute registers before this point, and use them only after it.
template <int N>
__device__ inline void hold(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]));
}
template <int N>
__device__ inline void hold(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3]));
}

// Called before the wgmma that take these registers, if anything else has used the registers since the last wgmma.
template <int NUM_TILES, int NUM_STEPS>
__device__ inline void wgmma_fence(float (&d)[NUM_TILES][4], uint32_t (&a)[NUM_STEPS][4]) {
  hold(d);
  hold(a);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

#define PAGEDATTN_TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PAGEDATTN_TILES(i) PAGEDATTN_TILE(i), PAGEDATTN_TILE(i + 1), PAGEDATTN_TILE(i + 2), PAGEDATTN_TILE(i + 3)
#define PAGEDATTN_WGMMA_64(TYPE)                                                                                   \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE   \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                                          \
               "{%32, %33, %34, %35}, %36, p, 1, 1, %38;}"                                                         \
               : PAGEDATTN_TILES(0), PAGEDATTN_TILES(4)                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),            \
                 "n"(static_cast<int>(MAJOR_B)))
#define PAGEDATTN_WGMMA_128(TYPE)                                                                                  \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE  \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "   \
               "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "   \
               "%59, %60, %61, %62, %63}, "                                                                        \
               "{%64, %65, %66, %67}, %68, p, 1, 1, %70;}"                                                         \
               : PAGEDATTN_TILES(0), PAGEDATTN_TILES(4), PAGEDATTN_TILES(8), PAGEDATTN_TILES(12)                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),            \
                 "n"(static_cast<int>(MAJOR_B)))

// d = a * b, plus d if `accumulate`. a is 64 x 16, and each warp has 16 of its rows, as in mma_m16n8k16. b is 16 x 64
// or 16 x 128, in shared memory (wgmma_descriptor). Both are of T. d[i] is columns [8 * i, 8 * i + 8), as in
// mma_m16n8k16. All 128 threads take part, with the same b. Asynchronous: d, a and b are in use until wgmma_wait, but
// several calls in a row may accumulate in the same d.
template <typename T, Major MAJOR_B, int NUM_TILES>
__device__ inline void wgmma_m64k16(float (&d)[NUM_TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(NUM_TILES == 8 || NUM_TILES == 16);
  constexpr bool IS_FLOAT16 = std::is_same_v<T, float16>;
  if constexpr (NUM_TILES == 8 && IS_FLOAT16) {
    PAGEDATTN_WGMMA_64("f16");
  } else if constexpr (NUM_TILES == 8) {
    PAGEDATTN_WGMMA_64("bf16");
  } else if constexpr (IS_FLOAT16) {
    PAGEDATTN_WGMMA_128("f16");
  } else {
    PAGEDATTN_WGMMA_128("bf16");
  }
}

#undef PAGEDATTN_TILE
#undef PAGEDATTN_TILES
#undef PAGEDATTN_WGMMA_64
#undef PAGEDATTN_WGMMA_128

// Closes a group: all wgmma since the last group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are under way. d and a are registers of the groups before these.
template <int PENDING, int NUM_TILES, int NUM_STEPS>
__device__ inline void wgmma_wait(float (&d)[NUM_TILES][4], uint32_t (&a)[NUM_STEPS][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  hold(d);
  hold(a);
}

// ---- barriers

// Waits until `num_threads` threads of the block, in whole warps, are here with the same `id`. `id` is 1 to 15, as 0 is
// __syncthreads.
__device__ inline void barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- asynchronous copies to shared memory

// Copies 16 bytes, with both addresses aligned to 16. If not `valid`, writes zeros, and `source` is not read. Other
// threads see the bytes after this thread's cp_async_wait and a barrier.
__device__ inline void cp_async_16(void* target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}

// As cp_async_16, with 8 bytes.
__device__ inline void cp_async_8(void* target, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(target)), "l"(source),
               "r"(valid ? 8 : 0)
               : "memory");
}

// Closes a group: all copies since the last group, which may be none.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are under way.
template <int PENDING>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- kernels that follow each other in a stream. Before sm_90, each begins when the one before it has ended

// A next kernel that was launched with launch_dependent may begin once all blocks of this kernel have called this, or
// ended.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before this one has ended, and its writes can be read.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- bulk copies to shared memory, and the barriers that count their bytes. sm_90

// Whether the functions of this section may be called: known when the kernel is compiled. In code for older GPUs they
// are nothing, as ptxas takes no instruction that the GPU does not have, not even one that is never reached.
__device__ constexpr bool is_sm90() {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

// `barrier` is in shared memory. A phase of the barrier ends when `num_arrivals` arrivals have come, and all bytes that
// they announced. One thread calls this, then calls fence_proxy_async, and then comes to a barrier of all threads.
__device__ inline void mbarrier_init(uint64_t* barrier, uint32_t num_arrivals) {
  if constexpr (is_sm90())
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals)
                 : "memory");
}

// Arrives, and announces that bulk copies of so many bytes belong to the phase.
__device__ inline void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  if constexpr (is_sm90())
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Waits for the end of a phase, of which only the parity is given; the first phase has parity 0. Returns at once if the
// current phase of the barrier has the other parity. Then this thread sees what was copied.
__device__ inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t is_over = !is_sm90();
  while (!is_over) {
    if constexpr (is_sm90())
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                   : "=r"(is_over)
                   : "r"(shared_address(barrier)), "r"(parity)
                   : "memory");
  }
}

// True in one lane of the warp, always the same lane. All 32 lanes take part. By this the compiler knows that only one
// lane starts bulk copies, and makes no loop over lanes.
__device__ inline bool elect() {
  uint32_t is_elected = 0;
  if constexpr (is_sm90())
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(is_elected));
  return is_elected != 0;
}

// Copies from global to shared memory. Both addresses and the number of bytes are multiples of 16. One thread calls
// this, and `barrier` counts the bytes as they come.
__device__ inline void bulk_copy(void* target, const void* source, uint32_t bytes, uint64_t* barrier) {
  if constexpr (is_sm90())
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Orders what threads have written to shared memory before later bulk copies into it, and before wgmma that read it.
// For bulk copies, the thread that starts them calls this after a barrier, or the threads that wrote call it before a
// barrier. For wgmma, the threads that wrote call it.
__device__ inline void fence_proxy_async() {
  if constexpr (is_sm90()) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- clusters: up to 8 blocks that run at the same time and can read each other's shared memory. sm_90

// Waits for all threads of all blocks of the cluster. After this, all can read what they wrote to shared memory before
// it. The lanes of a warp call this together. In a kernel that was not launched in clusters, each block is a cluster.
__device__ inline void cluster_sync() {
  if constexpr (is_sm90())
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// As cluster_sync, but orders nothing. For the end of a block that other blocks read from: they have used what they
// read.
__device__ inline void cluster_sync_relaxed() {
  if constexpr (is_sm90())
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// `pointer` is in the shared memory of this block. Returns the address of the same place in the `rank`-th block of the
// cluster.
__device__ inline uint32_t map_shared(const void* pointer, uint32_t rank) {
  uint32_t address = 0;
  if constexpr (is_sm90())
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

// Loads 8 or 16 bytes from an address of map_shared, which is aligned to as many bytes. A cluster_sync comes before, so
// that the other block has begun. Another cluster_sync or a cluster_sync_relaxed comes after, so that the other block
// has not ended.
__device__ inline void load_cluster(uint32_t (&words)[2], uint32_t address) {
  if constexpr (is_sm90())
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
}
__device__ inline void load_cluster(uint32_t (&words)[4], uint32_t address) {
  if constexpr (is_sm90())
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
}

// ---- numbers

// 2^x with a relative error of 2^-22; 0 for minus infinity, and for results below the normal range.
__device__ inline float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x with a relative error of 2^-23. x and results below the normal range count as 0.
__device__ inline float reciprocal_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// To the nearest, ties to even.
__device__ inline float16 to_float16(float x) {
  float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}
__device__ inline bfloat16 to_bfloat16(float x) {
  bfloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}
__device__ inline float to_float(float16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

// Two numbers rounded to T (float16 or bfloat16), `low` in the low half.
template <typename T>
__device__ inline uint32_t pack(float low, float high);

template <>
__device__ inline uint32_t pack<float16>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

template <>
__device__ inline uint32_t pack<bfloat16>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

#if __CUDA_ARCH__ >= 890
// Two numbers rounded to T (float8_e4m3 or float8_e5m2), `low` in the low byte: to the nearest, ties to even. A number
// beyond the largest becomes the largest; NaN stays NaN.
template <typename T>
__device__ inline uint32_t to_float8x2(float low, float high);

template <>
__device__ inline uint32_t to_float8x2<float8_e4m3>(float low, float high) {
  uint16_t result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}

template <>
__device__ inline uint32_t to_float8x2<float8_e5m2>(float low, float high) {
  uint16_t result;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}
#endif

// Two float8_e4m3 (the low 16 bits) as two float16: exact, NaN stays NaN. One instruction since sm_89.
__device__ inline uint32_t e4m3x2_to_f16x2(uint32_t x) {
#if __CUDA_ARCH__ >= 890
  uint32_t result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(static_cast<uint16_t>(x)));
  return result;
#else
  // The numbers become the upper bytes of float16, shifted to its fields. As the biases differ, they are then 2^-8 of
  // what they should be. 0x7f is NaN.
  const uint32_t upper = __byte_perm(x, 0, 0x1404);
  const uint32_t scaled = (upper & 0x80008000u) | (upper & 0x7f007f00u) >> 1;
  const uint32_t is_nan = ((upper & 0x7f007f00u) + 0x01000100u & 0x80008000u) >> 15;
  uint32_t result;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(result) : "r"(scaled), "r"(0x5c005c00u));  // 256
  return result | is_nan * 0x7fffu;
#endif
}

}  // namespace pagedattn::ptx

#endif

namespace pagedattn::ptx {

// The descriptor of a matrix b of wgmma in shared memory, not swizzled. The matrix is in pieces of 8 columns (n) x 8
// elements of a column (k): 128 adjacent bytes, 16 for each column (Major::K) or for each row (Major::N).
// `leading_bytes` is the distance from a piece to the next 8 of k, `stride_bytes` to the next 8 of n. The address and
// both distances are multiples of 16. A number of bytes divided by 16 may be added to a descriptor: it then describes
// the matrix that begins there.
__device__ inline uint64_t wgmma_descriptor(const void* matrix, uint32_t leading_bytes, uint32_t stride_bytes) {
  const auto encode = [](uint32_t bytes) { return uint64_t{(bytes & 0x3ffff) >> 4}; };
  return encode(shared_address(matrix)) | encode(leading_bytes) << 16 | encode(stride_bytes) << 32;
}

}  // namespace pagedattn::ptx
