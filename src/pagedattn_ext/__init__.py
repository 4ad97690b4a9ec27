"""Paged attention as a library: torch ops for the PagedAttention serving design, with one schema on every device.

`pagedattn_ext.ops` has a documented function for each op; `torch.ops.pagedattn_ext` has the ops themselves.
"""

import re

import torch  # first: it loads the library that _C is linked to

# The version is that of _C.torch_target. An older torch cannot load _C, and its error names only a missing symbol.
if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 10):
    raise ImportError(
        f"pagedattn_ext: expected torch 2.10 or later, got {torch.__version__}: pip install 'torch>=2.10'"
    )

# _C registers the ops under the name of this package. Torch cannot have two libraries under one name.
if hasattr(getattr(torch.ops, re.sub(r"\W", "_", __name__)), "rms_norm"):
    raise ImportError(
        f"{__name__}: expected one copy of this package in a process, got a second one, whose ops torch could not tell "
        "from those of the first: import one of them, or one as part of another package"
    )

from . import _C
from . import ops as ops  # after _C, which registers the ops
from .cpu_graph import CPUGraph as CPUGraph
from .kv_cache import allocate_kv_cache as allocate_kv_cache
from .kv_cache import padded_head_size as padded_head_size
from .shared_memory import SharedMemoryGroup as SharedMemoryGroup

__version__ = "0.1.0"
__all__ = [
    "CPUGraph",
    "SharedMemoryGroup",
    "__version__",
    "allocate_kv_cache",
    "build_info",
    "cpu_capability",
    "ops",
    "padded_head_size",
]


def __dir__() -> list[str]:
    return __all__


def cpu_capability() -> str:
    """The instruction set that the CPU kernels use: one of `build_info()["cpu_capabilities"]`.

    It is the best of this build that the machine runs, unless the environment variable PAGEDATTN_CPU_CAPABILITY names a
    lower one. The variable is read once, at the first call of an op. Raises RuntimeError if the name is unknown, or if
    the machine or the build lacks that instruction set.
    """
    return _C.cpu_capability()


def build_info() -> dict[str, str | list[str]]:
    """What this build is, and what it uses here.

    version; torch_target, the oldest torch that it runs on; cpu_capability, in use; cpu_capabilities, all that this
    build has and this machine runs, lowest first; cuda_arches that it was compiled for.
    """
    return {
        "version": __version__,
        "torch_target": _C.torch_target,
        "cpu_capability": _C.cpu_capability(),
        "cpu_capabilities": _C.available_cpu_capabilities(),
        "cuda_arches": _C.cuda_arches(),
    }
