"""The `pagedattn` command. It imports a subcommand's code when the subcommand runs, so `--help` needs no torch."""

import os
import signal
import sys
from collections.abc import Sequence

from pagedattn_serve import require_extra


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, in the main thread; returns the exit status. A user's mistake is one line on standard error."""
    # If a KeyboardInterrupt comes in the midst of an import, the import may turn it into some other error.
    previous_handler = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        try:
            return run(argv)
        finally:
            sys.stdout.flush()  # shows at the latest whether the reader has gone away, after --help too
    except BrokenPipeError:  # `| head` has seen enough, and the interpreter must not write at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the status that a shell reports for a process that SIGPIPE ended
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
    if args.command == "quantize":
        from pagedattn_serve.cli.quantize import quantize

        return quantize(args)
    if args.command == "simulate":
        from pagedattn_serve.cli.simulate import simulate

        return simulate(args)
    from pagedattn_serve.cli.info import info

    return info(args)
