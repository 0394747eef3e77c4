"""`python -m trainer`."""

from __future__ import annotations

import sys

from trainer.cli.app import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
