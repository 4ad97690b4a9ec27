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

// Checks that every (src, dst) pair is in range, and that no dst is named twice. Returns all dst. `mapping` is on the
// host.
std::unordered_set<int64_t> check_pairs(const Door& door, const Tensor& mapping, int64_t num_src_blocks,
                                        int64_t num_dst_blocks) {
  const int64_t* pairs = mapping.const_data_ptr<int64_t>();
  std::unordered_set<int64_t> targets;
  for (int64_t i = 0; i < mapping.size(0); ++i) {
    const int64_t src = pairs[2 * i];
    const int64_t dst = pairs[2 * i + 1];
    door.check(src >= 0 && src < num_src_blocks, "block_mapping", "expected source blocks of 0 to ", num_src_blocks - 1,
               ", got ", src, " in pair ", i);
    door.check(dst >= 0 && dst < num_dst_blocks, "block_mapping", "expected target blocks of 0 to ", num_dst_blocks - 1,
               ", got ", dst, " in pair ", i);
    door.check(targets.insert(dst).second, "block_mapping", "expected every target block once, got ", dst,
               " again in pair ", i);
  }
  return targets;
}

// Pairs are copied in parallel, so within one pool no block may be both read and written. `mapping` is on the host.
void check_disjoint(const Door& door, const Tensor& mapping, const std::unordered_set<int64_t>& targets) {
  const int64_t* pairs = mapping.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < mapping.size(0); ++i) {
    door.check(!targets.contains(pairs[2 * i]), "block_mapping",
               "expected blocks that are either source or target, got both for ", pairs[2 * i], " in pair ", i);
  }
}

// The mapping may be on any device. Its pairs are checked wherever that takes no wait for a GPU.
bool checks_pairs(const Door& door, const Tensor& mapping) { return !is_on_cuda(mapping) || door.checks_values(); }

// All parameters but the mapping. `src` is not empty.
BlockTransferParams make_transfer(const Tensor& src, const Tensor& dst) {
  const auto element_bytes = static_cast<int64_t>(src.element_size());
  BlockTransferParams params{};
  params.block_bytes = src.numel() / src.size(0) * element_bytes;
  params.src = static_cast<const char*>(src.const_data_ptr());
  params.src_stride = src.stride(0) * element_bytes;
  params.dst = static_cast<char*>(dst.mutable_data_ptr());
  params.dst_stride = dst.stride(0) * element_bytes;
  return params;
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
void transfer(const Door& door, const std::vector<BlockTransferParams>& transfers, const Tensor& mapping,
              const OnCuda& on_cuda) {
  const Tensor on_cpu = door.runs_on_cuda() ? mapping : on_host(mapping);
  run_on<transfer_on_cpu>(door, with_mapping(transfers, on_cpu), on_cuda);
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

// The memory of a pool: blocks of `width` bytes, `stride` bytes apart.
struct Span {
  const char* begin;
  const char* end;
  int64_t stride;
  int64_t width;
};

Span span_of(const Tensor& pool) {
  const auto element_bytes = static_cast<int64_t>(pool.element_size());
  const auto* begin = static_cast<const char*>(pool.const_data_ptr());
  if (pool.numel() == 0) return {begin, begin, 0, 0};
  const int64_t width = pool.numel() / pool.size(0) * element_bytes;
  const int64_t stride = pool.size(0) == 1 ? width : pool.stride(0) * element_bytes;
  return {begin, begin + (pool.size(0) - 1) * stride + width, stride, width};
}

// Pools may lie in each other's gaps, as keys and values that are views of one tensor do. Pools of different strides
// overlap if their ranges of addresses do.
bool overlap(const Span& a, const Span& b) {
  if (a.width == 0 || b.width == 0 || a.begin >= b.end || b.begin >= a.end) return false;
  if (a.stride != b.stride) return true;
  const int64_t distance =
      ((b.begin - a.begin) % a.stride + a.stride) % a.stride;  // from a block of a to the next block of b
  return distance < a.width || a.stride - distance < b.width;
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
      door.written_from_1(argument, cache);
    }
  };
  check_caches("key_caches", key_caches);
  check_caches("value_caches", value_caches);
  check_apart(door, key_caches, value_caches);
  check_mapping(door, block_mapping);
  if (checks_pairs(door, block_mapping)) {
    const Tensor mapping = on_host(block_mapping);
    check_disjoint(door, mapping, check_pairs(door, mapping, num_blocks, num_blocks));
  }

  if (block_mapping.size(0) == 0) return;
  std::vector<BlockTransferParams> transfers;
  for (size_t layer = 0; layer < key_caches.size(); ++layer) {
    for (const Tensor& cache : {key_caches[layer], value_caches[layer]}) {
      if (cache.numel() > 0) transfers.push_back(make_transfer(cache, cache));
    }
  }
  transfer(door, transfers, block_mapping, [&](cudaStream_t stream) {
    const Transfers on_device = with_mapping(transfers, on_gpu(door, block_mapping, stream));
    cuda::transfer_blocks(on_device.all, /*over_the_bus=*/false, stream);
  });
}

void swap_blocks(const Tensor& src, Tensor& dst, const Tensor& block_mapping) {
  const Door door("swap_blocks", is_on_cuda(src) ? src : dst);
  door.defined("src", src);
  door.check(src.dim() >= 2, "src", "expected [num_blocks, ...], got shape ", src.sizes());
  door.contiguous_from("src", src, 1);
  door.dtype_anywhere("dst", dst, src.scalar_type());
  door.check(dst.dim() == src.dim(), "dst", "expected blocks shaped like those of src ", src.sizes(), ", got ",
             dst.sizes());
  for (int64_t dim = 1; dim < src.dim(); ++dim) {
    door.check(dst.size(dim) == src.size(dim), "dst", "expected blocks shaped like those of src ", src.sizes(),
               ", got ", dst.sizes());
  }
  door.written_from_1("dst", dst);
  door.check(!overlap(span_of(src), span_of(dst)), "dst",
             "expected another pool than src (copy_blocks copies within one), got memory that they share");
  check_mapping(door, block_mapping);
  if (checks_pairs(door, block_mapping)) check_pairs(door, on_host(block_mapping), src.size(0), dst.size(0));

  if (block_mapping.size(0) == 0 || src.numel() == 0) return;
  const std::vector<BlockTransferParams> transfers = {make_transfer(src, dst)};
  transfer(door, transfers, block_mapping, [&](cudaStream_t stream) {
    const auto is_reachable = [&](const Tensor& pool) {
      return pool.is_cuda() ? pool.get_device_index() == door.device().index()
                            : cuda::is_reachable(pool.const_data_ptr());
    };
    if (is_reachable(src) && is_reachable(dst)) {
      const Transfers in_a_kernel = with_mapping(transfers, on_gpu(door, block_mapping, stream));
      cuda::transfer_blocks(in_a_kernel.all, /*over_the_bus=*/!src.is_cuda() || !dst.is_cuda(), stream);
    } else {
      const Transfers in_runs = with_mapping(transfers, on_host(block_mapping));
      cuda::copy_block_runs(in_runs.all[0], stream);
    }
  });
}

}  // namespace pagedattn
