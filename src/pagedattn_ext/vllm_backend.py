"""The attention backend that `vllm_plugin` registers. Only vLLM imports this module."""

from copy import copy

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionLayer, AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec

from . import ops


class PagedAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU_ATTN with its memory, its metadata and its scheduler, and the attention of `PagedAttentionImpl`."""

    @staticmethod
    def get_impl_cls() -> type["PagedAttentionImpl"]:
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["PagedAttentionMetadataBuilder"]:
        return PagedAttentionMetadataBuilder


class PagedAttentionMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """vLLM's builder, which refuses fp8 caches where vLLM's kernels cannot read them: on CPUs without AVX512. Layers of
    decoders do not run on these kernels, so that the plan for them may be that of another cache."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        try:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        except NotImplementedError:
            if isinstance(kv_cache_spec, (CrossAttentionSpec, EncoderOnlyAttentionSpec)):
                raise
            vllm_config = copy(vllm_config)
            vllm_config.cache_config = copy(vllm_config.cache_config)
            vllm_config.cache_config.cache_dtype = "auto"
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)


class PagedAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Decoder layers go through `reshape_and_cache` and `paged_attention`. Layers of an encoder, and layers that
    attend to one, keep vLLM's kernels: the two write keys into a block in different orders."""

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,  # [num_tokens, num_heads, head_size]
        key: Tensor,  # [num_tokens, num_kv_heads, head_size], in the cache already
        value: Tensor,
        kv_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, 2 * head_size]
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,  # like query, written
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None or output_scale is not None or output_block_scale is not None or not self.is_ours():
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if attn_metadata.dynamic_causal is not None:
            raise NotImplementedError("pagedattn_ext: expected batches that are causal or not, got a mix of both")
        num_tokens = attn_metadata.num_actual_tokens
        out, _ = ops.paged_attention(
            query[:num_tokens],
            *caches_of(kv_cache),
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            query_start_loc=attn_metadata.query_start_loc,
            scale=self.scale,
            causal=attn_metadata.causal,
            alibi_slopes=self.alibi_slopes,
            sliding_window=None if self.sliding_window < 0 else self.sliding_window,
            softcap=self.logits_soft_cap,
            sinks=None if self.sinks is None else self.sinks.float(),
            kv_cache_dtype=self.kv_cache_dtype,
            k_scale=layer._k_scale,
            v_scale=layer._v_scale,
        )
        output[:num_tokens] = out
        return output

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if not self.is_ours():
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        num_tokens = slot_mapping.shape[0]  # rows behind them are padding
        ops.reshape_and_cache(
            key[:num_tokens],
            value[:num_tokens],
            *caches_of(kv_cache),
            slot_mapping,
            kv_cache_dtype=self.kv_cache_dtype,
            k_scale=layer._k_scale,
            v_scale=layer._v_scale,
        )

    def is_ours(self) -> bool:
        return bool(self.attn_type == AttentionType.DECODER)


def caches_of(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, [num_blocks, block_size, num_kv_heads, head_size] each: views of what vLLM keeps as one tensor,
    whose blocks hold, for each head, the keys of all tokens and then the values of all tokens."""
    num_blocks, num_kv_heads, block_size, two_heads = kv_cache.shape
    heads = kv_cache.view(num_blocks, num_kv_heads, 2, block_size, two_heads // 2)
    return heads[:, :, 0].transpose(1, 2), heads[:, :, 1].transpose(1, 2)
