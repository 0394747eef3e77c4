"""What a worker's announcement says of its stage, and the worker's name in it.

A worker's DHT name (spec P-7) is ``head.0.42``, ``body3.0.55``, ``tail.0.100``: stage, a constant 0, and a number of
its own from 32 on, which tells replicas apart for people. Programs know a worker by its key.

In a module of its own, without tensors: announcements are also read by seeds and DHT processes, which import no torch
(reading announcements takes 0.5 s and 37 MB to import; with torch 2.3 s and 235 MB).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trainer.errors import TrainerUsageError
from trainer.network.rpc.messages import Message

__all__ = [
    "FIRST_NUMBER",
    "LAST_NUMBER",
    "MAX_REASON",
    "Counted",
    "Incarnation",
    "StageName",
    "StageReport",
    "StageUid",
    "free_number",
]

FIRST_NUMBER = 32
LAST_NUMBER = 1023
"""Numbers of workers (spec P-7: ``head.0.[32:1024]``)."""

_UID = re.compile(r"(head|tail|body([1-9][0-9]{0,3}))\.0\.([1-9][0-9]{0,5})")

MAX_REASON = 80
"""Characters of a reason in an announcement."""

StageName: TypeAlias = Annotated[str, Field(pattern=r"^(head|tail|body-[1-9][0-9]{0,3})$")]
Counted: TypeAlias = Annotated[int, Field(ge=0, lt=2**53)]
Incarnation: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""Drawn by a worker process when it starts: another one at the same address has forgotten what this one was told."""


class StageReport(Message):
    """What a worker's announcement says of its stage, for drivers and for whoever chooses a stage."""

    uid: Annotated[str, Field(pattern=r"^(head|tail|body[1-9][0-9]{0,3})\.0\.[1-9][0-9]{0,5}$")]
    incarnation: Incarnation
    status: Literal["joining", "serving", "leaving"]
    """Micro-batches are sent to workers that serve only."""
    version: Counted = 0
    saved: Counted = 0
    """The newest version of this worker's that is on its disk, or that it went on from; 0: none is."""
    round_index: Counted = 0
    """The stage's round that is next."""
    round_position: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How much of the way there is behind it: newcomers take up a state at its beginning (spec P-43)."""
    shared_through: Counted = 0
    """As in `StageAnswer`."""
    num_tokens: Counted = 0
    """Accumulated towards the next step."""
    queued: Counted = 0
    """Requests waiting."""
    rows_per_s: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    """What it gets done, forward and backward, while it has work; 0: not known yet."""
    busy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the last while in which it computed: how much its stage needs help."""
    resumed: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    """The incarnation whose checkpoint this process goes on from, as long as it does."""
    resumed_through: Counted = 0
    """The first so many micro-batches that one counted are in it."""
    began_from: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    """What its first weights are of (`trainer.checkpoint.stages.fingerprint`), where it read a model to begin with."""
    unsaved_s: Annotated[float, Field(ge=0, lt=1e11)] = 0.0
    """Since its newest checkpoint is on the disk, or since it began; of one that makes none, 0."""
    unsaved_because: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """Why the checkpoint that was due last is not there; empty: it is, or none was due."""


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
