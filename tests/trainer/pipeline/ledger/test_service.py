"""The keeper on real sockets: drivers that lease from it, workers it asks, and its death at any moment."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from tests.support.ledger_cast import ALIVE, done, invented
from tests.support.ledger_run import CONFIG, KEEPER_CONFIG, SEQ_LEN, Run, all_of, keeper_process, ledger_run
from tests.support.rpc_pair import running_endpoint
from trainer.errors import LedgerError, RefusedError
from trainer.network.rpc import Endpoint, Peer, Reply, Request
from trainer.pipeline.ledger import AppliedReport, LedgerClient, LedgerConfig, WorkerInquiry, open_ledger
from trainer.pipeline.ledger.messages import LEDGER_LEASE, LeaseAnswer, LeaseAsk
from trainer.pipeline.protocol.messages import APPLIED, AppliedAnswer, AppliedAsk
from trainer.pipeline.protocol.work import MicroBatchId, boottime_s


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return ledger_run(tmp_path)


@pytest.mark.slow
async def test_two_drivers_read_every_window_of_every_shard_once_but_of_those_held_out(run: Run) -> None:
    async with run.keeper() as (service, endpoint), run.driver(endpoint.peer) as one, run.driver(endpoint.peer) as two:
        first, second = await asyncio.gather(all_of(one), all_of(two, 1000))
        account = await service.account()
        assert [service.has_told(each) for each in (*run.drivers, "another")] == [True, True, False]
    assert len(first) > 0 < len(second)
    found = np.concatenate([each.input_ids.numpy() for each in (*first, *second)])
    expected = np.concatenate(
        [run.session.open_shard(shard).ids[: 19 * SEQ_LEN].reshape(19, SEQ_LEN) for shard in (1, 2, 3)]
    )
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))
    assert (account.micro_batches.done, account.micro_batches.open) == (15, 0)
    assert account.trained_tokens == account.tokens.done == 3 * 19 * SEQ_LEN


@pytest.mark.slow
async def test_rows_are_given_to_drivers_that_are_announced_and_a_new_one_waits_until_it_is(run: Run) -> None:
    announced: set[str] = set()
    async with (
        run.keeper(announced=lambda: announced) as (service, at),
        run.driver(at.peer) as one,
        running_endpoint() as stranger,
    ):
        ask = LeaseAsk(token="0" * 32, data_digest=run.spec.digest(), num_units=1)
        with pytest.raises(RefusedError) as refused:
            await stranger.call(at.peer, LEDGER_LEASE, ask, LeaseAnswer, timeout_s=30.0)
        assert refused.value.reason == "not-a-driver"
        own = await at.call(at.peer, LEDGER_LEASE, ask, LeaseAnswer, timeout_s=30.0)
        assert own.body.runs
        waiting = asyncio.create_task(one.next())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert {*map(service.quiet_s, (*run.drivers, stranger.peer_id))} == {math.inf}
        announced.update(run.drivers)
        assert await waiting is not None
        assert 0 <= service.quiet_s(run.drivers[0]) < 30
        assert service.quiet_s(stranger.peer_id) == math.inf


@pytest.mark.slow
async def test_a_keeper_whose_journal_cannot_be_written_says_so_to_whoever_waits(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run.keeper() as (service, endpoint), run.driver(endpoint.peer) as one:
        failing = asyncio.create_task(service.failed())
        begun = await one.next()
        assert not failing.done()

        def full(_descriptor: int) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr("trainer.pipeline.ledger.journal.os.fdatasync", full)
        one.settle(done(begun.id))
        with pytest.raises(LedgerError, match="no space left on device"):
            await asyncio.wait_for(failing, 20)


@pytest.mark.slow
async def test_a_dead_drivers_lease_is_asked_after_and_what_no_worker_has_is_given_again(run: Run) -> None:
    config = LedgerConfig(
        unit_rows=8, lease_s=1.0, lease_margin_s=0.1, inquiry_s=0.0, reissue_after_s=0.0, epochs=1, close_s=0.2
    )
    async with run.keeper(config) as (service, endpoint):
        reach = [endpoint.peer]
        async with run.driver(reach, config) as dead, run.driver(endpoint.peer, config) as heir:
            begun = [await dead.next() for _ in range(3)]
            everywhere, somewhere, nowhere = [each.id for each in begun]
            both = {str(everywhere), str(somewhere)}
            run.workers.applied.update(head=both, tail=both, **{"body-1": {str(everywhere)}})
            reach.clear()  # It reaches nobody any more.
            found = {each.id for each in await all_of(heir)}
            assert boottime_s() >= begun[0].send_before_s
            assert {str(nowhere)} | both <= set(run.workers.asked)
            account = await service.account()
            assert nowhere in found
            assert not {everywhere, somewhere} & found
            assert [(each.stage, each.reason, each.micro_batches) for each in account.lost] == [
                ("body-1", "driver-lost", 1)
            ]
            assert (account.micro_batches.done, account.micro_batches.open) == (14, 0)
            dead.settle(done(everywhere))
            reach.append(endpoint.peer)
        assert (dead.stale, dead.cache.num_unreported) == (0, 0)  # It was known already.
        assert (await service.account()).micro_batches.done == 14


async def test_a_driver_with_other_data_is_refused(run: Run) -> None:
    async with run.keeper() as (service, endpoint):
        run.spec = run.spec.model_copy(update={"seed": 4})
        async with run.driver(endpoint.peer) as driver:
            with pytest.raises(LedgerError, match="seed, seq_len"):
                await driver.next()
        assert (await service.account()).micro_batches.leased == 0
        assert endpoint.counters.refused["data"] >= 1


async def test_a_driver_may_be_the_keeper_too(run: Run) -> None:
    async with run.keeper() as (service, endpoint), run.driver(endpoint.peer, endpoint=endpoint) as client:
        assert len(await all_of(client)) == 15
    assert service.has_told(endpoint.peer_id)


@pytest.mark.slow
async def test_a_driver_that_knows_workers_before_the_keeper_does_loses_nothing_by_it(run: Run) -> None:
    async with run.keeper(announced=lambda: run.drivers) as (service, at), run.driver(at.peer) as one:
        given = []
        while len(given) < 4:
            micro_batch = await one.next()
            given.append(micro_batch)
            one.settle(done(micro_batch.id, len(given), tokens=micro_batch.num_tokens))
        await asyncio.sleep(0.5)
        account = await service.account()
        assert (account.micro_batches.done, one.cache.num_unreported) == (0, 4)
        await service.note_workers(ALIVE)
        given += await all_of(one, 4)
        account = await service.account()
    assert len(given) == account.micro_batches.done == 15
    assert (account.micro_batches.open, account.reissued, one.stale, one.refused) == (0, 0, 0, 0)


@pytest.mark.slow
async def test_what_a_driver_only_says_is_done_is_trained_on_by_another(run: Run) -> None:
    config = replace(CONFIG, lease_s=0.5, worker_gone_s=0.5, close_s=0.2)
    async with run.keeper(config, announced=lambda: run.drivers) as (service, at):

        async def announce() -> None:
            while True:
                await service.note_workers(ALIVE)
                await asyncio.sleep(0.1)

        announcing = asyncio.create_task(announce())
        async with run.driver(at.peer, config) as liar:
            for _ in range(3):
                micro_batch = await liar.next()
                liar.settle(invented(micro_batch.id))
            while liar.stale < 3:
                await asyncio.sleep(0.05)
        async with run.driver(at.peer, config) as honest:
            found = await all_of(honest)
        announcing.cancel()
        account = await service.account()
    assert (len(found), account.micro_batches.done, account.micro_batches.open) == (15, 15, 0)


KEYS = tuple(f"e0.s0.r{row}" for row in range(1100))


def answer_with(endpoint: Endpoint, incarnations: Iterator[str], counted: set[str], asked: list[AppliedAsk]) -> None:
    async def answer(request: Request[AppliedAsk]) -> Reply[AppliedAnswer]:
        asked.append(request.body)
        mine = tuple(key for key in request.body.micro_batches if key in counted)
        return Reply(AppliedAnswer(incarnation=next(incarnations), micro_batches=(*mine, "e9.s9.r0")))

    endpoint.register(APPLIED, AppliedAsk, answer)


async def test_a_stage_has_counted_what_any_of_its_workers_has_and_who_is_silent_or_forgets_is_said() -> None:
    asked: list[AppliedAsk] = []
    one_and_two = {"1" * 16, "2" * 16}
    async with running_endpoint() as own, running_endpoint() as one, running_endpoint() as two:
        answer_with(one, repeat("1" * 16), {KEYS[0], KEYS[1050]}, asked)
        answer_with(two, repeat("2" * 16), {KEYS[1]}, asked)
        workers = [("head", one.peer), ("head", two.peer)]
        inquiry = WorkerInquiry(own, lambda: workers, timeout_s=5.0)
        report = await inquiry(KEYS)
        assert report == AppliedReport({"head": frozenset((KEYS[0], KEYS[1], KEYS[1050]))}, frozenset(one_and_two))
        assert {key for ask in asked for key in ask.micro_batches} == set(KEYS)
        assert all(ask.refuse_from_now for ask in asked)
        workers.append(("tail", Peer("f" * 64, "127.0.0.1:9")))
        assert await inquiry(KEYS[:2]) == AppliedReport({"head": frozenset(KEYS[:2])}, frozenset(one_and_two), 1)
    async with running_endpoint() as own, running_endpoint() as forgetful:
        answer_with(forgetful, iter(["1" * 16, "2" * 16, "2" * 16]), set(KEYS), asked)
        inquiry = WorkerInquiry(own, lambda: [("head", forgetful.peer)])
        assert await inquiry(KEYS) == AppliedReport({}, frozenset(), 1)


KILLS = 2
MICRO_BATCHES = 4 * 15


async def drive(client: LedgerClient, found: list[MicroBatchId]) -> None:
    while (micro_batch := await client.next()) is not None:
        found.append(micro_batch.id)
        client.settle(done(micro_batch.id, len(found), tokens=micro_batch.num_tokens))
        await asyncio.sleep(0.02)


@pytest.mark.slow
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
                while len(found) < count:
                    await asyncio.sleep(0.001)
                keeper.kill()
            reach.append(await last.begin())
            await driving
    assert len(found) == len(set(found)) == MICRO_BATCHES
    ledger, journal = open_ledger(run.path, run.spec, run.shards, KEEPER_CONFIG)
    journal.close()
    account = ledger.account()
    assert (account.micro_batches.done, account.micro_batches.open) == (MICRO_BATCHES, 0)
    assert (account.reissued, one.stale, two.stale, one.refused, two.refused) == (0, 0, 0, 0, 0)
