"""Drivers and a keeper on real sockets, rows from a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from loader.options import StoreOptions
from loader.session import Session
from tests.support.event_loop import on_event_loop
from tests.support.ledger_cast import STAGES, WORKER, done, journal_path
from tests.support.rpc_pair import running_endpoint
from tests.support.token_store import TokenStore
from trainer.ledger import (
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
from trainer.ledger.journal import Journal
from trainer.pipeline.work import MicroBatch
from trainer.rpc import Endpoint, Peer

CONFIG = LedgerConfig(unit_rows=8, lease_s=30.0, lease_margin_s=0.0, inquiry_s=0.0, epochs=1)
SEQ_LEN = 100  # 19 windows a shard of 2,000 ids.


@dataclass(slots=True)
class Workers:
    """Stand for all workers: what they say they have counted."""

    applied: dict[str, set[str]]
    asked: list[str]

    async def __call__(self, keys: Sequence[str]) -> AppliedReport:
        self.asked.extend(keys)
        found = {stage: frozenset(each & set(keys)) for stage, each in self.applied.items()}
        return AppliedReport(found, frozenset(WORKER.values()))


@dataclass(slots=True)
class Run:
    """A store, and who keeps its account where."""

    session: Session
    spec: LedgerSpec
    shards: list[Sequence[int]]
    path: Path
    workers: Workers

    def rows(self) -> MicroBatches:
        return MicroBatches(self.session, self.spec.seed, self.spec.layout)

    @asynccontextmanager
    async def keeper(
        self, config: LedgerConfig = CONFIG, **options: object
    ) -> AsyncIterator[tuple[LedgerService, Endpoint]]:
        ledger, journal = open_ledger(self.path, self.spec, self.shards, config)
        async with keeping(ledger, journal, config, self.workers, options) as both:
            yield both

    @asynccontextmanager
    async def driver(
        self, keeper: Peer | list[Peer], config: LedgerConfig = CONFIG, preferred: Sequence[int] = ()
    ) -> AsyncIterator[LedgerClient]:
        peers = keeper if isinstance(keeper, list) else [keeper]
        async with running_endpoint() as endpoint:
            client = LedgerClient(
                endpoint, lambda: peers[-1] if peers else None, self.rows(), self.spec, config, preferred
            )
            await client.start()
            try:
                yield client
            finally:
                await client.close()


@asynccontextmanager
async def keeping(
    ledger: object, journal: Journal, config: LedgerConfig, workers: Workers, options: dict[str, object]
) -> AsyncIterator[tuple[LedgerService, Endpoint]]:
    from tests.support.rpc_node import RUN_ID, fast_config
    from trainer.rpc import Identity

    endpoint = Endpoint(Identity.create(), RUN_ID, fast_config(**options))
    service = LedgerService(endpoint, ledger, journal, config, workers)  # type: ignore[arg-type]
    service.register()
    await endpoint.start()
    await service.start()
    try:
        yield service, endpoint
    finally:
        await endpoint.stop()
        await service.stop()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    store = TokenStore.of(tmp_path / "store", 4)
    session = Session.open(StoreOptions.of(store.url, cache_dir=tmp_path / "cache"))
    lanes = lanes_of(session.catalog, {}, holdout=1)
    spec = spec_of(session.catalog, lanes, stages=STAGES, seed=3, seq_len=SEQ_LEN, micro_batch_rows=4, config=CONFIG)
    return Run(session, spec, [lane.shards for lane in lanes], journal_path(tmp_path), Workers({}, []))


async def all_of(client: LedgerClient, number: int = 0) -> list[MicroBatch]:
    found = []
    while (micro_batch := await client.next()) is not None:
        found.append(micro_batch)
        client.settle(done(micro_batch.id, number + len(found), tokens=micro_batch.num_tokens))
    return found


@on_event_loop
async def test_two_drivers_read_every_window_of_every_shard_once_but_of_those_held_out(run: Run) -> None:
    async with run.keeper() as (service, endpoint), run.driver(endpoint.peer) as one, run.driver(endpoint.peer) as two:
        first, second = await asyncio.gather(all_of(one), all_of(two, 1000))
        account = await service.account()
    assert first
    assert second
    found = np.concatenate([each.input_ids.numpy() for each in (*first, *second)])
    expected = np.concatenate(
        [run.session.open_shard(shard).ids[: 19 * SEQ_LEN].reshape(19, SEQ_LEN) for shard in (1, 2, 3)]
    )
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))
    assert (account.micro_batches.done, account.micro_batches.open) == (15, 0)
    assert account.trained_tokens == account.tokens.done == 3 * 19 * SEQ_LEN
