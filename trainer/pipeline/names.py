"""Names of stages and of the workers that hold them.

A run's stages are ``head``, ``body-1``, ``body-2``, …, ``tail``. A worker's DHT name (spec P-7) is ``head.0.42``,
``body3.0.55``, ``tail.0.100``: stage, a constant 0, and a number of its own from 32 on, which tells replicas apart for
people. What a worker is known by to programs is its key, which nobody can take from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from trainer.errors import TrainerUsageError

__all__ = ["FIRST_NUMBER", "LAST_NUMBER", "StageUid", "free_number", "stage_names"]

FIRST_NUMBER = 32
LAST_NUMBER = 1023
"""Numbers of workers (spec P-7: ``head.0.[32:1024]``)."""

_UID = re.compile(r"(head|tail|body([1-9][0-9]{0,3}))\.0\.([1-9][0-9]{0,5})")


def stage_names(num_stages: int) -> tuple[str, ...]:
    """The names of a run's stages, in order.

    Raises:
        TrainerUsageError: there are fewer than two.
    """
    if num_stages < 2:
        raise TrainerUsageError(f"swarm.num_stages: expected 2 or more, found {num_stages}")
    return ("head", *(f"body-{number}" for number in range(1, num_stages - 1)), "tail")


@dataclass(frozen=True, slots=True)
class StageUid:
    """A worker's name for people."""

    stage: str
    """``head``, ``body-3``, ``tail``."""
    number: int
    """Tells the workers of a stage apart."""

    def __str__(self) -> str:
        return f"{self.stage.replace('-', '')}.0.{self.number}"

    @classmethod
    def parse(cls, text: str) -> StageUid:
        """The inverse of ``str``.

        Raises:
            TrainerUsageError: it is not the spelling of one.
        """
        found = _UID.fullmatch(text)
        if found is None:
            raise TrainerUsageError(f"expected a worker's name such as body3.0.55, found {text[:80]!r}")
        name, body, number = found.groups()
        return cls(f"body-{body}" if body else name, int(number))


def free_number(seed: int, taken: Collection[int]) -> int:
    """A number no other worker of the stage has: where the search begins depends on ``seed``, a newcomer's own.

    Beyond `LAST_NUMBER` it goes on where all of these are taken.
    """
    count = LAST_NUMBER - FIRST_NUMBER + 1
    for step in range(count):
        number = FIRST_NUMBER + (seed + step) % count
        if number not in taken:
            return number
    return next(number for number in range(LAST_NUMBER + 1, LAST_NUMBER + 2 + len(taken)) if number not in taken)
