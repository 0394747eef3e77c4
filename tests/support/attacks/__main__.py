"""Runs one attack; see the package."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from tests.support.attacks import Target
from tests.support.attacks.connections import half_requests, idle_connections, no_window
from tests.support.attacks.identities import knocking, sybils
from tests.support.attacks.shapes import shapes

_GRACE_S = 120.0


async def nothing(target: Target) -> None:
    """What the measurement itself shows where nobody does any harm."""
    await asyncio.sleep(target.seconds)


_ALL = (half_requests, idle_connections, knocking, no_window, nothing, shapes, sybils)
ATTACKS: dict[str, Callable[[Target], Coroutine[None, None, None]]] = {attack.__name__: attack for attack in _ALL}


async def main(name: str, target: Target) -> None:
    try:
        async with asyncio.timeout(target.seconds + _GRACE_S):
            await ATTACKS[name](target)
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
