"""Drivers' side of the ledger, with a keeper on real sockets and rows from a real store."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from loader.errors import DataUnavailableError
from loader.fetch.shards import OpenShard
from loader.session import Session
from tests.support.event_loop import on_event_loop
from tests.support.ledger_cast import done, lost
from tests.support.ledger_run import CONFIG, Run, all_of, ledger_run
from tests.support.rpc_pair import running_endpoint
from trainer.network.rpc import Peer, Reply, Request
from trainer.pipeline.ledger import LedgerClient, LedgerConfig, LedgerService
from trainer.pipeline.ledger.lease_cache import Bundle, LeaseCache
from trainer.pipeline.ledger.messages import LEDGER_LEASE, LeaseAnswer, LeaseAsk
from trainer.pipeline.ledger.units import Run as Rows
from trainer.pipeline.protocol.work import MicroBatchId, boottime_s


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return ledger_run(tmp_path)


@pytest.mark.slow
@on_event_loop
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


@on_event_loop
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
@on_event_loop
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
@on_event_loop
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
@on_event_loop
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
@on_event_loop
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
@on_event_loop
async def test_one_settlement_that_makes_no_sense_does_not_hold_up_the_others(run: Run) -> None:
    async with run.keeper() as (service, endpoint), run.driver(endpoint.peer) as driver:
        some = [await driver.next() for _ in range(4)]
        driver.settle(done(some[0].id))
        driver.settle(lost(some[1].id, "body-7"))
        driver.settle(done(some[2].id, 2))
        driver.settle(done(some[3].id, 3))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        [{"row": 16, "num_rows": 4}],
        [{"row": 2, "num_rows": 4}],
        [{"row": 0, "num_rows": 10**9}],
        [{"row": 0, "num_rows": 16}] * 500,
    ],
)
@on_event_loop
async def test_rows_that_no_lease_has_are_taken_from_no_keeper_and_end_no_driver(
    run: Run, wrong: list[dict[str, int]]
) -> None:
    asked = 0

    async def answer(request: Request[LeaseAsk]) -> Reply[LeaseAnswer]:
        nonlocal asked
        asked += 1
        return Reply(LeaseAnswer(runs=tuple(Rows(epoch=0, shard=1, **each) for each in wrong), lease_s=30.0))

    async with running_endpoint() as liar, run.keeper() as (service, endpoint):
        liar.register(LEDGER_LEASE, LeaseAsk, answer)
        keepers = [liar.peer]
        async with run.driver(keepers) as driver:
            while asked < 2:
                await asyncio.sleep(0.01)
            assert not driver.cache.leases
            keepers.append(endpoint.peer)
            assert len(await all_of(driver)) == 15
        assert (await service.account()).micro_batches.done == 15


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"epoch": 10**9 - 1, "shard": 1}, {"epoch": 0, "shard": 10**10 - 1}])
@on_event_loop
async def test_rows_that_cannot_be_read_end_no_driver(
    run: Run, wrong: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.pipeline.ledger.client._UNREADABLE_S", 0.01)

    async def answer(request: Request[LeaseAsk]) -> Reply[LeaseAnswer]:
        return Reply(LeaseAnswer(runs=(Rows(row=0, num_rows=4, **wrong),), lease_s=1e300))

    async with running_endpoint() as liar, run.keeper() as (_service, endpoint):
        liar.register(LEDGER_LEASE, LeaseAsk, answer)
        keepers = [liar.peer]
        async with run.driver(keepers, replace(CONFIG, close_s=0.1)) as driver:
            while not driver.cache.leases:
                await asyncio.sleep(0.01)
            while driver.cache.unread:
                await asyncio.sleep(0.01)
            keepers.append(endpoint.peer)
            assert len([await driver.next() for _ in range(3)]) == 3


@pytest.mark.slow
@on_event_loop
async def test_a_shard_that_cannot_be_read_is_handed_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.pipeline.ledger.client._UNREADABLE_S", 0.01)
    rows = run.rows()
    read, failures = rows.read, iter([True, True])

    def fails_twice(wanted: MicroBatchId) -> tuple[Tensor, Tensor]:
        if next(failures, False):
            raise DataUnavailableError("expected the shard, found the store away")
        return read(wanted)

    monkeypatch.setattr(rows, "read", fails_twice)
    async with run.keeper() as (service, endpoint), running_endpoint() as own:
        client = LedgerClient(own, lambda: endpoint.peer, rows, run.spec, CONFIG)
        await client.start()
        assert len(await all_of(client)) == 15
        await client.close()
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


def test_a_settlement_that_was_not_accepted_is_repeated_after_a_while_and_holds_up_nothing_else() -> None:
    token = "a" * 32
    cache, first, second = LeaseCache(), MicroBatchId(0, 2, 0), MicroBatchId(0, 2, 4)
    cache.add(token, (), 99.0)
    cache._unreported_of(cache.leases[token]).settlements.update({str(each): done(each) for each in (first, second)})
    cache.reported(cache.bundle(0.0), [str(first), "e0.s9.r0"], 5.0)
    assert (cache.num_unreported, cache.bundle(4.9)) == (1, None)
    assert cache.leases  # It is renewed as long as something of it is to be reported.
    again = cache.bundle(5.0)
    assert again == Bundle(token, (done(first),), ())
    cache.reported(again, (), 0.0)
    assert (cache.num_unreported, cache.leases) == (0, {})
