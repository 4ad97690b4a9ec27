"""Which copy of the CPU kernels a process uses, in builds that do not have all copies (PAGEDATTN_CPU_CAPABILITIES)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import pagedattn_ext

CSRC = Path(__file__).resolve().parent.parent / "csrc"

PROGRAM = """
#include <cstdio>
#define PAGEDATTN_CPU_CAPABILITIES {names}
#include "cpu_dispatch.cpp"
int main() {{
  try {{
    for (const auto& name : pagedattn::available_cpu_capabilities()) std::printf("%s ", name.c_str());
    std::printf("| %s", pagedattn::cpu_capability_name(pagedattn::cpu_capability()));
  }} catch (const std::exception& error) {{
    std::printf("| %s", error.what());
  }}
}}
"""


def capability(directory: Path, compiled: list[str], asked: str = "") -> str:
    """What a build for `compiled` has and uses here: "default avx2 | avx2", or the error in place of the last name."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = directory / "program.cpp", directory / "program"
    source.write_text(PROGRAM.format(names=", ".join(f'"{name}"' for name in compiled)))
    subprocess.run([compiler, "-std=c++20", f"-I{CSRC}", str(source), "-o", str(program)], check=True)
    environment = {**os.environ, "PAGEDATTN_CPU_CAPABILITY": asked}
    return subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout


def test_the_best_of_what_is_compiled(tmp_path):
    assert capability(tmp_path, ["default"]) == "default | default"
    available = pagedattn_ext.build_info()["cpu_capabilities"]
    assert capability(tmp_path, available) == f"{' '.join(available)} | {available[-1]}"


def test_one_that_is_not_compiled(tmp_path):
    best = pagedattn_ext.build_info()["cpu_capabilities"][-1]
    if best == "default":
        pytest.skip("this machine has no other capability")
    expected = (
        f"PAGEDATTN_CPU_CAPABILITY: expected one that this build has (default), got {best}: `make build` compiles all"
    )
    assert capability(tmp_path, ["default"], asked=best) == f"default | {expected}"


def test_a_build_for_better_machines(tmp_path):
    best = pagedattn_ext.build_info()["cpu_capabilities"][-1]
    assert capability(tmp_path, ["avx1024", "avx2048"]) == (
        "| pagedattn_ext: this build is for machines with avx1024, avx2048, the best that this machine runs is "
        f"{best}: build it with PAGEDATTN_CPU_CAPABILITIES=all"
    )
