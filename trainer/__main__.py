"""`python -m trainer`."""

from __future__ import annotations

import os
import sys

# gRPC's own log goes to the terminal unasked; what matters of it comes back as our errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from trainer.run.cli.app import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
