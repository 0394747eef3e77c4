"""What the journal's lines say. Replayed in order they give the account again; times are in none of them.

A lease that was live when the keeper went down begins anew when it is back: drivers know their own, earlier ends, so
nothing is given twice, only later.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from trainer.network.rpc.messages import Message
from trainer.pipeline.ledger.units import LedgerSpec, Run
from trainer.pipeline.protocol.messages import Counted, Incarnation, StageName
from trainer.pipeline.protocol.work import LossReason, Settlement

__all__ = [
    "RECORD",
    "Granted",
    "Grown",
    "LaneState",
    "LeaseState",
    "LostRuns",
    "Opened",
    "Record",
    "Resolved",
    "Settled",
    "Snapshot",
    "WorkerSeen",
    "WorkerState",
    "Workers",
]

Runs: TypeAlias = tuple[Run, ...]
Span: TypeAlias = tuple[Counted, Counted]


class Opened(Message):
    """The first line of a new account."""

    kind: Literal["opened"] = "opened"
    version: Literal[1] = 1
    spec: LedgerSpec
    shards: tuple[Counted, ...]
    """How many each lane has."""


class Grown(Message):
    """The store has more shards; each lane reads them from its next epoch on."""

    kind: Literal["grown"] = "grown"
    shards: tuple[Counted, ...]


class Granted(Message):
    """A driver was given these rows."""

    kind: Literal["granted"] = "granted"
    token: str
    driver: str
    runs: Runs


class Settled(Message):
    """A driver said what became of some, and handed some back."""

    kind: Literal["settled"] = "settled"
    token: str
    settlements: tuple[Settlement, ...] = ()
    handed_back: Runs = ()


class LostRuns(Message):
    """Micro-batches lost in one way."""

    stage: StageName
    reason: LossReason
    runs: Runs


class Resolved(Message):
    """A lease ran out, and the workers were asked: nothing of it is open any more."""

    kind: Literal["resolved"] = "resolved"
    token: str
    done: Runs = ()
    lost: tuple[LostRuns, ...] = ()
    returned: Runs = ()


class WorkerSeen(Message):
    """A worker there is, and how much of what it has applied outlives it."""

    stage: StageName
    incarnation: Incarnation
    shared_through: Counted = 0
    resumed: Incarnation | None = None
    """One that was before, from whose state this one goes on."""
    resumed_through: Counted = 0
    """Of what that one had applied, the first so many are in it, and did not perish."""


class Workers(Message):
    """Workers came, went, stepped, or shared what they had."""

    kind: Literal["workers"] = "workers"
    seen: tuple[WorkerSeen, ...] = ()
    gone: tuple[Incarnation, ...] = ()
    version: Counted | None = None
    """The stages' now; None: as before."""


class LaneState(Message):
    """Where a lane stands."""

    epoch: Counted
    num_shards: Counted
    """Of this epoch."""
    next_num_shards: Counted
    """Of the next."""
    begun: tuple[Span, ...]
    """Positions of shards of which units were leased in this epoch: first and last of each run."""
    cursors: tuple[Span, ...]
    """Of these, those that have more: position and next unit."""
    units_leased: Counted
    """In all epochs."""


class LeaseState(Message):
    """A live lease."""

    token: str
    driver: str
    bereaved: bool
    """A worker of the last stage has vanished since it was given."""
    open: Runs


class WorkerState(Message):
    """A worker that is taken to be alive."""

    stage: StageName
    incarnation: Incarnation
    announced: bool = True
    """Else drivers alone have spoken of it."""
    shared_through: Counted
    unshared: tuple[Span, ...]


class Snapshot(Message):
    """All that the lines before it add up to."""

    kind: Literal["snapshot"] = "snapshot"
    version: Literal[1] = 1
    spec: LedgerSpec
    lanes: tuple[LaneState, ...]
    leases: tuple[LeaseState, ...]
    waiting: Runs
    workers: tuple[WorkerState, ...]
    departed: tuple[WorkerState, ...] = ()
    """Of those announced that are gone, the last, in that order."""
    done: Span
    """Micro-batches, rows."""
    lost: Span
    lost_by: tuple[tuple[str, str, Counted], ...]
    """Stage, reason, micro-batches."""
    perished_by: tuple[tuple[str, Counted], ...]
    trained_tokens: Counted
    reissued: Counted
    noted: Span | None = None
    """The stages' version when it was noted last, and the tokens that were done or lost then."""


Record: TypeAlias = Annotated[
    Opened | Grown | Granted | Settled | Resolved | Workers | Snapshot, Field(discriminator="kind")
]
RECORD: TypeAdapter[Record] = TypeAdapter(Record)
