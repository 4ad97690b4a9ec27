"""`pagedattn generate`: prompts to text, streamed, or to lines of JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pagedattn_serve.cli.options import engine_args
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.errors import with_place
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "ignore_eos")


def generate(args: argparse.Namespace) -> int:
    """Run all prompts together. Returns the exit status.

    If a prompt ended in an error or was no text, all outputs are written first, then ValueError is raised.
    """
    prompts, errors = (args.prompt, {}) if args.prompt else read_prompts(args.prompts_file)
    params = SamplingParams(
        **{name: getattr(args, name) for name in SAMPLING},
        output_kind=RequestOutputKind.FINAL_ONLY if args.json else RequestOutputKind.DELTA,
    )
    engine = LLMEngine.from_engine_args(engine_args(args))
    for i, prompt in enumerate(prompts):
        if i in errors:
            continue
        try:
            engine.add_request(str(i), prompt, params)
        except (TypeError, ValueError) as error:
            raise with_place(error, f"prompt {i + 1} of {len(prompts)}") from None
    errors |= (write_json if args.json else write_text)(engine, prompts, errors)
    if errors:
        first = min(errors)
        raise ValueError(f"prompt {first + 1} of {len(prompts)}: {errors[first]}")
    return 0


def read_prompts(file: str) -> tuple[list[str], dict[int, str]]:
    """The lines of a file, or of standard input for "-", without empty lines; and the errors of lines, by prompt.

    A line that is not UTF-8 is a prompt with an error, which is shown and not run. Raises ValueError if there are no
    lines.
    """
    lines = (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).splitlines()
    prompts: list[str] = []
    errors: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.decode(errors="replace")
        if not text.strip():
            continue
        try:
            line.decode()
        except UnicodeDecodeError as error:
            place = f"byte {error.start + 1} of line {number}"
            errors[len(prompts)] = f"prompts-file: expected UTF-8 in {file}, got {line[error.start]:#04x} as {place}"
        prompts.append(text)
    if not prompts:
        raise ValueError(f"prompts-file: expected a prompt a line in {file}, got none")
    return prompts, errors


def write_json(engine: LLMEngine, prompts: list[str], unread: dict[int, str]) -> dict[int, str]:
    """Write an object for each prompt, in their order. It is written when the prompt and all before it are done.

    unread: the errors of prompts that the engine was not given. Returns the errors that requests ended in, by prompt.
    """
    errors: dict[int, str] = {}
    finished: dict[int, RequestOutput] = {}
    for i, prompt in enumerate(prompts):
        fields: dict[str, Any] = {"prompt": prompt}
        if i in unread:
            fields |= {"text": "", "token_ids": [], "finish_reason": "error", "error": unread[i]}
        else:
            while i not in finished:
                finished |= {int(output.request_id): output for output in engine.step()}
            output = finished.pop(i)
            completion = output.outputs[0]
            fields |= {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
            if output.error is not None:
                errors[i] = fields["error"] = output.error
        print(json.dumps(fields, ensure_ascii=False), flush=True)
    return errors


def write_text(engine: LLMEngine, prompts: list[str], unread: dict[int, str]) -> dict[int, str]:
    """The text of the first unfinished prompt streams; later prompts wait for their turn. Else as `write_json`."""
    errors: dict[int, str] = {}
    texts = [""] * len(prompts)  # that are not on the screen yet
    done = [i in unread for i in range(len(prompts))]
    shown = 0  # the prompt whose text is on the screen
    print(prompts[0], end="", flush=True)
    while shown < len(texts):
        for output in engine.step() if engine.has_unfinished_requests() else ():
            i = int(output.request_id)
            texts[i] += output.outputs[0].text
            done[i] = output.finished
            if output.error is not None:
                errors[i] = output.error
        while shown < len(texts):
            print(texts[shown], end="", flush=True)
            texts[shown] = ""
            if not done[shown]:
                break
            shown += 1
            print("\n" if shown < len(texts) else "")
            if shown < len(texts):
                print(prompts[shown], end="", flush=True)
    return errors
