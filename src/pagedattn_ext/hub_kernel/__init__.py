"""This package in the form that Hugging Face's `kernels` loads from a local directory: the functions of
kernels-community/paged-attention and of kernels-community/flash-attn2, and `layers`.

`kernels` imports this file by its path, under the name in metadata.json. `make hub` writes a folder that needs no
installed package.
"""

from pagedattn_ext import ops as ops
from pagedattn_ext.flash_attn import flash_attn_func as flash_attn_func
from pagedattn_ext.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from pagedattn_ext.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
from pagedattn_ext.vllm_ops import convert_fp8 as convert_fp8
from pagedattn_ext.vllm_ops import copy_blocks as copy_blocks
from pagedattn_ext.vllm_ops import paged_attention_v1 as paged_attention_v1
from pagedattn_ext.vllm_ops import paged_attention_v2 as paged_attention_v2
from pagedattn_ext.vllm_ops import reshape_and_cache as reshape_and_cache
from pagedattn_ext.vllm_ops import reshape_and_cache_flash as reshape_and_cache_flash
from pagedattn_ext.vllm_ops import swap_blocks as swap_blocks

from . import layers as layers
