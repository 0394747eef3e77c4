"""`python -m trainer`."""

from __future__ import annotations

import os
import sys

# gRPC's own log goes to the terminal unasked; what matters of it comes back as our errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from genesis.extras import with_extra


def main() -> int:
    """Runs this process's command line; its exit code."""
    try:
        from trainer.run.cli.app import run

        return run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if (explained := with_extra(error, least="train")) is error:
            raise
        print(f"trainer: {explained}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
