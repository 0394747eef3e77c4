"""``python -m trainer.run.swarm.parent_death_signal PARENT COMMAND …``: runs a command that ends when PARENT does.

The kernel is asked to kill this process when its parent ends, and then the process becomes the command, with the same
process id. It is a program of its own and no `preexec_fn`, which would run Python between fork and exec, where a lock
that another thread held is never released. A start costs 40 ms. Linux only: elsewhere children outlive a killed parent.
"""

from __future__ import annotations

import os
import signal
import sys

from trainer.network.discovery.parent import die_with_parent


def main(arguments: list[str]) -> int:
    """Becomes the command; returns only if the parent has ended already."""
    parent_pid, *command = arguments
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent_pid):  # It ended before the kernel was asked.
        return 1
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
