"""Runs one attack; see the package."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import time
from pathlib import Path

from tests.support.attacks import Target

_GRACE_S = 120.0


async def main(name: str, target: Target) -> None:
    """Attacks, for its time and no longer."""
    module = importlib.import_module(f"tests.support.attacks.{name}")
    try:
        async with asyncio.timeout(target.seconds + _GRACE_S):
            await module.attack(target)
    except TimeoutError:
        sys.exit(f"expected {name} to end within {target.seconds:.0f} s")


def be_nice(niceness: int) -> None:
    """Leaves the cores to the victims, each of which is a session, and so a group of its own to Linux's scheduler."""
    os.nice(niceness)
    with contextlib.suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="ascii")


if __name__ == "__main__":
    target = Target.load(Path(sys.argv[2]))
    be_nice(target.niceness)
    asyncio.run(main(sys.argv[1], target))
    sys.stdout.write(f"took {time.process_time():.1f} s of a core\n")
