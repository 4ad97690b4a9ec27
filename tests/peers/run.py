"""The forward tests of other libraries on our modules, on a CPU: run.py FOLDER [FILES] [--cases N]

FOLDER holds their checkouts, or some of them: `flashinfer`, `flash-attention`, `causal-conv1d`, `mamba` and
`flash-linear-attention`. Each of their test files runs in a process of its own, two at a time; of each test that has
parameters, a sample runs. A table says what became of the tests, and behind it stands each reason for which a test has
not passed.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from names import use_our_names
from no_gradients import use_no_gradients
from on_cpu import use_cpu
from outcomes import KINDS, Outcomes
from sampling import Sampling

sys.dont_write_bytecode = True


@dataclass(frozen=True)
class Suite:
    checkout: str
    files: tuple[str, ...]
    left_out: str  # -k of pytest: docs/adopt.md says which tests these are


FLASHINFER = Suite(
    "flashinfer",
    (
        *("tests/attention/test_batch_prefill_kernels.py", "tests/attention/test_batch_decode_kernels.py"),
        *("tests/attention/test_sliding_window.py", "tests/attention/test_attention_sink.py"),
        *("tests/attention/test_tensor_cores_decode.py", "tests/attention/test_shared_prefix_kernels.py"),
        *("tests/attention/test_single_prefill.py", "tests/attention/test_batch_prefill.py"),
        *("tests/attention/test_batch_attention.py", "tests/attention/test_page.py"),
        *("tests/attention/test_non_contiguous_prefill.py", "tests/attention/test_non_contiguous_decode.py"),
        *("tests/attention/test_logits_cap.py", "tests/attention/test_alibi.py", "tests/attention/test_hopper.py"),
        *("tests/attention/test_decode_prefill_lse.py", "tests/attention/test_decode_fp8_calibration_scale.py"),
        *("tests/attention/test_fp8_prefill.py", "tests/attention/test_rope.py"),
        *("tests/utils/test_norm.py", "tests/utils/test_activation.py", "tests/utils/test_sampling.py"),
        *("tests/utils/test_quantization.py", "tests/attention/test_deepseek_mla.py"),
        *("tests/attention/test_mla_page.py", "tests/utils/test_topk.py", "tests/utils/test_concat_mla.py"),
        "tests/gdn/test_prefill_state_indices.py",
    ),
    "not (nvfp4 or quant_invalid or cutlass_mla or mla_fp8 or fp8_kv or int64_stride or overflow or compil"
    " or smem_probe or cutile or rejects_mismatched_q_len or dirty_cached or clusters or dtype_mismatch)",
)
FLASH_ATTN = Suite(
    "flash-attention",
    (
        *("tests/test_flash_attn.py", "hopper/test_flash_attn.py", "tests/cute/test_flash_attn.py"),
        *("tests/cute/test_flash_attn_varlen.py", "tests/test_rotary.py"),
        *("tests/ops/triton/test_layer_norm.py", "tests/test_flash_attn_ck.py"),
    ),
    "not (bwd or backward or grad or race_condition or deterministic or mla or sm100 or compilation or cache_separates"
    " or norm_linear or bw_compatibility or invalid_head_dim or generator_arg)",
)
CAUSAL_CONV1D = Suite("causal-conv1d", ("tests/test_causal_conv1d.py",), "not (bwd or race_condition)")
MAMBA = Suite(
    "mamba",
    (
        *("tests/ops/test_selective_scan.py", "tests/ops/triton/test_selective_state_update.py"),
        "tests/ops/triton/test_layernorm_gated.py",
    ),
    "not inner",
)
FLA = Suite(
    "flash-linear-attention",
    ("tests/ops/test_gdn.py", "tests/modules/test_layernorm_gated.py"),
    "not (flash_qla or wy_repr or blackwell or gate_linear)",
)
SUITES = (FLASHINFER, FLASH_ATTN, CAUSAL_CONV1D, MAMBA, FLA)


def run_file(folder: Path, suite: Suite, file: str, num_cases: int, result: Path) -> None:
    """In a process of its own. Writes what became of the tests."""
    log = os.open(result.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    use_our_names(folder)
    use_cpu()
    use_no_gradients()
    if file == "tests/test_rotary.py":
        sys.modules["triton"] = ModuleType("triton")  # for a test that counts what Triton has compiled, and is left out
    checkout = folder / suite.checkout
    os.chdir(checkout)
    sys.path.insert(0, str((checkout / file).parent))  # for modules of helpers beside the file
    outcomes = Outcomes()
    options = ["-q", "--noconftest", "-c", os.devnull, "--rootdir", str(checkout), "-p", "no:cacheprovider"]
    pytest.main([*options, "--timeout", "120", "-k", suite.left_out, file], plugins=[Sampling(num_cases), outcomes])
    seconds = time.process_time()
    result.write_text(json.dumps({"counts": outcomes.counts, "reasons": outcomes.reasons, "seconds": seconds}))


def result_of(folder: Path, suite: Suite, file: str, num_cases: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "result")
        arguments = (folder, suite, file, num_cases, path)
        process = multiprocessing.get_context("fork").Process(target=run_file, args=arguments)
        process.start()
        process.join()
        if path.exists():
            return json.loads(path.read_text())
        end = path.with_suffix(".log").read_text()[-500:]
        reason = f"the process ended with {process.exitcode}: {end}"
        return {"counts": {"failed": 1}, "reasons": [("failed", file, reason)], "seconds": 0}


def table(results: dict[str, Any]) -> str:
    lines = ["| test file | passed | refused by name | missing | failed |", "|---|---|---|---|---|"]
    for suite in SUITES:
        rows = {name: result["counts"] for name, result in results.items() if name.startswith(suite.checkout + "/")}
        total = sum(map(Counter, rows.values()), Counter())
        if rows:
            rows[f"**{suite.checkout}**"] = total
        for name, counts in rows.items():
            lines.append(f"| {name} | " + " | ".join(str(counts.get(kind, 0)) for kind in KINDS) + " |")
    return "\n".join(lines)


def reasons(results: dict[str, Any]) -> str:
    lines = []
    for kind in KINDS[1:]:
        for name, result in results.items():
            seen: dict[tuple[str, str], list[str]] = {}
            for of_kind, test, reason in result["reasons"]:
                if of_kind == kind:
                    function, _, case = test.split("::", 1)[-1].partition("[")
                    short = re.sub(r"0x[0-9a-f]+|\d+\.\d+(e-?\d+)?", "#", " ".join(reason.split()))[:160]
                    seen.setdefault((function, short), []).append(case.rstrip("]"))
            for (function, short), cases in seen.items():
                lines.append(f"- {kind}: {name} {function} x{len(cases)} [{cases[0]}]: {short}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="parts of the names of test files; default all")
    parser.add_argument("--cases", type=int, default=8, help="cases of each test")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    suites = [suite for suite in SUITES if (arguments.folder / suite.checkout).is_dir()]
    files = {f"{suite.checkout}/{file}": (suite, file) for suite in suites for file in suite.files}
    files = {name: of for name, of in files.items() if any(part in name for part in arguments.files or [""])}
    start = time.perf_counter()
    with ThreadPool(2) as pool:
        calls = [(arguments.folder.resolve(), suite, file, arguments.cases) for suite, file in files.values()]
        results = dict(zip(files, pool.starmap(result_of, calls, chunksize=1), strict=True))
    print(table(results), reasons(results), sep="\n\n")
    seconds = {name: result["seconds"] for name, result in results.items()}
    took = f"{time.perf_counter() - start:.0f} s, of CPU time {sum(seconds.values()):.0f} s"
    print(took, *(f"{name}: {time:.0f}" for name, time in seconds.items() if time > 10), sep="; ", file=sys.stderr)
