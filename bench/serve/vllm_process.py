"""A program for the environment of vLLM: python vllm_process.py MODEL DTYPE.

Each line of its input is a JSON list of requests, and each line of its output says what they took. An empty list is
answered with the settings. Nothing of this project is imported, because the environment does not have it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MAX_BATCH_TOKENS, MAX_SEQUENCES = 2048, 256


def cpu_seconds() -> float:
    """Of this process and all that it has started."""
    parents, seconds = {}, {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(directory.name)] = int(fields[1])
        seconds[int(directory.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_ours(process: int) -> bool:
        return process == os.getpid() or (process in parents and is_ours(parents[process]))

    return sum(seconds[process] for process in seconds if is_ours(process))


def main() -> None:
    model, dtype = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints
    import vllm

    options: dict[str, Any] = {
        "dtype": dtype,
        "max_num_seqs": MAX_SEQUENCES,
        "max_num_batched_tokens": MAX_BATCH_TOKENS,
        "enable_prefix_caching": False,
    }
    llm = vllm.LLM(model, skip_tokenizer_init=True, **options)

    def generate(requests: list[dict[str, Any]]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=each["max_tokens"], ignore_eos=True, detokenize=False)
            for each in requests
        ]
        cpu_started, started = cpu_seconds(), time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, of_cpu = time.monotonic() - started, cpu_seconds() - cpu_started
        return {
            "seconds": seconds,
            "cpu_seconds": of_cpu,
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        }

    settings = ", ".join(f"{name}={value}" for name, value in options.items())
    for line in sys.stdin:
        requests = json.loads(line)
        answer = generate(requests) if requests else {"settings": f"{settings}, compiled, version={vllm.__version__}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
