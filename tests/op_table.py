"""The raw ops that a test calls, for the device it runs on."""

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch

import pagedattn_ext.ops._call
from pagedattn_ext import _C

ROOT = Path(__file__).resolve().parent.parent
SIMT_LIBRARY = Path(
    os.environ.get(
        "PAGEDATTN_SIMT_LIBRARY", ROOT / "build" / f"cmake-{sys.implementation.cache_tag}" / "libpagedattn_simt.so"
    )
)
DEVICES = ("cpu", "simt", "cuda")
EVERY_CPU = [f"cpu-{capability}" for capability in _C.available_cpu_capabilities()]


class OpTable:
    """torch.ops.pagedattn_ext; in a test on the simt device torch.ops.pagedattn_simt, for CPU tensors as well."""

    def __init__(self) -> None:
        self.namespace = "pagedattn_ext"
        self.capability = ""  # the one that the process began with

    def __getattr__(self, name: str):
        return getattr(getattr(torch.ops, self.namespace), name)

    def select(self, device: str) -> None:
        """For the raw ops and for their wrappers."""
        self.namespace = "pagedattn_simt" if device == "simt" else "pagedattn_ext"
        names = [name for name in pagedattn_ext.ops.__all__ if hasattr(self, name)]
        pagedattn_ext.ops._call.overloads = {name: getattr(self, name).default for name in names}
        capability = device.removeprefix("cpu-") if device in EVERY_CPU else ""
        if capability != self.capability:
            _C.set_cpu_capability(capability)
            self.capability = capability


OPS = OpTable()


def load_simt() -> None:
    if not SIMT_LIBRARY.exists():
        pytest.exit(f"--device simt: {SIMT_LIBRARY} is missing: make simt builds it", returncode=4)
    torch.ops.load_library(SIMT_LIBRARY)


def num_simt_launches() -> int:
    """Launches of this process. Unless PAGEDATTN_SIMT_SEED says otherwise, the n-th launch has seed n."""
    return ctypes.CDLL(str(SIMT_LIBRARY)).pagedattn_simt_num_launches()


class SimtUses(ctypes.Structure):
    """As pagedattn::simt::Uses."""

    _fields_ = [
        (name, ctypes.c_uint64) for name in ("dependent_launches", "clusters", "bulk_copies", "wgmma", "questions")
    ]


def simt_uses() -> dict[str, int]:
    """How often the kernels of this process have used each mechanism."""
    ask = ctypes.CDLL(str(SIMT_LIBRARY)).pagedattn_simt_uses
    ask.restype = SimtUses
    uses = ask()
    return {name: getattr(uses, name) for name, _ in SimtUses._fields_}


def rounds_probabilities(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention with queries of this dtype may round the probabilities to it, as torch's SDPA does."""
    on_pairs = dtype == torch.bfloat16 and _C.cpu_capability() == "avx512_bf16"
    return on_pairs or runs_cuda_kernels(device)


def runs_cuda_kernels(device: torch.device) -> bool:
    """On a GPU or the simt device, whose results may differ from the CPU's in the last bits."""
    return device.type == "cuda" or OPS.namespace == "pagedattn_simt"
