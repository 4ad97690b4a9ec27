"""`python -m pagedattn_serve` is the command `pagedattn`."""

import sys

from pagedattn_serve.cli import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m pagedattn_serve"))
