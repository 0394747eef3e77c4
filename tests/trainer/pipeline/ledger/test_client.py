"""Drivers and a keeper on real sockets, rows from a real store."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from loader.errors import DataUnavailableError
from loader.fetch.shards import OpenShard
from loader.session import Session
from tests.support.event_loop import on_event_loop
from tests.support.ledger_cast import done, lost
from tests.support.ledger_run import CONFIG, SEQ_LEN, Run, all_of, ledger_run
from tests.support.rpc_pair import running_endpoint
from trainer.errors import LedgerError, RefusedError
from trainer.network.rpc import Peer, Reply, Request
from trainer.pipeline.ledger import LedgerClient, LedgerConfig, LedgerService
from trainer.pipeline.ledger.messages import LEDGER_LEASE, LeaseAnswer, LeaseAsk
from trainer.pipeline.ledger.units import Run as Rows
from trainer.pipeline.protocol.work import MicroBatchId, boottime_s


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return ledger_run(tmp_path)


@pytest.mark.slow
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


@pytest.mark.slow
@on_event_loop
async def test_two_drivers_do_what_the_run_is_to_train_on_together_and_both_hear_that_it_is_done(run: Run) -> None:
    async with (
        run.keeper(max_tokens=7 * 4 * SEQ_LEN) as (service, endpoint),
        run.driver(endpoint.peer) as one,
        run.driver(endpoint.peer) as two,
    ):
        first, second = await asyncio.gather(all_of(one), all_of(two, 1000))
        account = await service.account()
        assert all(map(service.has_told, run.drivers))
        assert not service.has_told("another")
    assert sum(each.num_tokens for each in (*first, *second)) == account.trained_tokens
    assert 7 * 4 * SEQ_LEN <= account.trained_tokens < 8 * 4 * SEQ_LEN
    assert account.micro_batches.open == account.waiting


@pytest.mark.slow
@on_event_loop
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
@on_event_loop
async def test_a_keeper_whose_journal_cannot_be_written_says_so_to_whoever_waits(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run.keeper() as (service, endpoint), run.driver(endpoint.peer) as one:
        failing = asyncio.create_task(service.failed())
        begun = await one.next()
        assert begun is not None
        assert not failing.done()

        def full(_descriptor: int) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr("trainer.pipeline.ledger.journal.os.fdatasync", full)
        one.settle(done(begun.id))
        with pytest.raises(LedgerError, match="no space left on device"):
            await asyncio.wait_for(failing, 20)


@pytest.mark.slow
@on_event_loop
async def test_a_driver_that_closes_hands_back_what_it_did_not_begin(run: Run) -> None:
    async with run.keeper() as (service, endpoint):
        async with run.driver(endpoint.peer) as one:
            begun = await one.next()
            assert begun is not None
            also = await one.next()
            assert also is not None
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
async def test_a_dead_drivers_lease_is_asked_after_and_what_no_worker_has_is_given_again(run: Run) -> None:
    config = LedgerConfig(
        unit_rows=8, lease_s=1.0, lease_margin_s=0.1, inquiry_s=0.0, reissue_after_s=0.0, epochs=1, close_s=0.2
    )
    async with run.keeper(config) as (service, endpoint):
        reach = [endpoint.peer]
        async with run.driver(reach, config) as dead, run.driver(endpoint.peer, config) as heir:
            begun = [await dead.next() for _ in range(3)]
            everywhere, somewhere, nowhere = [each.id for each in begun if each is not None]
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
        assert (dead.stale, dead.holdings.num_unreported) == (0, 0)  # It was known already.
        assert (await service.account()).micro_batches.done == 14


@pytest.mark.slow
@on_event_loop
async def test_a_driver_goes_on_while_the_keeper_is_away_and_says_all_when_it_is_back(run: Run) -> None:
    reach: list[Peer] = []
    async with run.driver(reach) as driver:
        async with run.keeper() as (_, endpoint):
            reach.append(endpoint.peer)
            held = [await driver.next()]
        held += [await driver.next() for _ in range(3)]  # The keeper is gone; two units of two were leased.
        micro_batches = [each for each in held if each is not None]
        assert len({each.id for each in micro_batches}) == 4
        for number, each in enumerate(micro_batches, 1):
            driver.settle(done(each.id, number, tokens=each.num_tokens))
        assert driver.holdings.num_unreported == 4
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
            assert each is not None
            driver.settle(done(each.id, number))
        async with asyncio.timeout(20):
            while driver.holdings.num_ahead < 36:
                await asyncio.sleep(0.02)
        assert (await service.account()).micro_batches.open <= 40 + 4
        few = replace(config, max_open=8)
        async with run.driver(endpoint.peer, few) as other:
            for number in range(100, 120):
                each = await other.next()
                assert each is not None
                other.settle(done(each.id, number))
            await asyncio.sleep(0.3)
            assert other.holdings.num_ahead <= 8 + 2


@pytest.mark.slow
@on_event_loop
async def test_a_driver_that_waits_for_its_keeper_says_so_again_and_tells_how_long(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.pipeline.ledger.client._RETRY_S", 0.02)
    monkeypatch.setattr("trainer.pipeline.ledger.client._SAY_AWAY_S", 0.1)
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
            first, left = await driver.next(), await driver.next()
            assert first is not None
            assert left is not None
        while boottime_s() < first.send_before_s:
            await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.next(), 0.3)
        driver.settle(done(first.id))
        async with run.keeper(replace(config, lease_s=30.0)) as (service, endpoint):
            reach.append(endpoint.peer)
            found = await all_of_but(driver, service, 1)
            account = await service.account()
            assert first.send_before_s < boottime_s()  # It was not renewed: `left` is the keeper's to ask about.
    assert found == 13
    assert (account.micro_batches.done, account.micro_batches.open, account.waiting, driver.stale) == (14, 1, 0, 0)
    assert account.leases == 1


@pytest.mark.slow
@on_event_loop
async def test_one_settlement_that_makes_no_sense_does_not_hold_up_the_others(run: Run) -> None:
    async with run.keeper() as (service, endpoint), run.driver(endpoint.peer) as driver:
        some = [each for each in [await driver.next() for _ in range(4)] if each is not None]
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
        assert each is not None
        count += 1
        driver.settle(done(each.id, 100 + count))
    return count


@on_event_loop
async def test_a_driver_with_other_data_is_refused(run: Run) -> None:
    async with run.keeper() as (service, endpoint):
        run.spec = run.spec.model_copy(update={"seed": 4})
        async with run.driver(endpoint.peer) as driver:
            with pytest.raises(LedgerError, match="seed, seq_len"):
                await driver.next()
        assert (await service.account()).micro_batches.leased == 0
        assert endpoint.counters.refused["data"] >= 1


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
            assert not driver.holdings.leases
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
            while not driver.holdings.leases:
                await asyncio.sleep(0.01)
            while driver.holdings.unread:
                await asyncio.sleep(0.01)
            keepers.append(endpoint.peer)
            assert len([await driver.next() for _ in range(3)]) == 3


@on_event_loop
async def test_a_driver_may_be_the_keeper_too(run: Run) -> None:
    async with run.keeper() as (service, endpoint):
        client = LedgerClient(endpoint, lambda: endpoint.peer, run.rows(), run.spec, CONFIG)
        await client.start()
        assert len(await all_of(client)) == 15
        await client.close()
        assert (await service.account()).micro_batches.done == 15


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
            assert driver.holdings.unread

    try:
        test()
        assert not given_up
    finally:
        released.set()
