"""What the CUDA kernels do on a GPU, and how fast, in the order of worth: for a GPU that is there for half an hour.

Usage: python bench/gpu_report.py [--out DIR] [--wheel FILE] [--steps NAME ...] [--device simt] [--dry-run]
       python bench/gpu_report.py --docs DIR [DIR ...]

Each step runs a few commands with this Python and its packages: torch for CUDA, pytest, hypothesis, transformers. All
have a limit of time, after which they are interrupted, then killed. DIR gets a log of each command, JUnit XML of the
tests, JSON of what was measured, and summary.json, written anew after each command: a machine that goes away leaves
what was done. Unless --wheel names one that `make gpu-wheel` has built, the extension for this Python is taken from
src/pagedattn_ext, and built there first where it is missing.

--device simt tries this program where there is no GPU: the op tests on the simt device (`make simt`), all else on the
CPU. --docs puts what is in the folders of one or more runs into docs/cuda-kernels.md. The exit status is 0 if nothing
failed and nothing took too long.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu import docs
from gpu.commands import ROOT, Command, run_together
from gpu.steps import STEPS, Work

ESSENTIAL = ("build", "smoke")  # if one of them fails, what comes after it is not worth its time


class Report:
    """summary.json, and a line on stdout for each command."""

    def __init__(self, out: Path, options: Mapping[str, Any]) -> None:
        self.out = out
        self.summary: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), **options, "steps": {}}
        self.write()

    def add(self, step: str, outcomes: Sequence[dict[str, Any]]) -> None:
        self.summary["steps"].setdefault(step, []).extend(outcomes)
        self.write()
        for outcome in outcomes:
            print(f"{outcome['name']:22} {outcome['status']:9} {outcome['seconds']:6.1f} s  {self.details(outcome)}")
            sys.stdout.flush()

    def details(self, outcome: Mapping[str, Any]) -> str:
        """Behind the line: what was counted, and why it is not good."""
        first = outcome.get("reason") or ", ".join(f"{n} {name}" for name, n in outcome.get("counts", {}).items())
        more = outcome.get("failures", [])[:10]
        if outcome["status"] in ("failed", "timed out") and not more:
            log = (self.out / f"{outcome['name']}.log").read_text(errors="replace").splitlines()
            more = log[-15:] if outcome["status"] == "failed" else log[-3:]
        return "\n    ".join([first, *more])

    def write(self) -> None:
        whole = self.out / "summary.json.new"
        whole.write_text(json.dumps(self.summary, indent=1) + "\n")
        whole.replace(self.out / "summary.json")

    def is_good(self) -> bool:
        outcomes = [outcome for step in self.summary["steps"].values() for outcome in step]
        return all(outcome["status"] in ("passed", "skipped") for outcome in outcomes)


def first_failure(outcomes: Sequence[Mapping[str, Any]]) -> str | None:
    """A test that failed, or was running when its process was stopped."""
    return next((test for outcome in outcomes for test in outcome.get("failures", [])), None)


def run_report(steps: Mapping[str, Sequence[Sequence[Command]]], report: Report, work: Work) -> bool:
    """Whether all went well. A step is groups of commands, one group after the other."""
    for name, groups in steps.items():
        for commands in groups:
            outcomes = run_together(commands, report.out)
            report.add(name, outcomes)
            if name not in ESSENTIAL or all(outcome["status"] == "passed" for outcome in outcomes):
                continue
            if test := first_failure(outcomes):
                report.add(name, run_together([work.sanitize("memcheck", "smoke-memcheck", [test])], report.out))
            print(f"{name} has failed: the steps after it are left out")
            return False
    return report.is_good()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "build/gpu-report", metavar="DIR", help="default: build/gpu-report")
    add("--wheel", type=Path, metavar="FILE", help="of pagedattn_ext, instead of what lies in src and python")
    names = [name for name in STEPS if name != "build"]
    add("--steps", choices=names, nargs="+", default=names, metavar="NAME", help=f"in this order: {', '.join(names)}")
    add("--device", choices=["cuda", "simt"], default="cuda", help="default: %(default)s")
    add("--dry-run", action="store_true", help="print the commands")
    add("--docs", type=Path, nargs="+", metavar="DIR", help="put what is in DIR into docs/cuda-kernels.md; run nothing")
    args = parser.parse_args()
    if args.wheel and not zipfile.is_zipfile(args.wheel):
        parser.error(f"--wheel: expected a wheel, got {args.wheel}")
    return args


def main() -> int:
    args = parse_args()
    if args.docs:
        docs.write(args.docs, ROOT / "docs/cuda-kernels.md")
        return 0
    # cmake, ninja and other tools of this Python's environment, which need not be the one that is active.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    out = args.out.resolve()
    work = Work(args.device, out, args.wheel and args.wheel.resolve())
    steps = {name: groups(work) for name, groups in STEPS.items() if name in ("build", *args.steps)}
    if args.dry_run:
        for name, groups in steps.items():
            for command in (command for commands in groups for command in commands):
                print(f"{name:9} {command.seconds:4.0f} s  {shlex.join(command.argv)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that commands are killed on the way
    return 0 if run_report(steps, Report(out, {"device": args.device}), work) else 1


if __name__ == "__main__":
    sys.exit(main())
