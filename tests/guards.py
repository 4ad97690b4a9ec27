"""Prints which tests guard a file: make tests-of FILE=python/pagedattn_serve/engine.py

First come the tests that lie where the file lies, or have its name. Then come the planted bugs of tests/mutants that
change the file, each with the tests that catch it.
"""

import argparse
from pathlib import Path

from mutants.run import ROOT, all_mutants

TESTS_OF = {"pagedattn_serve": "serving", "pagedattn_simulate": "simulate"}
OPS = ("src", "pagedattn_ext", "ops")


def tests_by_layout(file: str) -> list[str]:
    """Folders and files of tests, as paths from the root. The file need not exist."""
    path = Path(file).with_suffix("")
    if path.parts[0] == "tests":
        return [file]
    if path.parts[0] == "python" and path.parts[1] in TESTS_OF:
        room = ROOT / "tests" / TESTS_OF[path.parts[1]]
        for part in path.parts[2:]:
            if not (room / part).is_dir():
                break
            room /= part
        found = [*(ROOT / "tests").rglob(f"test_{path.name}.py")]
        if room.name != "serving":
            found = [room, *(each for each in found if room not in each.parents)]
    elif path.parts[0] == "csrc" or path.parts[:3] == OPS:
        family = path.parts[1] if path.parts[0] == "csrc" else path.name
        found = [*(ROOT / "tests").rglob(f"test_{family}*.py")]
    else:
        names = {*path.parts[1:]} - {"pagedattn_ext"}
        found = [each for name in names for each in (ROOT / "tests").rglob(f"test_{name}.py")]
    return sorted({each.relative_to(ROOT).as_posix() for each in found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="a file of the repository")
    path = Path(parser.parse_args().file).resolve()
    if not (path.is_file() and path.is_relative_to(ROOT)):
        parser.error(f"FILE: expected a file in {ROOT}, got {path}")
    file = path.relative_to(ROOT).as_posix()
    for test in tests_by_layout(file):
        print(test)
    for mutant in all_mutants():
        if file in mutant.files:
            print(f"{' '.join(mutant.pytest_arguments)}  # {mutant.name}")


if __name__ == "__main__":
    main()
