"""The account as it is told to whoever asks: every figure adds up, in micro-batches and in tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.network.rpc.messages import Message
from trainer.pipeline.protocol.messages import Counted

__all__ = ["Account", "LaneProgress", "LostCount", "PerishedCount", "Tally"]


class Tally(Message):
    """Micro-batches, or tokens: `leased` = `done` + `lost` + `open`, always."""

    leased: Counted
    """Given to a driver at least once; each counts once, however often it was given."""
    done: Counted
    """Counted once in every stage."""
    lost: Counted
    """Not known to be counted in every stage, and never to be sent again."""
    open: Counted
    """The rest: held by drivers, or waiting to be given again."""


class LostCount(Message):
    """How many micro-batches were lost in one way."""

    stage: str
    """The first that did not, or may not, have counted them."""
    reason: str
    micro_batches: Counted


class PerishedCount(Message):
    """Micro-batches whose gradient died with a worker, of those that are done or lost.

    Counted when a worker incarnation is gone: the micro-batches that it acknowledged to drivers and of which no message
    has said that they were in a state that outlives it (`shared_through`); taken back when a worker says that it goes
    on with them (`WorkerSeen.resumed`). An upper bound: what it shared after its last message is in it. Not in it:
    micro-batches that are done because workers said so after a driver died, and those of which the driver did not learn
    the worker's number (chain routing, behind the first stage).
    """

    stage: str
    micro_batches: Counted


class LaneProgress(Message):
    """How far a lane is."""

    source: str | None
    epoch: Counted
    """The pass whose units are being leased."""
    shards: Counted
    """Of that pass."""
    units_leased: Counted
    """Of that pass."""
    units: Counted
    """Of that pass, in all."""


class Account(Message):
    """What has become of the data so far."""

    micro_batches: Tally
    tokens: Tally
    """Labels of the rows: rows times positions."""
    trained_tokens: Counted
    """Of those done, the labels that counted, as drivers say: fewer where labels are masked."""
    waiting: Counted
    """Micro-batches of `open` that no driver holds."""
    reissued: Counted
    """Times a micro-batch was given once more, handed back before or of a lease that ran out."""
    leases: Counted
    """Live ones."""
    lost: Annotated[tuple[LostCount, ...], Field(max_length=4096)]
    perished: Annotated[tuple[PerishedCount, ...], Field(max_length=4096)]
    lanes: Annotated[tuple[LaneProgress, ...], Field(max_length=4096)]
