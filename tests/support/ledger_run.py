"""A run's account over a small store: a keeper and drivers on real sockets, workers that answer what a test says.

As a process it keeps an account that tests can kill -9 and start again on the same journal, which is compacted every
few records.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from loader.options import StoreOptions
from loader.session import Session
from tests.support.child import Child, input_ended, say
from tests.support.ledger_cast import STAGES, WORKER, done, journal_path
from tests.support.rpc_node import RUN_ID, fast_config, running_endpoint
from tests.support.token_store import TokenStore
from trainer.network.rpc import Endpoint, Identity, Peer
from trainer.pipeline.ledger import (
    AppliedReport,
    LedgerClient,
    LedgerConfig,
    LedgerService,
    LedgerSpec,
    MicroBatches,
    lanes_of,
    open_ledger,
    spec_of,
)
from trainer.pipeline.protocol.work import MicroBatch

CONFIG = LedgerConfig(unit_rows=8, lease_s=30.0, lease_margin_s=0.0, inquiry_s=0.0, reissue_after_s=0.0, epochs=1)
KEEPER_CONFIG = replace(CONFIG, compact_bytes=1 << 12, epochs=4)
SEQ_LEN = 100
"""19 windows a shard of 2,000 ids."""


@dataclass(slots=True)
class Workers:
    applied: dict[str, set[str]]
    asked: list[str]

    async def __call__(self, keys: Sequence[str]) -> AppliedReport:
        self.asked.extend(keys)
        found = {stage: frozenset(each & set(keys)) for stage, each in self.applied.items()}
        return AppliedReport(found, frozenset(WORKER.values()))


@dataclass(slots=True)
class Run:
    store: Path
    session: Session
    spec: LedgerSpec
    shards: list[Sequence[int]]
    path: Path
    workers: Workers
    drivers: list[str] = field(default_factory=list)
    """Keys of all there were."""

    def rows(self) -> MicroBatches:
        return MicroBatches(self.session, self.spec.seed, self.spec.layout)

    @asynccontextmanager
    async def keeper(
        self,
        config: LedgerConfig = CONFIG,
        *,
        max_tokens: int = 0,
        announced: Callable[[], Collection[str]] | None = None,
    ) -> AsyncIterator[tuple[LedgerService, Endpoint]]:
        """Keeps the account, on a new port and with a new key each time."""
        ledger, journal = open_ledger(self.path, self.spec, self.shards, config, max_tokens=max_tokens)
        endpoint = Endpoint(Identity.create(), RUN_ID, fast_config())
        service = LedgerService(endpoint, ledger, journal, config, self.workers, drivers=announced)
        service.register()
        await endpoint.start()
        await service.start()
        try:
            yield service, endpoint
        finally:
            await endpoint.stop()
            await service.stop()

    @asynccontextmanager
    async def driver(
        self,
        keeper: Peer | list[Peer],
        config: LedgerConfig = CONFIG,
        *,
        rows: MicroBatches | None = None,
        endpoint: Endpoint | None = None,
    ) -> AsyncIterator[LedgerClient]:
        peers = keeper if isinstance(keeper, list) else [keeper]
        async with running_endpoint() if endpoint is None else nullcontext(endpoint) as own:
            self.drivers.append(own.peer_id)
            client = LedgerClient(own, lambda: peers[-1] if peers else None, rows or self.rows(), self.spec, config)
            await client.start()
            try:
                yield client
            finally:
                await client.close()


def ledger_run(folder: Path) -> Run:
    """Of a store of four shards, the first held out: 3 × 19 windows, 15 micro-batches."""
    TokenStore.of(folder / "store", 4)
    return run_of(folder / "store", folder / "cache", journal_path(folder))


def run_of(store: Path, cache: Path, journal: Path) -> Run:
    session = Session.open(StoreOptions.of(store, cache_dir=cache))
    lanes = lanes_of(session.catalog, {}, holdout=1)
    spec = spec_of(session.catalog, lanes, stages=STAGES, seed=3, seq_len=SEQ_LEN, micro_batch_rows=4, config=CONFIG)
    return Run(store, session, spec, [lane.shards for lane in lanes], journal, Workers({}, []))


async def all_of(client: LedgerClient, number: int = 0) -> list[MicroBatch]:
    found = []
    while (micro_batch := await client.next()) is not None:
        found.append(micro_batch)
        client.settle(done(micro_batch.id, number + len(found), tokens=micro_batch.num_tokens))
    return found


class KeeperProcess(Child):
    """One that is started, and keeps nothing yet: the second it takes to import everything can be another's last."""

    async def begin(self) -> Peer:
        self.say("go")
        return Peer(*await asyncio.to_thread(self.hear))


def keeper_process(run: Run) -> KeeperProcess:
    return KeeperProcess("ledger_run", run.store, run.session.options.cache_dir, run.path)


async def _serve(store: str, cache: str, journal: str) -> None:
    await asyncio.to_thread(sys.stdin.readline)
    run = run_of(Path(store), Path(cache), Path(journal))
    async with run.keeper(KEEPER_CONFIG) as (_, endpoint):
        say([endpoint.peer_id, endpoint.address])
        await input_ended()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
