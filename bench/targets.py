"""The speeds that this project asks of itself, and what it reaches here.

Usage: python bench/targets.py [--device cuda] [--only SUBSTRING ...] [--vllm PYTHON] [--json FILE [--go-on]]

The targets are in targets_cpu.py and targets_cuda.py; this file measures them, prints and writes.

A percentage is our rate over that of a probe, a factor a peer's time over ours, both timed in the same rounds. The run
takes half an hour and is sensitive to noise: near a limit, repeat it. The exit status is 0 whether targets are met or
not, and 1 if one could not be measured. FILE is written anew after each target: a run that is cut off leaves what it
has measured, and --go-on measures the rest. A run ends with status 3 where an error has made the GPU useless for its
process.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import targets_cpu
import targets_cuda
import vllm_kernels
from harness import Target, add_device_option, check_device, hardware, prepare, synchronize, write_json

WIDTH = 84

UNFINISHED = "the process ended meanwhile"
STATUS_OF_LOST_GPU = 3


def measured(target: Target) -> dict[str, object]:
    """Measure and print a target; returns what goes into the JSON file. An error ends this target only."""
    try:
        value = target.measure()
        found = {
            "measured": value,
            "met": target.is_met(value),
            "note": target.note(),
            "row": target.row().as_dict() if target.row else None,
        }
    except Exception as error:  # wrong results, too little memory, a kernel that fails
        print(f"{target.what:{WIDTH}}  failed: {type(error).__name__}: {error}", flush=True)
        found = {"error": f"{type(error).__name__}: {error}"}
    else:
        numbers = "  ".join(target.form.format(number).rjust(8) for number in (target.required, value))
        outcome = f"{'met' if found['met'] else 'not met'} {found['note']}".rstrip()
        print(f"{target.what:{WIDTH}}  {numbers}  {outcome}", flush=True)
    return described(target, found)


def described(target: Target, found: Mapping[str, object]) -> dict[str, object]:
    return {"what": target.what, "required": target.required, "at_most": target.at_most, **found}


def is_gpu_lost() -> bool:
    """After an illegal address and the like, every call of the process fails."""
    try:
        synchronize()
    except Exception:  # RuntimeError, or torch.AcceleratorError
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_device_option(parser)
    only = "the targets whose description contains one of them"
    parser.add_argument("--only", nargs="+", default=[""], metavar="SUBSTRING", help=only)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write hardware, command, targets and raw times")
    parser.add_argument("--go-on", action="store_true", help="keep what FILE has, and measure what it lacks")
    vllm_kernels.add_option(parser)
    args = parser.parse_args()
    if args.go_on and not args.json:
        parser.error("--go-on: expected --json FILE beside it")
    check_device(parser, args.device)
    of_device = targets_cuda if args.device == "cuda" else targets_cpu
    for part in args.only:
        if not any(part in target.what for target in of_device.targets()):
            parser.error(f"--only: expected a part of a target's description, got {part!r}")
    vllm_kernels.load(parser, args.vllm)
    prepare(num_threads=1)
    facts = hardware(args.device)
    results: list[dict[str, object]] = []
    if args.go_on and args.json.exists():
        results = json.loads(args.json.read_text())["targets"]

    def save() -> None:
        if args.json:
            write_json(args.json, facts, {"targets": results})

    print(f"\n{'what':{WIDTH}}  required  measured", flush=True)
    known = {result["what"] for result in results}
    for target in of_device.targets():
        if target.what in known or not any(part in target.what for part in args.only):
            continue
        results.append(described(target, {"error": UNFINISHED}))  # one that ends the process is not tried again
        save()
        results[-1] = measured(target)
        save()
        if "error" in results[-1] and is_gpu_lost():
            print("the GPU is lost to this process: the targets after this one are left out", flush=True)
            return STATUS_OF_LOST_GPU
    num_failed = sum("error" in result for result in results)
    failed = f", {num_failed} failed" if num_failed else ""
    print(f"\n{sum(bool(result.get('met')) for result in results)} of {len(results)} met{failed}")
    print(of_device.not_measured())
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
