"""C++ of the benchmarks, compiled where they run."""

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

COMPILER = os.environ.get("CXX", "c++")


def compile_library(sources: Sequence[Path], *options: str) -> ctypes.CDLL:
    """Raises OSError where there is no compiler, and CalledProcessError where it fails."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "library.so"
        command = [COMPILER, "-std=c++20", "-O3", "-fPIC", "-shared", *options, *map(str, sources), "-o", str(path)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(path))
