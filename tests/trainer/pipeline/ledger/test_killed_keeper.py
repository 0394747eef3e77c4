"""A keeper that is killed (-9) at any moment comes back with all that it told anybody."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.ledger_cast import done
from tests.support.ledger_keeper import KEEPER_CONFIG, KeeperProcess, keeper_process
from tests.support.ledger_run import Run, ledger_run
from trainer.network.rpc import Peer
from trainer.pipeline.ledger import LedgerClient, open_ledger
from trainer.pipeline.protocol.work import MicroBatchId

KILLS = 2
MICRO_BATCHES = 4 * 15


async def drive(client: LedgerClient, found: list[MicroBatchId]) -> None:
    while (micro_batch := await client.next()) is not None:
        found.append(micro_batch.id)
        client.settle(done(micro_batch.id, len(found), tokens=micro_batch.num_tokens))
        await asyncio.sleep(0.02)


async def kill_at(count: int, found: list[MicroBatchId], keeper: KeeperProcess) -> None:
    while len(found) < count:
        await asyncio.sleep(0.001)
    keeper.kill()


@pytest.mark.slow
@on_event_loop
async def test_every_micro_batch_is_done_once_however_often_the_keeper_is_killed(tmp_path: Path) -> None:
    run: Run = ledger_run(tmp_path)
    reach: list[Peer] = []
    found: list[MicroBatchId] = []
    when = sorted(random.Random(5).sample(range(3, MICRO_BATCHES - 10), KILLS))
    async with run.driver(reach, KEEPER_CONFIG) as one, run.driver(reach, KEEPER_CONFIG) as two:
        driving = asyncio.gather(drive(one, found), drive(two, found))
        with ExitStack() as stack:
            *mortal, last = [stack.enter_context(keeper_process(run)) for _ in range(KILLS + 1)]
            for count, keeper in zip(when, mortal, strict=True):
                reach.append(await keeper.begin())
                await kill_at(count, found, keeper)
            reach.append(await last.begin())
            await driving
    assert len(found) == len(set(found)) == MICRO_BATCHES
    ledger, journal = open_ledger(run.path, run.spec, run.shards, KEEPER_CONFIG)
    journal.close()
    account = ledger.account()
    assert (account.micro_batches.done, account.micro_batches.open) == (MICRO_BATCHES, 0)
    assert (account.reissued, one.stale, two.stale, one.refused, two.refused) == (0, 0, 0, 0, 0)
