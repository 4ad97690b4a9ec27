"""Requests that come and go: the engine's loop, with text that streams, a late arrival and an abort.

Usage: python python/examples/stream.py [MODEL]
"""

import argparse

from pagedattn_serve import DEMO_MODEL, LLMEngine, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEMO_MODEL, help="default: the demo model")
    args = parser.parse_args()
    engine = LLMEngine(args.model)
    engine.add_request("with", "The with statement", SamplingParams(temperature=0, max_tokens=40))
    engine.add_request("class", "A class definition", SamplingParams(temperature=0.8, seed=1, max_tokens=200))
    num_steps, shown = 0, {"with": 0, "class": 0, "late": 0}
    while engine.has_unfinished_requests():
        for output in engine.step():
            text = output.outputs[0].text
            print(f"{output.request_id:6}{text[shown[output.request_id] :]!r}", output.outputs[0].finish_reason or "")
            shown[output.request_id] = len(text)
        num_steps += 1
        if num_steps == 5:  # the request joins the batch at the next step
            engine.add_request("late", "The for statement", SamplingParams(temperature=0, max_tokens=10))
        if num_steps == 20:
            aborted = engine.abort_request("class")
            print(f"{aborted.request_id:6}aborted after {len(aborted.outputs[0].token_ids)} tokens")


if __name__ == "__main__":
    main()
