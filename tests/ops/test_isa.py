"""One binary for every machine of an architecture: what instructions each part of it holds (on x86-64), and which
part a process uses.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict

import pytest

import pagedattn_ext
from pagedattn_ext import _C

X86_LEVELS = ["default", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
LEVELS = ["default", "neon", "neon_bf16"] if platform.machine() in {"aarch64", "arm64"} else X86_LEVELS
EXPECTED = f"expected {', '.join(LEVELS[:-1])} or {LEVELS[-1]}"
OUTSIDE = "outside"  # of the namespaces cpu_*

# The namespace in a name that objdump cannot demangle, as those of some lambdas, and its length.
NAMESPACE_OF_MANGLED = re.compile(r"9pagedattn(\d+)(cpu_\w+)")

# In AT&T syntax. A mnemonic with a v is VEX or EVEX coded, and faults on a machine without AVX whatever its registers.
VEX = re.compile(r"^v")
EVEX = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])")
VNNI = re.compile(r"^v(pdp(bus|wss)ds?|perm[it]?2?b|pmultishiftqb)\b")  # and VBMI
BF16 = re.compile(r"^v(dpbf16|cvtne2?ps2?bf16)")
AMX = re.compile(r"^(t(ile|dp)|(ld|st)tilecfg)")
FORBIDDEN = {
    OUTSIDE: [VEX, AMX],
    "default": [VEX, AMX],
    "avx2": [EVEX, AMX],
    "avx512": [VNNI, BF16, AMX],
    "avx512_vnni": [BF16, AMX],
    "avx512_bf16": [AMX],
    "amx": [],
}


@pytest.fixture(scope="module")
def code() -> dict[str, list[tuple[str, str]]]:
    """The (function, instruction) pairs of each namespace, by its capability."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", _C.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "file format elf64-x86-64" not in listing:
        pytest.skip("not an x86-64 build")
    code, function, level = defaultdict(list), "", OUTSIDE
    for line in listing.splitlines():
        if label := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = label[1]
            levels = set(re.findall(r"\bpagedattn::cpu_(\w+)::", function))
            if mangled := NAMESPACE_OF_MANGLED.search(function):
                levels.add(mangled[2][: int(mangled[1])].removeprefix("cpu_"))
            assert len(levels) <= 1, f"one function for several capabilities: {function}"
            level = levels.pop() if levels else OUTSIDE
        elif instruction := re.match(r"\s+[0-9a-f]+:\t(.*)", line):
            code[level].append((function, instruction[1]))
    return code


def functions_with(pattern: re.Pattern, code: list[tuple[str, str]]) -> set[str]:
    return {function for function, instruction in code if pattern.search(instruction)}


@pytest.mark.parametrize("level", [OUTSIDE, *X86_LEVELS])
def test_no_instruction_beyond_the_capability(code, level):
    for pattern in FORBIDDEN[level]:
        assert not functions_with(pattern, code[level])


def test_the_patterns_find_what_is_there(code):
    """Else the test above would pass on anything."""
    assert set(code) == {OUTSIDE, *X86_LEVELS}
    ymm, zmm = re.compile("%ymm"), re.compile("%zmm")
    has = {"avx2": [VEX, ymm], "avx512": [zmm, EVEX], "avx512_vnni": [VNNI], "avx512_bf16": [VNNI, BF16], "amx": [AMX]}
    for level, patterns in has.items():
        for pattern in patterns:
            found = " ".join(functions_with(pattern, code[level]))
            assert re.search("compute_logits|attend_rows|linear_int8_tiles", found), f"{level}: no {pattern.pattern}"


@pytest.mark.devices("cpu")
@pytest.mark.code_for("avx512_vnni", "avx512_bf16", "amx")
def test_capability_of_a_test(device, request):
    """`make test` runs the op tests on every instruction set that the machine has. This says that they do."""
    available = pagedattn_ext.build_info()["cpu_capabilities"]
    asked = request.node.callspec.params["device"].removeprefix("cpu").removeprefix("-")
    asked = asked or os.environ.get("PAGEDATTN_CPU_CAPABILITY") or available[-1]
    assert pagedattn_ext.cpu_capability() == asked


def test_capability_of_a_running_process():
    available = pagedattn_ext.build_info()["cpu_capabilities"]
    before = pagedattn_ext.cpu_capability()
    for name in [*available, ""]:
        _C.set_cpu_capability(name)
        assert pagedattn_ext.cpu_capability() == (name or before)
    with pytest.raises(RuntimeError, match=f"{EXPECTED}, got sse$"):
        _C.set_cpu_capability("sse")
    assert pagedattn_ext.cpu_capability() == before


# One import for all: the variable is read at the first call of an op, which is in a child.
FIRST_CALLS = """
import os, sys, torch, pagedattn_ext
for name in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        os.environ["PAGEDATTN_CPU_CAPABILITY"] = name
        try:
            result = torch.ops.pagedattn_ext.gelu_new(torch.empty(1), torch.ones(1)) or pagedattn_ext.cpu_capability()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        print(f"{name}|{result}".splitlines()[0], flush=True)
        os._exit(0)
    os.wait()
"""


def test_environment_variable():
    names = [*LEVELS, "", "avx1024", "AVX2"]
    command = [sys.executable, "-c", FIRST_CALLS, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result_of = dict(line.split("|", 1) for line in done.stdout.splitlines())
    available = pagedattn_ext.build_info()["cpu_capabilities"]
    assert result_of[""] == available[-1]
    for level in LEVELS:
        missing = (
            f"RuntimeError: PAGEDATTN_CPU_CAPABILITY: this machine does not run {level}, its best is {available[-1]}"
        )
        assert result_of[level] == (level if level in available else missing)
    for name in ("avx1024", "AVX2"):
        assert result_of[name] == f"RuntimeError: PAGEDATTN_CPU_CAPABILITY: {EXPECTED}, got {name}"
