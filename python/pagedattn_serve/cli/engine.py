"""The engine that the options of a command ask for."""

import argparse

from pagedattn_serve.cli.options import ENGINE_OPTIONS
from pagedattn_serve.engine import LLMEngine


def make_engine(args: argparse.Namespace) -> LLMEngine:
    """args: with the options of `cli.options`. Raises what `LLMEngine` does."""
    return LLMEngine(**{name: getattr(args, name) for name in ENGINE_OPTIONS})
