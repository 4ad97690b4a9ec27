// Table of contents: every op's schema, by family, and the device keys that have it. Documentation:
// pagedattn_ext/ops.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <unistd.h>

#include <cstdint>

#include "cpu_dispatch.h"
#include "ops.h"

STABLE_TORCH_LIBRARY(pagedattn_ext, m) {
  // attention
  m.def(
      "paged_attention_v1(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, SymInt num_kv_heads, "
      "float scale, Tensor block_tables, Tensor seq_lens, SymInt block_size, SymInt max_seq_len, "
      "Tensor? alibi_slopes=None, str kv_cache_dtype=\"auto\", Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "paged_attention_v2(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, "
      "Tensor query, Tensor key_cache, Tensor value_cache, SymInt num_kv_heads, float scale, Tensor block_tables, "
      "Tensor seq_lens, SymInt block_size, SymInt max_seq_len, Tensor? alibi_slopes=None, "
      "str kv_cache_dtype=\"auto\", Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, *, "
      "Tensor? query_start_loc=None, float scale, Tensor? alibi_slopes=None, SymInt? sliding_window=None, "
      "float softcap=0.0, Tensor? sinks=None, str kv_cache_dtype=\"auto\", Tensor? k_scale=None, "
      "Tensor? v_scale=None) -> (Tensor, Tensor)");
  m.def(
      "merge_attn_states(Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, Tensor prefix_lse, "
      "Tensor suffix_output, Tensor suffix_lse) -> ()");

  // cache
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
      "str kv_cache_dtype=\"auto\", Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "gather_cached_kv(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping) "
      "-> ()");
  m.def("copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()");
  m.def("swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()");

  // layernorm
  m.def("rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()");
  m.def("fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()");

  // pos_encoding
  m.def(
      "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, SymInt head_size, Tensor cos_sin_cache, "
      "bool is_neox) -> ()");
  m.def(
      "rotary_embedding_neox(Tensor positions, Tensor(a!) query, Tensor(b!) key, SymInt head_size, "
      "Tensor cos_sin_cache) -> ()");

  // activation
  m.def("silu_and_mul(Tensor(a!) out, Tensor input) -> ()");
  m.def("mul_and_silu(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_and_mul(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_tanh_and_mul(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_new(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_fast(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_quick(Tensor(a!) out, Tensor input) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pagedattn_ext, CPU, m) {
  m.impl("paged_attention_v1", TORCH_BOX(&pagedattn::paged_attention_v1));
  m.impl("paged_attention_v2", TORCH_BOX(&pagedattn::paged_attention_v2));
  m.impl("paged_attention", TORCH_BOX(&pagedattn::paged_attention));
  m.impl("merge_attn_states", TORCH_BOX(&pagedattn::merge_attn_states));
  m.impl("reshape_and_cache", TORCH_BOX(&pagedattn::reshape_and_cache));
  m.impl("gather_cached_kv", TORCH_BOX(&pagedattn::gather_cached_kv));
  m.impl("copy_blocks", TORCH_BOX(&pagedattn::copy_blocks));
  m.impl("swap_blocks", TORCH_BOX(&pagedattn::swap_blocks));
  m.impl("rms_norm", TORCH_BOX(&pagedattn::rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&pagedattn::fused_add_rms_norm));
  m.impl("rotary_embedding", TORCH_BOX(&pagedattn::rotary_embedding));
  m.impl("rotary_embedding_neox", TORCH_BOX(&pagedattn::rotary_embedding_neox));
  m.impl("silu_and_mul", TORCH_BOX(&pagedattn::silu_and_mul));
  m.impl("mul_and_silu", TORCH_BOX(&pagedattn::mul_and_silu));
  m.impl("gelu_and_mul", TORCH_BOX(&pagedattn::gelu_and_mul));
  m.impl("gelu_tanh_and_mul", TORCH_BOX(&pagedattn::gelu_tanh_and_mul));
  m.impl("gelu_new", TORCH_BOX(&pagedattn::gelu_new));
  m.impl("gelu_fast", TORCH_BOX(&pagedattn::gelu_fast));
  m.impl("gelu_quick", TORCH_BOX(&pagedattn::gelu_quick));
}

namespace {

// Asks for huge pages in the whole pages of a range; returns whether the system has them. A page that was touched
// before stays as it is.
bool advise_huge_pages(uintptr_t address, size_t num_bytes) {
  const auto page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (address + page_size - 1) / page_size * page_size;
  const uintptr_t end = (address + num_bytes) / page_size * page_size;
  return begin >= end || madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
}

}  // namespace

// The part that knows no tensors.
PYBIND11_MODULE(_C, m) {
  m.def("advise_huge_pages", &advise_huge_pages);
  m.def("cpu_capability", [] { return pagedattn::cpu_capability_name(pagedattn::cpu_capability()); });
  m.def("available_cpu_capabilities", &pagedattn::available_cpu_capabilities);
  m.attr("torch_target") = PAGEDATTN_TORCH_TARGET;
}
