"""What drivers and the keeper of the account say to each other; all of it idempotent, so it is said until answered.

| method           | asks               | answers             |
|------------------|--------------------|---------------------|
| `ledger/lease`   | :class:`LeaseAsk`  | :class:`LeaseAnswer`|
| `ledger/renew`   | :class:`RenewAsk`  | :class:`RenewAnswer`|
| `ledger/settle`  | :class:`SettleAsk` | :class:`SettleAnswer`|
| `ledger/account` | :class:`AccountAsk`| :class:`Account`    |
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from trainer.network.rpc.messages import Message
from trainer.pipeline.ledger.config import MAX_LEASE_UNITS
from trainer.pipeline.ledger.units import Run
from trainer.pipeline.protocol.messages import Counted
from trainer.pipeline.protocol.micro_batch import MicroBatchKey
from trainer.pipeline.protocol.work import Settlement

__all__ = [
    "LEDGER_ACCOUNT",
    "LEDGER_LEASE",
    "LEDGER_RENEW",
    "LEDGER_SETTLE",
    "MAX_PREFERRED",
    "MAX_SAID",
    "AccountAsk",
    "LeaseAnswer",
    "LeaseAsk",
    "RenewAnswer",
    "RenewAsk",
    "SettleAnswer",
    "SettleAsk",
    "Token",
]

LEDGER_LEASE, LEDGER_RENEW = "ledger/lease", "ledger/renew"
LEDGER_SETTLE, LEDGER_ACCOUNT = "ledger/settle", "ledger/account"
MAX_PREFERRED = 256
MAX_SAID = 256

Token: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Of a lease; drawn by the driver, so that asking again is not asking for more."""


class LeaseAsk(Message):
    """Rows, please."""

    token: Token
    data_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """`LedgerSpec.digest`: by other settings the same name would be other rows."""
    preferred: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MAX_PREFERRED)] = ()
    """Shards, the first most."""
    num_units: Annotated[int, Field(ge=1, le=MAX_LEASE_UNITS)]


class LeaseAnswer(Message):
    """The rows of a lease, or that there are none now."""

    runs: tuple[Run, ...]
    lease_s: Annotated[float, Field(gt=0)]
    """How long it lasts, for the driver from before it asked."""
    finished: bool = False
    """Nothing is left, and nothing will be."""


class RenewAsk(Message):
    """These leases are still being worked on."""

    tokens: Annotated[tuple[Token, ...], Field(max_length=MAX_SAID)]


class RenewAnswer(Message):
    """Which of them are live; the others are over, and what was open in them is others' now."""

    live: Annotated[tuple[Token, ...], Field(max_length=MAX_SAID)]
    lease_s: Annotated[float, Field(gt=0)]


class SettleAsk(Message):
    """What became of micro-batches of a lease."""

    token: Token
    settlements: Annotated[tuple[Settlement, ...], Field(max_length=MAX_SAID)] = ()
    handed_back: Annotated[tuple[MicroBatchKey, ...], Field(max_length=MAX_SAID)] = ()
    """Not begun: no stage was asked to apply them."""
    release: bool = False
    """The driver sends nothing of this lease any more."""


class SettleAnswer(Message):
    """What was made of it."""

    accepted: Counted
    repeated: Counted
    """Were settled before."""
    stale: Annotated[tuple[MicroBatchKey, ...], Field(max_length=2 * MAX_SAID)] = ()
    """Not this lease's any more."""
    unheard: Annotated[tuple[MicroBatchKey, ...], Field(max_length=MAX_SAID)] = ()
    """Done, it is said, by workers that the keeper has not heard of, so they are open still: to be said again."""


class AccountAsk(Message):
    """How does the account stand?"""
