"""What workers have done of whom only a driver has heard is open, until they are heard of, or all are asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.ledger_cast import STAGES, WORKER, ListedLedger, credits, done, lost, micro_batches, report
from tests.support.ledger_run import CONFIG as RUN_CONFIG
from tests.support.ledger_run import Run, all_of, ledger_run
from trainer.pipeline.ledger import LedgerConfig
from trainer.pipeline.ledger.lease_cache import Bundle, LeaseCache
from trainer.pipeline.ledger.records import RECORD, WorkerSeen
from trainer.pipeline.protocol.work import MicroBatchId, Settlement

CONFIG = LedgerConfig(lease_s=10, lease_margin_s=2, epochs=2, worker_gone_s=5, reissue_after_s=3)
A, B = "a" * 32, "b" * 32
ALIVE = [WorkerSeen(stage=stage, incarnation=WORKER[stage]) for stage in STAGES]


@pytest.fixture
def kept() -> ListedLedger:
    return ListedLedger(CONFIG)


def _leased(kept: ListedLedger, units: int = 1) -> list[MicroBatchId]:
    return micro_batches(kept.ledger.lease("one", A, (), units, 0.0).runs)


def _invented(micro_batch: MicroBatchId, stage: str = "tail") -> Settlement:
    """Done, by a worker of one stage that there is not."""
    others = tuple(each for each in STAGES if each != stage)
    nobody = credits(1, stages=(stage,))[0].model_copy(update={"incarnation": "f" * 16})
    return done(micro_batch).model_copy(update={"credits": (*credits(1, stages=others), nobody)})


def test_it_stays_open_until_they_are_heard_of(kept: ListedLedger) -> None:
    first, second = _leased(kept)
    receipt = kept.ledger.settle("one", A, [done(first), done(second)], checked_s=1.0)
    assert (receipt.accepted, receipt.repeated, receipt.stale, receipt.unheard) == (0, 0, (), (first, second))
    assert kept.ledger.account().micro_batches.open == 2
    kept.ledger.note_workers(ALIVE[:2], 1.0)
    assert kept.ledger.settle("one", A, [done(first)], checked_s=2.0).unheard == (first,)
    kept.ledger.note_workers(ALIVE, 2.0)
    assert kept.ledger.settle("one", A, [done(first), _invented(second)], checked_s=3.0).accepted == 1
    assert kept.ledger.account().micro_batches.done == 1
    assert kept.ledger.unheard(99.0) == {A: (second,)}


def test_what_is_lost_or_handed_back_needs_nobody(kept: ListedLedger) -> None:
    first, second = _leased(kept)
    partly = lost(first).model_copy(update={"credits": credits(1, stages=("head",))})
    receipt = kept.ledger.settle("one", A, [partly], [second], checked_s=1.0)
    assert (receipt.accepted, receipt.unheard) == (2, ())


def test_a_worker_is_believed_for_its_own_stage_only_whatever_was_said_of_it_before(kept: ListedLedger) -> None:
    first, second, third, _ = _leased(kept, 2)
    swapped = tuple(
        each.model_copy(update={"stage": stage}) for each, stage in zip(credits(1), STAGES[::-1], strict=True)
    )
    kept.ledger.settle("one", A, [lost(first).model_copy(update={"credits": swapped})], checked_s=0.0)
    kept.ledger.note_workers(ALIVE, 1.0)
    wrong = done(second).model_copy(update={"credits": swapped})
    assert kept.ledger.settle("one", A, [wrong, done(third)], checked_s=1.0).unheard == (second,)
    assert kept.ledger.account().micro_batches.done == 1


@pytest.mark.parametrize("compacted", [False, True])
def test_of_a_worker_that_died_meanwhile_it_is_believed_also_by_a_keeper_that_came_back(
    kept: ListedLedger, compacted: bool
) -> None:
    first, second = _leased(kept)
    kept.ledger.note_workers(ALIVE, 0.0)
    kept.ledger.settle("one", A, [done(first, 1)], checked_s=0.0)
    for now_s in (4.0, 8.0):
        kept.ledger.note_workers(ALIVE[1:], now_s)
    assert WORKER["head"] not in kept.ledger.books.workers
    if compacted:
        kept.records[:] = [RECORD.validate_json(kept.ledger.books.snapshot().model_dump_json())]
    kept.restart(8.0)
    assert kept.ledger.settle("one", A, [done(second, 2)], checked_s=9.0).accepted == 1
    account = kept.ledger.account()
    assert account.micro_batches.done == 2
    assert {each.stage: each.micro_batches for each in account.perished} == {"head": 2}  # The late one too.


def test_a_worker_that_was_only_silent_takes_back_what_counted_as_perished(kept: ListedLedger) -> None:
    first, second = _leased(kept)
    kept.ledger.note_workers(ALIVE, 0.0)
    kept.ledger.settle("one", A, [done(first, 1), done(second, 2)], checked_s=0.0)
    kept.ledger.note_workers(ALIVE[1:], 5.0)
    assert kept.ledger.account().perished
    kept.ledger.note_workers([*ALIVE[1:], ALIVE[0].model_copy(update={"shared_through": 1})], 6.0)
    assert kept.ledger.account().perished == ()
    kept.restart(6.0)
    kept.ledger.note_workers(ALIVE[1:], 11.0)
    assert {each.stage: each.micro_batches for each in kept.ledger.account().perished} == {"head": 1}


def test_how_many_of_the_dead_are_remembered_is_bounded(kept: ListedLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.pipeline.ledger.ledger_state._MOST_DEPARTED", 4)
    first, second = _leased(kept)
    for number in range(9):
        kept.ledger.note_workers([WorkerSeen(stage="head", incarnation=f"{number:016x}")], 6.0 * number)
    kept.ledger.note_workers(ALIVE, 54.0)

    def by(number: int, micro_batch: MicroBatchId) -> Settlement:
        head = credits(1, stages=("head",))[0].model_copy(update={"incarnation": f"{number:016x}"})
        return done(micro_batch).model_copy(update={"credits": (head, *credits(1)[1:])})

    receipt = kept.ledger.settle("one", A, [by(8, first), by(2, second)], checked_s=54.0)
    assert (receipt.accepted, receipt.unheard) == (1, (second,))


@pytest.mark.parametrize(
    ("counted_in", "becomes"),
    [
        (STAGES, {"done": 2}),
        (("head", "body-1"), {"done": 1, "lost": 1}),
        ((), {"done": 1, "open": 1}),
    ],
)
def test_who_is_not_heard_of_in_time_is_asked_after_and_the_workers_decide(
    kept: ListedLedger, counted_in: tuple[str, ...], becomes: dict[str, int]
) -> None:
    first, second = _leased(kept)
    kept.ledger.note_workers(ALIVE, 0.0)
    kept.ledger.settle("one", A, [done(first), _invented(second)], checked_s=1.0)
    for now_s in (4.0, 8.0):
        assert kept.ledger.settle("one", A, [_invented(second)], checked_s=now_s).unheard == (second,)
        assert kept.ledger.unheard(now_s) == {}
    unheard = kept.ledger.unheard(11.0)
    assert unheard == {A: (second,)}
    kept.ledger.resolve(A, report({stage: [second] for stage in counted_in}), 11.0, unheard[A])
    account = kept.ledger.account()
    tally = account.micro_batches
    found = {name: getattr(tally, name) for name in ("done", "lost", "open")}
    assert {name: count for name, count in found.items() if count} == becomes
    assert [(each.stage, each.reason) for each in account.lost] == ([("tail", "unheard")] if tally.lost else [])
    assert kept.ledger.unheard(99.0) == {}
    assert kept.ledger.settle("one", A, [_invented(second)], checked_s=12.0).unheard == ()
    if not counted_in:
        assert micro_batches(kept.ledger.lease("two", B, (), 1, 99.0).runs) == [second]


def test_the_rest_of_the_lease_goes_on(kept: ListedLedger) -> None:
    first, second = _leased(kept)
    kept.ledger.note_workers(ALIVE, 0.0)
    kept.ledger.settle("one", A, [_invented(first)], checked_s=0.0)
    kept.ledger.renew("one", [A], 9.0)
    kept.ledger.resolve(A, report(), 10.0, kept.ledger.unheard(10.0)[A])
    assert kept.ledger.renew("one", [A], 10.0) == (A,)
    assert kept.ledger.settle("one", A, [done(second)], checked_s=10.0).accepted == 1


def test_what_was_not_taken_up_is_said_again_after_a_while_and_holds_up_nothing_else() -> None:
    holdings, first, second = LeaseCache(), MicroBatchId(0, 2, 0), MicroBatchId(0, 2, 4)
    holdings.add(A, (), 99.0)
    holdings._unsaid_of(holdings.leases[A]).settlements.update({str(each): done(each) for each in (first, second)})
    bundle = holdings.bundle(0.0)
    assert bundle is not None
    holdings.said(holdings.not_taken_up(bundle, [str(first), "e0.s9.r0"], 5.0))
    assert (holdings.num_unreported, holdings.bundle(4.9)) == (1, None)
    assert holdings.leases  # It is renewed as long as something of it is to be said.
    again = holdings.bundle(5.0)
    assert again == Bundle(A, (done(first),), ())
    holdings.said(again)
    assert (holdings.num_unreported, holdings.leases) == (0, {})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return ledger_run(tmp_path)


@pytest.mark.slow
@on_event_loop
async def test_a_driver_that_knows_workers_before_the_keeper_does_loses_nothing_by_it(run: Run) -> None:
    async with (
        run.keeper(announced=lambda: run.drivers) as (service, at),
        run.driver(at.peer) as one,
    ):
        given = []
        while len(given) < 4:
            micro_batch = await one.next()
            assert micro_batch is not None
            given.append(micro_batch)
            one.settle(done(micro_batch.id, len(given), tokens=micro_batch.num_tokens))
        await asyncio.sleep(0.5)
        account = await service.account()
        assert (account.micro_batches.done, one.holdings.num_unreported) == (0, 4)
        await service.note_workers(ALIVE)
        given += await all_of(one, 4)
        account = await service.account()
    assert len(given) == account.micro_batches.done == 15
    assert (account.micro_batches.open, account.reissued, one.stale, one.refused) == (0, 0, 0, 0)


@pytest.mark.slow
@on_event_loop
async def test_what_a_driver_only_says_is_done_is_trained_on_by_another(run: Run) -> None:
    config = replace(RUN_CONFIG, lease_s=0.5, worker_gone_s=0.5, close_s=0.2)
    async with run.keeper(config, announced=lambda: run.drivers) as (service, at):

        async def announce() -> None:
            while True:
                await service.note_workers(ALIVE)
                await asyncio.sleep(0.1)

        announcing = asyncio.create_task(announce())
        async with run.driver(at.peer, config) as liar:
            for _ in range(3):
                micro_batch = await liar.next()
                assert micro_batch is not None
                liar.settle(_invented(micro_batch.id))
            while liar.stale < 3:
                await asyncio.sleep(0.05)
        async with run.driver(at.peer, config) as honest:
            found = await all_of(honest)
        announcing.cancel()
        account = await service.account()
    assert (len(found), account.micro_batches.done, account.micro_batches.open) == (15, 15, 0)
