"""A conversation: each line of standard input is a message, whose answer is printed. The chat grows by both.

Usage: python python/examples/chat.py [MODEL] (Ctrl-D ends it)
"""

import argparse
import sys

from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEMO_MODEL, help="default: the demo model")
    args = parser.parse_args()
    llm = LLM(args.model)
    params = SamplingParams(temperature=0, max_tokens=40)
    messages = [{"role": "system", "content": "You know the Python language reference."}]
    num_found = 0
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        try:
            [output] = llm.chat(messages, params, use_tqdm=False)
        except ValueError as error:  # for example, the conversation is too long for the model
            sys.exit(str(error))
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        # Earlier messages are in the cache: only new tokens are computed.
        num_found_before, num_found = num_found, llm.llm_engine.stats().num_found_tokens
        print(f"[{num_found - num_found_before} of {len(output.prompt_token_ids)} tokens were in the cache]")
        print(answer, flush=True)


if __name__ == "__main__":
    main()
