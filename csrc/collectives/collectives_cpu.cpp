// Sums in fp32, rounded once. An element is added up in the order of the ranks, so its sum has the same bits whichever
// rank computes it, and in whichever piece.
#include "collectives/collectives.h"

#include "cpu_memory.h"
#include "cpu_rows.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

template <typename T, typename WorldSize>
void sum_all(const RankSumParams& p, WorldSize world_size, int64_t begin, int64_t size) {
  const T* of_rank[MAX_RANKS];
  for (int64_t rank = 0; rank < world_size; ++rank) of_rank[rank] = static_cast<const T*>(p.of_rank[rank]) + begin;
  const auto sums = [&](int64_t i, auto load) {
    Vec sum = load(of_rank[0] + i);
    for (int64_t rank = 1; rank < world_size; ++rank) sum = sum + load(of_rank[rank] + i);
    return sum;
  };
  T* out = static_cast<T*>(p.out) + begin;
  if (p.copy == nullptr) {
    write_vectors<false>(size, {out}, [&](int64_t i, auto load) { return Vecs<1>{{sums(i, load)}}; });
  } else {
    write_vectors<false>(size, {out, static_cast<T*>(p.copy) + begin}, [&](int64_t i, auto load) {
      const Vec sum = sums(i, load);
      return Vecs<2>{{sum, sum}};
    });
  }
}

}  // namespace

void sum_ranks(const RankSumParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    if (params.world_size == 2) {
      sum_all<T>(params, std::integral_constant<int64_t, 2>{}, begin, end - begin);
    } else {
      sum_all<T>(params, params.world_size, begin, end - begin);
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
