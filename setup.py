"""Runs CMake and puts pagedattn_ext/_C where setuptools wants it. Everything else is in pyproject.toml; the sources are
listed in CMakeLists.txt.

Environment: CMAKE_ARGS (more arguments for cmake, e.g. -DPAGEDATTN_CUDA=OFF), MAX_JOBS (parallel compilations),
_PYTHON_HOST_PLATFORM (Python's own: the platform to build for, e.g. linux-aarch64, which has a build directory of its
own). What CMAKE_ARGS does not say is as in a new build directory, not as it was in the last build.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_tool(name: str) -> str:
    """The tool of this Python's environment, then the system's."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        sys.exit(f"pagedattn_ext: building needs {name}, which was not found: pip install {name}")
    return path


class CMakeBuild(build_ext):
    """Keeps its build directory, so that a second build compiles only what changed."""

    def run(self) -> None:
        if importlib.util.find_spec("torch") is None:
            sys.exit(
                "pagedattn_ext: building needs torch (2.10 or later), which is not installed in this environment.\n"
                "Install torch first, then build against it: pip install --no-build-isolation ."
            )
        platform = os.environ.get("_PYTHON_HOST_PLATFORM")
        build_dir = ROOT / "build" / f"cmake-{platform or sys.implementation.cache_tag}"
        in_place = self.inplace or getattr(self, "editable_mode", False)
        prefix = ROOT / "src" if in_place else Path(self.build_lib).resolve()
        cmake = find_tool("cmake")
        configure = [cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
        configure += ["-DPAGEDATTN_CPU_CAPABILITIES=all", "-DPAGEDATTN_CUDA=AUTO"]
        configure += ["-DPAGEDATTN_DRAFTS=OFF"]
        configure += os.environ.get("CMAKE_ARGS", "").split()
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build_dir), *jobs], check=True)
        subprocess.run([cmake, "--install", str(build_dir), "--prefix", str(prefix)], check=True)
        for older in prefix.glob("pagedattn_ext/_C.cpython-*.so"):  # of one Python alone, which would import it first
            older.unlink()

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    ext_modules=[Extension("pagedattn_ext._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": CMakeBuild},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
