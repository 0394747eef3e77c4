"""What a worker's announcement says of its stage.

In a module of its own, without tensors: announcements are also read by seeds and DHT processes, which import no torch
(reading announcements takes 0.5 s and 37 MB to import; with torch 2.3 s and 235 MB).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trainer.rpc.messages import Message

__all__ = ["MAX_REASON", "Counted", "Incarnation", "StageName", "StageReport"]

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
    """What its first weights are of (`trainer.stagewise.fingerprint`), where it read a model to begin with."""
    unsaved_s: Annotated[float, Field(ge=0, lt=1e11)] = 0.0
    """Since its newest checkpoint is on the disk, or since it began; of one that makes none, 0."""
    unsaved_because: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """Why the checkpoint that was due last is not there; empty: it is, or none was due."""
