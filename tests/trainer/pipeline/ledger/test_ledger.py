"""What the rules of the account are, one at a time; and its file, whatever happens to the process or the last line."""

from __future__ import annotations

import hashlib
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ledger_cast import (
    ALIVE,
    LAYOUT,
    SHARDS,
    STAGES,
    WORKER,
    ListedLedger,
    credits,
    done,
    invented,
    journal_path,
    lost,
    micro_batches,
    report,
    spec,
)
from trainer.errors import LedgerError, RefusedError
from trainer.pipeline.ledger import LedgerConfig, open_ledger
from trainer.pipeline.ledger.journal import Journal
from trainer.pipeline.ledger.journal_lines import SEED, chain_digest
from trainer.pipeline.ledger.ledger import Ledger
from trainer.pipeline.ledger.ledger_state import LedgerState
from trainer.pipeline.ledger.records import WorkerSeen
from trainer.pipeline.protocol.work import MicroBatchId, Settlement

CONFIG = LedgerConfig(lease_s=10, lease_margin_s=2, epochs=2, worker_gone_s=5, reissue_after_s=3)
A, B, C = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture
def kept() -> ListedLedger:
    return ListedLedger(CONFIG)


def keys(*micro_batches: MicroBatchId) -> tuple[str, ...]:
    return tuple(map(str, micro_batches))


def all_rows(kept: ListedLedger, driver: str = "one") -> list[MicroBatchId]:
    """Everything, leased and settled as done."""
    found: list[MicroBatchId] = []
    while given := kept.given(driver, f"{len(found):032x}", 2):
        token = f"{len(found):032x}"
        kept.ledger.settle(driver, token, [done(each, len(found) + n) for n, each in enumerate(given, 1)])
        found.extend(given)
    return found


def test_an_epoch_is_every_row_of_every_shard_once_and_then_the_next_begins(kept: ListedLedger) -> None:
    first = kept.given("one", A, 9)
    found = [*first, *all_rows(kept, "two")]  # The next has begun, with all of the first at work.
    assert kept.ledger.settle("one", A, [done(each) for each in first]).accepted == 18
    rows = Counter((each.epoch, each.shard, each.row + n) for each in found for n in range(LAYOUT.rows_of(each)))
    assert rows == Counter((epoch, shard, row) for epoch in (0, 1) for shard in SHARDS for row in range(23))
    epochs = [each.epoch for each in found]
    assert epochs == sorted(epochs)


def test_a_driver_gets_the_shards_it_prefers_then_some_that_nobody_reads(kept: ListedLedger) -> None:
    assert [each.shard for each in kept.given("one", A, 4, preferred=(5,))] == [5, 5, 5, 5, 5, 5, 2, 2]
    assert {each.shard for each in kept.given("two", B)} == {3}
    assert {(each.epoch, each.shard) for each in kept.given("three", C, preferred=(5, 99))} == {(0, 2)}


def test_sources_are_read_by_their_weights_each_with_its_own_epochs() -> None:
    kept = ListedLedger(LedgerConfig(max_open=10**6), shards=((0, 2, 4, 6), (1,)))
    shards = Counter(each.shard for n in range(60) for each in kept.given("one", f"{n:032x}"))
    of_first = sum(count for shard, count in shards.items() if shard != 1)
    assert of_first / shards.total() == pytest.approx(1 / 3, abs=0.03)
    assert [lane.epoch for lane in kept.ledger.account().lanes] == [1, 13]
    kept = ListedLedger(LedgerConfig(epochs=1), shards=((0, 2), (1,)))
    assert Counter(each.shard for each in all_rows(kept)) == {0: 6, 1: 6, 2: 6}, "one may be through before another"
    assert kept.ledger.lease("one", A, (), 1, 0.0).finished


