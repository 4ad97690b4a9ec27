"""What bench/gpu_report.py has found, as a section of docs/cuda-kernels.md: all between two markers is replaced."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def write(folders: Sequence[Path], page: Path) -> None:
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page}: expected {BEGIN} and {END}")
    page.write_text("\n".join([before + BEGIN, "", *measured(folders), "", END + after]))


def measured(folders: Sequence[Path]) -> Iterator[str]:
    """Lines of Markdown. All steps may have taken several runs, each with a folder of its own. If several folders have
    a
    step, the last folder in which it was run counts."""

    def read(name: str) -> dict[str, Any]:
        paths = [folder / name for folder in folders if (folder / name).exists()]
        return json.loads(paths[-1].read_text()) if paths else {}

    steps: dict[str, Any] = {}
    for folder in folders:
        summary = folder / "summary.json"
        if not summary.exists():
            raise SystemExit(f"{folder}: expected summary.json of bench/gpu_report.py")
        for step, outcomes in json.loads(summary.read_text())["steps"].items():
            if step not in steps or any(outcome["status"] != "not run" for outcome in outcomes):
                steps[step] = outcomes
    yield from tests(steps)
    for name, table in TABLES.items():
        if report := read(name):
            hardware, command = report["hardware"], re.sub(r" --(json \S+|go-on)", "", report["command"])
            yield ""
            yield f"{hardware['gpu'] or hardware['cpu']}, torch {hardware['torch']}; `{command}`:"
            yield ""
            yield from table(report)


def tests(steps: Mapping[str, Any]) -> Iterator[str]:
    """A line for each step that has tests, or commands that did not pass."""
    described_statuses = ("failed", "timed out", "not run")
    for step, outcomes in steps.items():
        counts: dict[str, int] = {}
        for outcome in outcomes:
            for name, number in outcome.get("counts", {}).items():
                counts[name] = counts.get(name, 0) + number
        described = ", ".join(f"{number:,} {name}" for name, number in counts.items())
        others = [f"{each['name']} {each['status']}" for each in outcomes if each["status"] in described_statuses]
        if described or others:
            yield f"- {step}: {'; '.join([described, *others] if described else others)}"


def table_of_targets(report: Mapping[str, Any]) -> Iterator[str]:
    yield "| what | us | rate | of the probe | beside | target |"
    yield "|---|---|---|---|---|---|"
    for target in report["targets"]:
        name, _, criterion = target["what"].partition(": ")
        if "error" in target:
            yield f"| {name} | | | | | {cell(target['error'])} |"
            continue
        bound = f"{'at most' if target['at_most'] else 'at least'} {target['required']:g}"
        outcome = f"{criterion} {bound}: {'met' if target['met'] else 'not met'}"
        row = target["row"]
        if row is None:  # a ratio of two rows, on a CPU
            yield f"| {name} | | | | | {outcome} |"
            continue
        unit = next(key for key in row if key in ("GB/s", "GFLOP/s"))
        rate = f"{row[unit]:,.0f} {unit}" if unit == "GB/s" else f"{row[unit] / 1e3:,.1f} TFLOP/s"
        share = next(f"{row[key]:.0%} ({key.split('_')[2]})" for key in row if key.startswith("share_of_"))
        ratios = {key.removeprefix("ratio_to_"): row[key] for key in row if key.startswith("ratio_to_")}
        peers = ", ".join(f"{peer} {ratio:.2f}x" for peer, ratio in ratios.items())
        micros = median(row["seconds"]["ours"]) * 1e6
        beside = cell(f"{peers} ({row['note']})" if row["note"] else peers)
        yield f"| {name} | {micros:,.1f} | {rate} | {share} | {beside} | {outcome} |"


def table_of_serving(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"| {report['num_requests']} requests, bfloat16 | tokens/s | the engine is |"
    yield "|---|---|---|"
    for name, peer in report["peers"].items():
        yield f"| {name} | {peer['tokens_per_s']:,.0f} | {peer['ratio']:.2f}x |"


def table_of_mechanisms(report: Mapping[str, Any]) -> Iterator[str]:
    yield "| what | us | without | takes |"
    yield "|---|---|---|---|"
    for row in report["rows"]:
        if "error" in row:
            yield f"| {row['case']} | | | {cell(row['error'])} |"
            continue
        [(name, ratio)] = ((key, row[key]) for key in row if key.startswith("ratio_to_"))
        micros = median(row["seconds"]["ours"]) * 1e6
        yield f"| {row['group']}, {row['case']} | {micros:,.1f} | {name.rpartition(' ')[2]} | {ratio:.2f}x |"


TABLES = {
    "targets.json": table_of_targets,
    "mechanisms.json": table_of_mechanisms,
    "serving.json": table_of_serving,
}


def cell(text: str) -> str:
    """On one line, without what would end a cell."""
    return " ".join(text.replace("|", "/").split())[:120]
