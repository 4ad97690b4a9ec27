"""Errors about arguments: what was expected and what came are fields, and the message is made of the fields. And errors
that go from one process to another."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

MAX_SHOWN = 500  # characters of a value


def shown(value: object, write: Callable[[Any], str] = repr, most: int = MAX_SHOWN) -> str:
    """A value as errors show it, by what writes it. Of a long one its beginning is shown, `most` characters."""
    try:
        text = write(value)
        return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
    except ValueError:  # Python writes no int of thousands of digits
        return f"one of {value.bit_length():,} bits" if isinstance(value, int) else type(value).__name__


class BadArgument(Exception):
    """An argument is not what it should be. The message is `argument: expected X, got Y`.

    argument: its name. expected: what it should be, in words.
    got: what came, in words; "" where the message says enough without it.
    place: which of several requests has the argument ("prompt 3 of 7"), if there are several. It opens the message. A
        place that begins with the argument's name stands for the name, too.
    """

    def __init__(self, argument: str, expected: str, got: object = "", place: str = "") -> None:
        self.argument = argument
        self.expected = expected
        self.got = shown(got, str, 2 * MAX_SHOWN)  # which may have a value and words behind it
        self.place = place
        super().__init__(argument, expected, self.got, place)  # so that the error can be pickled

    def __str__(self) -> str:
        name = self.argument
        if self.place:
            name = self.place if self.place.startswith(f"{name} ") else f"{self.place}: {name}"
        return f"{name}: expected {self.expected}" + (f", got {self.got}" if self.got else "")

    def renamed(self, argument: str) -> Self:
        """The same error where the argument has another name."""
        return type(self)(argument, self.expected, self.got, self.place)

    def at(self, place: str) -> Self:
        """The same error with its place."""
        return type(self)(self.argument, self.expected, self.got, place)


class ArgumentError(BadArgument, ValueError):
    """A wrong value."""


class ArgumentTypeError(BadArgument, TypeError):
    """A wrong type."""


class ArgumentImportError(BadArgument, ImportError):
    """An argument needs a package that is not installed."""


class ArgumentOSError(BadArgument, OSError):
    """The system does not give what an argument names: a file, a host, a port."""


class ArgumentFileError(ArgumentOSError, FileNotFoundError):
    """An argument names a file or a directory that is not there."""


def how_to_install(extra: str = "") -> str:
    """What installs this package with what it needs, and with an extra. The package index has no release of it."""
    serve = f"'./python[{extra}]'" if extra else "./python"
    return f"in a clone of pagedattn_ext: pip install --no-build-isolation . {serve}"


class ExecutorDeadError(ChildProcessError):
    """A process that computes a part of the model has died, or does not answer. The engine cannot go on."""


def reason_of(error: Exception) -> str:
    """The first line of an allocator's error."""
    return str(error).partition("\n")[0] or "out of memory"


def nth(what: str, index: int, number: int) -> str:
    """The place of one of several, as a place of BadArgument: "prompt 3 of 7" has index 2. People count from 1."""
    return f"{what} {index + 1} of {number}"


def with_place(error: Exception, place: str) -> Exception:
    """The same error, which says whose it is: which of several requests."""
    return error.at(place) if isinstance(error, BadArgument) else type(error)(f"{place}: {error}")


@contextmanager
def op_errors_about(subject: str) -> Iterator[None]:
    """A ValueError of an op, whose message is `op: what is wrong`, gets the subject in place of the op's name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{subject}: {str(error).partition(': ')[2]}") from None


# ---- between processes ----------------------------------------------------------------------------------------------

_OWN_ERRORS = (
    *(BadArgument, ArgumentError, ArgumentTypeError, ArgumentImportError, ArgumentOSError, ArgumentFileError),
    ExecutorDeadError,
)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def portable(error: BaseException) -> Any:
    """The error as another process can raise it: the same, or else one of the nearest builtin type with the same text.

    An error of another package would have to be loaded with that package, which the other process may not want.
    """
    kind = type(error)
    if kind in _OWN_ERRORS or kind.__module__ == "builtins":
        try:
            return pickle.loads(pickle.dumps(error))
        except Exception:  # for instance, an argument of the error cannot be pickled
            pass
    for base in kind.__mro__:
        if base.__module__ == "builtins" and base not in (Exception, BaseException, object):
            try:
                return base(str(error))
            except TypeError:  # such as UnicodeError, which takes five arguments
                continue
    return RuntimeError(describe(error))