@pytest.mark.slow
@given(st.lists(st.sampled_from(["done", "lost", "back", "restart"]), max_size=40), st.integers(1, 4))
def test_no_more_is_given_than_the_run_is_to_train_on_and_what_is_lost_is_made_up_for(fates, units):
    tokens = 4 * LAYOUT.seq_len
    kept = ListedLedger(CONFIG, max_tokens=5 * tokens)
    num_done, number, follows = 0, 0, iter(fates)
    while True:
        token = f"{number:032x}"
        leased = kept.ledger.lease("one", token, (), units, 100.0)
        assert kept.ledger.lease("two", f"{number + 1:032x}", (), 1, 100.0).finished is leased.finished
        if leased.finished:
            break
        given_now = micro_batches(leased.runs)
        number += 2
        held = kept.state.num_held_by("two")
        assert num_done + len(given_now) + held <= 6  # The last of a shard has 3 rows of 4.
        for driver, each_token in (("one", token), ("two", f"{number - 1:032x}")):
            lease = kept.state.leases.get(each_token)
            for each in sorted(lease.open) if lease is not None else ():
                fate = next(follows, "done")
                if fate == "restart":
                    kept.restart(100.0)
                    fate = "done"
                size = LAYOUT.rows_of(each) * LAYOUT.seq_len
                said = done(each, number, tokens=size) if fate == "done" else lost(each)
                kept.ledger.settle(driver, each_token, [] if fate == "back" else [said], [each] * (fate == "back"))
                num_done += fate == "done"
    account = kept.ledger.account()
    assert 5 * tokens <= account.trained_tokens < 6 * tokens
    assert account.micro_batches.open == account.waiting


def test_asking_again_with_the_same_token_is_not_asking_for_more(kept: ListedLedger) -> None:
    leased = kept.ledger.lease("one", A, (), 1, 0.0)
    assert kept.ledger.lease("one", A, (), 1, 5.0) == leased
    assert kept.ledger.account().micro_batches.leased == 2
    assert kept.ledger.due(16.9) == ()
    assert kept.ledger.due(17.0) == (A,)
    with pytest.raises(RefusedError, match="run out") as refused:
        kept.ledger.lease("one", A, (), 1, 17.0)
    assert refused.value.reason == "lease-over"
    with pytest.raises(RefusedError, match="another driver"):
        kept.ledger.lease("two", A, (), 1, 17.0)


@pytest.mark.parametrize(("asked", "given"), [(1, 2), (5, 10), (200, 10)])
def test_a_driver_gets_what_it_asks_for_ahead_and_never_more_than_it_may_hold(asked: int, given: int) -> None:
    kept = ListedLedger(LedgerConfig(max_open=given))
    assert len(kept.given("one", A, asked)) == given
    with pytest.raises(RefusedError, match=f"fewer than {given}") as refused:
        kept.ledger.lease("one", C, (), 1, 0.0)
    assert refused.value.reason == "enough"
    assert len(kept.given("two", B, asked)) == given


@pytest.mark.parametrize("end", [{"epochs": 4}, {"epochs": 0, "max_tokens": 64 * 40}])
def test_near_the_end_drivers_share_what_is_left_however_much_each_asks_for(end: dict[str, int]) -> None:
    """64 micro-batches or 72: one driver alone gets half of them ahead, and then the second still gets enough."""
    config = replace(CONFIG, lease_units=1, epochs=end["epochs"])
    kept = ListedLedger(config, max_tokens=end.get("max_tokens", 0))
    ahead = Counter[str]()
    for driver in ("one", "two"):
        with pytest.raises(RefusedError, match="its share"):
            while True:
                token = hashlib.md5(f"{driver} {ahead}".encode()).hexdigest()
                ahead[driver] += len(kept.given(driver, token, 200))
    assert 30 <= ahead["one"] <= 38
    assert 14 <= ahead["two"] <= 20


