"""Drivers' side of the ledger, with a keeper on real sockets; lanes and rows of a real store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loader.errors import DataUnavailableError
from loader.fetch.shards import OpenShard
from loader.options import StoreOptions
from loader.session import Session
from loader.stream.assignment import assign
from tests.support.event_loop import on_event_loop
from tests.support.ledger_cast import STAGES, done, lost
from tests.support.ledger_run import CONFIG, SEQ_LEN, Run, all_of, ledger_run, run_of
from tests.support.rpc_pair import running_endpoint
from tests.support.token_store import TokenStore
from trainer.errors import TrainerUsageError
from trainer.network.rpc import Peer, Reply, Request
from trainer.pipeline.ledger import LedgerClient, LedgerConfig, LedgerService, lanes_of, preferred_shards, spec_of
from trainer.pipeline.ledger.messages import LEDGER_LEASE, LeaseAnswer, LeaseAsk
from trainer.pipeline.ledger.units import Run as Rows
from trainer.pipeline.protocol.work import MicroBatchId, boottime_s


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return ledger_run(tmp_path)


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


async def test_what_is_granted_to_a_driver_that_closes_meanwhile_is_handed_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            async with asyncio.timeout(10.0):
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
        assert driver.cache.num_unreported == 4
        async with run.keeper() as (service, endpoint):
            reach.append(endpoint.peer)
            rest = await all_of(driver, 100)
            account = await service.account()
    assert len(rest) == 11
    assert (account.micro_batches.done, account.micro_batches.open, driver.stale) == (15, 0, 0)


@pytest.mark.slow
async def test_a_driver_holds_ahead_what_it_gets_done_in_two_thirds_of_a_lease(run: Run) -> None:
    """A driver that is done with 20 in less than 10 s gets 2 in a second: those of 20 s of a lease of 30 s are 40."""
    config = replace(CONFIG, epochs=100)
    async with run.keeper(config) as (service, endpoint), run.driver(endpoint.peer, config) as driver:
        await driver.next()
        assert (await service.account()).micro_batches.open <= 3 * 2
        for number in range(1, 20):
            each = await driver.next()
            driver.settle(done(each.id, number))
        async with asyncio.timeout(20):
            while driver.cache.num_ahead < 36:
                await asyncio.sleep(0.02)
        assert (await service.account()).micro_batches.open <= 40 + 4
        few = replace(config, max_open=8)
        async with run.driver(endpoint.peer, few) as other:
            for number in range(100, 120):
                each = await other.next()
                other.settle(done(each.id, number))
            await asyncio.sleep(0.3)
            assert other.cache.num_ahead <= 8 + 2


@pytest.mark.slow
async def test_a_driver_that_waits_for_its_keeper_says_so_again_and_tells_how_long(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.pipeline.ledger.client._RETRY_S", 0.02)
    monkeypatch.setattr("trainer.pipeline.ledger.client._LOG_AWAY_S", 0.1)
    reach: list[Peer] = []
    async with run.driver(reach) as driver:
        async with asyncio.timeout(20):
            while caplog.text.count("waiting for the account's keeper, driver-1") < 2:
                await asyncio.sleep(0.02)
        assert caplog.text.count("the account's keeper does not answer") == 1
        assert driver.keeper_away_s > 0.1
        async with run.keeper() as (_, endpoint):
            reach.append(endpoint.peer)
            assert await driver.next() is not None
            assert driver.keeper_away_s == 0.0


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
async def test_rows_that_no_lease_has_or_that_cannot_be_read_end_no_driver(
    run: Run, wrong: list[dict[str, int]], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_store_that_does_not_answer_holds_up_neither_leases_nor_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
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
