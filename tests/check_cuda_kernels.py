"""What nvcc made of each CUDA kernel: registers, shared memory, spills. Fails if a kernel spills, or waits for each
wgmma before the next one because ptxas found its registers in use.

    python tests/check_cuda_kernels.py BUILD_DIRECTORY

Reads what ptxas (-Xptxas=-v) said when the kernels were built: CMake runs nvcc through this program, with --compile
before the command, which keeps it beside each object file.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".ptxas"
FUNCTION = re.compile(r"ptxas info\s*: Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'")
SPILLS = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill")
SERIALIZED = re.compile(r"wgmma.* serialized due to (?P<why>.*) in the function '(?P<name>\w+)'")
USED = re.compile(r"ptxas info\s*: Used (?P<registers>\d+) registers(.*, (?P<shared>\d+) bytes smem)?")


@dataclass
class Kernel:
    name: str
    arch: str
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    registers: int = 0
    static_shared: int = 0


def compile_and_keep(command: list[str]) -> int:
    """Runs nvcc; what ptxas says goes to a file beside the object, anything else to stderr. The file is empty for
    kernels with few optimisations (-Ofc): their registers are not those of the kernels that are released."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    kept, shown = [], []
    for line in done.stderr.splitlines(keepends=True):
        is_info = "ptxas info" in line or SPILLS.search(line)
        (kept if is_info else shown).append(line)
    sys.stderr.writelines(shown)
    if "-o" in command:
        Path(command[command.index("-o") + 1] + SUFFIX).write_text("" if "-Ofc" in command else "".join(kept))
    return done.returncode


def kernels_of(log: str) -> Iterator[Kernel]:
    kernel = None
    for line in log.splitlines():
        if match := FUNCTION.search(line):
            kernel = Kernel(match["name"], match["arch"])
        elif kernel is None:
            continue
        elif match := SPILLS.search(line):
            kernel.stack, kernel.spill_stores, kernel.spill_loads = (int(number) for number in match.groups())
        elif match := USED.search(line):
            kernel.registers, kernel.static_shared = int(match["registers"]), int(match["shared"] or 0)
            yield kernel
            kernel = None


def serialized_kernels(log: str) -> dict[str, str]:
    """Why, by the kernel's name."""
    return {match["name"]: match["why"] for match in SERIALIZED.finditer(log)}


def readable(names: list[str]) -> list[str]:
    if shutil.which("c++filt") is None:
        return names
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [
        re.sub(r"pagedattn::|cuda::|\(anonymous namespace\)::|^void |\([^()]*\)$", "", name)
        for name in done.stdout.splitlines()
    ]


def report(build: Path) -> int:
    logs = [path.read_text() for path in sorted(build.rglob(f"*{SUFFIX}"))]
    kernels = [kernel for log in logs for kernel in kernels_of(log)]
    serialized = {name: why for log in logs for name, why in serialized_kernels(log).items()}
    if not kernels:
        print(f"{build}: no CUDA kernels were built here (-DPAGEDATTN_CUDA=ON)", file=sys.stderr)
        return 1
    print(f"{'arch':8}{'registers':>10}{'shared':>8}{'stack':>7}{'spills':>8}  kernel (shared: static bytes)")
    spilling = 0
    for kernel, name in zip(kernels, readable([kernel.name for kernel in kernels]), strict=True):
        spills = kernel.spill_stores + kernel.spill_loads
        spilling += spills > 0
        numbers = f"{kernel.registers:10}{kernel.static_shared:8}{kernel.stack:7}{spills:8}"
        print(f"{kernel.arch:8}{numbers}  {name}{'  <- spills' if spills else ''}")
    for name, why in zip(readable(list(serialized)), serialized.values(), strict=True):
        print(f"{name}: wgmma serialized, {why}")
    print(f"{len(kernels)} kernels in {len(logs)} files, {spilling} of them spill")
    return 1 if spilling or serialized else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        sys.exit(compile_and_keep(sys.argv[2:]))
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(report(Path(sys.argv[1])))
