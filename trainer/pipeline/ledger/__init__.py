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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
