"""The journal's lines. Replayed in order they give the ledger's state again; they hold no times.

A lease that was live when the keeper went down begins anew when it is back: drivers know their own, earlier ends.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from trainer.network.discovery.stage_report import Counted, Incarnation, StageName
from trainer.network.rpc.messages import Message
from trainer.pipeline.ledger.units import LaneSnapshot, LedgerSpec, Run, Span
from trainer.pipeline.protocol.work import LossReason, Settlement

Runs: TypeAlias = tuple[Run, ...]


class Opened(Message):
    """The first line of a new account; ``shards``: how many each lane has."""

    kind: Literal["opened"] = "opened"
    version: Literal[1] = 1
    spec: LedgerSpec
    shards: tuple[Counted, ...]


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
    """A driver said what became of some micro-batches, and handed some back."""

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
    """A worker as announced, and how much of what it has applied outlives it."""

    stage: StageName
    incarnation: Incarnation
    shared_through: Counted = 0
    resumed: Incarnation | None = None  # The former worker from whose state this one goes on.
    resumed_through: Counted = 0
    """The first so many that the former worker had applied are in that state, and did not perish."""


class Workers(Message):
    """Workers came, went, stepped, or shared what they had."""

    kind: Literal["workers"] = "workers"
    seen: tuple[WorkerSeen, ...] = ()
    gone: tuple[Incarnation, ...] = ()
    version: Counted | None = None  # The stages' version now; None: as before.


class LeaseSnapshot(Message):
    """A live lease; see `OpenLease`."""

    token: str
    driver: str
    bereaved: bool
    open: Runs


class WorkerSnapshot(Message):
    """A worker that is assumed to be alive."""

    stage: StageName
    incarnation: Incarnation
    announced: bool = True  # False: only drivers have named it.
    shared_through: Counted
    unshared: tuple[Span, ...]
    credited: Counted = 0  # Journals of earlier releases do not have it.


class LedgerSnapshot(Message):
    """All that the lines before it add up to."""

    kind: Literal["snapshot"] = "snapshot"
    version: Literal[1] = 1
    spec: LedgerSpec
    lanes: tuple[LaneSnapshot, ...]
    leases: tuple[LeaseSnapshot, ...] = ()
    waiting: Runs = ()
    workers: tuple[WorkerSnapshot, ...] = ()
    departed: tuple[WorkerSnapshot, ...] = ()  # The last of the announced workers that are gone, in that order.
    done: Span = (0, 0)  # Micro-batches, rows.
    lost: Span = (0, 0)
    lost_by: tuple[tuple[str, str, Counted], ...] = ()  # Stage, reason, micro-batches.
    perished_by: tuple[tuple[str, Counted], ...] = ()
    trained_tokens: Counted = 0
    reissued: Counted = 0
    noted: Span | None = None  # The stages' version when it was noted last, and the tokens that were done or lost then.


Record: TypeAlias = Annotated[
    Opened | Grown | Granted | Settled | Resolved | Workers | LedgerSnapshot, Field(discriminator="kind")
]
RECORD: TypeAdapter[Record] = TypeAdapter(Record)
