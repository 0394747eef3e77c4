"""The keeper on real sockets: drivers, workers it asks, its death at any moment; rows of a real store."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loader.errors import DataUnavailableError
from loader.fetch.shards import OpenShard
from loader.options import StoreOptions
from loader.session import Session
from loader.stream.assignment import assign
from tests.support.event_loop import on_event_loop
from tests.support.ledger_cast import ALIVE, STAGES, done, invented, lost
from tests.support.ledger_run import CONFIG, KEEPER_CONFIG, SEQ_LEN, Run, all_of, keeper_process, ledger_run, run_of
from tests.support.rpc_node import running_endpoint
from tests.support.token_store import TokenStore
from tests.support.waiting import until
from trainer.errors import LedgerError, RefusedError, TrainerUsageError
from trainer.network.rpc import Endpoint, Peer, Reply, Request
from trainer.pipeline.ledger import (
    AppliedReport,
    LedgerClient,
    LedgerConfig,
    LedgerService,
    WorkerInquiry,
    lanes_of,
    open_ledger,
    preferred_shards,
    spec_of,
)
from trainer.pipeline.ledger.messages import LEDGER_LEASE, LeaseAnswer, LeaseAsk
from trainer.pipeline.ledger.units import Run as Rows
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
        announced.update(run.drivers)
        assert await waiting is not None
        assert 0 <= service.quiet_s(run.drivers[0]) < 30 < service.quiet_s(stranger.peer_id)


@pytest.mark.slow
async def test_a_keeper_whose_journal_cannot_be_written_says_so_to_whoever_waits(run, monkeypatch):
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


# -- drivers' side of the ledger ---------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_driver_that_closes_hands_back_what_it_did_not_begin(run: Run) -> None:
    async with run.keeper() as (service, endpoint):
        async with run.driver(endpoint.peer) as one:
            begun = await one.next()
            also = await one.next()
            one.hand_back(also)
            one.settle(lost(begun.id, "head", "refused"))
        account = await service.account()
        assert (account.micro_batches.lost, account.micro_batches.open, account.waiting) == (1, 3, 3)
        assert account.leases == 0
        assert await one.next() is None
        async with run.driver(endpoint.peer) as two:
            assert len(await all_of(two)) == 14
        account = await service.account()
    assert (account.micro_batches.done, account.micro_batches.lost, account.reissued) == (14, 1, 3)


async def test_what_is_granted_to_a_driver_that_closes_meanwhile_is_handed_back(run, monkeypatch):
    """The keeper has leased it, and the driver has not heard so yet."""
    ask = LedgerClient._ask

    async def slow(self: LedgerClient, method: str, body: Any, model: Any) -> Any:
        answer = await ask(self, method, body, model)
        if method == LEDGER_LEASE:
            await asyncio.sleep(0.3)
        return answer

    monkeypatch.setattr(LedgerClient, "_ask", slow)
    async with run.keeper() as (service, endpoint):
        async with run.driver(endpoint.peer):
            while not (await service.account()).leases:
                await asyncio.sleep(0.01)
        account = await service.account()
        assert account.leases == 0
        assert account.micro_batches.open == account.waiting > 0


@pytest.mark.slow
async def test_a_driver_goes_on_while_the_keeper_is_away_and_says_all_when_it_is_back(run: Run) -> None:
    reach: list[Peer] = []
    async with run.driver(reach) as driver:
        async with run.keeper() as (_, endpoint):
            reach.append(endpoint.peer)
            held = [await driver.next()]
        held += [await driver.next() for _ in range(3)]  # The keeper is gone; two units of two were leased.
        assert len({each.id for each in held}) == 4
        for number, each in enumerate(held, 1):
            driver.settle(done(each.id, number, tokens=each.num_tokens))
        await until(lambda: driver.keeper_away_s > 0)
        assert driver.cache.num_unreported == 4
        async with run.keeper() as (service, endpoint):
            reach.append(endpoint.peer)
            rest = await all_of(driver, 100)
            account = await service.account()
        assert (len(rest), driver.keeper_away_s) == (11, 0.0)
    assert (account.micro_batches.done, account.micro_batches.open, driver.stale) == (15, 0, 0)


@pytest.mark.slow
async def test_a_driver_holds_ahead_what_it_gets_done_in_two_thirds_of_a_lease(run: Run) -> None:
    """A driver that is done with 20 in less than 10 s gets 2 in a second: those of 20 s of a lease of 30 s are 40."""
    config = replace(CONFIG, epochs=100)
    async with run.keeper(config) as (service, endpoint), run.driver(endpoint.peer, config) as driver:
        for number in range(20):
            each = await driver.next()
            driver.settle(done(each.id, number + 1))
        async with asyncio.timeout(20):
            while driver.cache.num_ahead < 36:
                await asyncio.sleep(0.02)
        assert (await service.account()).micro_batches.open <= 40 + 4


@pytest.mark.slow
async def test_a_lease_that_has_run_out_is_given_up_and_what_was_begun_of_it_may_still_be_settled(run: Run) -> None:
    config = LedgerConfig(unit_rows=8, lease_s=0.3, lease_margin_s=20.0, epochs=1, close_s=0.2)
    reach: list[Peer] = []
    async with run.driver(reach, config) as driver:
        async with run.keeper(config) as (_, endpoint):
            reach.append(endpoint.peer)
            first, _left = await driver.next(), await driver.next()
        while boottime_s() < first.send_before_s:
            await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.next(), 0.3)
        driver.settle(done(first.id))
        async with run.keeper(replace(config, lease_s=30.0)) as (service, endpoint):
            reach.append(endpoint.peer)
            found = await all_of_but(driver, service, 1)
            account = await service.account()
            assert first.send_before_s < boottime_s()  # It was not renewed: `_left` is the keeper's to ask about.
    assert found == 13
    assert (account.micro_batches.done, account.micro_batches.open, account.waiting, driver.stale) == (14, 1, 0, 0)
    assert account.leases == 1


@pytest.mark.slow
async def test_one_settlement_that_makes_no_sense_does_not_hold_up_the_others(run: Run) -> None:
    async with run.keeper() as (service, endpoint), run.driver(endpoint.peer) as driver:
        some = [(await driver.next()).id for _ in range(4)]
        for said in (done(some[0]), lost(some[1], "body-7"), done(some[2], 2), done(some[3], 3)):
            driver.settle(said)
        rest = await all_of_but(driver, service, 1)
        account = await service.account()
    assert driver.refused == 1
    assert (account.micro_batches.done, account.micro_batches.open, rest) == (14, 1, 11)


async def all_of_but(driver: LedgerClient, service: LedgerService, num_open: int) -> int:
    """Settles all until so many are open; how many these were."""
    count = 0
    while (await service.account()).micro_batches.done < 15 - num_open:
        try:
            each = await asyncio.wait_for(driver.next(), 0.2)
        except TimeoutError:
            continue
        count += 1
        driver.settle(done(each.id, 100 + count))
    return count


@asynccontextmanager
async def lying_keeper(*runs: dict[str, int]) -> AsyncIterator[tuple[Peer, list[LeaseAsk]]]:
    asked: list[LeaseAsk] = []

    async def answer(request: Request[LeaseAsk]) -> Reply[LeaseAnswer]:
        asked.append(request.body)
        return Reply(LeaseAnswer(runs=tuple(Rows(**{"epoch": 0, "shard": 1, **run}) for run in runs), lease_s=1e300))

    async with running_endpoint() as liar:
        liar.register(LEDGER_LEASE, LeaseAsk, answer)
        yield liar.peer, asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "is_taken"),
    [
        ([{"row": 16, "num_rows": 4}], False),
        ([{"row": 2, "num_rows": 4}], False),
        ([{"row": 0, "num_rows": 10**9}], False),
        ([{"row": 0, "num_rows": 16}] * 500, False),
        ([{"row": 0, "num_rows": 4, "epoch": 10**9 - 1}], True),
        ([{"row": 0, "num_rows": 4, "shard": 10**10 - 1}], True),
    ],
)
async def test_rows_that_no_lease_has_or_that_cannot_be_read_end_no_driver(run, wrong, is_taken, monkeypatch):
    monkeypatch.setattr("trainer.pipeline.ledger.client._UNREADABLE_S", 0.01)
    async with lying_keeper(*wrong) as (liar, asked), run.keeper() as (_, endpoint):
        keepers = [liar]
        async with run.driver(keepers, replace(CONFIG, close_s=0.1)) as driver:
            while len(asked) < 2 or driver.cache.unread:
                await asyncio.sleep(0.01)
            assert bool(driver.cache.leases) is is_taken
            keepers.append(endpoint.peer)
            assert len([await driver.next() for _ in range(3)]) == 3


@pytest.mark.slow
async def test_a_shard_that_cannot_be_read_is_handed_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.pipeline.ledger.client._UNREADABLE_S", 0.01)
    rows = run.rows()
    read, failures = rows.read, iter([True, True])

    def fails_twice(wanted: MicroBatchId) -> tuple[Tensor, Tensor]:
        if next(failures, False):
            raise DataUnavailableError("expected the shard, found the store away")
        return read(wanted)

    monkeypatch.setattr(rows, "read", fails_twice)
    async with run.keeper() as (service, endpoint), run.driver(endpoint.peer, rows=rows) as client:
        assert len(await all_of(client)) == 15
        assert (await service.account()).reissued == 2


def test_a_store_that_does_not_answer_holds_up_neither_leases_nor_the_end(run, monkeypatch):
    """Of several shards one comes; with another in the midst of opening, the driver leases, closes and ends."""
    released, opened, given_up = threading.Event(), list[int](), list[int]()
    open_shard = Session.open_shard

    def hangs_but_for_the_first(session: Session, shard: int) -> OpenShard:
        opened.append(shard)
        if shard != opened[0]:
            released.wait(30.0)
            given_up.append(shard)
        return open_shard(session, shard)

    monkeypatch.setattr(Session, "open_shard", hangs_but_for_the_first)

    @on_event_loop
    async def test() -> None:
        async with run.keeper() as (service, endpoint), run.driver(endpoint.peer) as driver:
            while (await service.account()).leases < 2 or len(set(opened)) < 2:
                with suppress(TimeoutError):
                    await asyncio.wait_for(driver.next(), 0.1)
            assert driver.cache.unread

    try:
        test()
        assert not given_up
    finally:
        released.set()


# -- rows of the store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 5])
def test_a_micro_batch_is_the_same_rows_for_whoever_reads_it_in_any_order(run: Run, epoch: int) -> None:
    names = [MicroBatchId(epoch, shard, row) for shard in (1, 2, 3) for row in range(0, 19, 4)]
    one = {name: run.rows().read(name) for name in names}
    rows = run.rows()
    rows.want([3, 2, 1])
    for name in reversed(names):
        inputs, labels = rows.read(name)
        assert torch.equal(inputs, one[name][0])
        assert torch.equal(labels, one[name][1])
        assert inputs.dtype == labels.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        assert len(inputs) == (3 if name.row == 16 else 4)
    assert not torch.equal(one[names[0]][0], run.rows().read(MicroBatchId(epoch + 1, 1, 0))[0])
    with pytest.raises(TrainerUsageError, match="multiple of 4 below 19"):
        rows.read(MicroBatchId(epoch, 1, 20))


def test_a_shard_the_store_has_gained_is_read_without_a_restart(tmp_path: Path) -> None:
    store = TokenStore.of(tmp_path / "store", 4)
    rows = run_of(store.folder, tmp_path / "cache", tmp_path / "journal").rows()
    store.grow(1)
    inputs = rows.read(MicroBatchId(0, 4, 0))[0]
    assert inputs.shape == (4, SEQ_LEN)
    ids = torch.from_numpy(store.ids(4))
    assert all(any(torch.equal(row, ids[at : at + SEQ_LEN]) for at in range(0, 1900, SEQ_LEN)) for row in inputs)


def test_lanes_are_the_loaders(tmp_path: Path) -> None:
    store = TokenStore.of(tmp_path / "store", 10, sources=("alpha", "beta"))
    catalog = Session.open(StoreOptions.of(store.url, cache_dir=tmp_path / "cache")).catalog
    (both,) = lanes_of(catalog, {}, holdout=1)
    assert (both.spec.source, list(both.shards)) == (None, [2, 3, 4, 5, 6, 7, 8, 9])
    beta, alpha = lanes = lanes_of(catalog, {"beta": 1.0, "alpha": 3.0}, holdout=2)
    assert [(lane.spec.source, lane.spec.weight) for lane in lanes] == [("beta", 1.0), ("alpha", 3.0)]
    assert (list(alpha.shards), list(beta.shards)) == ([4, 6, 8], [5, 7, 9])
    assert preferred_shards("driver-1", [both], 3, "modulo") == tuple(assign("driver-1", both.shards, 3, "modulo"))
    with pytest.raises(TrainerUsageError, match="at most 1999"):
        spec_of(catalog, lanes, stages=STAGES, seed=0, seq_len=2000, micro_batch_rows=1, config=CONFIG)
    with pytest.raises(TrainerUsageError, match="multiple of a micro-batch's 3 rows, found 8"):
        spec_of(catalog, lanes, stages=STAGES, seed=0, seq_len=100, micro_batch_rows=3, config=CONFIG)
