"""The `pagedattn` command. What it runs is imported when it runs: help needs no torch, and an error no traceback."""

import os
import signal
import sys
from collections.abc import Sequence

from pagedattn_serve import require_extra


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, in the main thread; returns the exit status. A user's mistake is one line on standard error."""
    # In the midst of an import, a KeyboardInterrupt may come out as some other error.
    previous_handler = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        try:
            return run(argv)
        finally:
            sys.stdout.flush()  # a reader that has gone away shows here at the latest, help and version included
    except BrokenPipeError:  # `| head` has seen enough; nothing may be written when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as the shell reports what SIGPIPE ends
    except (ImportError, MemoryError, OSError, TypeError, ValueError) as error:
        print(f"pagedattn: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def run(argv: Sequence[str] | None) -> int:
    from pagedattn_serve.cli.parser import make_parser

    args = make_parser().parse_args(argv)
    require_extra(for_server=args.command == "serve")
    if args.command == "generate":
        from pagedattn_serve.cli.generate import generate

        return generate(args)
    if args.command == "serve":
        from pagedattn_serve.cli.serve import serve

        return serve(args)
    from pagedattn_serve.cli.info import info

    return info(args)
