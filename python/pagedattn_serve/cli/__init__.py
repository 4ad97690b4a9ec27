"""The `pagedattn` command. It imports a subcommand's code when the subcommand runs, and options are judged
before, so `--help` needs no torch and a mistake is told at once."""

import os
import signal
import sys
from collections.abc import Sequence

from pagedattn_serve import require_dependencies
from pagedattn_serve.errors import BadArgument


def main(argv: Sequence[str] | None = None, prog: str = "pagedattn") -> int:
    """Run one command, in the main thread; returns the exit status. A user's mistake is one line on standard error.

    prog: the name by which the user has called the command.
    """
    # If a KeyboardInterrupt comes in the midst of an import, the import may turn it into some other error.
    previous_handler = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        try:
            return run(argv, prog)
        finally:
            if sys.stdout is not None:  # closed
                flush_output()
    except BrokenPipeError:  # `| head` has seen enough
        drop_output()
        return 141  # the status that a shell reports for a process that SIGPIPE ended
    except (ImportError, MemoryError, OSError, TypeError, ValueError) as error:
        return complain(prog, error, 1)
    except RuntimeError as error:
        if "PAGEDATTN_CPU_CAPABILITY: " not in str(error):  # a bug
            raise
        return complain(prog, error, 1)
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def flush_output() -> None:
    """Write what is not written yet. It shows at the latest, after --help too, whether the reader has gone away or the
    disk is full. Raises OSError, which says that the error is one of standard output."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise OSError(f"standard output: expected a place to write to, got {error.strerror}") from None


def drop_output() -> None:
    """Let the interpreter write nothing more to standard output, which it does at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(argv: Sequence[str] | None, prog: str) -> int:
    from pagedattn_serve.cli.commands import by_flag, make_parser

    args = make_parser(prog).parse_args(argv)
    require_dependencies(for_server=args.command == "serve")
    status = 2  # for what is found before anything is loaded
    try:
        command = args.prepare(args)
        status = 1
        return command()
    except BadArgument as error:
        return complain(prog, by_flag(error, args), status)


def complain(prog: str, error: Exception, status: int) -> int:
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
