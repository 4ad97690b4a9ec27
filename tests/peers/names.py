"""Our modules under the names that the tests of other libraries import.

What we do not have is a name as well, which raises `Missing` when it is called: a test file whose imports fail would
say nothing of its other tests. What the tests take from the insides of the libraries, such as their compilers, does
nothing.
"""

import importlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from on_cpu import CAPABILITY

import pagedattn_ext

PACKAGE = pagedattn_ext.__path__[0]
LIBRARIES = ("flashinfer", "flash_attn", "flash_attn_interface")  # ours have the same names
INSIDES = (
    *("flashinfer.jit", "flashinfer.cutile", "flashinfer.trace", "flashinfer.fp4_quantization"),
    *("flashinfer.quantization.nvfp4_quantization_utils", "flash_attn.cute.cache_utils"),
)


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


def use_our_names(flash_attn_checkout: Path) -> None:
    """From now on, for this process."""
    sys.meta_path.append(OtherModules())
    for name in LIBRARIES:
        put(name, importlib.import_module(f"pagedattn_ext.{name}"))
    add_helpers_of_tests(flash_attn_checkout)


def put(name: str, module: ModuleType) -> None:
    """The module under this name, with all modules in it."""
    sys.modules[name] = module
    for child in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if not child.name.startswith("_"):
            put(f"{name}.{child.name}", importlib.import_module(f"{module.__name__}.{child.name}"))
    with_other_names(module, name, MissingName)


def add_helpers_of_tests(flash_attn_checkout: Path) -> None:
    """What the tests ask of the GPU and of the build, and references that lie in the libraries."""
    utils = importlib.import_module("flashinfer.utils")
    utils.get_compute_capability = lambda device: CAPABILITY
    utils.is_sm90a_supported = lambda device: True
    utils.has_flashinfer_jit_cache = lambda: True
    utils.device_support_pdl = lambda device: True
    utils.GPUArchitectureError = type("GPUArchitectureError", (Exception,), {})
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    interface.USE_TRITON_ROCM = False
    path = flash_attn_checkout / "flash_attn" / "cute" / "testing.py"
    spec = importlib.util.spec_from_file_location("flash_attn.cute.testing", path)
    testing = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(testing)
