"""Starts so many ranks of a program on this machine, as torchrun does, in one process group that can be stopped.

torchrun gives each rank a session of its own, which SIGSTOP for the group of its agent does not reach.

    python launch_ranks.py 2 -m trainer …
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main(num_ranks: int, program: list[str]) -> int:
    """Runs them to their end; only rank 0 prints."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
        environment = {**os.environ, **{name: str(value) for name, value in (place | meeting).items()}}
        output = None if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen([sys.executable, *program], stdout=output, env=environment))
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
