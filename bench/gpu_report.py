"""What the CUDA kernels do on a GPU, and how fast, the most important first: for a GPU that is there for half an hour.

Usage: python bench/gpu_report.py [--out DIR] [--pack FILE] [--budget SECONDS] [--wheel FILE] [--steps NAME ...]
           [--device simt] [--dry-run]
       python bench/gpu_report.py --docs DIR [DIR ...]

Each step runs a few commands with this Python and its packages: torch for CUDA, pytest, hypothesis, transformers. Each
command has a limit of time, after which it is interrupted, then killed. DIR gets a log of each command, JSON of what
was measured, and summary.json. These are written anew after each command, so a machine that goes away leaves what was
done. FILE is one archive (.tar.gz) of DIR, written anew every few seconds, for machines from which only few files come
back. With --budget no command begins with less than half of its time left, and all commands end within the budget. The
report names what was left out. The last lines on stdout are a summary that fits in 10,000 characters.

With --wheel the extension comes from a wheel that `make wheel CUDA=1` has built. Without it, the extension is
taken from src/pagedattn_ext, and built there first if it is missing, which takes minutes.

If the smoke tests find a mechanism broken (wgmma, clusters, bulk copies, programmatic dependent launch), the report
names it, and PAGEDATTN_CUDA_WITHOUT leaves it out of what comes after. The report ends early only if no smoke test
passes.

--device simt tries this program where there is no GPU: the op tests on the simt device (`make simt`), all else on the
CPU. --docs puts what is in the folders of one or more runs into docs/cuda-kernels.md. The exit status is 0 if nothing
failed, nothing took too long and nothing was left out.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu import docs
from gpu.commands import GRACE_SECONDS, ROOT, Command, not_run, path_with_tools, run_together
from gpu.steps import STEPS, Outcomes, Step, Work

PACK_SECONDS = 10.0  # between two archives
PACKED = (".log", ".json", ".txt")
MAX_SUMMARY = 10_000  # characters
WIDTH = 160  # of a line of a log that is printed


@dataclass
class Report:
    """summary.json, the archive, and a line on stdout for each command."""

    out: Path
    options: Mapping[str, Any]
    pack: Path | None = None
    seconds: float = float("inf")  # that all may take
    steps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)  # mechanisms
    took: dict[str, float] = field(default_factory=dict)  # seconds, of each step
    started: float = field(default_factory=time.monotonic)
    packed: float = float("-inf")

    def __post_init__(self) -> None:
        self.write()

    def add(self, step: str, outcomes: Outcomes) -> None:
        self.steps.setdefault(step, []).extend(outcomes)
        self.write()
        self.write_archive_now_and_then()
        for outcome in outcomes:
            line = f"{outcome['name']:22} {outcome['status']:9} {outcome['seconds']:6.1f} s  {self.details(outcome)}"
            print(line, flush=True)

    def details(self, outcome: Mapping[str, Any]) -> str:
        """The end of a command's line: what was counted, and why the command did not pass."""
        first = outcome.get("reason") or ", ".join(f"{n} {name}" for name, n in outcome.get("counts", {}).items())
        more = outcome.get("failures", [])[:5]
        if outcome["status"] in ("failed", "timed out") and not more:
            log = (self.out / f"{outcome['name']}.log").read_text(errors="replace").splitlines()
            more = log[-10:] if outcome["status"] == "failed" else log[-3:]
        return "\n    ".join([first, *(line[:WIDTH] for line in more)])

    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def write(self) -> None:
        summary = {"command": shlex.join(["python", *sys.argv]), **self.options}
        summary |= {"without": self.without, "steps": self.steps}
        whole = self.out / "summary.json.new"
        whole.write_text(json.dumps(summary, indent=1) + "\n")
        whole.replace(self.out / "summary.json")

    def write_archive(self) -> None:
        if self.pack is None:
            return
        whole = self.pack.with_name(f"{self.pack.name}.new")
        with tarfile.open(whole, "w:gz", compresslevel=6) as archive:
            for path in sorted(self.out.iterdir()):
                if path.suffix in PACKED:
                    archive.add(path, path.name)
        whole.replace(self.pack)
        self.packed = time.monotonic()

    def write_archive_now_and_then(self) -> None:
        if time.monotonic() - self.packed > PACK_SECONDS:
            self.write_archive()

    def finish(self) -> None:
        """Print what matters in few lines, for readers who see only the end of the output."""
        self.write()
        self.write_archive()
        text = self.text_of_summary()
        (self.out / "summary.txt").write_text(text)
        self.write_archive()
        print(text, end="", flush=True)

    def text_of_summary(self) -> str:
        outcomes = [outcome for of_step in self.steps.values() for outcome in of_step]
        failures = [test for outcome in outcomes for test in outcome.get("failures", [])]
        lines = ["", "==== summary", *docs.measured([self.out]), ""]
        lines += [f"failed: {test}" for test in list(dict.fromkeys(failures))[:20]]
        for status in "failed", "timed out", "not run":
            described = [each["name"] for each in outcomes if each["status"] == status]
            if described:
                lines.append(f"{status}: {', '.join(described)}")
        if self.without:
            lines.append(f"broken, and left out behind the smoke tests: {', '.join(self.without)}")
        took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.took.items())
        lines.append(f"{time.monotonic() - self.started:.0f} s in all: {took}")
        lines.append(f"results: {self.pack or self.out}")
        return "\n".join(lines)[-MAX_SUMMARY:] + "\n"

    def is_good(self) -> bool:
        outcomes = [outcome for step in self.steps.values() for outcome in step]
        return all(outcome["status"] == "passed" for outcome in outcomes)


