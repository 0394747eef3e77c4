"""Attacks on a running swarm, one module each, as processes of their own on this machine.

    python -m tests.support.attacks NAME TARGET.json

A module defines ``async def attack(target: Target) -> None``. It attacks the nodes that ``target`` names, until
``target.seconds`` are over, and nothing else; what it finds out goes to standard output as one line of JSON at its end.
`tests/trainer/attacks` runs each beside a swarm at work.
"""

from __future__ import annotations

from tests.support.attacks.target import Target

__all__ = ["Target"]
