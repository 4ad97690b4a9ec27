"""This package in the form that Hugging Face's `kernels` loads from a local directory: functions, and `layers`.

`kernels` imports this file by its path, under the name in metadata.json.
"""

from pagedattn_ext.flash_attn import flash_attn_func as flash_attn_func
from pagedattn_ext.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from pagedattn_ext.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache

from . import layers as layers
