"""What drivers and the ledger's keeper say to each other; all of it idempotent, so it is repeated until answered.

| method           | asks                | answers              |
|------------------|---------------------|----------------------|
| `ledger/lease`   | :class:`LeaseAsk`   | :class:`LeaseAnswer` |
| `ledger/renew`   | :class:`RenewAsk`   | :class:`RenewAnswer` |
| `ledger/settle`  | :class:`SettleAsk`  | :class:`SettleAnswer`|
| `ledger/account` | :class:`AccountAsk` | :class:`Account`     |
| `ledger/workers` | :class:`AccountAsk` | :class:`WorkerCounts`|
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from pydantic import Field

from trainer.network.discovery.stage_report import Counted, Incarnation, StageName
from trainer.network.rpc.messages import Message
from trainer.pipeline.ledger.config import MAX_LEASE_UNITS
from trainer.pipeline.ledger.units import Run
from trainer.pipeline.protocol.work import MicroBatchKey, Settlement

LEDGER_LEASE, LEDGER_RENEW = "ledger/lease", "ledger/renew"
LEDGER_SETTLE, LEDGER_ACCOUNT = "ledger/settle", "ledger/account"
LEDGER_WORKERS = "ledger/workers"
MAX_PREFERRED: Final = 256
MAX_SAID: Final = 256
MAX_WORKER_COUNTS: Final = 512
"""Of an answer's 64 KiB each takes some 90 bytes."""
_MAX_COUNTS: Final = 4096

Token: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Of a lease; drawn by the driver, so that a repeated request does not lease more."""


class LeaseAsk(Message):
    """Asks for rows."""

    token: Token
    data_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """`LedgerSpec.digest`: with other settings the same name would mean other rows."""
    preferred: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MAX_PREFERRED)] = ()
    num_units: Annotated[int, Field(ge=1, le=MAX_LEASE_UNITS)]


class LeaseAnswer(Message):
    """The rows of a lease; empty if there are none now."""

    runs: tuple[Run, ...]
    lease_s: Annotated[float, Field(gt=0)]  # How long the lease lasts, for the driver from before it asked.
    finished: bool = False  # Nothing is left, and nothing will be.


class RenewAsk(Message):
    """Says that these leases are still being worked on."""

    tokens: Annotated[tuple[Token, ...], Field(max_length=MAX_SAID)]


class RenewAnswer(Message):
    """Which of them are live; the others are over, and what was open in them is given to others."""

    live: Annotated[tuple[Token, ...], Field(max_length=MAX_SAID)]
    lease_s: Annotated[float, Field(gt=0)]


class SettleAsk(Message):
    """Says what became of micro-batches of a lease."""

    token: Token
    settlements: Annotated[tuple[Settlement, ...], Field(max_length=MAX_SAID)] = ()
    handed_back: Annotated[tuple[MicroBatchKey, ...], Field(max_length=MAX_SAID)] = ()
    """Not begun: no stage was asked to apply them."""
    release: bool = False  # The driver sends nothing of this lease any more.


class SettleAnswer(Message):
    """What the ledger made of it."""

    accepted: Counted
    repeated: Counted  # Were settled before; nothing was counted twice.
    stale: Annotated[tuple[MicroBatchKey, ...], Field(max_length=2 * MAX_SAID)] = ()
    """Not of this lease any more; what was said of them does not count."""
    unheard: Annotated[tuple[MicroBatchKey, ...], Field(max_length=MAX_SAID)] = ()
    """Done by workers that the keeper has not heard of, so they stay open and have to be reported again."""


class AccountAsk(Message):
    """Asks for the account."""


class Tally(Message):
    """Micro-batches, or tokens: `leased` = `done` + `lost` + `open`, always."""

    leased: Counted  # Given to a driver at least once; each counts once, however often it was given.
    done: Counted  # Counted once in every stage.
    lost: Counted  # Not known to be counted in every stage, and never sent again.
    open: Counted  # The rest: held by drivers, or waiting to be given again.


class LostCount(Message):
    """How many micro-batches were lost in one way; `stage` is the first that did not, or may not, have counted them."""

    stage: str
    reason: str
    micro_batches: Counted


class PerishedCount(Message):
    """Micro-batches, done or lost, whose gradient was lost with a worker.

    Counted when a worker is gone: what it acknowledged to drivers and no message reports as part of a state that
    outlives it (`shared_through`); taken back when a worker resumes from that state. What the worker shared after its
    last message is included; what a driver did not learn the worker's number of (chains, behind the head) is not.
    """

    stage: str
    micro_batches: Counted


class LaneProgress(Message):
    """How far a lane is in the epoch whose units are being leased; `units` are all of that."""

    source: str | None
    epoch: Counted
    shards: Counted
    units_leased: Counted
    units: Counted


class Account(Message):
    """What has become of the data so far."""

    micro_batches: Tally
    tokens: Tally  # Labels of the rows: rows times positions.
    trained_tokens: Counted  # Of those done, the labels that counted, as drivers report: fewer where labels are masked.
    waiting: Counted  # Micro-batches of `open` that no driver holds.
    reissued: Counted  # Times a micro-batch was given again after it was handed back or its lease ran out.
    leases: Counted
    lost: Annotated[tuple[LostCount, ...], Field(max_length=_MAX_COUNTS)]
    perished: Annotated[tuple[PerishedCount, ...], Field(max_length=_MAX_COUNTS)]
    lanes: Annotated[tuple[LaneProgress, ...], Field(max_length=_MAX_COUNTS)]


class WorkerCount(Message):
    """How many micro-batches drivers settled with one worker process, each once."""

    stage: StageName
    incarnation: Incarnation
    micro_batches: Counted


class WorkerCounts(Message):
    """The workers with the most micro-batches, those lately gone included."""

    workers: Annotated[tuple[WorkerCount, ...], Field(max_length=MAX_WORKER_COUNTS)] = ()
