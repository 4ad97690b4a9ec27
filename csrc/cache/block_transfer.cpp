#include "cache/block_transfer.h"

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

void check_mapping(const Door& door, const Tensor& mapping) {
  door.dtype_anywhere("block_mapping", mapping, ScalarType::Long);
  door.shape("block_mapping", mapping, {ANY, 2});
  door.contiguous("block_mapping", mapping);
}

// Checks that every (src, dst) pair is in range, and that no dst is named twice. Pairs are copied in parallel, so
// within one pool no block may be both read and written. The mapping may be on any device. Its pairs are checked
// wherever that takes no wait for a GPU.
struct PairCheck {
  Door door;
  HostValues values;  // of the mapping
  int64_t num_pairs;
  int64_t num_src_blocks;
  int64_t num_dst_blocks;
  bool is_one_pool;

  void operator()() const {
    const auto* pairs = static_cast<const int64_t*>(values.data);
    door.check(num_pairs == 0 || num_src_blocks > 0, "block_mapping",
               "expected no pairs, as there are no source blocks, got ", num_pairs);
    door.check(num_pairs == 0 || num_dst_blocks > 0, "block_mapping",
               "expected no pairs, as there are no target blocks, got ", num_pairs);
    std::unordered_set<int64_t> targets;
    for (int64_t i = 0; i < num_pairs; ++i) {
      const int64_t src = pairs[2 * i];
      const int64_t dst = pairs[2 * i + 1];
      door.check(src >= 0 && src < num_src_blocks, "block_mapping", "expected source blocks of 0 to ",
                 num_src_blocks - 1, ", got ", src, " in pair ", i);
      door.check(dst >= 0 && dst < num_dst_blocks, "block_mapping", "expected target blocks of 0 to ",
                 num_dst_blocks - 1, ", got ", dst, " in pair ", i);
      door.check(targets.insert(dst).second, "block_mapping", "expected every target block once, got ", dst,
                 " again in pair ", i);
    }
    for (int64_t i = 0; is_one_pool && i < num_pairs; ++i) {
      door.check(!targets.contains(pairs[2 * i]), "block_mapping",
                 "expected blocks that are either source or target, got both for ", pairs[2 * i], " in pair ", i);
    }
  }
};

// A dimension of two tensors of one shape, or several dimensions that are evenly spaced in both.
struct PieceDim {
  int64_t count;
  int64_t src_stride;  // bytes
  int64_t dst_stride;
};

// The dimensions from `first_dim` on, as pieces of bytes that are adjacent in both tensors.
struct Pieces {
  int64_t bytes;               // of a piece
  std::vector<PieceDim> dims;  // smallest strides in dst first; empty if there is one piece
};

Pieces pieces_of(const Tensor& src, const Tensor& dst, int64_t first_dim) {
  const auto element_bytes = static_cast<int64_t>(dst.element_size());
  std::vector<PieceDim> dims;
  for (int64_t dim = first_dim; dim < dst.dim(); ++dim) {
    if (dst.size(dim) == 1) continue;
    dims.push_back({dst.size(dim), src.stride(dim) * element_bytes, dst.stride(dim) * element_bytes});
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [](const PieceDim& a, const PieceDim& b) { return a.dst_stride < b.dst_stride; });
  Pieces pieces{element_bytes, {}};
  for (const PieceDim& dim : dims) {
    if (pieces.dims.empty()) {
      if (dim.src_stride == pieces.bytes && dim.dst_stride == pieces.bytes) {
        pieces.bytes *= dim.count;
        continue;
      }
    } else if (PieceDim& last = pieces.dims.back();
               dim.src_stride == last.count * last.src_stride && dim.dst_stride == last.count * last.dst_stride) {
      last.count *= dim.count;
      continue;
    }
    pieces.dims.push_back(dim);
  }
  return pieces;
}

// Adds a transfer for each piece of a block, without the mapping. `src` and `dst` are not empty.
void add_transfers(const Tensor& src, const Tensor& dst, std::vector<BlockTransferParams>& transfers) {
  const Pieces pieces = pieces_of(src, dst, 1);
  const auto element_bytes = static_cast<int64_t>(src.element_size());
  const size_t first = transfers.size();
  BlockTransferParams params{};
  params.block_bytes = pieces.bytes;
  params.src = static_cast<const char*>(src.const_data_ptr());
  params.src_stride = src.stride(0) * element_bytes;
  params.dst = static_cast<char*>(dst.mutable_data_ptr());
  params.dst_stride = dst.stride(0) * element_bytes;
  transfers.push_back(params);
  for (const PieceDim& dim : pieces.dims) {
    const size_t end = transfers.size();
    for (int64_t i = 1; i < dim.count; ++i) {
      for (size_t t = first; t < end; ++t) {
        BlockTransferParams next = transfers[t];
        next.src += i * dim.src_stride;
        next.dst += i * dim.dst_stride;
        transfers.push_back(next);
      }
    }
  }
}

