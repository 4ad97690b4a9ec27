"""What says for which Pythons and systems a wheel is says the same everywhere: the build, `make wheel`, cibuildwheel's
configuration and RELEASING.md. tests/wheels tries the wheels themselves."""

import os
import platform
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CIBUILDWHEEL = PROJECT["tool"]["cibuildwheel"]
SYSTEM = "manylinux_2_28"
OTHER = {"x86_64": "aarch64"}.get(platform.machine(), "x86_64")


def commands_of(*arguments: str) -> str:
    """What make would do, each command in a line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", "CUDA=", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return re.sub(r"\s*\\\n\s*", " ", done.stdout)


def test_the_oldest_python() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=3.")
    assert PROJECT["project"]["requires-python"] == f">=3.{oldest}"
    assert CIBUILDWHEEL["build"] == f"cp3{oldest}-manylinux_*"
    assert f'"py_limited_api": "cp3{oldest}"' in (ROOT / "setup.py").read_text()
    limited_api = f"#define Py_LIMITED_API 0x03{int(oldest):02X}0000\n"
    assert limited_api in (ROOT / "csrc" / "python_module.cpp").read_text()


def test_both_ways_to_build_a_wheel() -> None:
    images = CIBUILDWHEEL["linux"]
    assert {images["manylinux-x86_64-image"], images["manylinux-aarch64-image"]} == {SYSTEM}
    commands = commands_of("wheel")
    assert f"--plat {SYSTEM}_{platform.machine()} " in commands and "CMAKE_SYSTEM_NAME" not in commands
    for options in ("--strip", "--only-plat", "--exclude libtorch_cpu.so"):
        assert options in commands and options in images["repair-wheel-command"]
    for package in CIBUILDWHEEL["test-requires"]:  # a release of a tool is the same in both
        assert "==" not in package or package in commands


def test_a_wheel_for_another_processor() -> None:
    commands = commands_of("wheel", f"ARCH={OTHER}")
    for words in (
        f"_PYTHON_HOST_PLATFORM=linux-{OTHER} ",
        f"-DCMAKE_SYSTEM_PROCESSOR={OTHER} ",
        f"-DCMAKE_CXX_COMPILER={OTHER}-linux-gnu-g++ ",
        f"ls -l dist/{OTHER}/pagedattn_ext-*-{SYSTEM}_{OTHER}.whl",
    ):
        assert words in commands
    assert "./python" not in commands  # the engine's is for all of them
    assert f"release/hub.py build/hub --wheel dist/{OTHER}/" in commands_of("hub", f"ARCH={OTHER}")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_a_maintainer_is_told(machine: str) -> None:
    assert f"`pagedattn_ext-VERSION-cp311-abi3-{SYSTEM}_{machine}.whl`" in (ROOT / "RELEASING.md").read_text()
