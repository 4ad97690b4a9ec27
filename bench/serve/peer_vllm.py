"""vLLM on a CPU beside the engine, in the Python of an environment of its own (vllm_process.py)."""

import ctypes.util
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagedattn_serve.config import QUANTIZATIONS
from pagedattn_serve.loading.quantize import quantize_checkpoint
from serve.peers import Loaded
from serve.run import Run, engine_options
from serve.workloads import Request

CACHE_GIB = 4
PROGRAM = Path(__file__).with_name("vllm_process.py")


def last_error(log: str) -> str:
    """Its last line that names an error; warnings may follow."""
    lines = log.strip().splitlines() or ["it wrote nothing"]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1]).strip()


def load(model: str, weight_format: str, threads: int, made: str, python: str) -> Loaded:
    """python: of the environment that has vLLM. made: a directory to write to."""
    dtype = weight_format
    if weight_format in QUANTIZATIONS:
        dtype, copy = engine_options(weight_format)["dtype"], str(Path(made) / f"vllm-{weight_format}")
        quantize_checkpoint(model, copy, weight_format)
        model = copy
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")  # as its documentation recommends
    if tcmalloc is not None:
        environment["LD_PRELOAD"] = tcmalloc
    log = Path(made) / "vllm.log"
    process = subprocess.Popen(
        [python, "-P", str(PROGRAM), model, dtype],  # -P: no modules of this folder
        env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
    )  # fmt: skip

    def answer(request: Sequence[object]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process has ended with {process.wait()}: {last_error(log.read_text())}")
        return json.loads(line)

    def serve(requests: list[Request]) -> Run:
        return Run(**answer([asdict(each) for each in requests]))

    settings = answer([])["settings"]
    return Loaded(serve, f"{settings}, {'tcmalloc' if tcmalloc is not None else 'malloc of glibc'}")
