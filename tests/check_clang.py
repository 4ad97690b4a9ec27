"""Whether Clang takes what GCC has built: the syntax and the warnings of each C++ source, once.

    python tests/check_clang.py build/cmake-cpython-311 clang++-19

A CPU kernel is read as its highest instruction set compiles it. The commands are those of the build, without GCC's
precompiled headers: a source that does not include what it uses is found here.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

# libstdc++ 12 itself calls what it deprecates, in std::stable_sort.
OPTIONS = ["-fsyntax-only", "-Werror", "-Wno-deprecated-declarations"]


def main(build: Path, clang: str) -> int:
    entries = json.loads((build / "compile_commands.json").read_text())
    commands = {entry["file"]: entry for entry in entries if "simt" not in entry["output"]}
    sources = [entry for file, entry in commands.items() if file.endswith((".cpp", ".cxx")) and "cmake_pch" not in file]
    failed = 0
    for entry in sources:
        words = shlex.split(entry["command"])
        first = next(i for i, word in enumerate(words) if word.startswith("-"))  # behind the compiler and its launcher
        if "-include" in words:
            at = words.index("-include")
            del words[at : at + 2]
        failed += subprocess.run([clang, *words[first:], *OPTIONS], cwd=entry["directory"]).returncode != 0
    print(f"{clang}: {len(sources)} sources, {failed} with errors")
    return failed or len(sources) < 40


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]) > 0)
