"""``python -m trainer.run.swarm.parent_death_signal PARENT COMMAND …``: runs a command that ends when PARENT does.

The kernel is asked to kill this process when its parent ends, in whatever way, and then it becomes the command; the
number of the process stays. A program of its own and not `preexec_fn`, because that runs Python between fork and exec,
where a thread that held a lock is gone and the lock is not. It costs 40 ms a start. Linux only: elsewhere a child of a
parent that was killed lives on.
"""

from __future__ import annotations

import os
import signal
import sys

from trainer.network.discovery.parent import die_with_parent

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Becomes the command; returns only if the parent has ended already."""
    parent_pid, *command = arguments
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent_pid):  # It ended before the kernel was asked.
        return 1
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