def test_the_versions_that_stages_can_have_follow_from_what_was_noted_and_leased_since(kept: ListedLedger) -> None:
    """A step of 80 tokens is two micro-batches of 4 rows of 10."""
    kept.ledger.leases_nothing = True
    leased = kept.ledger.lease("one", A, (), 1, 0.0)
    assert (leased.runs, leased.finished) == ((), False), "it is not known yet whose account it is"
    kept.ledger.leases_nothing = False
    assert kept.state.highest_version(80) == 0
    given = kept.given("one", A, 2)
    assert kept.state.highest_version(80) is None, "leased by a release that noted nothing"
    kept.ledger.note_workers(ALIVE, 0.0, 7)
    assert kept.state.highest_version(80) == 7 + 2
    kept.ledger.settle("one", A, [done(each) for each in given[:2]])
    kept.ledger.note_workers(ALIVE, 1.0, 8)
    assert kept.state.highest_version(80) == 8 + 1
    before = len(kept.records)
    kept.ledger.note_workers(ALIVE, 2.0, 8)
    kept.ledger.note_workers(ALIVE, 3.0)
    assert len(kept.records) == before
    kept.restart(4.0)
    assert kept.state.highest_version(80) == 8 + 1
    kept.compact(5.0)
    assert (kept.state.highest_version(80), kept.state.noted_version) == (9, 8)


def test_a_dead_drivers_micro_batches_wait_as_long_as_workers_refuse_them(kept: ListedLedger) -> None:
    kept.ledger.note_workers(ALIVE, 0.0)
    left = kept.given("one", A)
    kept.ledger.resolve(A, report(), 12.0)
    assert not {*left} & {*kept.given("two", B, now_s=14.9)}
    assert kept.given("two", C, now_s=15.0) == left


def test_a_keeper_that_is_back_waits_for_the_leases_of_others_and_not_for_its_own(kept: ListedLedger) -> None:
    for driver, token in (("one", A), ("two", B), ("three", C)):
        kept.ledger.lease(driver, token, (), 1, 0.0)
    kept.restart(20.0)
    kept.ledger.release_all("one", 20.0)
    kept.ledger.release("three", C, 20.0)
    assert kept.ledger.due(21.9) == ()  # The margin.
    assert kept.ledger.due(22.0) == (A, C)
    assert set(kept.ledger.due(32.0)) == {A, B, C}


@pytest.mark.parametrize("vanished", STAGES)
def test_what_a_tail_that_vanished_meanwhile_may_have_counted_is_not_given_again(vanished, kept):
    """A worker of another stage counts what a tail has counted before, and no tail that is there has."""
    kept.ledger.note_workers(ALIVE, 0.0)
    kept.ledger.lease("one", A, (), 1, 0.0)
    left = [each for each in ALIVE if each.stage != vanished]
    for now_s in (0.0, 4.0, 8.0):
        kept.ledger.note_workers(left, now_s)
    kept.restart(8.0)
    kept.ledger.resolve(A, report(answered=[each.incarnation for each in left]), 30.0)
    lost, waiting = ({("head", "unclear"): 2}, 0) if vanished == "tail" else ({}, 2)
    assert (kept.lost(), kept.ledger.account().waiting) == (lost, waiting)


def test_what_perished_with_a_worker_is_what_it_is_not_known_to_have_shared(kept: ListedLedger) -> None:
    kept.ledger.note_workers(ALIVE, 0.0)
    for number, each in enumerate(kept.given("one", A, 3)[:5], 1):
        kept.ledger.settle("one", A, [done(each, number, shared_through=99)])  # That is for the worker itself to say.
    assert kept.perished() == {}
    shared = {"head": 5, "body-1": 3, "tail": 0}
    kept.ledger.note_workers([each.model_copy(update={"shared_through": shared[each.stage]}) for each in ALIVE], 1.0)
    kept.restart(1.0)
    kept.ledger.note_workers(ALIVE[2:], 5.9)
    assert kept.perished() == {}  # Not for long enough.
    kept.ledger.note_workers(ALIVE[2:], 6.0)
    assert kept.perished() == {"body-1": 2}  # Numbers 4 and 5; the head had shared all of its own.
    assert set(kept.state.workers) == {WORKER["tail"]}


