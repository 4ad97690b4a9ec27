"""Our modules under the names that the tests of other libraries import.

What we do not have is a name as well, which raises `Missing` when it is called: a test file whose imports fail would
say nothing of its other tests. What the tests take from the insides of the libraries, such as their compilers, does
nothing.
"""

import ast
import importlib
import importlib.machinery
import importlib.util
import logging
import math
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from on_cpu import CAPABILITY

import pagedattn_ext

PACKAGE = pagedattn_ext.__path__[0]
# Ours have the same names.
LIBRARIES = ("flashinfer", "flash_attn", "flash_attn_interface", "causal_conv1d", "mamba_ssm", "fla")
INSIDES = (
    *("flashinfer.jit", "flashinfer.cutile", "flashinfer.trace", "flashinfer.fp4_quantization"),
    *("flashinfer.quantization.nvfp4_quantization_utils", "flash_attn.cute.cache_utils"),
)

# By the name of a module, a file of a checkout that has references in plain torch beside what needs a GPU.
REFERENCES = {
    "causal_conv1d.causal_conv1d_interface": "causal-conv1d/causal_conv1d/causal_conv1d_interface.py",
    "causal_conv1d.causal_conv1d_varlen": "causal-conv1d/causal_conv1d/causal_conv1d_varlen.py",
    "mamba_ssm.ops.selective_scan_interface": "mamba/mamba_ssm/ops/selective_scan_interface.py",
    "mamba_ssm.ops.triton.layernorm_gated": "mamba/mamba_ssm/ops/triton/layernorm_gated.py",
    "mamba_ssm.ops.triton.selective_state_update": "mamba/mamba_ssm/ops/triton/selective_state_update.py",
    "fla.ops.gated_delta_rule.gate": "flash-linear-attention/fla/ops/gated_delta_rule/gate.py",
    "fla.ops.gated_delta_rule.naive": "flash-linear-attention/fla/ops/gated_delta_rule/naive.py",
    "fla.utils": "flash-linear-attention/fla/utils/_testing.py",
    "flash_attn.ops.triton.layer_norm": "flash-attention/flash_attn/ops/triton/layer_norm.py",
}
IS_REFERENCE = re.compile(r".*_ref|naive_.*|assert_close|get_.*err.*")


class Missing(AttributeError):
    """A test has used a name that we do not have."""


class MissingName:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Missing(self._name)

    def __getattr__(self, name: str) -> "MissingName":
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingName(f"{self._name}.{name}")


def does_nothing(name: str) -> MagicMock:
    return MagicMock(name=name)


class OtherModules:
    """Finds every module of the libraries that no other finder has found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name.split(".")[0] in LIBRARIES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        inside = any(name == each or name.startswith(f"{each}.") for each in INSIDES)
        with_other_names(module, name, does_nothing if inside else MissingName)


def with_other_names(module: ModuleType, name: str, kind: Callable[[str], object]) -> None:
    def find(attribute: str) -> object:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return kind(f"{name}.{attribute}")

    module.__getattr__ = find
    if not hasattr(module, "__path__"):
        module.__path__ = []


def use_our_names(checkouts: Path) -> None:
    """From now on, for this process."""
    sys.meta_path.append(OtherModules())
    for name in LIBRARIES:
        put(name, importlib.import_module(f"pagedattn_ext.{name}"))
    add_helpers_of_tests(checkouts)


def put(name: str, module: ModuleType) -> None:
    """The module under this name, with all modules in it."""
    sys.modules[name] = module
    for child in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if not child.name.startswith("_"):
            put(f"{name}.{child.name}", importlib.import_module(f"{module.__name__}.{child.name}"))
    with_other_names(module, name, MissingName)


def add_helpers_of_tests(checkouts: Path) -> None:
    """What the tests ask of the GPU and of the build, and references that lie in the libraries."""
    for name, file in REFERENCES.items():
        if (checkouts / file).exists():
            add_references(importlib.import_module(name), checkouts / file)
    utils = importlib.import_module("flashinfer.utils")
    utils.get_compute_capability = lambda device: CAPABILITY
    utils.is_sm90a_supported = lambda device: True
    utils.is_sm100a_supported = utils.is_sm12x_supported = lambda device: False
    utils.has_flashinfer_jit_cache = lambda: True
    utils.device_support_pdl = lambda device: True
    utils.GPUArchitectureError = type("GPUArchitectureError", (Exception,), {})
    importlib.import_module("flashinfer.topk").can_implement_filtered_topk = lambda: True
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    interface.USE_TRITON_ROCM = False
    of_fla = importlib.import_module("fla.utils")
    of_fla.device = "cpu"
    for name in ("INTEL_ALCHEMIST", "NPU", "NVIDIA_BLACKWELL", "NVIDIA_HOPPER", "NVIDIA_SM100", "NVIDIA_SM120"):
        setattr(of_fla, f"IS_{name}", False)
    path = checkouts / "flash-attention" / "flash_attn" / "cute" / "testing.py"
    if path.exists():
        spec = importlib.util.spec_from_file_location("flash_attn.cute.testing", path)
        testing = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(testing)


def add_references(module: ModuleType, file: Path) -> None:
    """The functions of the file that compute in plain torch, without what the file imports and compiles."""
    names = {"torch": torch, "F": torch.nn.functional, "Tensor": torch.Tensor, "math": math, "warnings": warnings}
    einops = importlib.import_module("einops")  # which test_peers.py does without
    names |= {"rearrange": einops.rearrange, "repeat": einops.repeat}
    names |= {"logger": logging.getLogger(), "FLA_CI_ENV": False}  # False is strict
    functions = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and IS_REFERENCE.fullmatch(node.name) and not node.decorator_list
    ]
    exec(compile(ast.Module(functions, []), str(file), "exec"), names)
    for function in functions:
        setattr(module, function.name, names[function.name])
