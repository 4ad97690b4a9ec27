"""`pagedattn generate`: prompts to text, streamed, or to lines of JSON."""

import argparse
import json
import sys
from typing import Any

from pagedattn_serve.cli.engine import make_engine
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams


def generate(args: argparse.Namespace) -> int:
    """All prompts run together. Returns the exit status.

    Raises ValueError if one ended in an error, once all that there is has been written.
    """
    prompts = args.prompt or read_prompts(args.prompts_file)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
    engine = make_engine(args)
    for i, prompt in enumerate(prompts):
        try:
            engine.add_request(str(i), prompt, params)
        except (TypeError, ValueError) as error:
            raise type(error)(f"prompt {i + 1} of {len(prompts)}: {error}") from None
    errors = write_json(engine) if args.json else write_text(engine, prompts)
    if errors:
        first = min(errors)
        raise ValueError(f"prompt {first + 1} of {len(prompts)}: {errors[first]}")
    return 0


def read_prompts(file: str) -> list[str]:
    """The lines of a file, or of standard input for "-", but for empty ones. Raises ValueError if there are none."""
    try:
        if file == "-":
            text = sys.stdin.read()
        else:
            with open(file, encoding="utf-8") as lines:
                text = lines.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts-file: expected UTF-8 in {file}, got {error}") from None
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ValueError(f"prompts-file: expected a prompt a line in {file}, got none")
    return prompts


def write_json(engine: LLMEngine) -> dict[int, str]:
    """One object a request, in the order of the prompts, each as soon as it and those before it are done.

    Returns the errors that requests ended in, by prompt.
    """
    errors: dict[int, str] = {}
    finished: dict[int, RequestOutput] = {}
    num_written = 0
    while engine.has_unfinished_requests():
        finished |= {int(output.request_id): output for output in engine.step() if output.finished}
        while num_written in finished:
            output = finished.pop(num_written)
            completion = output.outputs[0]
            fields: dict[str, Any] = {
                "prompt": output.prompt,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
            if output.error is not None:
                errors[num_written] = fields["error"] = output.error
            print(json.dumps(fields, ensure_ascii=False), flush=True)
            num_written += 1
    return errors


def write_text(engine: LLMEngine, prompts: list[str]) -> dict[int, str]:
    """The first prompt's text streams, and each other's follows when it is its turn. Returns as `write_json`."""
    errors: dict[int, str] = {}
    texts = [""] * len(prompts)
    done = [False] * len(prompts)
    shown = 0  # the prompt whose text is on the screen
    num_printed = 0  # characters of it
    print(prompts[0], end="", flush=True)
    while shown < len(texts):
        for output in engine.step():
            i = int(output.request_id)
            texts[i] = output.outputs[0].text
            done[i] = output.finished
            if output.error is not None:
                errors[i] = output.error
        while shown < len(texts):
            print(texts[shown][num_printed:], end="", flush=True)
            num_printed = len(texts[shown])
            if not done[shown]:
                break
            shown, num_printed = shown + 1, 0
            print("\n" if shown < len(texts) else "")
            if shown < len(texts):
                print(prompts[shown], end="", flush=True)
    return errors