@pytest.mark.parametrize("compacted", [False, True])
def test_each_micro_batch_settled_with_a_worker_is_counted_once(kept: ListedLedger, compacted: bool) -> None:
    kept.ledger.note_workers(ALIVE, 0.0)
    given = kept.given("one", A, 3)
    for number, each in enumerate(given[:5], 1):
        for _ in range(2):  # Drivers repeat what they were not answered.
            kept.ledger.settle("one", A, [done(each, number)])
    kept.ledger.settle("one", A, [lost(given[5])])
    expected = {(stage, WORKER[stage]): 5 for stage in STAGES}
    assert {(it.stage, it.incarnation): it.micro_batches for it in kept.state.worker_counts()} == expected
    (kept.compact if compacted else kept.restart)(1.0)
    kept.ledger.note_workers([], 20.0)
    kept.ledger.note_workers([], 60.0)
    assert not kept.state.workers  # All are gone, and what they did is still known.
    assert {(it.stage, it.incarnation): it.micro_batches for it in kept.state.worker_counts()} == expected


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("compacted", [False, True])
def test_what_a_worker_goes_on_with_of_one_before_has_not_perished(kept, is_gone, compacted):
    kept.ledger.note_workers(ALIVE, 0.0)
    given = kept.given("one", A, 3)
    kept.ledger.settle("one", A, [done(each, number) for number, each in enumerate(given[:5], 1)])
    kept.restart(0.0)
    if is_gone:
        kept.ledger.note_workers([], 5.0)
        assert kept.perished() == dict.fromkeys(STAGES, 5)
    if compacted:
        kept.compact(5.0)
    head, body, tail = (
        WorkerSeen(stage=stage, incarnation=f"{number:016x}", resumed=WORKER[stage], resumed_through=through)
        for number, (stage, through) in enumerate({"head": 5, "body-1": 3, "tail": 5}.items())
    )
    not_its_stage = head.model_copy(update={"incarnation": "9" * 16, "resumed": WORKER["tail"]})
    for now_s in (6.0, 11.0):
        kept.ledger.note_workers([head, body, not_its_stage], now_s)
    assert kept.perished() == {"body-1": 2, "tail": 5}
    num_records = len(kept.records)
    kept.ledger.note_workers([head, body, not_its_stage], 12.0)
    assert len(kept.records) == num_records  # Said again, it is no news.
    kept.ledger.note_workers([head, body, not_its_stage, tail], 12.0)
    assert kept.perished() == {"body-1": 2}
    before = kept.ledger.account()
    kept.restart(12.0)
    assert kept.ledger.account() == before


def test_workers_that_a_driver_invents_hurt_nobody_and_do_not_pile_up(kept, monkeypatch):
    monkeypatch.setattr("trainer.pipeline.ledger.ledger_state._MOST_UNANNOUNCED", 6)
    kept.ledger.note_workers(ALIVE, 0.0)
    kept.ledger.lease("honest", B, (), 1, 0.0)
    given = kept.given("liar", A, 3)
    for number, each in enumerate(given):
        invented = tuple(
            credit.model_copy(update={"incarnation": f"{3 * number + n:016x}", "applied_number": 7 * number + 1})
            for n, credit in enumerate(credits(1))
        )
        kept.ledger.settle("liar", A, [done(each).model_copy(update={"credits": invented})])
    assert len(kept.state.workers) == 3 + 6
    kept.restart(1.0)
    kept.ledger.note_workers(ALIVE, 1.0)
    assert kept.ledger.is_complete(B, report())  # Nobody waits for those whom nobody has seen.
    for now_s in (5.0, 9.0):
        kept.ledger.note_workers(ALIVE, now_s)
    assert set(kept.state.workers) == set(WORKER.values())
    assert not kept.state.leases[B].bereaved
    assert kept.perished() == {}


_FIRST = MicroBatchId(0, SHARDS[0], 0)


