"""`pagedattn quantize`: a copy of a model with its weights in 4 or 8 bits, which loads faster than it is quantized."""

import argparse
import signal
import sys

from pagedattn_serve.loading.quantize import quantize_checkpoint


def quantize(args: argparse.Namespace) -> int:
    """Returns the exit status: after an interrupt that of a process which SIGINT ended, and nothing is left of OUT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        num_quantized, num_layers = quantize_checkpoint(args.model, args.out, args.format)
    except KeyboardInterrupt:
        return 130
    print(f"{args.out}: {num_quantized} of {num_layers} linear layers in {args.format}")
    return 0
