"""Children of a tree that are quick to start: a few lines of Python each, with neither torch nor network."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.run.swarm.children import ChildSpec, Role

__all__ = ["DIES", "ENDS", "OBEYS", "STUBBORN", "small_child", "up"]

OBEYS = "import time; print('up', flush=True); time.sleep(600)"
"""Ends when asked to."""
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {OBEYS}"
"""Does not."""
ENDS = "print('ready')"
"""Ends by itself, with 0."""
DIES = "import sys; print('trainer: the disk is full', file=sys.stderr); sys.exit(1)"
"""Fails at once."""


def small_child(name: str, program: str, role: Role = "worker", stage: str = "head") -> ChildSpec:
    command = (sys.executable, "-S", "-c", program)
    return ChildSpec(name=name, role=role, stage=stage if role == "worker" else "", command=command)


def up(log: Path) -> bool:
    """Whether the child that writes there has begun."""
    return log.exists() and "\nup\n" in log.read_text()
