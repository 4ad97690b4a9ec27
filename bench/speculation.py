"""Speculation by prompt lookup on the demo model: with and without in turns, greedy, one thread.

Usage: python bench/speculation.py [--repeats N] [--max-tokens N]

Some prompts have three words, and the model goes on in its own way. Other prompts are passages of the text that the
model was trained on, each with its beginning once more at the end; the model goes on to quote them. One request at a
time (four in a row), and 16 at once. Tokens per second are medians, of the wall clock and of CPU time; the first run is
not counted.
"""

import argparse
import time
from pydoc_data.topics import topics
from statistics import median

import torch

from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams

WORDS = ["with", "class", "for", "function", "import", "lambda", "try", "while"]
WORDS += ["raise", "yield", "assert", "return", "global", "pass", "del", "break"]


def make_prompts(llm: LLM) -> dict[str, list[list[int]]]:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    passages = [tokenizer(topics[name], verbose=False).input_ids for name in sorted(topics)]
    return {
        "ordinary": [tokenizer(f"The {word} statement").input_ids for word in WORDS],
        "quoting": [ids[:150] + ids[:20] for ids in passages if len(ids) >= 160][:16],
    }


def measure(llm: LLM, prompts: list[list[int]], at_once: int, params: SamplingParams) -> tuple[float, float, int, int]:
    """Tokens per second of wall and of CPU time; tokens proposed and accepted."""
    before = llm.llm_engine.stats()
    wall, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(prompts), at_once):
        llm.generate(prompt_token_ids=prompts[first : first + at_once], sampling_params=params, use_tqdm=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = llm.llm_engine.stats()
    count = after.num_output_tokens - before.num_output_tokens
    proposed = after.num_proposed_tokens - before.num_proposed_tokens
    return count / wall, count / cpu, proposed, after.num_accepted_tokens - before.num_accepted_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    llms = [LLM(DEMO_MODEL, dtype="float32", speculation=speculation) for speculation in (None, "ngram")]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    for name, prompts in make_prompts(llms[0]).items():
        for at_once in (1, 16):
            chosen = prompts[:4] if at_once == 1 else prompts
            runs = [[measure(llm, chosen, at_once, params) for llm in llms] for _ in range(args.repeats + 1)][1:]
            without, with_it = ([median(run[i][j] for run in runs) for j in (0, 1)] for i in (0, 1))
            proposed, accepted = runs[-1][1][2:]
            print(
                f"{name:9} {at_once:2} at once: {without[0]:5.0f} -> {with_it[0]:5.0f} tokens/s "
                f"({with_it[0] / without[0]:.2f}x), of CPU time {without[1]:5.0f} -> {with_it[1]:5.0f} "
                f"({with_it[1] / without[1]:.2f}x); {accepted} of {proposed} guesses were right"
            )


if __name__ == "__main__":
    main()
