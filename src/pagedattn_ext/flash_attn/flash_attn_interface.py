"""The functions of `flash_attn`, where flash-attn has them too."""

from pagedattn_ext.flash_attn._attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from pagedattn_ext.flash_attn._packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
