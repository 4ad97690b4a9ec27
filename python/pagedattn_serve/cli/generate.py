"""`pagedattn generate`: prompts to text, streamed, or to lines of JSON."""

import json
from typing import Any

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import nth, with_place
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams


def generate(
    options: EngineArgs, params: SamplingParams, prompts: list[str], errors: dict[int, str], as_json: bool
) -> int:
    """Run all prompts together. Returns the exit status.

    errors: of prompts that are no text. If there are any, or a prompt ends in an error, all outputs are written first,
    then ValueError is raised.
    """
    engine = LLMEngine.from_engine_args(options)
    for i, prompt in enumerate(prompts):
        if i in errors:
            continue
        try:
            engine.add_request(str(i), prompt, params)
        except (TypeError, ValueError) as error:
            raise with_place(error, nth("prompt", i, len(prompts))) from None
    errors = errors | (write_json if as_json else write_text)(engine, prompts, errors)
    if errors:
        first = min(errors)
        raise ValueError(f"{nth('prompt', first, len(prompts))}: {errors[first]}")
    return 0


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
