"""The ledger: leases micro-batches to drivers, each to be trained on once, and accounts for what became of them.

    ledger, journal = open_ledger(path, spec, [lane.shards for lane in lanes], config)   # at one driver of a run
    keeper = LedgerService(endpoint, ledger, journal, config, WorkerInquiry(endpoint, workers))
    keeper.register(); await keeper.start()
    seat = KeeperSeat(endpoint, StoreSite(...), config.takeover_s, make)  # instead, where any driver may be the keeper
    work = LedgerClient(endpoint, find_keeper, rows, spec, config, preferred)  # at every driver, the keeper's too
    await work.start()
    micro_batch = await work.next(); ...; work.settle(settlement)

A micro-batch is in one live lease at most, and those of an epoch are every window of every shard once. The trade-off:
one keeper at a time; an fsync (1 to 5 ms) for each lease and each bundle of settlements, or, where the account outlives
its keeper's machine, a put of the store (50 ms) or a round to most members for all that came meanwhile.
"""

from __future__ import annotations

from trainer.pipeline.ledger.client import LedgerClient
from trainer.pipeline.ledger.config import LedgerConfig
from trainer.pipeline.ledger.journal import Journal
from trainer.pipeline.ledger.ledger import AppliedReport
from trainer.pipeline.ledger.ledger_state import LedgerState
from trainer.pipeline.ledger.messages import LEDGER_ACCOUNT, LEDGER_LEASE, LEDGER_RENEW, LEDGER_SETTLE, Account
from trainer.pipeline.ledger.rows import LedgerLane, MicroBatches, lanes_of, preferred_shards, spec_of
from trainer.pipeline.ledger.service import LedgerService, WorkerInquiry, ledger_in, open_ledger
from trainer.pipeline.ledger.succession import KeeperSeat
from trainer.pipeline.ledger.units import LaneSpec, Layout, LedgerSpec, Run

__all__ = [
    "LEDGER_ACCOUNT",
    "LEDGER_LEASE",
    "LEDGER_RENEW",
    "LEDGER_SETTLE",
    "Account",
    "AppliedReport",
    "Journal",
    "KeeperSeat",
    "LaneSpec",
    "Layout",
    "LedgerClient",
    "LedgerConfig",
    "LedgerLane",
    "LedgerService",
    "LedgerSpec",
    "LedgerState",
    "MicroBatches",
    "Run",
    "WorkerInquiry",
    "lanes_of",
    "ledger_in",
    "open_ledger",
    "preferred_shards",
    "spec_of",
]
