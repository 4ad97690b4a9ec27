"""vLLM on a CPU beside the engine, in the Python of an environment of its own (vllm_process.py)."""

import ctypes.util
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serve.peers import Loaded
from serve.run import Run
from serve.workloads import Request

CACHE_GIB = 4
PROGRAM = Path(__file__).with_name("vllm_process.py")


def load(model: str, weight_format: str, threads: int, made: str, python: str) -> Loaded:
    """python: of the environment that has vLLM."""
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
        [python, "-P", str(PROGRAM), model, weight_format],  # -P: no modules of this folder
        env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
    )  # fmt: skip

    def answer(request: Sequence[object]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"its process has ended with {process.wait()}: {log.read_text().strip().splitlines()[-1:]}"
            )
        return json.loads(line)

    def serve(requests: list[Request]) -> Run:
        return Run(**answer([asdict(each) for each in requests]))

    settings = answer([])["settings"]
    return Loaded(serve, f"{settings}, {'tcmalloc' if tcmalloc is not None else 'malloc of glibc'}")
