"""Runs one attack; see the package."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path

from tests.support.attacks.target import Target

_GRACE_S = 120.0


async def main(name: str, target: Target) -> None:
    """Attacks, for its time and no longer."""
    module = importlib.import_module(f"tests.support.attacks.{name}")
    try:
        async with asyncio.timeout(target.seconds + _GRACE_S):
            await module.attack(target)
    except TimeoutError:
        sys.exit(f"expected {name} to end within {target.seconds:.0f} s")


if __name__ == "__main__":
    target = Target.load(Path(sys.argv[2]))
    os.nice(target.niceness)
    asyncio.run(main(sys.argv[1], target))