def first_failure(outcomes: Outcomes) -> str | None:
    """A test that failed, or was running when its process was stopped."""
    return next((test for outcome in outcomes for test in outcome.get("failures", [])), None)


def is_hopeless(step: str, outcomes: Outcomes) -> bool:
    """Whether the steps after this one are not worth their time."""
    if step == "build":
        return any(outcome["status"] != "passed" for outcome in outcomes)
    return step == "smoke" and not any(outcome.get("counts", {}).get("passed") for outcome in outcomes)


def run_in_time(commands: Sequence[Command], report: Report) -> Outcomes:
    """The commands, within what the budget leaves."""
    left = report.seconds_left() - GRACE_SECONDS
    seconds = max(command.seconds for command in commands)
    if left < seconds / 2:
        reason = f"{max(left, 0):.0f} s of the budget were left, of {seconds:.0f} s that it may take"
        return [not_run(command.name, reason) for command in commands]
    in_time = [replace(command, seconds=min(command.seconds, left)) for command in commands]
    return run_together(in_time, report.out, report.write_archive_now_and_then)


def outcomes_of(step: Step, run: Callable[[Sequence[Command]], Outcomes]) -> Iterator[Outcomes]:
    """Of the step's commands, which depend on the outcomes of those before."""
    commands = next(step, None)
    while commands is not None:
        outcomes = run(commands)
        yield outcomes
        try:
            commands = step.send(outcomes)
        except StopIteration:
            return


def run_step(name: str, step: Step, report: Report, work: Work) -> bool:
    """Run a step. Returns whether the later steps are worth their time."""
    for outcomes in outcomes_of(step, lambda commands: run_in_time(commands, report)):
        report.add(name, outcomes)
        if is_hopeless(name, outcomes):
            if test := first_failure(outcomes):
                report.add(name, run_in_time([work.sanitize("memcheck", "smoke-memcheck", [test])], report))
            return False
    return True


def run_report(steps: Mapping[str, Callable[[Work], Step]], report: Report, work: Work) -> bool:
    """Whether all went well."""
    stopped = ""
    for name, make in steps.items():
        started = time.monotonic()
        if stopped:
            report.add(name, [not_run(name, stopped)])
        elif not run_step(name, make(work), report, work):
            stopped = f"nothing of {name} passed" if name == "smoke" else f"{name} failed"
            print(f"{stopped}: the steps after it are left out")
        report.took[name] = time.monotonic() - started
        if work.broken != report.without:
            report.without = work.broken
            print(f"broken, and left out from here on: {', '.join(work.broken)}")
    return report.is_good()


def show(step: str, commands: Sequence[Command]) -> Outcomes:
    for command in commands:
        print(f"{step:10} {command.name:22} {command.seconds:4.0f} s  {shlex.join(command.argv)}")
    return []


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "build/gpu-report", metavar="DIR", help="default: build/gpu-report")
    add("--pack", type=Path, metavar="FILE", help="an archive of what is in DIR, written as it comes")
    add("--budget", type=float, default=float("inf"), metavar="SECONDS", help="that all may take; default: no end")
    add("--wheel", type=Path, metavar="FILE", help="of pagedattn_ext, instead of what lies in src and python")
    names = [name for name in STEPS if name != "build"]
    add("--steps", choices=names, nargs="+", default=names, metavar="NAME", help=f"in your order: {', '.join(names)}")
    add("--device", choices=["cuda", "simt"], default="cuda", help="default: %(default)s")
    add("--dry-run", action="store_true", help="print the commands")
    add("--docs", type=Path, nargs="+", metavar="DIR", help="put what is in DIR into docs/cuda-kernels.md; run nothing")
    args = parser.parse_args()
    if args.wheel and not zipfile.is_zipfile(args.wheel):
        parser.error(f"--wheel: expected a wheel, got {args.wheel}")
    if not args.budget > 0:
        parser.error(f"--budget: expected a number of seconds, got {args.budget:g}")
    return args


def main() -> int:
    args = parse_args()
    if args.docs:
        docs.write(args.docs, ROOT / "docs/cuda-kernels.md")
        return 0
    # cmake, ninja and other tools of this Python's environment, which need not be the active one; those of CUDA.
    os.environ["PATH"] = path_with_tools(Path(sys.executable).parent)
    out = args.out.resolve()
    work = Work(args.device, out, args.wheel and args.wheel.resolve())
    steps = {name: STEPS[name] for name in ("build", *args.steps)}
    if args.dry_run:
        for name, make in steps.items():
            for _ in outcomes_of(make(work), partial(show, name)):
                pass
        return 0
    for folder in (out, *([args.pack.resolve().parent] if args.pack else [])):
        folder.mkdir(parents=True, exist_ok=True)
    report = Report(out, {"device": args.device}, args.pack and args.pack.resolve(), args.budget)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that commands are killed on the way
    try:
        return 0 if run_report(steps, report, work) else 1
    finally:
        report.finish()


if __name__ == "__main__":
    sys.exit(main())
