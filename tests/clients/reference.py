"""What transformers makes of the demo model in fp64; transformers computes norms and angles in fp32 in any dtype.

Runs in the project's environment. A line of standard input is [name of a function here, its arguments] as JSON; a line
of standard output is what the function returns.
"""

import json
import sys
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pagedattn_serve import DEMO_MODEL


@cache
def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float64)
    return model, AutoTokenizer.from_pretrained(DEMO_MODEL)


def loglikelihoods(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Of each (context, continuation), in token ids: the continuation's log probability, and whether it is greedy."""
    model, _ = load()
    results = []
    for context, continuation in pairs:
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        targets = torch.tensor(continuation)
        logprobs = logits.log_softmax(dim=-1).gather(1, targets[:, None])
        results.append((logprobs.sum().item(), bool((logits.argmax(dim=-1) == targets).all())))
    return results


def greedy_texts(prompts: list[str], max_tokens: int, stop: list[str]) -> list[str]:
    """What follows each prompt, up to the first of the stop strings."""
    model, tokenizer = load()
    texts = []
    for prompt in prompts:
        token_ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = model.generate(token_ids, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0)
        text = tokenizer.decode(output[0, token_ids.shape[1] :], skip_special_tokens=True)
        ends = [text.index(each) for each in stop if each in text]
        texts.append(text[: min(ends, default=len(text))])
    return texts


def call(name: str, arguments: list[Any]) -> Any:
    with torch.inference_mode():
        return globals()[name](*arguments)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(call(*json.loads(line))), flush=True)