@pytest.mark.parametrize(
    "wrong",
    [
        done(_FIRST).model_copy(update={"credits": credits(1, stages=STAGES[:2])}),
        done(_FIRST).model_copy(update={"credits": (*credits(1), *credits(1))}),
        done(_FIRST).model_copy(update={"lost_at": "tail"}),
        done(_FIRST).model_copy(update={"num_tokens": 41}),
        lost(_FIRST).model_copy(update={"reason": None}),
        lost(_FIRST, stage="body-9"),
        done(MicroBatchId(0, SHARDS[0], 1)),
        done(MicroBatchId(0, 4, 0)),
    ],
)
def test_a_settlement_that_makes_no_sense_changes_nothing(kept: ListedLedger, wrong: Settlement) -> None:
    kept.ledger.lease("one", A, (), 1, 0.0)
    before, records = kept.ledger.account(), len(kept.records)
    with pytest.raises(RefusedError, match="expected") as refused:
        kept.ledger.settle("one", A, [done(MicroBatchId(0, SHARDS[0], 4)), wrong])
    assert refused.value.reason == "malformed"
    assert (kept.ledger.account(), len(kept.records)) == (before, records)


def test_a_store_that_grew_is_read_from_the_next_epoch_on(kept: ListedLedger) -> None:
    kept.ledger.lease("one", A, (), 1, 0.0)
    grown = ((*SHARDS, 6),)
    kept.ledger.grow(grown)
    kept.shards = grown
    kept.restart(0.0)
    found = kept.given("one", A)
    found += all_rows(kept, "two")
    assert Counter((each.epoch, each.shard) for each in found) == {
        **{(0, shard): 6 for shard in SHARDS},
        **{(1, shard): 6 for shard in grown[0]},
    }
    with pytest.raises(LedgerError, match="grown at its end"):
        kept.ledger.grow(((2, 3, 4, 5, 6),))


def test_an_account_of_something_else_is_not_gone_on_with(kept: ListedLedger) -> None:
    for field, other in (("seed", 8), ("stages", ("head", "tail"))):
        with pytest.raises(LedgerError, match=f"an account with {field} "):
            LedgerState.of(kept.records, kept.spec.model_copy(update={field: other}), kept.shards)
    with pytest.raises(LedgerError, match=r"at least \[3\] shards"):
        LedgerState.of(kept.records, kept.spec, (SHARDS[:2],))


def test_drivers_cannot_make_the_account_long() -> None:
    kept = ListedLedger(LedgerConfig(max_open=10**6, epochs=100), shards=(tuple(range(50)),))
    given = kept.given("one", A, 150)
    kept.ledger.settle("one", A, [lost(each, "head", f"r{n}") for n, each in enumerate(given)])
    assert len(kept.lost()) == 257
    assert kept.lost()["head", "other"] == 300 - 256


# -- workers that only drivers have named ------------------------------------------------------------------------------


def test_a_worker_is_believed_for_its_own_stage_only_whatever_was_said_of_it_before(kept: ListedLedger) -> None:
    first, second, third, _ = kept.given("one", A, 2)
    swapped = tuple(
        each.model_copy(update={"stage": stage}) for each, stage in zip(credits(1), STAGES[::-1], strict=True)
    )
    kept.ledger.settle("one", A, [lost(first).model_copy(update={"credits": swapped})], checked_s=0.0)
    kept.ledger.note_workers(ALIVE, 1.0)
    wrong = done(second).model_copy(update={"credits": swapped})
    assert kept.ledger.settle("one", A, [wrong, done(third)], checked_s=1.0).unheard == keys(second)
    assert kept.ledger.account().micro_batches.done == 1


