"""`python -m trainer`."""

from __future__ import annotations

import os
import sys

# gRPC's own log goes to the terminal unasked; what matters of it comes back as our errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# A round makes and gives back vectors as large as the model. In pages of 2 MB instead of 4 KB the kernel takes a sixth
# of the time for that: with 125 million parameters, a round in the background stops training for 0.2 s less.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from genesis.extras import report_missing_extra


def main() -> int:
    """Runs this process's command line; its exit code."""
    try:
        from trainer.run.cli.app import run

        return run(sys.argv[1:])
    except ModuleNotFoundError as error:
        return report_missing_extra(error, "trainer", least="train")


if __name__ == "__main__":
    sys.exit(main())
