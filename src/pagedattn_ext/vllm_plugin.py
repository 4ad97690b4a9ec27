"""vLLM's CPU attention on the ops of this package, as a plugin: PAGEDATTN_VLLM=1 turns the plugin on, and
PAGEDATTN_SANITIZE=1 puts its caches under the sanitizer.

vLLM calls `register`, the entry point of the group `vllm.general_plugins`, in each of its processes.
"""

from .switches import is_on


def register() -> None:
    """Puts the backend of `vllm_backend` in the place of vLLM's CPU_ATTN, if PAGEDATTN_VLLM is 1; else does nothing."""
    if not is_on("PAGEDATTN_VLLM"):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "pagedattn_ext.vllm_backend.PagedAttentionBackend")
    if is_on("PAGEDATTN_SANITIZE"):
        from . import vllm_sanitizer

        vllm_sanitizer.install()