@pytest.mark.parametrize("compacted", [False, True])
def test_of_a_worker_that_died_meanwhile_it_is_believed_also_by_a_keeper_that_came_back(kept, compacted):
    first, second = kept.given("one", A)
    kept.ledger.note_workers(ALIVE, 0.0)
    kept.ledger.settle("one", A, [done(first, 1)], checked_s=0.0)
    for now_s in (4.0, 8.0):
        kept.ledger.note_workers(ALIVE[1:], now_s)
    assert WORKER["head"] not in kept.state.workers
    if compacted:
        kept.compact(8.0)
    kept.restart(8.0)
    assert kept.ledger.settle("one", A, [done(second, 2)], checked_s=9.0).accepted == 1
    assert kept.ledger.account().micro_batches.done == 2
    assert kept.perished() == {"head": 2}  # The late one too.
    kept.ledger.note_workers([*ALIVE[1:], ALIVE[0].model_copy(update={"shared_through": 1})], 10.0)
    assert kept.perished() == {}, "it was only silent"
    kept.restart(10.0)
    kept.ledger.note_workers(ALIVE[1:], 15.0)
    assert kept.perished() == {"head": 1}


@pytest.mark.parametrize(
    ("counted_in", "becomes"),
    [(STAGES, (2, 0, 0)), (("head", "body-1"), (1, 1, 0)), ((), (1, 0, 1))],
)
def test_who_is_not_heard_of_in_time_is_asked_after_and_the_workers_decide(kept, counted_in, becomes):
    first, second, third, _ = kept.given("one", A, 2)
    kept.ledger.note_workers(ALIVE, 0.0)
    answer = kept.ledger.settle("one", A, [done(first), invented(second)], checked_s=1.0)
    assert (answer.accepted, answer.repeated, answer.stale, answer.unheard) == (1, 0, (), keys(second))
    for now_s in (4.0, 8.0):
        assert kept.ledger.settle("one", A, [invented(second)], checked_s=now_s).unheard == keys(second)
        assert kept.ledger.unheard(now_s) == {}
    unheard = kept.ledger.unheard(11.0)
    assert unheard == {A: (second,)}
    kept.ledger.resolve(A, report({stage: [second] for stage in counted_in}), 11.0, unheard[A])
    account, tally = kept.ledger.account(), kept.ledger.account().micro_batches
    assert (tally.done, tally.lost, account.waiting) == becomes
    assert kept.lost() == ({("tail", "unheard"): 1} if tally.lost else {})
    assert kept.ledger.unheard(99.0) == {}
    assert kept.ledger.settle("one", A, [invented(second)], checked_s=12.0).unheard == ()
    assert kept.ledger.settle("one", A, [done(third)], checked_s=12.0).accepted == 1, "the rest of the lease is over"
    if not counted_in:
        assert kept.given("two", B, now_s=99.0) == [second]


# -- the account's file ------------------------------------------------------------------------------------------------

JOURNALED = LedgerConfig(unit_rows=8, reissue_after_s=0)


@contextmanager
def opened(path: Path, config: LedgerConfig = JOURNALED) -> Iterator[tuple[Ledger, Journal]]:
    ledger, journal = open_ledger(path, spec(), (SHARDS,), config)
    try:
        yield ledger, journal
    finally:
        journal.close()


@pytest.mark.slow
def test_a_journal_cut_at_any_byte_of_its_last_line_or_with_others_there_is_the_account_before_it(tmp_path):
    path = journal_path(tmp_path)
    with opened(path) as (ledger, _):
        given = micro_batches(ledger.lease("one", A, (), 2, 0.0).runs)
        before, whole_bytes = ledger.account(), path.stat().st_size
        ledger.settle("one", A, [lost(given[0])])
        after = ledger.account()
    body = path.read_bytes()
    assert len(body) > whole_bytes
    for length in range(whole_bytes, len(body) + 1):
        cut = journal_path(tmp_path / "cut")
        cut.parent.mkdir(parents=True, exist_ok=True)
        cut.write_bytes(body[:length])
        with opened(cut) as (ledger, _):
            assert ledger.account() == (after if length == len(body) else before), length
            if length % 40 and length < len(body):
                continue
            ledger.settle("one", A, [lost(given[1])])
        with opened(cut) as (ledger, _):
            assert ledger.account().micro_batches.lost == (2 if length == len(body) else 1)
    last = body[whole_bytes:]
    for garbage in (b"\0" * len(last), b"\xff\xfe\n", last.replace(b'"lost"', b'"done"')):
        path.write_bytes(body[:whole_bytes] + garbage)
        with opened(path) as (ledger, _):
            assert ledger.account() == before


