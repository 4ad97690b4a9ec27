"""Which copy of the CPU kernels a process uses, in builds that do not have all copies (PAGEDATTN_CPU_CAPABILITIES)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import pagedattn_ext

CSRC = Path(__file__).resolve().parent.parent / "csrc"

PROGRAM = """
#include <csignal>
#include <cstdio>
#define PAGEDATTN_CPU_CAPABILITIES {names}
#include "cpu_dispatch.cpp"
int main() {{
  if ({refuse_tiles}) {{
    // The kernel refuses tiles to a process with a signal stack that is too small for them. AVX512 finds room on it.
    static char signal_stack[6144];
    const stack_t stack{{signal_stack, 0, sizeof signal_stack}};
    if (sigaltstack(&stack, nullptr) != 0) return 1;
  }}
  try {{
    for (const auto& name : pagedattn::available_cpu_capabilities()) std::printf("%s ", name.c_str());
    std::printf("| %s", pagedattn::cpu_capability_name(pagedattn::cpu_capability()));
  }} catch (const std::exception& error) {{
    std::printf("| %s", error.what());
  }}
}}
"""


def capability(directory: Path, compiled: list[str], asked: str = "", refuse_tiles: bool = False) -> str:
    """What a build for `compiled` has and uses here: "default avx2 | avx2", or the error in place of the last name."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = directory / "program.cpp", directory / "program"
    names = ", ".join(f'"{name}"' for name in compiled)
    source.write_text(PROGRAM.format(names=names, refuse_tiles=int(refuse_tiles)))
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


def test_tiles_that_the_kernel_refuses(tmp_path):
    """Would catch a process that uses tiles without permission, which ends by SIGILL."""
    available = pagedattn_ext.build_info()["cpu_capabilities"]
    if available[-1] != "amx":
        pytest.skip("this machine has no tiles")
    assert capability(tmp_path, available, refuse_tiles=True) == f"{' '.join(available[:-1])} | {available[-2]}"
    assert capability(tmp_path, available, asked="amx", refuse_tiles=True).endswith(
        "| PAGEDATTN_CPU_CAPABILITY: this machine does not run amx, its best is avx512_bf16"
    )