struct Transfers {
  std::vector<BlockTransferParams> all;
  Tensor mapping;  // of every transfer
};

// `mapping` is in memory that the kernel of these transfers reads.
Transfers with_mapping(std::vector<BlockTransferParams> transfers, const Tensor& mapping) {
  for (BlockTransferParams& transfer : transfers) {
    transfer.num_pairs = mapping.size(0);
    transfer.mapping = mapping.const_data_ptr<int64_t>();
  }
  return {std::move(transfers), mapping};
}

void transfer_on_cpu(const Transfers& transfers) {
  const auto kernel = PAGEDATTN_CPU_KERNEL(transfer_blocks);
  for (const BlockTransferParams& params : transfers.all) {
    parallel_for_rows(params.num_pairs, params.block_bytes,
                      [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
  }
}

// Runs on the CPU, or by `on_cuda` on a GPU. `on_cuda` brings the mapping to the GPU itself.
template <typename OnCuda>
void transfer(const Door& door, const PairCheck& check, const std::vector<BlockTransferParams>& transfers,
              const Tensor& mapping, const OnCuda& on_cuda) {
  const Tensor on_cpu = door.runs_on_cuda() ? mapping : on_host(mapping);
  run_on<transfer_on_cpu>(door, check, with_mapping(transfers, on_cpu), [&](cudaStream_t stream) {
    if (!transfers.empty() && mapping.size(0) > 0) on_cuda(stream);
  });
}

// The mapping in the memory of the door's GPU, without a wait. The caller may change a mapping in pinned memory as soon
// as the op returns, so a copy of the mapping is sent. A CUDA graph would read this copy at its replay, when the copy
// is gone.
Tensor on_gpu(const Door& door, const Tensor& mapping, cudaStream_t stream) {
  if (is_on_cuda(mapping) && mapping.get_device_index() == door.device().index()) return mapping;
  door.check(!cuda::is_capturing(stream), "block_mapping", "expected a tensor on ", door.device(),
             " while a CUDA graph is captured, got one on ", mapping.device());
  return torch::stable::to(torch::stable::clone(mapping), door.device(), /*non_blocking=*/true);
}

// The memory of a pool.
struct Span {
  const char* begin;
  const char* end;
  Pieces pieces;
};

Span span_of(const Tensor& pool) {
  const auto* begin = static_cast<const char*>(pool.const_data_ptr());
  if (pool.numel() == 0) return {begin, begin, {}};
  Span span{begin, begin, pieces_of(pool, pool, 0)};
  span.end += span.pieces.bytes;
  for (const PieceDim& dim : span.pieces.dims) span.end += (dim.count - 1) * dim.dst_stride;
  return span;
}

// Whether a piece of b lies on a piece of a, where b begins `distance` bytes behind a. Both have `num_dims` dimensions,
// of the same strides.
bool pieces_overlap(const Pieces& a, const Pieces& b, int64_t distance, size_t num_dims) {
  if (num_dims == 0) return -b.bytes < distance && distance < a.bytes;
  const PieceDim& dim = a.dims[num_dims - 1];
  const int64_t stride = dim.dst_stride;
  const int64_t before = distance / stride - (distance % stride < 0);  // the dimensions within span less than a stride
  for (const int64_t steps : {before, before + 1}) {
    const bool exists = steps < dim.count && -steps < b.dims[num_dims - 1].count;
    if (exists && pieces_overlap(a, b, distance - steps * stride, num_dims - 1)) return true;
  }
  return false;
}

// Pools may lie in each other's gaps, as keys and values that are views of one tensor do. Pools of different strides
// overlap if their ranges of addresses do.
bool overlap(const Span& a, const Span& b) {
  if (a.begin == a.end || b.begin == b.end || a.begin >= b.end || b.begin >= a.end) return false;
  const bool same_strides =
      std::equal(a.pieces.dims.begin(), a.pieces.dims.end(), b.pieces.dims.begin(), b.pieces.dims.end(),
                 [](const PieceDim& x, const PieceDim& y) { return x.dst_stride == y.dst_stride; });
  return !same_strides || pieces_overlap(a.pieces, b.pieces, b.begin - a.begin, a.pieces.dims.size());
}

// The caches of all layers are written in any order, so none may overlap another.
void check_apart(const Door& door, const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches) {
  struct Cache {
    Span span;
    const char* argument;
    size_t layer;
  };
  std::vector<Cache> caches;
  for (size_t layer = 0; layer < key_caches.size(); ++layer) {
    caches.push_back({span_of(key_caches[layer]), "key_caches", layer});
    caches.push_back({span_of(value_caches[layer]), "value_caches", layer});
  }
  std::stable_sort(caches.begin(), caches.end(),
                   [](const Cache& a, const Cache& b) { return a.span.begin < b.span.begin; });
  for (size_t i = 0; i < caches.size(); ++i) {
    for (size_t j = i + 1; j < caches.size() && caches[j].span.begin < caches[i].span.end; ++j) {
      door.check(!overlap(caches[i].span, caches[j].span), caches[j].argument,
                 "expected caches that do not overlap, got memory in layer ", caches[j].layer, " that ",
                 caches[i].argument, " has in layer ", caches[i].layer);
    }
  }
}

}  // namespace

void copy_blocks(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
                 const Tensor& block_mapping) {
  const Door door("copy_blocks", key_caches.empty() ? block_mapping : key_caches[0]);
  door.check(key_caches.size() == value_caches.size(), "value_caches", "expected as many layers as key_caches has, ",
             key_caches.size(), ", got ", value_caches.size());
  if (key_caches.empty()) return;
  const int64_t num_blocks = key_caches[0].dim() > 0 ? key_caches[0].size(0) : 0;
  const auto check_caches = [&](const char* argument, const std::vector<Tensor>& caches) {
    for (const Tensor& cache : caches) {
      door.present(argument, cache);
      door.check(cache.dim() >= 2 && cache.size(0) == num_blocks, argument, "expected caches of ", num_blocks,
                 " blocks (as in the first layer), got shape ", cache.sizes());
      door.contiguous_from(argument, cache, cache.dim() - 1);
      door.written_elements(argument, cache);
    }
  };
  check_caches("key_caches", key_caches);
  check_caches("value_caches", value_caches);
  check_apart(door, key_caches, value_caches);
  check_mapping(door, block_mapping);

  const int64_t num_pairs = block_mapping.size(0);
  const PairCheck check{door, door.values(block_mapping), num_pairs, num_blocks, num_blocks, /*is_one_pool=*/true};
  std::vector<BlockTransferParams> transfers;
  for (size_t layer = 0; layer < key_caches.size(); ++layer) {
    for (const Tensor& cache : {key_caches[layer], value_caches[layer]}) {
      if (cache.numel() > 0) add_transfers(cache, cache, transfers);
    }
  }
  transfer(door, check, transfers, block_mapping, [&](cudaStream_t stream) {
    const Transfers on_device = with_mapping(transfers, on_gpu(door, block_mapping, stream));
    cuda::transfer_blocks(on_device.all, /*over_the_bus=*/false, stream);
  });
}

void swap_blocks(const Tensor& src, Tensor& dst, const Tensor& block_mapping) {
  const Door door("swap_blocks", is_on_cuda(src) ? src : dst);
  door.defined("src", src);
  door.check(src.dim() >= 2, "src", "expected [num_blocks, ...], got shape ", src.sizes());
  door.contiguous_from("src", src, src.dim() - 1);
  door.dtype_anywhere("dst", dst, dtype_of(src));
  door.check(dst.dim() == src.dim(), "dst", "expected blocks shaped like those of src ", src.sizes(), ", got ",
             dst.sizes());
  for (int64_t dim = 1; dim < src.dim(); ++dim) {
    door.check(dst.size(dim) == src.size(dim), "dst", "expected blocks shaped like those of src ", src.sizes(),
               ", got ", dst.sizes());
  }
  door.contiguous_from("dst", dst, dst.dim() - 1);
  door.written_elements("dst", dst);
  door.check(!overlap(span_of(src), span_of(dst)), "dst",
             "expected another pool than src (copy_blocks copies within one), got memory that they share");
  check_mapping(door, block_mapping);

  const int64_t num_pairs = block_mapping.size(0);
  const PairCheck check{door, door.values(block_mapping), num_pairs, src.size(0), dst.size(0), /*is_one_pool=*/false};
  std::vector<BlockTransferParams> transfers;
  if (src.numel() > 0 && dst.numel() > 0) add_transfers(src, dst, transfers);
  transfer(door, check, transfers, block_mapping, [&](cudaStream_t stream) {
    const auto is_reachable = [&](const Tensor& pool) {
      return pool.is_cuda() ? pool.get_device_index() == door.device().index()
                            : cuda::is_reachable(pool.const_data_ptr());
    };
    if (is_reachable(src) && is_reachable(dst)) {
      const Transfers in_a_kernel = with_mapping(transfers, on_gpu(door, block_mapping, stream));
      cuda::transfer_blocks(in_a_kernel.all, /*over_the_bus=*/!src.is_cuda() || !dst.is_cuda(), stream);
    } else {
      const Transfers in_runs = with_mapping(transfers, on_host(block_mapping));
      for (const BlockTransferParams& piece : in_runs.all) cuda::copy_block_runs(piece, stream);
    }
  });
}

}  // namespace pagedattn