@pytest.mark.parametrize("change", ["flip", "drop", "swap", "repeat"])
def test_damage_before_the_last_line_is_refused(tmp_path: Path, change: str) -> None:
    path = journal_path(tmp_path)
    with opened(path) as (ledger, _):
        given = micro_batches(ledger.lease("one", A, (), 2, 0.0).runs)
        for each in given:
            ledger.settle("one", A, [done(each)])
    first, second, third, fourth, *rest = path.read_bytes().splitlines(keepends=True)
    changed = {
        "flip": [third.replace(b'"done"', b'"lost"'), fourth],
        "drop": [fourth],
        "swap": [fourth, third],
        "repeat": [third, third, fourth],
    }
    lines = [first, second, *changed[change], *rest]
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match=r"line \d of .* damaged or changed"), opened(path):
        pass
    assert path.read_bytes() == b"".join(lines)


def test_one_process_keeps_a_journal_of_this_release_in_a_folder_that_can_be_written(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    with opened(path), pytest.raises(LedgerError, match="another process"):
        Journal.open(path)
    with opened(path):
        pass
    with pytest.raises(LedgerError, match="expected a journal that can be written at"):
        Journal.open(path / "journal.jsonl")
    body = b'{"kind":"opened","version":2}'
    path.write_bytes(b"%s %s\n" % (chain_digest(SEED, body).encode(), body))
    with pytest.raises(LedgerError, match=r"line 1 of .* another"):
        Journal.open(path)


def test_it_is_compacted_to_what_it_adds_up_to(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    config = LedgerConfig(unit_rows=8, compact_bytes=1 << 12, max_open=10**6)
    sizes = []
    with opened(path, config) as (ledger, journal):
        ledger.lease("two", B, (), 1, 0.0)
        for n in range(60):
            token = f"{n:032x}"
            given = micro_batches(ledger.lease("one", token, (), 2, 0.0).runs)
            ledger.settle("one", token, [done(each, n + 1) for each in given], given[3:])
            sizes.append(path.stat().st_size)
            assert sizes[-1] == journal.size_bytes
        account = ledger.account()
    assert any(after < before for before, after in pairwise(sizes))
    assert max(sizes) < 12_000
    with opened(path, config) as (ledger, _):
        assert ledger.account() == account
        assert ledger.settle("two", B, [done(each) for each in micro_batches(ledger.lease("two", B, (), 1, 0.0).runs)])


def test_a_compaction_that_was_killed_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    with opened(path) as (ledger, journal):
        ledger.lease("one", A, (), 2, 0.0)
        account = ledger.account()
        copy = tmp_path / "copy"
        shutil.copytree(path.parent, copy)
        journal.replace(ledger.state.snapshot())
        snapshot = path.read_bytes()
    for length in range(0, len(snapshot), 61):  # Killed before the renaming.
        (copy / (path.name + ".new")).write_bytes(snapshot[:length])
        with opened(copy / path.name) as (ledger, _):
            assert ledger.account() == account
    with opened(path) as (ledger, _):
        assert ledger.account() == account


def test_a_line_that_cannot_be_written_ends_it_and_costs_nothing(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(path) as (ledger, journal):
        given = micro_batches(ledger.lease("one", A, (), 2, 0.0).runs)
        before = ledger.account()
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(LedgerError, match="expected to write the journal"):
                ledger.settle("one", A, [done(given[0])])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.stat().st_size == journal.size_bytes + 20  # A part of it is there.
        with pytest.raises(LedgerError, match="writing has failed"):
            ledger.lease("two", B, (), 1, 0.0)
        assert ledger.account() == before
    with opened(path) as (ledger, _):
        assert ledger.account() == before
        assert ledger.settle("one", A, [done(given[0])]).accepted == 1
