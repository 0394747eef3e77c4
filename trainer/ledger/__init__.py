"""Who trains on which data, once: leases of micro-batches to drivers, and the account of what became of them.

    ledger, journal = open_ledger(path, spec, [lane.shards for lane in lanes], config)   # at one driver of a run
    keeper = LedgerService(endpoint, ledger, journal, config, WorkerInquiry(endpoint, workers))
    keeper.register(); await keeper.start()
    work = LedgerClient(endpoint, find_keeper, rows, spec, config, preferred)  # at every driver, the keeper's too
    await work.start()
    micro_batch = await work.next(); ...; work.settle(settlement)

Guarantees: leased = done + lost + open at every moment, in micro-batches and in tokens; a micro-batch is in one live
lease at most, and the micro-batches of an epoch are every window of every shard once; what a driver was told is on disk
before it is told (killed at any byte, the keeper comes back with it); settling twice counts once. The trade-off: one
keeper a run, an fsync (1 to 5 ms) for each lease and each bundle of settlements. Drivers go on with what they hold
while it is away, until their lease ends (60 s).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.ledger.account import Account, LostCount
    from trainer.ledger.books import Books
    from trainer.ledger.client import LedgerClient
    from trainer.ledger.config import LedgerConfig
    from trainer.ledger.inquiry import AppliedInquiry, AppliedReport, WorkerInquiry
    from trainer.ledger.journal import Journal
    from trainer.ledger.lanes import Lane, lanes_of, preferred_shards, spec_of
    from trainer.ledger.ledger import Ledger
    from trainer.ledger.messages import LEDGER_ACCOUNT, LEDGER_LEASE, LEDGER_RENEW, LEDGER_SETTLE
    from trainer.ledger.rows import MicroBatches
    from trainer.ledger.service import LedgerService, open_ledger
    from trainer.ledger.units import LaneSpec, Layout, LedgerSpec, Run, Unit

_MODULES = {
    "Account": "account",
    "AppliedInquiry": "inquiry",
    "AppliedReport": "inquiry",
    "Books": "books",
    "Journal": "journal",
    "LEDGER_ACCOUNT": "messages",
    "LEDGER_LEASE": "messages",
    "LEDGER_RENEW": "messages",
    "LEDGER_SETTLE": "messages",
    "Lane": "lanes",
    "LaneSpec": "units",
    "Layout": "units",
    "Ledger": "ledger",
    "LedgerClient": "client",
    "LedgerConfig": "config",
    "LedgerService": "service",
    "LedgerSpec": "units",
    "LostCount": "account",
    "MicroBatches": "rows",
    "Run": "units",
    "Unit": "units",
    "WorkerInquiry": "inquiry",
    "lanes_of": "lanes",
    "open_ledger": "service",
    "preferred_shards": "lanes",
    "spec_of": "lanes",
}

__all__ = [
    "LEDGER_ACCOUNT",
    "LEDGER_LEASE",
    "LEDGER_RENEW",
    "LEDGER_SETTLE",
    "Account",
    "AppliedInquiry",
    "AppliedReport",
    "Books",
    "Journal",
    "Lane",
    "LaneSpec",
    "Layout",
    "Ledger",
    "LedgerClient",
    "LedgerConfig",
    "LedgerService",
    "LedgerSpec",
    "LostCount",
    "MicroBatches",
    "Run",
    "Unit",
    "WorkerInquiry",
    "lanes_of",
    "open_ledger",
    "preferred_shards",
    "spec_of",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainer.ledger' has no attribute {name!r}")
    value = getattr(import_module(f"trainer.ledger.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
