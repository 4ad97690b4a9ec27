"""Which copy of the CPU kernels a process uses, in builds that do not have all copies (PAGEDATTN_CPU_CAPABILITIES)."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import pagedattn_ext

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

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


def run(directory: Path, source: str, **environment: str) -> str:
    """What a C++ program prints that includes files of csrc."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    file, program = directory / "program.cpp", directory / "program"
    file.write_text(source)
    subprocess.run([compiler, "-std=c++20", f"-I{CSRC}", str(file), "-o", str(program)], check=True)
    return subprocess.run([program], env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def capability(directory: Path, compiled: list[str], asked: str = "", refuse_tiles: bool = False) -> str:
    """What a build for `compiled` has and uses here: "default avx2 | avx2", or the error in place of the last name."""
    names = ", ".join(f'"{name}"' for name in compiled)
    source = PROGRAM.format(names=names, refuse_tiles=int(refuse_tiles))
    return run(directory, source, PAGEDATTN_CPU_CAPABILITY=asked)


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


def test_the_model(tmp_path):
    """A family that is read from the wrong bits: fetching ahead is slow then, and no other test sees it."""
    if not Path("/proc/cpuinfo").exists() or platform.machine() != "x86_64":
        pytest.skip("no x86-64 with a Linux that names the family")
    facts = dict(re.findall(r"^(vendor_id|cpu family)\s*: (\S+)$", Path("/proc/cpuinfo").read_text(), re.M))
    expected = facts == {"vendor_id": "AuthenticAMD", "cpu family": str(0x1A)}
    program = '#include <cstdio>\n#include "cpu_model.cpp"\nint main() { std::printf("%d", pagedattn::IS_ZEN_5); }\n'
    assert run(tmp_path, program) == str(int(expected))


def kernels_with_code_for(capability: str) -> set[str]:
    """The sources without their `_cpu.cpp`, and the attention kernels, that have a copy for it."""
    [sources] = re.findall(
        rf"set\(CPU_KERNELS_{capability.upper()}\n(.*?)\)", (ROOT / "CMakeLists.txt").read_text(), re.S
    )
    kernels = {Path(source).stem.removesuffix("_cpu") for source in sources.split()}
    order = ["default", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
    listed = re.findall(
        r"\n  KERNEL\((\w+), .*, (\w+), (\w+), \w+\)", (CSRC / "attention/cpu/attend_kernels.h").read_text()
    )
    return kernels | {
        name for name, lowest, highest in listed if capability in order[order.index(lowest) : order.index(highest) + 1]
    }


def test_which_kernels_have_code_beyond_avx512():
    """The tests of these kernels say so by the mark code_for, so that --device cpu-all runs them there. Would catch a
    kernel with a new copy that no test runs."""
    quantized = {"linear_int4", "linear_int8"}
    attention = {"int8", "e4m3", "e5m2", "nhd_e4m3", "nhd_e5m2"}
    assert kernels_with_code_for("avx512_vnni") == quantized | {f"attend_{cache}" for cache in attention}
    moving = {"block_transfer", "reshape_and_cache"}  # without a mark for anything
    for capability in ("avx512_bf16", "amx"):
        assert not kernels_with_code_for(capability) & (quantized | moving | {"attend_int8"})
