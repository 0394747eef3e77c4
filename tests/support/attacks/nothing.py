"""No attack: what the measurement itself shows where nobody does any harm."""

from __future__ import annotations

import asyncio

from tests.support.attacks import Target

__all__ = ["attack"]


async def attack(target: Target) -> None:
    """Waits."""
    await asyncio.sleep(target.seconds)
